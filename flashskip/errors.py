"""Every exception that flashskip defines. Wrong arguments raise ``ValueError`` or ``TypeError``."""

from __future__ import annotations

from ._jit.compile import CompileError
from ._jit.driver import DriverError
from ._jit.entry import CacheError, DamagedEntryError
from ._jit.error import FlashSkipError

__all__ = [
    "CacheError",
    "CompileError",
    "DamagedEntryError",
    "DriverError",
    "FlashSkipError",
    "UnsupportedDevice",
    "UnsupportedVariant",
]


class UnsupportedVariant(FlashSkipError, NotImplementedError, ValueError):
    """The arguments make sense, but no kernel does this. The message names the alternatives."""


class UnsupportedDevice(FlashSkipError):
    """There are no kernels for this GPU. The message says what works there."""
