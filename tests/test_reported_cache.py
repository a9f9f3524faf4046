"""Cases from public bug reports about compiled kernels on disk (J), by processes of their own.

`test_cache.py` goes through the faults one by one (J01 with a killed builder is there); here the
cases are run as they were reported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashskip._jit import driver
from flashskip._jit.entry import read_entry

ROOT = Path(__file__).resolve().parent.parent
pytest.importorskip("cuda.bindings.nvrtc")

# A process that gets kernels from the cache that the environment names, and prints their hashes.
FETCH = """
import hashlib, logging, sys
sys.path.insert(0, {root!r})
from flashskip import _env
from flashskip._jit import compile, kernel
from flashskip._jit.render import Source
logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
cache = _env.kernel_cache()
for n in range({kernels}):
    text = 'extern "C" __global__ void k%d(int* p) {{ *p = %d; }}' % (n, n)
    program = compile.Program("k%d" % n, Source(text + chr(10)), block=32)
    cubin = kernel.fetch(program, cache).cubin
    assert cubin[:4] == bytes([127]) + b"ELF"
    print(hashlib.sha256(cubin).hexdigest())
"""


def start(root: Path = ROOT, kernels: int = 1, **environment: str | None) -> subprocess.Popen[str]:
    """Start a process; None removes a variable."""
    given = {**os.environ, "XDG_CACHE_HOME": None, "FLASHSKIP_CACHE_SEED": None, **environment}
    return subprocess.Popen(
        [sys.executable, "-c", FETCH.format(root=str(root), kernels=kernels)],
        env={k: v for k, v in given.items() if v is not None},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[list[str], str]:
    out, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    assert "Traceback" not in log
    return out.split(), log


def fetch(directory: Path, **options: object) -> tuple[list[str], str]:
    return finish(start(FLASHSKIP_CACHE_DIR=str(directory), **options))  # type: ignore[arg-type]


def kernels_in(directory: Path) -> list[Path]:
    """All files, which must be sound entries."""
    files = sorted(directory.iterdir())
    for file in files:
        assert read_entry(file).payload[:4] == b"\x7fELF"
    return files


# ---- J01 -----------------------------------------------------------------------------------------


def test_reported_J01_eight_cold_processes_and_three_kernels(tmp_path: Path) -> None:
    processes = [start(kernels=3, FLASHSKIP_CACHE_DIR=str(tmp_path)) for _ in range(8)]
    results = [finish(process) for process in processes]
    assert len({tuple(hashes) for hashes, _ in results}) == 1
    assert "".join(log for _, log in results).count("INFO compiling k") == 3
    assert len(kernels_in(tmp_path)) == 3


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


# ---- J02 -----------------------------------------------------------------------------------------


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes(b ^ 1 for b in data[middle : middle + 64]) + data[middle + 64 :]


@pytest.mark.parametrize(
    "damage",
    [lambda d: b"", lambda d: d[: len(d) // 2], flipped, lambda d: os.urandom(len(d)), None],
    ids=["empty", "half", "flipped", "random", "another kernel's"],
)
def test_reported_J02_a_damaged_file_costs_one_warning(
    tmp_path: Path, damage: Callable[[bytes], bytes] | None
) -> None:
    expected, _ = fetch(tmp_path, kernels=2)
    files = {read_entry(file).metadata["symbol"]: file for file in kernels_in(tmp_path)}
    file = files["k0"]
    file.write_bytes(files["k1"].read_bytes() if damage is None else damage(file.read_bytes()))
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
    finish(start(HOME=str(home), FLASHSKIP_CACHE_DIR=str(cache)))
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
    _, log = finish(start(kernels=2, **environment))
    assert log.count("WARNING") == 1
    assert log.count("INFO compiling") == 2
    assert list(tmp_path.iterdir()) == [blocked]


ODD = "a b'c\"d$HOME ü"


def test_reported_J05_odd_characters_in_both_paths(tmp_path: Path) -> None:
    install = tmp_path / ODD / "lib"
    install.mkdir(parents=True)
    (install / "flashskip").symlink_to(ROOT / "flashskip")
    cache = tmp_path / ODD / "cache"
    hashes, log = finish(start(install, FLASHSKIP_CACHE_DIR=str(cache)))
    assert "WARNING" not in log
    assert len(kernels_in(cache)) == 1
    assert finish(start(install, FLASHSKIP_CACHE_DIR=str(cache))) == (hashes, "")


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
