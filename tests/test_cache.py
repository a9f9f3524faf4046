"""The cache of kernels under faults and races, most of it with real processes."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashskip._jit import cache as cache_module
from flashskip._jit import entry as entry_module
from flashskip._jit.cache import KernelCache, clear, entries, prune, verify
from flashskip._jit.compile import Program, compile_cubin
from flashskip._jit.entry import (
    CacheError,
    DamagedEntryError,
    Entry,
    Key,
    holds,
    publish,
    read_entry,
)
from flashskip._jit.kernel import fetch, key_of
from flashskip._jit.render import Source

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = Program("k", Source('extern "C" __global__ void k(int* p) { *p = 7; }\n'), block=32)
KEY = Key("content", "digest", "a kernel")
ENTRY = Entry({"symbol": "k"}, bytes(range(256)) * 20)

# A process that fetches PROGRAM and prints the cubin's hash; argument: lock_seconds.
FETCH = """
import hashlib, logging, pathlib, sys, time
sys.path.insert(0, {root!r})
from flashskip._jit import compile, kernel
from flashskip._jit.cache import KernelCache
from flashskip._jit.render import Source
logging.basicConfig(level="INFO", format="%(message)s")
original = compile.compile_cubin
def slow(program):
    print("building", flush=True)
    time.sleep({build_seconds})
    return original(program)
kernel.compile_cubin = slow
cache = KernelCache(pathlib.Path({directory!r}), lock_seconds={lock_seconds})
program = compile.Program("k", Source({text!r}), block=32)
print(hashlib.sha256(kernel.fetch(program, cache).cubin).hexdigest())
"""


def start(
    directory: Path, *, build_seconds: float = 0, lock_seconds: float = 20
) -> subprocess.Popen[str]:
    code = FETCH.format(
        root=str(ROOT),
        directory=str(directory),
        text=PROGRAM.source.text,
        build_seconds=build_seconds,
        lock_seconds=lock_seconds,
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    return out.split()[-1], log


@pytest.fixture(autouse=True)
def _log_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flashskip")


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def builder(times: list[int] | None = None) -> Callable[[], Entry]:
    def build() -> Entry:
        if times is not None:
            times.append(1)
        return ENTRY

    return build


def must_not_build() -> Entry:
    raise AssertionError("the entry should have been found")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# -- the ordinary life of an entry ---------------------------------------------------------------


def test_an_entry_outlives_the_process_and_the_second_fetch_is_a_hit(tmp_path: Path) -> None:
    made = KernelCache(tmp_path / "c").fetch(KEY, builder())
    found = KernelCache(tmp_path / "c").fetch(KEY, must_not_build)
    assert made.payload == found.payload == ENTRY.payload
    assert found.metadata["symbol"] == "k"
    assert names(tmp_path / "c") == [KEY.file_name]  # neither locks nor temporary files


def test_a_hit_takes_at_most_five_milliseconds(tmp_path: Path) -> None:
    fetch(PROGRAM, KernelCache(tmp_path))
    times = []
    for _ in range(5):
        start_time = time.perf_counter()
        compiled = fetch(PROGRAM, KernelCache(tmp_path))
        times.append(time.perf_counter() - start_time)
    assert min(times) < 0.005
    assert compiled.cubin == compile_cubin(PROGRAM).cubin
    assert compiled.registers > 0


def test_the_directory_is_private_and_made_only_when_written_to(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "a" / "b")
    assert cache.find(KEY) is None
    assert not (tmp_path / "a").exists()
    cache.fetch(KEY, builder())
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_without_a_directory_entries_live_in_memory() -> None:
    cache, times = KernelCache(None), []
    for _ in range(3):
        assert cache.fetch(KEY, builder(times)).payload == ENTRY.payload
    assert len(times) == 1


def test_an_entry_is_data_and_never_code(tmp_path: Path) -> None:
    publish(tmp_path, KEY, ENTRY)
    data = (tmp_path / KEY.file_name).read_bytes()
    assert data.startswith(b"flashskip\0kernel\x001\n")
    metadata = data[data.index(b'{"') : data.index(b'"}') + 2]
    assert json.loads(metadata) == {"symbol": "k", "content": "content", "digest": "digest"}
    for module in (cache_module, entry_module):
        text = Path(module.__file__ or "").read_text()
        assert not any(word in text for word in ("pickle", "marshal", "eval(", "exec("))


# -- damage --------------------------------------------------------------------------------------


def truncate(size: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * size)])

    return damage


def flip(position: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int((len(data) - 1) * position)] ^= 4
        path.write_bytes(data)

    return damage


def random_bytes(path: Path) -> None:
    path.write_bytes(os.urandom(5000))


def another_entry(path: Path) -> None:
    other = Key("other content", "other digest")
    publish(path.parent, other, ENTRY)
    (path.parent / other.file_name).rename(path)


def directory_in_its_place(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "file").write_text("x")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def deep_metadata(path: Path) -> None:
    body = b'{"digest":' * 100_000
    header = entry_module._HEADER.pack(len(body), 0, hashlib.sha256(body).digest())
    path.write_bytes(entry_module._MAGIC + header + body)


def dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


@pytest.mark.parametrize(
    "damage",
    [
        truncate(0), truncate(0.001), truncate(0.5), truncate(0.9999), longer,
        flip(0), flip(0.003), flip(0.006), flip(0.5), flip(1), random_bytes, another_entry,
        directory_in_its_place, dangling_link, pipe, deep_metadata,
    ],
)  # fmt: skip
def test_a_damaged_entry_is_rebuilt_once_with_one_warning(
    tmp_path: Path, damage: Callable[[Path], None], warnings: Callable[[], list[str]]
) -> None:
    KernelCache(tmp_path).fetch(KEY, builder())
    damage(tmp_path / KEY.file_name)
    times: list[int] = []
    cache = KernelCache(tmp_path)
    for _ in range(2):
        assert cache.fetch(KEY, builder(times)).payload == ENTRY.payload
    assert len(times) == 1
    if damage is not dangling_link:  # that one is simply missing
        assert [KEY.file_name in message for message in warnings()] == [True]
    assert KernelCache(tmp_path).fetch(KEY, must_not_build).payload == ENTRY.payload
    assert verify(tmp_path) == []
    assert names(tmp_path) == [KEY.file_name]


def test_verify_names_what_is_damaged(tmp_path: Path) -> None:
    keys = [Key(f"c{i}", f"d{i}") for i in range(4)]
    for key in keys:
        publish(tmp_path, key, ENTRY)
    assert verify(tmp_path) == []
    flip(0.7)(tmp_path / keys[1].file_name)
    (tmp_path / keys[2].file_name).unlink()
    (tmp_path / keys[3].file_name).rename(tmp_path / keys[2].file_name)
    problems = {path.name: problem for path, problem in verify(tmp_path)}
    assert problems.keys() == {keys[1].file_name, keys[2].file_name}
    assert "wrong checksum" in problems[keys[1].file_name]
    assert "another key" in problems[keys[2].file_name]
    assert [holds(tmp_path, key) for key in keys] == [True, False, False, False]


@pytest.mark.parametrize("metadata", [b"[]", b"7", b"{", b"{}", b'{"digest": 1}', b"\xff"])
def test_metadata_that_is_not_ours_is_damage(tmp_path: Path, metadata: bytes) -> None:
    body = metadata + b"payload"
    header = entry_module._HEADER.pack(len(metadata), 7, hashlib.sha256(body).digest())
    (tmp_path / "x").write_bytes(entry_module._MAGIC + header + body)
    with pytest.raises(DamagedEntryError, match="metadata"):
        read_entry(tmp_path / "x")


# -- places that cannot be used ------------------------------------------------------------------


@pytest.fixture(params=["below a file", "below /proc", "no name is legal"])
def unusable(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Directories that not even root can write to."""
    (tmp_path / "file").write_text("")
    return {
        "below a file": tmp_path / "file" / "cache",
        "below /proc": Path("/proc/flashskip/cache"),
        "no name is legal": tmp_path / ("x" * 300),
    }[request.param]


def test_an_unusable_directory_costs_one_warning(
    unusable: Path, warnings: Callable[[], list[str]]
) -> None:
    cache, times = KernelCache(unusable), []
    for key in (KEY, Key("c2", "d2"), KEY):
        assert cache.fetch(key, builder(times)).payload == ENTRY.payload
    assert len(times) == 2
    (message,) = warnings()
    assert str(unusable) in message
    assert "FLASHSKIP_CACHE_DIR" in message


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_full_or_read_only_disk_leaves_nothing_half_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warnings: Callable[[], list[str]],
    code: int,
) -> None:
    def fail(self: Path, target: Path) -> Path:
        raise OSError(code, os.strerror(code), str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        cache, times = KernelCache(tmp_path), []
        for _ in range(2):
            assert cache.fetch(KEY, builder(times)).payload == ENTRY.payload
    assert len(times) == 1
    assert len(warnings()) == 1
    assert os.strerror(code) in warnings()[0]
    assert names(tmp_path) == []


def test_a_file_system_that_really_fills_up(
    tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    """A file-size limit stops the write in its middle, as a full disk does."""
    code = f"""
import resource, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from flashskip._jit.cache import KernelCache
from flashskip._jit.entry import Entry, Key
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))
entry = KernelCache(Path({str(tmp_path)!r})).fetch(Key("c", "d"), lambda: Entry({{}}, bytes(50000)))
print(len(entry.payload))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "50000\n", done.stderr
    assert done.stderr.count("cannot use the kernel cache") == 1
    assert "Traceback" not in done.stderr
    assert names(tmp_path) == []


def test_a_read_only_copy_serves_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    publish(tmp_path, KEY, ENTRY)

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("utime", "mkdir", "unlink", "replace", "rename"):
        monkeypatch.setattr(cache_module.os, name, fail)
    assert KernelCache(tmp_path).fetch(KEY, must_not_build).payload == ENTRY.payload
    assert warnings() == []


@pytest.mark.parametrize(
    "name", ["with blank", "q'uo\"te", "$HOME", "umläut", "new\nline", "-n", "%s"]
)
def test_odd_characters_in_the_path(
    tmp_path: Path, name: str, warnings: Callable[[], list[str]]
) -> None:
    directory = tmp_path / name
    KernelCache(directory).fetch(KEY, builder())
    KernelCache(directory).fetch(KEY, must_not_build)
    assert names(directory) == [KEY.file_name]
    assert warnings() == []


def test_a_directory_that_disappears(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    cache = KernelCache(tmp_path / "c")
    cache.fetch(KEY, builder())
    shutil.rmtree(tmp_path / "c")
    cache.fetch(KEY, must_not_build)  # from memory
    cache.fetch(Key("c2", "d2"), builder())
    assert len(names(tmp_path / "c")) == 1

    def build_meanwhile() -> Entry:
        shutil.rmtree(tmp_path / "c")
        return ENTRY

    cache.fetch(Key("c3", "d3"), build_meanwhile)
    assert names(tmp_path / "c") == [Key("c3", "d3").file_name]
    assert warnings() == []


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become a user without a home")
def test_a_user_without_rights_or_home(tmp_path: Path) -> None:
    """A container with an arbitrary user id: unwritable, unreadable, and no directory at all."""
    code = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from flashskip import _env
from flashskip._jit.cache import KernelCache
from flashskip._jit.entry import Entry, Key
os.environ.pop("HOME", None), os.environ.pop("XDG_CACHE_HOME", None)
os.setgid(54321), os.setuid(54321)
print(_env.cache_dir())
for place in ("/flashskip", {str(tmp_path / "closed")!r}):
    for number in range(2):
        key = Key(f"c{{number}}", f"d{{number}}")
        assert KernelCache(Path(place)).fetch(key, lambda: Entry({{}}, b"x")).payload == b"x"
"""
    (tmp_path / "closed").mkdir(mode=0o700)
    environment = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
    assert done.stderr.count("cannot use the kernel cache") == 4  # each cache object once
    assert done.stderr.count("\n") == 4


# -- seeds ---------------------------------------------------------------------------------------


def test_a_seed_is_only_read_and_may_differ_in_the_compiler_s_version(tmp_path: Path) -> None:
    seed, old = tmp_path / "seed", Key("content", "digest of an older compiler")
    seed.mkdir()
    publish(seed, old, ENTRY)
    before = names(seed)
    cache = KernelCache(tmp_path / "c", [tmp_path / "missing", seed])
    assert cache.fetch(KEY, must_not_build).payload == ENTRY.payload
    assert names(seed) == before
    assert not (tmp_path / "c").exists()
    with pytest.raises(AssertionError):  # not so in the cache's own directory
        KernelCache(seed).fetch(KEY, must_not_build)
    with pytest.raises(AssertionError):  # and not for other content
        KernelCache(None, [seed]).fetch(Key("content 2", "digest 2"), must_not_build)


def test_the_exact_seed_wins(tmp_path: Path) -> None:
    for i in range(5):
        publish(tmp_path, Key("content", f"older {i}"), Entry({}, b"older"))
    publish(tmp_path, KEY, ENTRY)
    assert KernelCache(None, [tmp_path]).fetch(KEY, must_not_build).payload == ENTRY.payload


def test_a_damaged_seed_is_built_into_the_cache(
    tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    seed = tmp_path / "seed"
    seed.mkdir()
    publish(seed, KEY, ENTRY)
    flip(0.9)(seed / KEY.file_name)
    KernelCache(tmp_path / "c", [seed]).fetch(KEY, builder())
    assert len(warnings()) == 1
    KernelCache(tmp_path / "c", [seed]).fetch(KEY, must_not_build)
    assert len(warnings()) == 1


def test_a_moved_directory_is_still_a_hit(tmp_path: Path) -> None:
    fetch(PROGRAM, KernelCache(tmp_path / "made here"))
    (tmp_path / "made here").rename(tmp_path / "used there")
    cache = KernelCache(None, [tmp_path / "used there"])
    assert cache.fetch(key_of(PROGRAM), must_not_build).metadata["symbol"] == "k"


def test_disabled_building_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path, [tmp_path / "seed"], allow_build=False)
    with pytest.raises(CacheError, match=r"a kernel is not in the cache.*seed.*flashskip warmup"):
        cache.fetch(KEY, must_not_build)
    publish(tmp_path, KEY, ENTRY)
    assert cache.fetch(KEY, must_not_build).payload == ENTRY.payload


# -- races ---------------------------------------------------------------------------------------


def test_eight_cold_processes_compile_once(tmp_path: Path) -> None:
    processes = [start(tmp_path / "c", build_seconds=0.5) for _ in range(8)]
    results = [finish(process) for process in processes]
    assert len({digest for digest, _ in results}) == 1
    logs = "".join(log for _, log in results)
    assert logs.count("compiling k") == 1
    assert "Traceback" not in logs
    assert names(tmp_path / "c") == [key_of(PROGRAM).file_name]


def test_eight_cold_threads_build_once(tmp_path: Path) -> None:
    for cache in (KernelCache(tmp_path), KernelCache(None)):
        times: list[int] = []
        barrier = threading.Barrier(8)

        def work(
            cache: KernelCache = cache,
            times: list[int] = times,
            barrier: threading.Barrier = barrier,
        ) -> None:
            barrier.wait()
            cache.fetch(KEY, lambda: time.sleep(0.1) or builder(times)())

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(times) == 1


def test_a_killed_builder_holds_nobody_up(tmp_path: Path) -> None:
    victim = start(tmp_path, build_seconds=60)
    assert victim.stdout is not None
    assert victim.stdout.readline() == "building\n"
    waiters = [start(tmp_path) for _ in range(2)]
    time.sleep(0.3)
    victim.kill()
    victim.communicate()
    results = [finish(waiter) for waiter in waiters]
    assert len({digest for digest, _ in results}) == 1
    assert names(tmp_path) == [key_of(PROGRAM).file_name]


def test_a_stopped_builder_is_waited_for_only_so_long(tmp_path: Path) -> None:
    stopped = start(tmp_path, build_seconds=60)
    try:
        assert stopped.stdout is not None
        assert stopped.stdout.readline() == "building\n"
        stopped.send_signal(signal.SIGSTOP)
        finish(start(tmp_path, lock_seconds=0.5))
        assert holds(tmp_path, key_of(PROGRAM))
    finally:
        stopped.kill()
        stopped.communicate()


def test_a_stale_lock_file_is_no_obstacle(
    tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    (tmp_path / f"{KEY.file_name}.lock").write_text("12345")
    begin = time.monotonic()
    KernelCache(tmp_path).fetch(KEY, builder())
    assert time.monotonic() - begin < 2
    assert names(tmp_path) == [KEY.file_name]
    assert warnings() == []


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(cache_module.fcntl, "flock", fail)
    KernelCache(tmp_path).fetch(KEY, builder())
    KernelCache(tmp_path).fetch(KEY, must_not_build)


def test_a_reader_never_sees_half_an_entry(tmp_path: Path) -> None:
    """One thread publishes again and again while this one reads and verifies."""
    publish(tmp_path, KEY, ENTRY)
    stop = threading.Event()

    def rewrite() -> None:
        while not stop.is_set():
            publish(tmp_path, KEY, ENTRY)

    thread = threading.Thread(target=rewrite)
    thread.start()
    try:
        for _ in range(300):
            assert read_entry(tmp_path / KEY.file_name).payload == ENTRY.payload
    finally:
        stop.set()
        thread.join()


def test_a_failed_build_is_not_stored_and_frees_the_lock(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)

    def fail() -> Entry:
        raise RuntimeError("does not compile")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="does not compile"):
            cache.fetch(KEY, fail)
    assert names(tmp_path) == []
    assert cache.fetch(KEY, builder()).payload == ENTRY.payload


def test_fork_while_a_thread_builds(tmp_path: Path) -> None:
    """The child has a copy of a lock that nobody will release; it waits its time and goes on."""
    code = f"""
import os, sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from flashskip._jit.cache import KernelCache
from flashskip._jit.entry import Entry, Key
cache, key, building = KernelCache(None, lock_seconds=0.5), Key("c", "d"), threading.Event()
def build():
    building.set()
    time.sleep(1)
    return Entry({{}}, b"built")
thread = threading.Thread(target=lambda: cache.fetch(key, build))
thread.start()
building.wait()
child = os.fork()
if child == 0:
    os._exit(0 if cache.fetch(key, build).payload == b"built" else 1)
thread.join()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


# -- two versions, size, clock -------------------------------------------------------------------


def test_two_versions_share_a_directory_without_a_fight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    new = Key("content of a newer template", "newer digest")
    for key in (KEY, new):
        KernelCache(tmp_path).fetch(key, builder())
    with monkeypatch.context() as patch:  # a version with another file format
        patch.setattr(entry_module, "_FORMAT", b"2")
        patch.setattr(entry_module, "_MAGIC", b"flashskip\0kernel\x002\n")
        KernelCache(tmp_path).fetch(KEY, builder())
        KernelCache(tmp_path).fetch(KEY, must_not_build)
    for key in (KEY, new):
        KernelCache(tmp_path).fetch(key, must_not_build)
    assert len(names(tmp_path)) == 3
    assert warnings() == []


@pytest.fixture
def six(tmp_path: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Six entries of which number 0 was not used for longest, in a directory with other files."""
    keys = [Key(f"c{i}", f"d{i}") for i in range(6)]
    for age, key in enumerate(reversed(keys)):
        publish(tmp_path, key, ENTRY)
        os.utime(tmp_path / key.file_name, (1e9 - age, 1e9 - age))
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model.kernel").write_text("mine too")
    yield tmp_path, [tmp_path / key.file_name for key in keys]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "model.kernel").read_text() == "mine too"


def test_prune_removes_the_longest_unused_entries(six: tuple[Path, list[Path]]) -> None:
    directory, paths = six
    assert [entry.path for entry in entries(directory)] == paths
    size = paths[0].stat().st_size
    assert KernelCache(directory).find(Key("c0", "d0")) is not None  # used: now the youngest
    assert prune(directory, 3 * size) == paths[1:4]
    assert [entry.path for entry in entries(directory)] == [paths[4], paths[5], paths[0]]
    assert prune(directory, 3 * size) == []


def test_a_full_cache_makes_room_for_the_new_entry(six: tuple[Path, list[Path]]) -> None:
    directory, paths = six
    size = paths[0].stat().st_size
    KernelCache(directory, max_bytes=2 * size + 100).fetch(KEY, builder())
    assert {entry.path for entry in entries(directory)} == {paths[5], directory / KEY.file_name}
    KernelCache(directory, max_bytes=1).fetch(Key("c", "d"), builder())  # too large by itself
    assert [entry.path.name for entry in entries(directory)] == [Key("c", "d").file_name]


def test_clear_removes_what_is_the_cache_s_and_nothing_else(six: tuple[Path, list[Path]]) -> None:
    directory, paths = six
    directory_in_its_place(paths[0])
    (directory / f"{paths[1].name}.lock").write_text("")
    (directory / f"{paths[1].name}.0123456789abcdef.tmp").write_text("")
    assert clear(directory) == 8
    assert names(directory) == ["model.kernel", "notes.txt"]
    assert clear(directory / "missing") == 0


@pytest.mark.parametrize("clock", [0.0, 1e9, 4e9])
def test_leftovers_of_killed_writers_go_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: float
) -> None:
    leftover = tmp_path / f"{KEY.file_name}.0123456789abcdef.tmp"
    leftover.write_text("half")
    os.utime(leftover, (2e9, 2e9))
    monkeypatch.setattr(cache_module.time, "time", lambda: clock)
    KernelCache(tmp_path).fetch(KEY, builder())
    assert names(tmp_path) == [KEY.file_name]


def test_a_jumping_clock_changes_no_lookup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    KernelCache(tmp_path).fetch(KEY, builder())
    for clock in (0.0, 4e9):
        os.utime(tmp_path / KEY.file_name, (clock, clock))
        monkeypatch.setattr(cache_module.time, "time", lambda clock=clock: 4e9 - clock)
        assert KernelCache(tmp_path).fetch(KEY, must_not_build).payload == ENTRY.payload
