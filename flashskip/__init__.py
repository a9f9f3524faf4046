"""Attention for Hopper GPUs that skips the tiles which do not matter, compiled on demand."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import reference
    from ._options import PlanOptions
    from .controller import SparsityController
    from .decode import BatchDecodeWrapper
    from .errors import (
        CacheError,
        CompileError,
        DriverError,
        FlashSkipError,
        UnsupportedDevice,
        UnsupportedVariant,
    )
    from .indices import check_indices
    from .page import append_paged_kv_cache
    from .policy import DenoiseProgress, SkipSoftmaxConfig, record_denoise_step
    from .prefill import BatchPrefillWrapper
    from .state import merge_state, merge_states
    from .variant import Variant

__version__ = "0.1.0"

__all__ = [
    "BatchDecodeWrapper",
    "BatchPrefillWrapper",
    "CacheError",
    "CompileError",
    "DenoiseProgress",
    "DriverError",
    "FlashSkipError",
    "PlanOptions",
    "SkipSoftmaxConfig",
    "SparsityController",
    "UnsupportedDevice",
    "UnsupportedVariant",
    "Variant",
    "append_paged_kv_cache",
    "check_indices",
    "merge_state",
    "merge_states",
    "record_denoise_step",
    "reference",
]

# Where each public name lives. Names are looked up on first use, because the build workers of
# `flashskip warmup` import this package too and need neither torch nor the CUDA driver.
_HOME = {
    "BatchDecodeWrapper": "decode",
    "BatchPrefillWrapper": "prefill",
    "CacheError": "errors",
    "CompileError": "errors",
    "DenoiseProgress": "policy",
    "DriverError": "errors",
    "FlashSkipError": "errors",
    "PlanOptions": "_options",
    "SkipSoftmaxConfig": "policy",
    "SparsityController": "controller",
    "UnsupportedDevice": "errors",
    "UnsupportedVariant": "errors",
    "Variant": "variant",
    "append_paged_kv_cache": "page",
    "check_indices": "indices",
    "merge_state": "state",
    "merge_states": "state",
    "record_denoise_step": "policy",
}


def __getattr__(name: str) -> object:
    if name == "reference":
        return import_module(".reference", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
