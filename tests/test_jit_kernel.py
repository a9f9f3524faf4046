"""Loading, preparing and launching against a driver that records, so that no GPU is needed."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashskip._jit import driver as driver_module
from flashskip._jit import kernel as kernel_module
from flashskip._jit.cache import KernelCache
from flashskip._jit.compile import Program
from flashskip._jit.driver import DriverError
from flashskip._jit.entry import Entry, publish
from flashskip._jit.kernel import fetch, key_of, load
from flashskip._jit.render import Source

PROGRAM = Program(
    "k", Source('extern "C" __global__ void k() {}\n'), block=96, shared_bytes=100_000
)


class RecordingDriver:
    """Answers every function of cuda.bindings.driver; `faults` maps a name to results in turn."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="max dynamic shared"
    )

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.faults: dict[str, list[int]] = {}

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        def function(*arguments: Any) -> tuple[Any, ...]:
            if name in ("cuGetErrorName", "cuGetErrorString"):
                return 0, f"{name[10:]} {arguments[0]}".encode()
            if name == "cuDriverGetVersion":
                return 0, 13000
            self.calls.append((name, *arguments))
            pending = self.faults.get(name)
            error = pending.pop(0) if pending else 0
            return (error,) if name in NO_VALUE else (error, f"{name} result")

        return function

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


NO_VALUE = (
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuKernelSetAttribute",
    "cuFuncLoad",
    "cuCtxPushCurrent",
)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> RecordingDriver:
    recorder = RecordingDriver()
    for module in (driver_module, kernel_module):
        monkeypatch.setattr(module, "driver", lambda: recorder)
    return recorder


@pytest.fixture
def compilations(caplog: pytest.LogCaptureFixture) -> Callable[[], int]:
    caplog.set_level(logging.INFO, "flashskip")
    return lambda: sum(r.getMessage().startswith("compiling k for") for r in caplog.records)


def test_the_cached_cubin_is_loaded_as_it_is(fake: RecordingDriver, tmp_path: Path) -> None:
    kernel = load(PROGRAM, KernelCache(tmp_path))
    ((cubin, *options),) = fake.named("cuLibraryLoadData")
    assert cubin == kernel.cubin == fetch(PROGRAM, KernelCache(tmp_path)).cubin
    assert options == [[], [], 0, [], [], 0]
    assert fake.named("cuLibraryGetKernel") == [("cuLibraryLoadData result", b"k")]
    assert kernel.registers > 0


def test_a_device_is_prepared_once(fake: RecordingDriver) -> None:
    kernel = load(PROGRAM, KernelCache(None))
    for device in (0, 1, 0, 1):
        kernel.prepare(device)
    assert fake.named("cuDeviceGet") == [(0,), (1,)]
    assert fake.named("cuKernelSetAttribute") == 2 * [
        ("max dynamic shared", 100_000, "cuLibraryGetKernel result", "cuDeviceGet result")
    ]
    assert fake.named("cuFuncLoad") == 2 * [("cuKernelGetFunction result",)]
    assert len(fake.named("cuCtxPushCurrent")) == len(fake.named("cuCtxPopCurrent")) == 2


def test_a_failed_preparation_restores_the_context_and_is_tried_again(
    fake: RecordingDriver,
) -> None:
    kernel = load(PROGRAM, KernelCache(None))
    fake.faults["cuFuncLoad"] = [2]
    with pytest.raises(DriverError, match="cuFuncLoad, preparing k on device 3"):
        kernel.prepare(3)
    assert len(fake.named("cuCtxPushCurrent")) == len(fake.named("cuCtxPopCurrent")) == 1
    kernel.prepare(3)
    assert len(fake.named("cuFuncLoad")) == 2


def test_a_launch_passes_the_record_by_address(fake: RecordingDriver) -> None:
    seen = []

    def launch(*arguments: Any) -> tuple[int]:
        block = ctypes.c_void_p.from_address(arguments[9]).value
        seen.append((*arguments[:9], block, arguments[10]))
        return (0,)

    fake.cuLaunchKernel = launch  # type: ignore[method-assign]
    load(PROGRAM, KernelCache(None)).launch(132, ctypes.c_void_p(0x7F0000001240), 0xABC)
    assert seen == [
        ("cuLibraryGetKernel result", 132, 1, 1, 96, 1, 1, 100_000, 0xABC, 0x7F0000001240, 0)
    ]


def test_a_kernel_that_waits_is_launched_early(fake: RecordingDriver) -> None:
    fake.CUlaunchAttributeID = SimpleNamespace(  # type: ignore[attr-defined]
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="early"
    )
    fake.CUlaunchAttribute = lambda: SimpleNamespace(  # type: ignore[method-assign]
        value=SimpleNamespace()
    )
    fake.CUlaunchConfig = SimpleNamespace  # type: ignore[method-assign]
    kernel = load(replace(PROGRAM, waits=True), KernelCache(None))
    record = ctypes.c_void_p(0x7F0000001240)
    for stream in (0xABC, 0xDEF, 0xABC):
        kernel.launch(132, record, stream)
    first, second, third = (call[0] for call in fake.named("cuLaunchKernelEx"))
    assert first is third
    assert (first.hStream, second.hStream) == (0xABC, 0xDEF)
    assert (first.gridDimX, first.gridDimY, first.gridDimZ) == (132, 1, 1)
    assert (first.blockDimX, first.blockDimY, first.blockDimZ) == (96, 1, 1)
    assert (first.sharedMemBytes, first.numAttrs) == (100_000, 1)
    assert first.attrs[0].id == "early"
    assert first.attrs[0].value.programmaticStreamSerializationAllowed == 1
    _, *passed = fake.named("cuLaunchKernelEx")[0]
    assert passed == ["cuLibraryGetKernel result", ctypes.addressof(record), 0]
    assert not fake.named("cuLaunchKernel")


def test_a_failed_launch_says_what_was_launched(fake: RecordingDriver) -> None:
    kernel = load(PROGRAM, KernelCache(None))
    fake.faults["cuLaunchKernel"] = [1]
    with pytest.raises(
        DriverError, match=r"k with 5 blocks of 96 threads and 100000 bytes.*Name 1"
    ):
        kernel.launch(5, ctypes.c_void_p(64), 0)


@pytest.mark.parametrize("code", [200, 209, 218, 222])
def test_a_cubin_that_the_driver_refuses_is_compiled_anew_once(
    fake: RecordingDriver,
    tmp_path: Path,
    code: int,
    compilations: Callable[[], int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A sound entry whose cubin is for something else: in the cache, and in a seed."""
    report = {"log": "", "seconds": 0, "registers": 1, "spill_stores": 0, "spill_loads": 0}
    for place in ("cache", "seed"):
        (tmp_path / place).mkdir()
        publish(tmp_path / place, key_of(PROGRAM), Entry(report, b"foreign"))
    fake.faults["cuLibraryLoadData"] = [code]
    kernel = load(PROGRAM, KernelCache(tmp_path / "cache", [tmp_path / "seed"]))
    assert [call[0] for call in fake.named("cuLibraryLoadData")] == [b"foreign", kernel.cubin]
    assert compilations() == 1
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.startswith("the driver refuses the cached k; compiling it anew: CUDA driver")
    # the next process finds a good one
    assert fetch(PROGRAM, KernelCache(tmp_path / "cache")).cubin == kernel.cubin
    assert compilations() == 1


def test_a_refused_entry_in_a_read_only_cache_is_compiled_anew_too(
    fake: RecordingDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = {"log": "", "seconds": 0, "registers": 1, "spill_stores": 0, "spill_loads": 0}
    publish(tmp_path, key_of(PROGRAM), Entry(report, b"foreign"))

    def fail(*arguments: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("flashskip._jit.cache.publish", fail)
    fake.faults["cuLibraryLoadData"] = [209]
    assert load(PROGRAM, KernelCache(tmp_path)).cubin.startswith(b"\x7fELF")


def test_a_driver_that_refuses_a_new_cubin_too_is_an_error(fake: RecordingDriver) -> None:
    fake.faults["cuLibraryLoadData"] = [209, 209]
    with pytest.raises(DriverError, match=r"CUDA driver error 209 Name 209 String 209.*loading k"):
        load(PROGRAM, KernelCache(None))


def test_other_errors_do_not_lead_to_compiling(
    fake: RecordingDriver, compilations: Callable[[], int]
) -> None:
    fake.faults["cuLibraryLoadData"] = [2]
    with pytest.raises(DriverError, match="error 2 "):
        load(PROGRAM, KernelCache(None))
    assert compilations() == 1


def test_a_driver_that_is_too_old_says_what_to_do(fake: RecordingDriver) -> None:
    fake.faults["cuLibraryLoadData"] = [35]
    with pytest.raises(DriverError, match="older than CUDA 13: update it to 580 or newer"):
        load(PROGRAM, KernelCache(None))
