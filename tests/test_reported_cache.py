"""Cases from public bug reports about compiled kernels on disk (J), by processes of their own.

`test_cache.py` goes through the faults one by one, `test_faults.py` through those that need a
machine out of order; here the cases are run as they were reported.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("cuda.bindings.nvrtc")

from cold_start import BARRIER, ROOT, command, fetch, finish, kernels_in, launch, mounted

from flashskip._jit import driver
from flashskip._jit.entry import read_entry

TMPFS = ["mount", "-t", "tmpfs", "tmpfs"]


# ---- J01 -----------------------------------------------------------------------------------------


def test_reported_J01_eight_cold_processes_and_three_kernels(tmp_path: Path) -> None:
    for number in range(5):
        cache, go = tmp_path / f"cache{number}", tmp_path / f"go{number}"
        cold = command(kernels=3, before=BARRIER.format(file=str(go)))
        processes = [launch(cold, FLASHSKIP_CACHE_DIR=str(cache)) for _ in range(8)]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        go.write_text("")
        results = [finish(process) for process in processes]
        assert len({tuple(hashes) for hashes, _ in results}) == 1
        assert len(results[0][0]) == 3
        assert "".join(log for _, log in results).count("INFO compiling k") == 3
        assert len(kernels_in(cache)) == 3


# Stops in the middle of compiling.
STUCK = """
def stuck(program):
    print("building", flush=True)
    time.sleep(600)
kernel.compile_cubin = stuck
"""


def test_reported_J01_a_killed_builder_and_three_that_wait(tmp_path: Path) -> None:
    expected, _ = fetch(tmp_path / "elsewhere")
    victim = launch(command(before=STUCK), FLASHSKIP_CACHE_DIR=str(tmp_path / "cache"))
    assert victim.stdout is not None
    assert victim.stdout.readline() == "building\n"
    waiting = [
        launch(
            command(before='print("ready", flush=True)'),
            FLASHSKIP_CACHE_DIR=str(tmp_path / "cache"),
        )
        for _ in range(3)
    ]
    for process in waiting:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    begin = time.monotonic()
    results = [finish(process) for process in waiting]
    assert time.monotonic() - begin < 15  # not the 20 seconds that a live builder is waited for
    assert [hashes for hashes, _ in results] == [expected] * 3
    assert "".join(log for _, log in results).count("INFO compiling") == 1
    assert len(kernels_in(tmp_path / "cache")) == 1


def test_reported_J01_leftovers_and_a_directory_that_disappears(tmp_path: Path) -> None:
    expected, _ = fetch(tmp_path)
    (file,) = kernels_in(tmp_path)
    file.write_bytes(b"")
    for suffix in (".lock", ".0123456789abcdef.tmp"):
        file.with_name(file.name + suffix).write_text("4711")
    hashes, log = fetch(tmp_path)
    assert hashes == expected
    assert log.count("INFO compiling") == 1
    shutil.rmtree(tmp_path)
    assert fetch(tmp_path)[0] == expected


def test_reported_J01_a_directory_deleted_while_processes_run(tmp_path: Path) -> None:
    cache, go = tmp_path / "cache", tmp_path / "go"
    one = "program = compile.Program('k', Source('extern \"C\" __global__ void k() {}'), block=32)"
    before = f"{one}; kernel.fetch(program, cache)\n{BARRIER.format(file=str(go))}"
    processes = [launch(command(before=before), FLASHSKIP_CACHE_DIR=str(cache)) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    shutil.rmtree(cache)
    go.write_text("")
    results = [finish(process) for process in processes]
    assert results[0][0] == results[1][0]
    logs = "".join(log for _, log in results)
    assert "WARNING" not in logs
    assert logs.count("INFO compiling k0 ") == 1
    assert len(kernels_in(cache)) == 1


# ---- J02 -----------------------------------------------------------------------------------------


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes(b ^ 1 for b in data[middle : middle + 64]) + data[middle + 64 :]


def damaged_metadata(data: bytes) -> bytes:
    return data.replace(b'"symbol"', b'"simbol"')


@pytest.mark.parametrize(
    "damage",
    [lambda d: b"", lambda d: d[: len(d) // 2], flipped, lambda d: os.urandom(len(d)),
     damaged_metadata, "another kernel's", "a directory"],
    ids=["empty", "half", "flipped", "random", "metadata", "another kernel's", "a directory"],
)  # fmt: skip
def test_reported_J02_a_damaged_file_costs_one_warning(
    tmp_path: Path, damage: Callable[[bytes], bytes] | str
) -> None:
    expected, _ = fetch(tmp_path, kernels=2)
    files = {read_entry(file).metadata["symbol"]: file for file in kernels_in(tmp_path)}
    file = files["k0"]
    if damage == "another kernel's":
        file.write_bytes(files["k1"].read_bytes())
    elif isinstance(damage, str):
        file.unlink()
        file.mkdir()
    else:
        before = file.read_bytes()
        file.write_bytes(damage(before))
        assert file.read_bytes() != before
    hashes, log = fetch(tmp_path, kernels=2)
    assert hashes == expected
    assert log.count("WARNING") == 1
    assert file.name in log
    assert log.count("INFO compiling") == 1
    hashes, log = fetch(tmp_path, kernels=2)
    assert hashes == expected
    assert log == ""


# ---- J05 -----------------------------------------------------------------------------------------


def test_reported_J05_the_variable_is_used_first(tmp_path: Path) -> None:
    home, cache = tmp_path / "home", tmp_path / "cache"
    finish(launch(command(), HOME=str(home), FLASHSKIP_CACHE_DIR=str(cache)))
    assert len(kernels_in(cache)) == 1
    assert not home.exists()


@pytest.mark.parametrize("place", ["home", "variable", "nowhere"])
def test_reported_J05_an_unusable_place_costs_one_warning(tmp_path: Path, place: str) -> None:
    blocked = tmp_path / "file"  # a directory below a file: not even root can write there
    blocked.write_text("")
    environment: dict[str, str | None] = {
        "home": {"HOME": str(blocked / "home"), "FLASHSKIP_CACHE_DIR": None},
        "variable": {"FLASHSKIP_CACHE_DIR": str(blocked / "cache")},
        "nowhere": {"HOME": "", "FLASHSKIP_CACHE_DIR": "/proc/flashskip"},
    }[place]  # type: ignore[assignment]
    _, log = finish(launch(command(kernels=2), **environment))
    assert log.count("WARNING") == 1
    assert log.count("INFO compiling") == 2
    assert list(tmp_path.iterdir()) == [blocked]


ODD = "a b'c\"d$HOME ü"


def test_reported_J05_odd_characters_in_both_paths(tmp_path: Path) -> None:
    install = tmp_path / ODD / "lib"
    install.mkdir(parents=True)
    (install / "flashskip").symlink_to(ROOT / "flashskip")
    cache = tmp_path / ODD / "cache"
    hashes, log = fetch(cache, root=install)
    assert "WARNING" not in log
    assert len(kernels_in(cache)) == 1
    assert fetch(cache, root=install) == (hashes, "")


def test_reported_J05_a_read_only_home(tmp_path: Path) -> None:
    """A real one: with and without the variable that names another place, and for a user."""
    home, cache = tmp_path / "home", tmp_path / "cache"
    home.mkdir()
    mounts = [[*TMPFS, "-o", "ro", str(home)]]
    lines, log = mounted(mounts, [command(kernels=2)], HOME=str(home), FLASHSKIP_CACHE_DIR=None)
    assert lines[-1] == "status 0"
    assert log.count("WARNING") == 1
    assert "Read-only file system" in log
    assert log.count("INFO compiling") == 2
    lines, log = mounted(mounts, [command()] * 2, HOME=str(home), FLASHSKIP_CACHE_DIR=str(cache))
    assert lines == [lines[0], "status 0"] * 2
    assert "WARNING" not in log
    assert log.count("INFO compiling") == 1
    assert len(kernels_in(cache)) == 1


def test_reported_J05_a_file_system_of_64_kib(tmp_path: Path) -> None:
    """The first of three kernels has room, the others have not; nothing half written remains."""
    cache = tmp_path / "cache"
    cache.mkdir()
    lines, log = mounted(
        [[*TMPFS, "-o", "size=64k", str(cache)]],
        [command(kernels=3, padding=70_000)] * 2 + [["ls", "-A", str(cache)]],
        FLASHSKIP_CACHE_DIR=str(cache),
    )
    *hashes, first, last = lines
    assert hashes[:4] == hashes[4:]
    assert hashes[3] == last == "status 0"
    assert first.endswith(".kernel")
    assert log.count("WARNING cannot use the kernel cache") == 2  # once for each process
    assert log.count("No space left on device") == 2
    assert log.count("INFO compiling") == 5


# ---- J07 -----------------------------------------------------------------------------------------


class Refusing:
    """A driver of which every call gives one error."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def __init__(self, code: int) -> None:
        self.code = code

    def cuGetErrorName(self, code: int) -> tuple[int, bytes]:
        return 0, f"CUDA_ERROR_{code}".encode()

    cuGetErrorString = cuGetErrorName

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return 0, 13010

    def cuLibraryLoadData(self, *_: object) -> tuple[int, None]:
        return self.code, None


@pytest.mark.parametrize("code", [222, 218, 209, 35])
def test_reported_J07_a_refused_image_is_one_error(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """209, 218 and 222 lead to one rebuild first: see `test_jit_kernel.py`."""
    monkeypatch.setattr(driver, "driver", lambda: Refusing(code))
    with pytest.raises(driver.DriverError, match=f"error {code} .*loading k") as error:
        driver.call("loading k", "cuLibraryLoadData", b"")
    assert error.value.blames_image == (code != 35)
    assert ("update it to 580 or newer" in str(error.value)) == (code == 35)


@pytest.mark.parametrize("code", [222, 218])
def test_reported_J07_a_refused_image_names_both_versions(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "driver", lambda: Refusing(code))
    with pytest.raises(driver.DriverError, match=r"supports CUDA 13\.1, and NVRTC \S+ is"):
        driver.call("loading k", "cuLibraryLoadData", b"")


def test_reported_J07_a_machine_without_a_gpu_is_told_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flashskip", "doctor"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "Traceback" not in done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "GPU" in line or "driver" in line]
    assert lines
