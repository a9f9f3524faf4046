"""One file per kernel: magic, sizes, checksum, JSON metadata, payload.

It appears by an atomic rename and is believed only if its checksum and its key are right, so
neither a killed writer nor two at once can do harm.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .error import FlashSkipError

_MAGIC = b"flashskip\x00kernel\x001\n"
_HEADER = struct.Struct("<QQ32s")  # metadata bytes, payload bytes, SHA-256 of both
_FORMAT = b"1"  # part of every name: two versions of the package never fight over one file
_LARGEST_BYTES = 1 << 28


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


def read_entry(path: Path) -> Entry:
    """Read and check one file.

    Raises
    ------
    OSError
        The file cannot be read.
    DamagedEntryError
        It is not a whole entry, or its checksum is wrong.
    """
    with open(path, "rb", opener=_open_without_waiting) as file:
        data = file.read(_LARGEST_BYTES)
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
    except (ValueError, AttributeError, RecursionError):
        known = False
    if not known:
        raise DamagedEntryError(f"{path} has no valid metadata")
    return Entry(metadata, data[start + metadata_size :])


def _open_without_waiting(path: str, flags: int) -> int:
    """Open whatever is in an entry's place: a pipe without a writer too must not be waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


def publish(directory: Path, key: Key, entry: Entry) -> None:
    """Write an entry beside its place, then rename it. No partial file remains.

    Raises
    ------
    OSError
        The directory is missing, read-only or full.
    """
    metadata = json.dumps({**entry.metadata, "content": key.content, "digest": key.digest})
    body = metadata.encode() + entry.payload
    checksum = hashlib.sha256(body).digest()
    header = _HEADER.pack(len(metadata.encode()), len(entry.payload), checksum)
    path = directory / key.file_name
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


def holds(directory: Path, key: Key) -> bool:
    """Whether a directory has a sound entry of `key`."""
    try:
        return bool(read_entry(directory / key.file_name).metadata["digest"] == key.digest)
    except (OSError, DamagedEntryError):
        return False
