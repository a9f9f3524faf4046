"""Compiled kernels by key: memory, then a directory, then read-only seed directories.

An entry is one file: magic, sizes, checksum, JSON metadata, payload. It appears by an atomic
rename and is believed only if its checksum and its key are right, so neither a killed writer nor
two at once can do harm; the lock merely saves work. A directory that cannot be used costs one
warning, and the process goes on from memory. What a key stands for is not known here.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .error import FlashSkipError

_LOG = logging.getLogger("flashskip")
_MAGIC = b"flashskip\x00kernel\x001\n"
_HEADER = struct.Struct("<QQ32s")  # metadata bytes, payload bytes, SHA-256 of both
_ENTRY = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.kernel")
_LEFTOVER = re.compile(_ENTRY.pattern + r"\.(lock|[0-9a-f]{16}\.tmp)")
_FORMAT = b"1"  # part of every name: two versions of the package never fight over one file
_LARGEST_BYTES = 1 << 28
_LEFTOVER_SECONDS = 3600.0
_POLL_SECONDS = 0.02


class CacheError(FlashSkipError):
    """The cache cannot give what was asked, and only the user can change that."""


class DamagedEntryError(CacheError):
    """A file in the cache is not a valid entry; it is rebuilt where that is possible."""


@dataclass(frozen=True)
class Key:
    """What an entry is called. `content` leaves out what a seed's entry may differ in.

    `label` is for messages.
    """

    content: str
    digest: str
    label: str = ""

    @property
    def file_name(self) -> str:
        """The entry's name in a directory."""
        digest = hashlib.sha256(_FORMAT + self.digest.encode()).hexdigest()
        return f"{self._prefix}{digest[:32]}.kernel"

    @property
    def _prefix(self) -> str:
        content = hashlib.sha256(_FORMAT + self.content.encode()).hexdigest()
        return f"{content[:32]}-"

    def is_content_of(self, file_name: str) -> bool:
        """Whether a seed's file holds this content."""
        return file_name.startswith(self._prefix)


@dataclass(frozen=True)
class Entry:
    """A payload and what is worth knowing about it (JSON values)."""

    metadata: dict[str, Any]
    payload: bytes


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
        entry = self._memory.get(key.digest) or self._find_file(key) or self._find_seed(key)
        if entry is not None:
            self._memory[key.digest] = entry
        return entry

    def discard(self, key: Key) -> None:
        """Forget an entry that turned out useless; seeds keep their files but are not asked again.

        The caller builds it anew.
        """
        self._memory.pop(key.digest, None)
        self.seeds = ()
        if self.directory is not None:
            with suppress(OSError):
                (self.directory / key.file_name).unlink()

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
                self._warn_once(f"cannot read the seed directory {seed}: {error}")
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
        except (OSError, DamagedEntryError) as error:
            self._warn_once(f"ignoring a damaged kernel in the cache and building it anew: {error}")
            return None
        return entry

    def _store(self, key: Key, entry: Entry) -> None:
        if self.directory is None:
            return
        path = self.directory / key.file_name
        try:
            _make_private(self.directory)
            write_entry(path, _with_key(entry, key))
            prune(self.directory, self.max_bytes, keep=path)
        except OSError as error:
            self._warn_once(
                f"cannot write to the kernel cache {self.directory} ({error}); kernels are kept in "
                "memory and compiled again by the next process; set FLASHSKIP_CACHE_DIR to a "
                "writable directory",
                topic="write",
            )

    def _warn_once(self, message: str, topic: str | None = None) -> None:
        topic = topic or message
        if topic not in self._warned:
            self._warned.add(topic)
            _LOG.warning(message)

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
                _make_private(self.directory)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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


def read_entry(path: Path) -> Entry:
    """Read and check one file.

    Raises
    ------
    OSError
        The file cannot be read.
    DamagedEntryError
        It is not a whole entry, or its checksum is wrong.
    """
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > _LARGEST_BYTES:
            raise DamagedEntryError(f"{path} is too large")
        data = file.read()
    start = len(_MAGIC) + _HEADER.size
    if len(data) < start or not data.startswith(_MAGIC):
        raise DamagedEntryError(f"{path} has no valid header")
    metadata_size, payload_size, checksum = _HEADER.unpack_from(data, len(_MAGIC))
    if len(data) != start + metadata_size + payload_size:
        raise DamagedEntryError(f"{path} has {len(data)} bytes, not those that its header says")
    if hashlib.sha256(data[start:]).digest() != checksum:
        raise DamagedEntryError(f"{path} has a wrong checksum")
    try:
        metadata = json.loads(data[start : start + metadata_size])
        known = {"content", "digest"} <= metadata.keys()
    except (ValueError, AttributeError):
        known = False
    if not known:
        raise DamagedEntryError(f"{path} has no valid metadata")
    return Entry(metadata, data[start + metadata_size :])


def write_entry(path: Path, entry: Entry) -> None:
    """Publish an entry: write it beside its place, then rename. No partial file remains."""
    metadata = json.dumps(entry.metadata, sort_keys=True).encode()
    body = metadata + entry.payload
    header = _HEADER.pack(len(metadata), len(entry.payload), hashlib.sha256(body).digest())
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(_MAGIC + header + body)
        if path.is_dir() and not path.is_symlink():  # whatever it is, it is in an entry's place
            shutil.rmtree(path)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


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


def _make_private(directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)


def _with_key(entry: Entry, key: Key) -> Entry:
    return replace(entry, metadata={**entry.metadata, "content": key.content, "digest": key.digest})
