"""Text, headers and options to a cubin, through NVRTC. Knows no files and no driver."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import re
import tempfile
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .error import FlashSkipError
from .render import Source

_LOG = logging.getLogger("flashskip")
_PACKAGE = "nvidia-cuda-nvrtc"
_NVRTC_MAJOR = 13
_INSTALL = f"pip install '{_PACKAGE}>={_NVRTC_MAJOR},<{_NVRTC_MAJOR + 1}'"

OPTIONS = (
    "--std=c++17",
    "--no-source-include",  # only hashed headers: not even the working directory is searched
    "--device-as-default-execution-space",
    "--fmad=false",  # only fmaf() rounds once: left to itself, each kernel would round its own way
    "--ptxas-options=-v",  # registers and spills, into the log
)


class CompileError(FlashSkipError):
    """A kernel could not be compiled. `log` is the compiler's, `path` the saved source."""

    def __init__(self, message: str, log: str = "", path: str | None = None) -> None:
        super().__init__(message)
        self.log = log
        self.path = path


@dataclass(frozen=True)
class Program:
    """One kernel to be: what the compiler sees, and what a launch needs.

    `block` is the number of threads, `shared_bytes` the dynamic shared memory of a launch. A kernel
    that `waits` for those before it in its stream by itself may be started while they still run.
    """

    symbol: str
    source: Source
    block: int
    shared_bytes: int = 0
    arch: str = "sm_90a"
    options: tuple[str, ...] = OPTIONS
    waits: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler's command line."""
        return (f"--gpu-architecture={self.arch}", *self.options)

    @property
    def content(self) -> str:
        """SHA-256 of all that the compiler sees, but not of which compiler it is."""
        parts = [self.symbol, self.source.text]
        parts += [part for header in self.source.headers for part in header]
        return _sha256(*parts, "", *self.flags)

    def digest(self, nvrtc: str) -> str:
        """SHA-256 of all that the cubin depends on; `nvrtc` is the compiler's full version."""
        return _sha256(self.content, nvrtc)


@dataclass(frozen=True)
class Compiled:
    """A cubin and the compiler's report; spills in bytes."""

    cubin: bytes
    log: str
    seconds: float
    registers: int
    spill_stores: int
    spill_loads: int


@lru_cache
def nvrtc_version() -> str:
    """Return the full version of the installed NVRTC, ``"none"`` if its package is absent.

    The version is the package's: the library itself knows only major and minor, and loading it
    takes longer than a cache hit may.
    """
    try:
        return importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def compile_cubin(program: Program) -> Compiled:
    """Compile `program` for exactly its architecture.

    Raises
    ------
    CompileError
        NVRTC is missing or of the wrong version, or the source does not compile.
    """
    nvrtc = _load_nvrtc()
    _LOG.info("compiling %s for %s", program.symbol, program.arch)
    start = time.perf_counter()
    cubin, log = _compile(nvrtc, program)
    seconds = time.perf_counter() - start
    report = _report(log)
    compiled = Compiled(cubin, log, seconds, *report)
    _LOG.info(
        "compiled %s in %.2f s: %d registers, %d + %d bytes spilled",
        program.symbol,
        seconds,
        *report,
    )
    return compiled


def _sha256(*parts: str) -> str:
    """Hash length-prefixed parts, so that they cannot run together."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode()
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()


def _load_nvrtc() -> Any:
    """Import NVRTC and check that it is the one whose version is in the key."""
    version = nvrtc_version()
    if version == "none":
        raise CompileError(
            f"the compiler NVRTC is missing: {_PACKAGE} is not installed; run: {_INSTALL}"
        )
    if version.split(".")[0] != str(_NVRTC_MAJOR):
        raise CompileError(
            f"the compiler NVRTC is of the wrong version: {_PACKAGE} {version} is installed and "
            f"version {_NVRTC_MAJOR} is needed; run: {_INSTALL}"
        )
    try:
        from cuda.bindings import nvrtc

        error, major, minor = nvrtc.nvrtcVersion()
    except Exception as cause:  # the loader's own errors differ between versions of cuda-bindings
        raise CompileError(
            f"the compiler NVRTC could not be loaded ({_first_line(cause)}); "
            f"{_PACKAGE} {version} is installed, version {_NVRTC_MAJOR} and cuda-python "
            f"{_NVRTC_MAJOR} are needed; run: {_INSTALL}"
        ) from cause
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS or major != _NVRTC_MAJOR:
        raise CompileError(
            f"NVRTC {major}.{minor} was loaded; version {_NVRTC_MAJOR} is needed; run: {_INSTALL}"
        )
    if version.split(".")[:2] != [str(major), str(minor)]:
        raise CompileError(
            f"NVRTC {major}.{minor} was loaded although {_PACKAGE} {version} is installed; remove "
            "the other library from LD_LIBRARY_PATH, so that the package's own is found"
        )
    return nvrtc


def _first_line(cause: Exception) -> str:
    """Say what went wrong; the loader goes on to list every directory that it searched."""
    return next(filter(None, map(str.strip, str(cause).splitlines())), type(cause).__name__)


def _compile(nvrtc: Any, program: Program) -> tuple[bytes, str]:
    headers = program.source.headers
    error, handle = nvrtc.nvrtcCreateProgram(
        program.source.text.encode(),
        f"{program.symbol}.cu".encode(),
        len(headers),
        [text.encode() for _, text in headers],
        [name.encode() for name, _ in headers],
    )
    _check(nvrtc, error, program)
    try:
        flags = [flag.encode() for flag in program.flags]
        (error,) = nvrtc.nvrtcCompileProgram(handle, len(flags), flags)
        log = _read(nvrtc, program, handle, "nvrtcGetProgramLog").decode(errors="replace")
        log = log.rstrip("\0\n")
        if error == nvrtc.nvrtcResult.NVRTC_ERROR_COMPILATION:
            raise _source_error(program, log)
        _check(nvrtc, error, program, log)
        return _read(nvrtc, program, handle, "nvrtcGetCUBIN"), log
    finally:
        nvrtc.nvrtcDestroyProgram(handle)


def _read(nvrtc: Any, program: Program, handle: Any, what: str) -> bytes:
    """Read the log or the cubin of a compiled program."""
    error, size = getattr(nvrtc, f"{what}Size")(handle)
    _check(nvrtc, error, program)
    data = bytearray(size)
    (error,) = getattr(nvrtc, what)(handle, data)
    _check(nvrtc, error, program)
    return bytes(data)


def _check(nvrtc: Any, error: Any, program: Program, log: str = "") -> None:
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        flags = " ".join(program.flags)
        raise CompileError(f"NVRTC: {error!r} for {program.symbol} with {flags}\n{log}", log)


def _source_error(program: Program, log: str) -> CompileError:
    """Make an error that shows the first faults with their lines, and saves the whole source."""
    texts = dict(program.source.headers) | {f"{program.symbol}.cu": program.source.text}
    lines = []
    for fault in [line for line in log.splitlines() if "error" in line][:3]:
        lines.append(fault)
        place = re.match(r"(.+?)\((\d+)\)", fault)
        if place and place[1] in texts:
            number = int(place[2])
            source = texts[place[1]].splitlines()
            first = max(number - 3, 0)
            for shown, text in enumerate(source[first : number + 1], first + 1):
                lines.append(f"{'>' if shown == number else ' '}{shown:5} | {text}")
    path = _save(program)
    message = f"{program.symbol} does not compile; source: {path or 'could not be saved'}\n"
    return CompileError(message + "\n".join(lines or [log]), log, path)


def _save(program: Program) -> str | None:
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="flashskip-", suffix=".cu", delete=False, encoding="utf-8"
        ) as file:
            for name, text in program.source.headers:
                file.write(f"// ---- {name}\n{text}\n")
            file.write(f"// ---- {program.symbol}.cu\n{program.source.text}")
            return file.name
    except OSError:
        return None


def _report(log: str) -> tuple[int, int, int]:
    """Read registers and spilled bytes (stores, loads) from ptxas' report: the worst function."""

    def worst(pattern: str) -> int:
        return max(map(int, re.findall(pattern, log)), default=0)

    return (
        worst(r"Used (\d+) registers"),
        worst(r"(\d+) bytes spill stores"),
        worst(r"(\d+) bytes spill loads"),
    )
