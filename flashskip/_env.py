"""Every environment variable of flashskip; nothing else reads the environment."""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from pathlib import Path

from ._jit.cache import KernelCache

VARIABLES = {
    "FLASHSKIP_CACHE_DIR": "where compiled kernels are kept; default: flashskip in the user's "
    "cache directory",
    "FLASHSKIP_CACHE_SEED": "directories of compiled kernels that are only read, separated by "
    "colons",
    "FLASHSKIP_CACHE_MAX_MB": "size of the cache above which the longest unused kernels go; "
    "default 1024",
    "FLASHSKIP_DISABLE_JIT": "1: a kernel that is not in the cache is an error, never compiled",
    "FLASHSKIP_LOG": "level of the logger 'flashskip': debug, info, warning or error",
    "FLASHSKIP_MANIFEST": "file to which each kernel used is appended, for "
    "`flashskip warmup --manifest`",
}

_LEVELS = ("debug", "info", "warning", "error")


def cache_dir() -> Path | None:
    """Return FLASHSKIP_CACHE_DIR, else the user's cache directory; None where there is no home."""
    chosen = os.environ.get("FLASHSKIP_CACHE_DIR")
    if chosen:
        return _absolute(chosen)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base, "flashskip")
    try:
        return Path.home() / ".cache" / "flashskip"
    except RuntimeError:
        return None


def cache_seeds() -> tuple[Path, ...]:
    """Return the directories of FLASHSKIP_CACHE_SEED."""
    seeds = os.environ.get("FLASHSKIP_CACHE_SEED", "").split(":")
    return tuple(_absolute(seed) for seed in seeds if seed)


def cache_max_bytes() -> int:
    """Return FLASHSKIP_CACHE_MAX_MB in bytes."""
    text = os.environ.get("FLASHSKIP_CACHE_MAX_MB") or "1024"
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(
            f"FLASHSKIP_CACHE_MAX_MB={text!r} is not a number of megabytes; set it to 1 or more"
        )
    return int(text) << 20


def disable_jit() -> bool:
    """Whether FLASHSKIP_DISABLE_JIT forbids to compile."""
    text = os.environ.get("FLASHSKIP_DISABLE_JIT") or "0"
    if text not in ("0", "1"):
        raise ValueError(
            f"FLASHSKIP_DISABLE_JIT={text!r} is neither 0 nor 1; set it to one of them"
        )
    return text == "1"


@lru_cache
def kernel_cache() -> KernelCache:
    """Return the process's cache of kernels, as the environment was at the first call."""
    configure_logging()  # from here on there is something to say
    return KernelCache(
        cache_dir(), cache_seeds(), max_bytes=cache_max_bytes(), allow_build=not disable_jit()
    )


def configure_logging() -> None:
    """Apply FLASHSKIP_LOG: the logger's level, and lines to stderr where nothing else listens."""
    text = os.environ.get("FLASHSKIP_LOG")
    if not text:
        return
    if text.lower() not in _LEVELS:
        raise ValueError(
            f"FLASHSKIP_LOG={text!r} is no level; set it to one of {', '.join(_LEVELS)}"
        )
    logger = logging.getLogger("flashskip")
    logger.setLevel(text.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("flashskip: %(message)s"))
        logger.addHandler(handler)


def manifest() -> Path | None:
    """Return FLASHSKIP_MANIFEST."""
    chosen = os.environ.get("FLASHSKIP_MANIFEST")
    return _absolute(chosen) if chosen else None


def record_used(symbol: str) -> None:
    """Append a kernel's symbol to FLASHSKIP_MANIFEST, if that is set."""
    path = manifest()
    if path is None:
        return
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{symbol}\n")  # one short write: lines of several processes do not mix
    except OSError as error:
        logging.getLogger("flashskip").warning(
            "cannot append to FLASHSKIP_MANIFEST=%s: %s", path, error
        )


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))
