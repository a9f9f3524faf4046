"""What this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import __version__, _env
from ._jit import sources
from ._jit.build import ninja_path
from ._jit.cache import entries
from ._jit.compile import Program, compile_cubin, nvrtc_version
from ._jit.driver import call
from ._jit.render import Source
from .errors import DriverError, FlashSkipError

_PROBE = Source('extern "C" __global__ void probe() {}\n')


@dataclass(frozen=True)
class Finding:
    """One line of the report. `status` is ``"ok"``, ``"note"`` or ``"FAIL"``."""

    status: str
    subject: str
    text: str


def examine() -> Iterator[Finding]:
    """Look at everything that flashskip needs; a FAIL keeps kernels from being built or found."""
    yield Finding("ok", "flashskip", f"{__version__}, Python {platform.python_version()}")
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("sources", _sources),
        ("torch", _torch),
        ("cuda-python", _bindings),
        ("NVRTC", _nvrtc),
        ("ninja", _ninja),
        ("GPU", _gpu),
        ("cache", _cache),
        ("manifest", _manifest),
    ]
    for subject, check in checks:
        try:
            yield from check()
        except (FlashSkipError, OSError, ValueError) as error:
            yield Finding("FAIL", subject, str(error))


def _sources() -> Iterator[Finding]:
    yield Finding("ok", "sources", f"{sources.folder('templates')}, {sources.folder('csrc')}")


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("FAIL", "torch", f"cannot be imported ({error}); run: pip install torch")
        return
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    yield Finding("ok", "torch", f"{torch.__version__}, {build}")


def _bindings() -> Iterator[Finding]:
    try:
        version = importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError:
        version = "missing"
    if version.split(".")[0] == "13":
        yield Finding("ok", "cuda-python", version)
    else:
        text = f"{version}; version 13 is needed; run: pip install 'cuda-python>=13,<14'"
        yield Finding("FAIL", "cuda-python", text)


def _nvrtc() -> Iterator[Finding]:
    compiled = compile_cubin(Program("probe", _PROBE, block=32))
    text = f"{nvrtc_version()}, compiles for sm_90a ({compiled.seconds * 1000:.0f} ms)"
    yield Finding("ok", "NVRTC", text)


def _ninja() -> Iterator[Finding]:
    yield Finding("ok", "ninja", ninja_path())


def _gpu() -> Iterator[Finding]:
    try:
        version = call("asking for its version", "cuDriverGetVersion")
        count = call("counting devices", "cuDeviceGetCount")
    except DriverError as error:
        text = f"none ({error}); CPU tensors run the reference, and warmup works"
        yield Finding("note", "GPU", text)
        return
    yield Finding("ok", "driver", f"supports CUDA {version // 1000}.{version % 1000 // 10}")
    for index in range(count):
        device = call(f"opening device {index}", "cuDeviceGet", index)
        name = call("asking for its name", "cuDeviceGetName", 100, device)
        major, minor = call("asking for its kind", "cuDeviceComputeCapability", device)
        text = f"{index}: {name.rstrip(bytes(1)).decode()}, sm_{major}{minor}"
        if (major, minor) == (9, 0):
            yield Finding("ok", "GPU", text)
        else:
            text += "; kernels exist for sm_90 (H100, H200); CPU tensors run the reference"
            yield Finding("note", "GPU", text)


def _cache() -> Iterator[Finding]:
    directory = _env.cache_dir()
    if directory is None:
        text = "in memory only: there is no home directory; set FLASHSKIP_CACHE_DIR"
        yield Finding("note", "cache", text)
    else:
        yield _directory(directory)
    for seed in _env.cache_seeds():
        if seed.is_dir():
            yield Finding("ok", "seed", f"{seed}, {len(entries(seed))} kernels")
        else:
            text = f"{seed} is not a directory; correct FLASHSKIP_CACHE_SEED"
            yield Finding("FAIL", "seed", text)
    _env.cache_max_bytes()  # what is wrong with it keeps kernels from being found
    if _env.disable_jit():
        text = "set: a kernel that is in no cache is an error"
        yield Finding("note", "FLASHSKIP_DISABLE_JIT", text)


def _manifest() -> Iterator[Finding]:
    path = _env.manifest()
    if path is None:
        return
    try:
        with path.open("a"):
            yield Finding("ok", "manifest", str(path))
    except OSError as error:
        text = f"{error}: kernels are used, but not recorded; correct FLASHSKIP_MANIFEST"
        yield Finding("note", "manifest", text)


def _directory(directory: Path) -> Finding:
    text = f"{directory}, {len(entries(directory))} kernels"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        return Finding(
            "note",
            "cache",
            f"{text}; not writable ({error}): kernels that are not there are compiled by each "
            "process again; set FLASHSKIP_CACHE_DIR to a writable directory",
        )
    return Finding("ok", "cache", text)


def main() -> int:
    """Print the report; return 1 if something failed."""
    failed = False
    for finding in examine():
        print(f"{finding.status:5}{finding.subject:12} {finding.text}")
        sys.stdout.flush()
        failed |= finding.status == "FAIL"
    return int(failed)
