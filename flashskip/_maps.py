"""Tensors to the maps by which kernels load them with the copy engine (TMA)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flashskip._jit.tensor_map import tensor_map
from flashskip._tiles import PrefillTile, decode_box_bytes, tile_for
from flashskip.variant import Variant

Map = np.ndarray[Any, np.dtype[np.uint8]]

CHUNK = 64  # 16-bit elements in the 128 bytes that a swizzle spans
DECODE_TILE = 64  # keys of a decode tile

# A ragged map reaches row r of a request of n rows at token `start` through coordinates
# (row = 2**30 - n + r, y = start + n, x = 2**30): the row's own limit 2**30 then ends the request,
# so rows past it read as zeros. The strides of x and y cancel what that adds to the address (modulo
# 2**64).
ROW_LIMIT = 2**30
OFFSET_LIMIT = 2**31 - 65536
WRAP_BYTES = 2**34


def ragged_map(t: torch.Tensor, dtype: str, box_rows: int) -> Map:
    """Map of `t` ``[tokens, heads, dim]`` by (column, row, head, y, x), boxes of 64 columns."""
    _, heads, dim = t.shape
    # The stride of a dimension of one element is arbitrary, an empty tensor has no address: neither
    # is ever used.
    row = dim * t.element_size()
    token = t.stride(0) * t.element_size() if t.shape[0] > 1 else row
    head = t.stride(1) * t.element_size() if heads > 1 else row
    return tensor_map(
        t.data_ptr() or 16,
        dtype,
        (dim, ROW_LIMIT, heads, OFFSET_LIMIT, OFFSET_LIMIT),
        (token, head, token, WRAP_BYTES - token),
        (CHUNK, box_rows, 1, 1, 1),
        128,
    )


def paged_map(
    t: torch.Tensor,
    dtype: str,
    tile_kv: int = DECODE_TILE,
    fetch: int = 128,
    box_bytes: int = 128,
) -> Map:
    """Map of a cache view ``[pages, page_size, heads, dim]`` by (column, token, head, page).

    A box is `box_bytes` of what a tile of `tile_kv` keys takes from one page.
    """
    pages, page_size, heads, dim = t.shape
    row = dim * t.element_size()  # the stride of a dimension of one element is arbitrary
    page, token, head = (
        s * t.element_size() if n > 1 else row
        for n, s in zip(t.shape[:3], t.stride()[:3], strict=True)
    )
    return tensor_map(
        t.data_ptr(),
        dtype,
        (dim, page_size, heads, pages),
        (token, head, page),
        (box_bytes // t.element_size(), min(page_size, tile_kv), 1, 1),
        box_bytes,
        fetch,
    )


def tma_pages(page_size: int, tile_kv: int = DECODE_TILE) -> bool:
    """Whether tiles are whole boxes of pages, aligned to the swizzle's 8 rows."""
    return page_size % tile_kv == 0 or (page_size % 8 == 0 and tile_kv % page_size == 0)


def prefill_maps(
    v: Variant, q: torch.Tensor, k: torch.Tensor, value: torch.Tensor
) -> dict[str, Map]:
    """Return the maps in a prefill's launch record; of a cache, K and V are NHD views."""
    tile = tile_for(v)
    assert isinstance(tile, PrefillTile)
    maps = {"q_map": ragged_map(q, v.q_dtype, tile.unit_rows)}
    if v.kv_path != "paged_gather":
        kv_map = ragged_map if v.kv_path == "ragged" else paged_map
        maps["k_map"] = kv_map(k, v.kv_dtype, tile.tile_kv)
        maps["v_map"] = kv_map(value, v.kv_dtype, tile.tile_kv)
    return maps


def decode_maps(v: Variant, k: torch.Tensor, value: torch.Tensor) -> dict[str, Map]:
    """Return the maps in a decode's launch record."""
    # Lines of 128 bytes come fastest, but where a head's row is not made of them, half of a line is
    # another head's, which another CTA reads at another time.
    row = v.head_dim_qk * k.element_size()
    fetch = next((n for n in (128, 64) if row % n == 0), 0)
    box = decode_box_bytes(row)
    k_map, v_map = (paged_map(t, v.kv_dtype, fetch=fetch, box_bytes=box) for t in (k, value))
    return {"k_map": k_map, "v_map": v_map}
