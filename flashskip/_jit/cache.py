"""Compiled kernels by key: memory, then a directory, then read-only seed directories.

Whole entries appear by themselves (see `entry`), so the lock merely saves work. A directory that
cannot be used costs one warning, and the process goes on from memory. What a key stands for is not
known here.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .entry import CacheError, DamagedEntryError, Entry, Key, publish, read_entry

_LOG = logging.getLogger("flashskip")
_ENTRY = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.kernel")
_LEFTOVER = re.compile(_ENTRY.pattern + r"\.(lock|[0-9a-f]{16}\.tmp)")
_LEFTOVER_SECONDS = 3600.0
_POLL_SECONDS = 0.02


class KernelCache:
    """A cache of entries.

    Parameters
    ----------
    directory
        Where entries are kept; made when first written to, mode 0700. None: memory only.
    seeds
        Directories that are only read, in this order, after `directory`.
    max_bytes
        Above this size the entries that were not used for longest are removed.
    allow_build
        Whether a missing entry may be built; if not, missing it is a `CacheError`.
    lock_seconds
        Longest time to wait for another process or thread that builds the same entry.
    """

    def __init__(
        self,
        directory: Path | None,
        seeds: Sequence[Path] = (),
        *,
        max_bytes: int = 1 << 30,
        allow_build: bool = True,
        lock_seconds: float = 20.0,
    ) -> None:
        self.directory = directory
        self.seeds = tuple(seeds)
        self.max_bytes = max_bytes
        self._allow_build = allow_build
        self._lock_seconds = lock_seconds
        self._memory: dict[str, Entry] = {}
        self._thread_locks: dict[str, threading.Lock] = {}
        self._discarded: set[str] = set()
        self._warned: set[str] = set()

    def fetch(self, key: Key, build: Callable[[], Entry]) -> Entry:
        """Return the entry of `key`; the first to miss it calls `build` and stores the result.

        Raises
        ------
        CacheError
            The entry is missing and may not be built.
        """
        entry = self.find(key)
        if entry is not None:
            return entry
        if not self._allow_build:
            places = [str(place) for place in (self.directory, *self.seeds) if place is not None]
            raise CacheError(
                f"the kernel {key.label} is not in the cache and compiling is disabled "
                f"(FLASHSKIP_DISABLE_JIT); searched: {', '.join(places) or 'memory'}; build it "
                "with `flashskip warmup --out DIR` and name DIR in FLASHSKIP_CACHE_SEED"
            )
        with self._lock(key):
            entry = self.find(key)
            if entry is None:
                entry = build()
                self._memory[key.digest] = entry
                self._store(key, entry)
        return entry

    def find(self, key: Key) -> Entry | None:
        """Return the entry of `key` if there is one."""
        entry = self._memory.get(key.digest)
        if entry is None and key.digest not in self._discarded:
            entry = self._find_file(key) or self._find_seed(key)
        if entry is not None:
            self._memory[key.digest] = entry
        return entry

    def discard(self, key: Key) -> None:
        """Forget an entry that turned out useless, so that `fetch` builds and stores it anew."""
        self._memory.pop(key.digest, None)
        self._discarded.add(key.digest)

    def _find_file(self, key: Key) -> Entry | None:
        if self.directory is None:
            return None
        path = self.directory / key.file_name
        entry = self._read(path, "digest", key.digest)
        if entry is not None:
            with suppress(OSError):
                os.utime(path)  # the order of pruning
        return entry

    def _find_seed(self, key: Key) -> Entry | None:
        for seed in self.seeds:
            try:
                names = sorted(filter(key.is_content_of, os.listdir(seed)))
            except OSError as error:
                self._warn_once(f"cannot read FLASHSKIP_CACHE_SEED {seed}: {error}")
                continue
            names.sort(key=key.file_name.__ne__)  # the exact one first
            for name in filter(_ENTRY.fullmatch, names):
                entry = self._read(seed / name, "content", key.content)
                if entry is not None:
                    return entry
        return None

    def _read(self, path: Path, field: str, expected: str) -> Entry | None:
        """Read a file; None if there is none, or, with a warning, if it is not to be believed."""
        try:
            entry = read_entry(path)
            if entry.metadata[field] != expected:
                raise DamagedEntryError(f"{path} is the entry of another key")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (DamagedEntryError, IsADirectoryError) as error:
            self._warn_once(f"ignoring a damaged kernel in the cache and building it anew: {error}")
            return None
        except OSError as error:
            self._warn_unusable(path.parent, error)
            return None
        return entry

    def _store(self, key: Key, entry: Entry) -> None:
        if self.directory is None:
            return
        path = self.directory / key.file_name
        try:
            make_private(self.directory)
            publish(self.directory, key, entry)
            prune(self.directory, self.max_bytes, keep=path)
        except OSError as error:
            self._warn_unusable(self.directory, error)

    def _warn_unusable(self, directory: Path, error: OSError) -> None:
        self._warn_once(
            f"cannot use the kernel cache {directory} ({error}); kernels are kept in memory and "
            "compiled again by the next process; set FLASHSKIP_CACHE_DIR to a writable directory",
            topic=str(directory),
        )

    def _warn_once(self, message: str, topic: str | None = None) -> None:
        topic = topic or message
        if topic not in self._warned:
            self._warned.add(topic)
            _LOG.warning("%s", message)

    @contextmanager
    def _lock(self, key: Key) -> Iterator[None]:
        """Hold the key's locks; after `lock_seconds`, or where locks do not work, go on without."""
        deadline = time.monotonic() + self._lock_seconds
        thread_lock = self._thread_locks.setdefault(key.digest, threading.Lock())
        acquired = thread_lock.acquire(timeout=self._lock_seconds)
        try:
            with self._file_lock(key, deadline):
                yield
        finally:
            if acquired:
                thread_lock.release()

    @contextmanager
    def _file_lock(self, key: Key, deadline: float) -> Iterator[None]:
        """Lock a file beside the entry. The system drops the lock of a process that is killed."""
        descriptor, path = -1, None
        if self.directory is not None and not self._memory.get(key.digest):
            path = self.directory / f"{key.file_name}.lock"
            with suppress(OSError):
                make_private(self.directory)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                descriptor = os.open(path, flags, 0o600)
        try:
            if descriptor >= 0:
                self._wait_for(descriptor, key, deadline)
            yield
        finally:
            if descriptor >= 0:
                with suppress(OSError):
                    os.unlink(str(path))  # before letting go: the next ones find the entry
                os.close(descriptor)

    def _wait_for(self, descriptor: int, key: Key, deadline: float) -> None:
        assert self.directory is not None
        path = self.directory / key.file_name
        seen = path.exists()  # a damaged one: only its replacement ends the wait
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if not seen and path.exists():
                    return
                time.sleep(_POLL_SECONDS)
            except OSError:  # a file system without locks
                return


@dataclass(frozen=True)
class Listed:
    """A file of a cache directory, as found by `entries`."""

    path: Path
    size: int
    used: float


def entries(directory: Path) -> list[Listed]:
    """List the entries of a directory, longest unused first. Other files are not looked at."""
    found = []
    for path in _matching(directory, _ENTRY):
        with suppress(OSError):  # removed by another process meanwhile
            status = path.stat()
            found.append(Listed(path, status.st_size, status.st_mtime))
    return sorted(found, key=lambda entry: (entry.used, entry.path))


def verify(directory: Path) -> list[tuple[Path, str]]:
    """Check every entry of a directory; return the damaged ones, each with what is wrong."""
    damaged = []
    for listed in entries(directory):
        try:
            metadata = read_entry(listed.path).metadata
            if Key(metadata["content"], metadata["digest"]).file_name != listed.path.name:
                damaged.append((listed.path, f"{listed.path} is the entry of another key"))
        except (OSError, DamagedEntryError) as error:
            damaged.append((listed.path, str(error)))
    return damaged


def prune(directory: Path, max_bytes: int, keep: Path | None = None) -> list[Path]:
    """Remove the longest unused entries until `max_bytes` hold, and what killed writers left."""
    now = time.time()
    for leftover in _matching(directory, _LEFTOVER):
        with suppress(OSError):
            if abs(now - leftover.stat().st_mtime) > _LEFTOVER_SECONDS:
                leftover.unlink()
    listed = entries(directory)
    total = sum(entry.size for entry in listed)
    removed = []
    for entry in listed:
        if total <= max_bytes:
            break
        if entry.path != keep:
            with suppress(OSError):
                entry.path.unlink()
                removed.append(entry.path)
                total -= entry.size
    return removed


def clear(directory: Path) -> int:
    """Remove all entries and leftovers, and nothing else; return how many files went."""
    removed = 0
    for pattern in (_ENTRY, _LEFTOVER):
        for path in _matching(directory, pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            removed += 1
    return removed


def _matching(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    try:
        return [directory / name for name in os.listdir(directory) if pattern.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def make_private(directory: Path) -> None:
    """Make a cache's directory, if it is not there, so that nobody else writes machine code."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
