"""Faults of the machine around the cache and the compiler: real processes, real file systems."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc")

from cold_start import (
    BARRIER,
    ROOT,
    command,
    environment,
    fetch,
    finish,
    kernels_in,
    launch,
    mounted,
)

from flashskip._jit.entry import Entry, publish, read_entry
from flashskip.variant import every

# ---- file systems --------------------------------------------------------------------------------


def read_only(directory: Path) -> list[list[str]]:
    place = str(directory)
    return [["mount", "--bind", place, place], ["mount", "-o", "remount,bind,ro", place]]


def test_a_read_only_directory_of_sound_entries_serves_in_silence(tmp_path: Path) -> None:
    hashes, _ = fetch(tmp_path, kernels=2)
    lines, log = mounted(
        read_only(tmp_path), [command(kernels=2)] * 2, FLASHSKIP_CACHE_DIR=str(tmp_path)
    )
    assert lines == [*hashes, "status 0"] * 2
    assert log == ""


def test_a_damaged_entry_that_cannot_be_replaced(tmp_path: Path) -> None:
    hashes, _ = fetch(tmp_path)
    (file,) = kernels_in(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    lines, log = mounted(read_only(tmp_path), [command()], FLASHSKIP_CACHE_DIR=str(tmp_path))
    assert lines == [*hashes, "status 0"]
    warnings = [line for line in log.splitlines() if line.startswith("WARNING")]
    assert ["damaged kernel" in w for w in warnings] == [True, False]  # what it is, that it stays
    assert "Read-only file system" in warnings[1]


def test_a_file_system_without_room_for_a_name(tmp_path: Path) -> None:
    """No lock and no entry can be made there, while bytes are free."""
    mounts = [["mount", "-t", "tmpfs", "tmpfs", "-o", "nr_inodes=1", str(tmp_path)]]
    lines, log = mounted(
        mounts,
        [command(kernels=2), ["ls", "-A", str(tmp_path)]],
        FLASHSKIP_CACHE_DIR=str(tmp_path),
    )
    assert lines[2:] == ["status 0", "status 0"]
    assert log.count("WARNING") == 1
    assert "No space left on device" in log


def test_room_that_comes_back_is_used_again(tmp_path: Path) -> None:
    mounts = [["mount", "-t", "tmpfs", "tmpfs", "-o", "size=64k", str(tmp_path)]]
    filler = str(tmp_path / "filler")
    lines, log = mounted(
        mounts,
        [["dd", "if=/dev/zero", f"of={filler}", "status=none"], command(), ["rm", filler],
         command(), command()],
        FLASHSKIP_CACHE_DIR=str(tmp_path),
    )  # fmt: skip
    assert [line for line in lines if line.startswith("status")] == [
        "status 1", "status 0", "status 0", "status 0", "status 0",
    ]  # fmt: skip
    assert log.count("WARNING") == 1
    assert log.count("INFO compiling") == 2  # the third process finds it


@pytest.mark.parametrize("full", ["out", "tmp"])
def test_a_warmup_onto_a_full_file_system_fails_in_words(tmp_path: Path, full: str) -> None:
    places = {name: tmp_path / name for name in ("out", "tmp")}
    for place in places.values():
        place.mkdir()
    manifest = tmp_path / "manifest"
    manifest.write_text(every()[0].symbol)
    warmup = [sys.executable, "-m", "flashskip", "warmup", "--manifest", str(manifest)]
    lines, log = mounted(
        [["mount", "-t", "tmpfs", "tmpfs", "-o", "size=16k", str(places[full])]],
        [[*warmup, "--jobs", "1", "--out", str(places["out"])], ["ls", "-A", str(places["out"])]],
        TMPDIR=str(places["tmp"]), PYTHONPATH=str(ROOT),
    )  # fmt: skip
    assert lines[-2:] == ["status 1", "status 0"]  # and the directory is empty
    assert "No space left on device" in "".join(lines) + log
    if full == "out":
        assert f"failed: {every()[0].symbol}" in log


# ---- killed, removed, at once --------------------------------------------------------------------

# The process is killed between writing an entry and giving it its name.
KILLED = """
import pathlib, signal
pathlib.Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_writer_killed_before_the_rename_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    victim = launch(command(before=KILLED), FLASHSKIP_CACHE_DIR=str(tmp_path))
    victim.communicate(timeout=60)
    assert victim.returncode == -9
    left = {path.suffix for path in tmp_path.iterdir()}
    assert left == {".lock", ".tmp"}
    hashes, log = fetch(tmp_path)
    assert "WARNING" not in log
    for path in tmp_path.glob("*.tmp"):  # an hour later a writer takes it away
        os.utime(path, (1e9, 1e9))
    assert fetch(tmp_path, kernels=2)[0][:1] == hashes
    assert len(kernels_in(tmp_path)) == 2


def test_a_directory_removed_under_processes_that_wait(tmp_path: Path) -> None:
    cache, go = tmp_path / "cache", tmp_path / "go"
    slow = f"original = kernel.compile_cubin\ndef slow(program):{BARRIER.format(file=str(go))}"
    slow = slow.replace("\nprint", "\n    print").replace("\nwhile", "\n    while")
    slow += "\n    return original(program)\nkernel.compile_cubin = slow"
    builder = launch(command(before=slow), FLASHSKIP_CACHE_DIR=str(cache))
    assert builder.stdout is not None
    assert builder.stdout.readline() == "ready\n"
    waiting = [launch(command(), FLASHSKIP_CACHE_DIR=str(cache)) for _ in range(2)]
    shutil.rmtree(cache)
    go.write_text("")
    results = [finish(process) for process in (builder, *waiting)]
    assert len({hashes[0] for hashes, _ in results}) == 1
    assert "WARNING" not in "".join(log for _, log in results)
    assert len(kernels_in(cache)) == 1


def test_eight_cold_processes_whose_clocks_differ(tmp_path: Path) -> None:
    """Each believes to be at another time, and gives its files that time, as over a network."""
    clock = """
now = {now}
time.time = lambda: now
import pathlib
renamed = pathlib.Path.replace
def replace(self, target):
    os.utime(self, (now, now))
    return renamed(self, target)
pathlib.Path.replace = replace
"""
    processes = [
        launch(
            command(kernels=2, before=clock.format(now=1.0e9 + 1e8 * number)),
            FLASHSKIP_CACHE_DIR=str(tmp_path),
        )
        for number in range(8)
    ]
    results = [finish(process) for process in processes]
    assert len({tuple(hashes) for hashes, _ in results}) == 1
    assert len(results[0][0]) == 2
    # One may take another's unnamed file for a leftover; that costs a warning and nothing else.
    assert all(log.count("WARNING") <= 1 for _, log in results)
    assert "INFO compiling" not in fetch(tmp_path, kernels=2)[1] or any(
        "WARNING" in log for _, log in results
    )


def test_children_of_a_fork_share_a_cold_cache(tmp_path: Path) -> None:
    """Forked after the import and before the first kernel, as servers do with their workers."""
    fork = "for _ in range(3):\n    if os.fork() == 0: break\n"
    code = command(kernels=2, before=fork)[2] + "sys.stdout.flush()\n"
    code += "try:\n    while True: assert os.wait()[1] == 0\nexcept ChildProcessError: pass\n"
    process = launch([sys.executable, "-c", code], FLASHSKIP_CACHE_DIR=str(tmp_path))
    hashes, log = finish(process)
    assert len(hashes) == 8
    assert len(set(hashes)) == 2
    assert log.count("INFO compiling k") == 2
    assert len(kernels_in(tmp_path)) == 2


# ---- two versions of the package in one directory ------------------------------------------------


def other_version(place: Path, *edits: tuple[str, str, str]) -> Path:
    """A copy of the package with some texts replaced: (file, text, other text)."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ("flashskip", "csrc", "templates"):
        shutil.copytree(ROOT / name, place / name, ignore=ignored)
    for name, text, other in edits:
        path = place / name
        assert text in path.read_text()
        path.write_text(path.read_text().replace(text, other))
    return place


def test_two_versions_share_a_directory(tmp_path: Path) -> None:
    """Versions that differ in a flag of the compiler, in the file format, or in what is reported.

    Each finds its own, first and last, and none warns, except of an entry that reports too little.
    """
    flag = ("flashskip/_jit/compile.py", '"--std=c++17",', '"--std=c++17", "--prec-sqrt=true",')
    form = [
        ("flashskip/_jit/entry.py", '_FORMAT = b"1"', '_FORMAT = b"2"'),
        ("flashskip/_jit/entry.py", r"\x001\n", r"\x002\n"),
    ]
    roots = [
        ROOT,
        other_version(tmp_path / "flag", flag),
        other_version(tmp_path / "form", *form),
    ]
    cache = tmp_path / "cache"
    first = [fetch(cache, root=root) for root in roots]
    assert [log.count("INFO compiling") for _, log in first] == [1, 1, 1]
    assert len(list(cache.iterdir())) == 3
    assert [fetch(cache, root=root) for root in roots] == [(hashes, "") for hashes, _ in first]
    shutil.rmtree(cache)
    processes = [launch(command(root=root), FLASHSKIP_CACHE_DIR=str(cache)) for root in 2 * roots]
    results = [finish(process) for process in processes]
    assert [hashes for hashes, _ in results] == 2 * [hashes for hashes, _ in first]
    assert "".join(log for _, log in results).count("INFO compiling") == 3


def test_an_entry_of_a_version_that_reported_less_is_replaced(tmp_path: Path) -> None:
    hashes, _ = fetch(tmp_path)
    (file,) = kernels_in(tmp_path)
    entry = read_entry(file)
    from flashskip._jit.entry import Key

    key = Key(entry.metadata["content"], entry.metadata["digest"])
    del entry.metadata["spill_loads"]
    publish(tmp_path, key, Entry(entry.metadata, entry.payload))
    again, log = fetch(tmp_path)
    assert again == hashes
    assert log.count("WARNING the cached k0 has no whole report; compiling it anew") == 1
    assert log.count("INFO compiling") == 1
    assert fetch(tmp_path) == (hashes, "")


# ---- the compiler --------------------------------------------------------------------------------


def packages_without_nvrtc(place: Path) -> Path:
    """A site directory like this interpreter's, but NVRTC and what describes it are missing."""
    from importlib.metadata import distribution

    site = Path(str(distribution("cuda-bindings").locate_file("")))
    place.mkdir()
    for path in site.iterdir():
        if path.name != "nvidia" and not path.name.startswith("nvidia_cuda_nvrtc"):
            (place / path.name).symlink_to(path)
    return place


def run_in(site: Path, **changed: str | None) -> subprocess.CompletedProcess[str]:
    """Run one process whose only site directory is this one."""
    arguments = command(before=f"assert {str(site)!r} in sys.path")
    return subprocess.run(
        [arguments[0], "-S", *arguments[1:]], text=True, capture_output=True, timeout=60,
        env=environment(PYTHONPATH=str(site), CUDA_HOME=None, CUDA_PATH=None, **changed),
    )  # fmt: skip


def test_a_missing_nvrtc_names_the_package_to_install(tmp_path: Path) -> None:
    site = packages_without_nvrtc(tmp_path / "site")
    done = run_in(site, FLASHSKIP_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 1
    assert "the compiler NVRTC is missing: nvidia-cuda-nvrtc is not installed" in done.stderr
    assert done.stderr.rstrip().endswith("run: pip install 'nvidia-cuda-nvrtc>=13,<14'")
    assert not list((tmp_path / "cache").glob("*"))  # the lock went with the failure


def test_a_seed_needs_no_nvrtc(tmp_path: Path) -> None:
    """What another machine compiled serves one without a compiler."""
    hashes, _ = fetch(tmp_path / "seed")
    site = packages_without_nvrtc(tmp_path / "site")
    seed = str(tmp_path / "seed")
    cache = str(tmp_path / "cache")
    done = run_in(site, FLASHSKIP_CACHE_DIR=cache, FLASHSKIP_CACHE_SEED=seed)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, hashes, "")
    assert not Path(cache).exists()


@pytest.mark.parametrize("version", ["12.9.86", "14.0.1"])
def test_an_nvrtc_of_another_major_version_is_named(tmp_path: Path, version: str) -> None:
    site = packages_without_nvrtc(tmp_path / "site")
    about = site / f"nvidia_cuda_nvrtc-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: nvidia-cuda-nvrtc\nVersion: {version}\n"
    )
    done = run_in(site, FLASHSKIP_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(
        "CompileError: the compiler NVRTC is of the wrong version: nvidia-cuda-nvrtc "
        f"{version} is installed and version 13 is needed; "
        "run: pip install 'nvidia-cuda-nvrtc>=13,<14'"
    )


def test_an_nvrtc_without_its_library_is_told_in_one_line(tmp_path: Path) -> None:
    site = packages_without_nvrtc(tmp_path / "site")
    about = site / "nvidia_cuda_nvrtc-13.0.88.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: nvidia-cuda-nvrtc\nVersion: 13.0.88\n"
    )
    done = run_in(site, FLASHSKIP_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 1
    last = done.stderr.rstrip().splitlines()[-1]
    assert "CompileError: the compiler NVRTC could not be loaded (" in last
    assert last.endswith("run: pip install 'nvidia-cuda-nvrtc>=13,<14'")
