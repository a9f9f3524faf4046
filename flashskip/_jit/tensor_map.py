"""A tensor in memory to the descriptor that TMA copies read."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np

from .driver import driver, failure

_DTYPES = {
    "bf16": "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
    "fp16": "CU_TENSOR_MAP_DATA_TYPE_FLOAT16",
    "e4m3": "CU_TENSOR_MAP_DATA_TYPE_UINT8",
}
_SWIZZLES = {
    0: "CU_TENSOR_MAP_SWIZZLE_NONE",
    32: "CU_TENSOR_MAP_SWIZZLE_32B",
    64: "CU_TENSOR_MAP_SWIZZLE_64B",
    128: "CU_TENSOR_MAP_SWIZZLE_128B",
}
_FETCHES = {
    0: "CU_TENSOR_MAP_L2_PROMOTION_NONE",
    64: "CU_TENSOR_MAP_L2_PROMOTION_L2_64B",
    128: "CU_TENSOR_MAP_L2_PROMOTION_L2_128B",
}


@lru_cache(maxsize=256)
def tensor_map(
    address: int,
    dtype: str,
    shape: tuple[int, ...],
    strides_bytes: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
    fetch: int = 128,
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Encode a tensor map; reads outside `shape` give zeros, writes there do nothing.

    Parameters
    ----------
    address
        Of element 0; a multiple of 16.
    dtype
        ``"bf16"``, ``"fp16"`` or ``"e4m3"``.
    shape
        Elements per dimension, fastest first, each at least 1.
    strides_bytes
        Of all dimensions but the fastest, in bytes; multiples of 16.
    box
        Elements per dimension that one copy moves.
    swizzle
        Width of the shared-memory swizzle in bytes: 0, 32, 64 or 128.
    fetch
        Bytes that L2 reads at a time: 64 or 128, or 0 for no more than is asked for.

    Returns
    -------
    numpy.ndarray
        uint8 ``[128]``, read-only; for a field of type ``TensorMap``.

    Raises
    ------
    DriverError
        The driver refuses the combination, or there is no driver.
    """
    module = driver()
    rank = len(shape)
    assert len(strides_bytes) == rank - 1, "strides of all dimensions but the fastest"
    assert len(box) == rank, "a box has the tensor's rank"
    error, encoded = module.cuTensorMapEncodeTiled(
        getattr(module.CUtensorMapDataType, _DTYPES[dtype]),
        rank,
        address,
        _wide(shape),
        _wide(strides_bytes),
        _narrow(box),
        _narrow((1,) * rank),
        module.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(module.CUtensorMapSwizzle, _SWIZZLES[swizzle]),
        getattr(module.CUtensorMapL2promotion, _FETCHES[fetch]),
        module.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if error:
        raise failure(
            error,
            f"cuTensorMapEncodeTiled, {dtype} {shape} strides {strides_bytes} box {box} swizzle "
            f"{swizzle} at {address:#x}",
        )
    data = ctypes.string_at(int(encoded.getPtr()), 128)
    return np.frombuffer(data, np.uint8)


# Tensors move more often than their shapes change, and making these lists takes half the time.


@lru_cache(maxsize=256)
def _wide(values: tuple[int, ...]) -> list[Any]:
    return [driver().cuuint64_t(value) for value in values]


@lru_cache(maxsize=256)
def _narrow(values: tuple[int, ...]) -> list[Any]:
    return [driver().cuuint32_t(value) for value in values]
