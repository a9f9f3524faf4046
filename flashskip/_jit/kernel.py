"""A program to a kernel that can be launched."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from ctypes import addressof, c_void_p
from dataclasses import asdict
from typing import Any

from .cache import KernelCache
from .compile import Compiled, Program, compile_cubin, nvrtc_version
from .driver import DriverError, call, driver
from .entry import Entry, Key

_LOG = logging.getLogger("flashskip")
_DEFAULT_SHARED_BYTES = 48 * 1024  # more must be asked for
_MOST_STREAMS = 256  # whose launch configuration a kernel remembers
_REPORTED = Compiled.__annotations__.keys() - {"cubin"}  # what an entry says beside the cubin


def key_of(program: Program) -> Key:
    """Return the name of a program in the cache."""
    return Key(program.content, program.digest(nvrtc_version()), program.symbol)


def build(program: Program) -> Entry:
    """Compile a program into what the cache keeps."""
    compiled = compile_cubin(program)
    about = {"symbol": program.symbol, "flags": program.flags, "nvrtc": nvrtc_version()}
    return Entry({**about, **_report(asdict(compiled))}, compiled.cubin)


def fetch(program: Program, cache: KernelCache) -> Compiled:
    """Return a program's cubin from the cache, compiling it if it is not there.

    Raises
    ------
    CacheError
        It is not there, and the cache does not allow to build it.
    CompileError
        It cannot be compiled.
    """
    key = key_of(program)
    entry = cache.fetch(key, lambda: build(program))
    if _REPORTED - entry.metadata.keys():  # of a version of the package that reported less
        _LOG.warning("the cached %s has no whole report; compiling it anew", program.symbol)
        cache.discard(key)
        entry = cache.fetch(key, lambda: build(program))
    return Compiled(cubin=entry.payload, **_report(entry.metadata))


def load(program: Program, cache: KernelCache) -> Kernel:
    """Return the kernel of `program`, which serves all devices of its architecture.

    Raises
    ------
    CacheError, CompileError
        See `fetch`.
    DriverError
        There is no driver, or it refuses a freshly compiled cubin too.
    """
    try:
        return Kernel(program, fetch(program, cache))
    except DriverError as error:
        if not error.blames_image:
            raise
        _LOG.warning(
            "the driver refuses the cached %s; compiling it anew: %s", program.symbol, error
        )
    cache.discard(key_of(program))
    return Kernel(program, fetch(program, cache))


def _report(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Pick what `Compiled` holds besides the cubin."""
    return {name: fields[name] for name in _REPORTED}


class Kernel:
    """A loaded kernel: a handle that is valid on every device, and the compiler's report."""

    def __init__(self, program: Program, compiled: Compiled) -> None:
        self.symbol = program.symbol
        self.block = program.block
        self.shared_bytes = program.shared_bytes
        self.waits = program.waits
        self.compiled = compiled
        self._prepared: set[int] = set()
        self._configurations: dict[tuple[int, int], Any] = {}
        self._lock = threading.Lock()
        self._launch = driver().cuLaunchKernel
        self._launch_early = driver().cuLaunchKernelEx
        self._library = call(
            f"loading {self.symbol}",
            "cuLibraryLoadData",
            *(compiled.cubin, [], [], 0, [], [], 0),
        )
        self._handle = call(
            f"finding {self.symbol}", "cuLibraryGetKernel", self._library, self.symbol.encode()
        )

    @property
    def registers(self) -> int:
        """Registers per thread."""
        return self.compiled.registers

    @property
    def cubin(self) -> bytes:
        """The machine code."""
        return self.compiled.cubin

    def prepare(self, device: int) -> None:
        """Load the code onto a device and allow its shared memory, so that `launch` need not.

        Call it outside of graph capture. A second call for a device does nothing.

        Parameters
        ----------
        device
            CUDA ordinal, as in ``torch.device("cuda", device)``.
        """
        if device in self._prepared:
            return
        with self._lock:
            doing = f"preparing {self.symbol} on device {device}"
            handle = call(doing, "cuDeviceGet", device)
            if self.shared_bytes > _DEFAULT_SHARED_BYTES:
                attribute = (
                    driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                )
                call(
                    doing,
                    "cuKernelSetAttribute",
                    *(attribute, self.shared_bytes, self._handle, handle),
                )
            # The primary context is the one torch uses; it stays retained, as torch keeps it too.
            call(doing, "cuCtxPushCurrent", call(doing, "cuDevicePrimaryCtxRetain", handle))
            try:
                call(doing, "cuFuncLoad", call(doing, "cuKernelGetFunction", self._handle))
            finally:
                call(doing, "cuCtxPopCurrent")
            self._prepared.add(device)

    def launch(self, grid: int, record: c_void_p, stream: int) -> None:
        """Launch `grid` blocks with a parameter record, given by `pointer_to`.

        The record is copied before this returns. The stream's device must have been prepared, and
        must be the current one where the stream is the default stream (0).
        """
        if self.waits:
            where = self._configurations.get((grid, stream)) or self._configure(grid, stream)
            result: Any = self._launch_early(where, self._handle, addressof(record), 0)
        else:
            result = self._launch(
                self._handle, grid, 1, 1, self.block, 1, 1, self.shared_bytes, stream,
                addressof(record), 0,
            )  # fmt: skip
        if result[0]:
            self._fail(result[0], grid)

    def _configure(self, grid: int, stream: int) -> Any:
        """Return, and remember, what launches on a stream before its other kernels are done."""
        module = driver()
        early = module.CUlaunchAttribute()
        early.id = module.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        where = module.CUlaunchConfig()
        where.gridDimX, where.gridDimY, where.gridDimZ = grid, 1, 1
        where.blockDimX, where.blockDimY, where.blockDimZ = self.block, 1, 1
        where.sharedMemBytes, where.hStream = self.shared_bytes, stream
        where.attrs, where.numAttrs = [early], 1
        if len(self._configurations) >= _MOST_STREAMS:  # of a process that makes new ones all along
            self._configurations.clear()
        self._configurations[grid, stream] = where
        return where

    def _fail(self, error: Any, grid: int) -> None:
        module = driver()
        _, name = module.cuGetErrorName(error)
        _, text = module.cuGetErrorString(error)
        raise DriverError(
            f"launching {self.symbol} with {grid} blocks of {self.block} threads and "
            f"{self.shared_bytes} bytes of shared memory: {name.decode()}, {text.decode()}",
            int(error),
        )
