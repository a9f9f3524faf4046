"""How much a kernel that does not count skips: attend over V that tells its tiles apart."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.cases import PrefillCase
from benchmarks.data import PrefillData

_ROWS = 64  # that are taken to decide together


def skipped_share(
    case: PrefillCase, data: PrefillData, attend: Callable[[Tensor], Tensor], tile: int
) -> float:
    """Return the share of visited tiles that left no trace in any of `_ROWS` rows.

    V is 1 in one channel for the keys of one tile, as many tiles at a time as there are channels: a
    channel that is 0 in all rows of a block belongs to a tile that was skipped there.
    """
    skipped = visited = 0
    most = -(-max(case.kv_lens) // tile)
    for first in range(0, most, case.head_dim_vo):
        last = min(first + case.head_dim_vo, most)
        out = attend(_indicators(case, data, tile, first, last))
        at = 0
        for qo_len, kv_len in zip(case.qo_lens, case.kv_lens, strict=True):
            rows = out[at : at + qo_len, :, : last - first]
            blocks = -(-qo_len // _ROWS)
            padded = rows.new_zeros(blocks * _ROWS, *rows.shape[1:])
            padded[:qo_len] = rows
            traces = padded.view(blocks, _ROWS, *rows.shape[1:]).ne(0).any(1)
            seen = _seen(case, qo_len, kv_len, tile, first, last, out.device)
            visited += int(seen.sum()) * case.num_qo_heads
            skipped += int((~traces & seen[:, None]).sum())
            at += qo_len
    return skipped / max(visited, 1)


def _indicators(case: PrefillCase, data: PrefillData, tile: int, first: int, last: int) -> Tensor:
    """Return a V whose channel c is 1 for the keys of tile `first + c` of every request."""
    v = torch.zeros_like(data.v)
    at = 0
    for kv_len in case.kv_lens:
        keys = torch.arange(min(first * tile, kv_len), min(last * tile, kv_len), device=v.device)
        v[at + keys, :, keys // tile - first] = 1
        at += kv_len
    return v


def _seen(
    case: PrefillCase,
    qo_len: int,
    kv_len: int,
    tile: int,
    first: int,
    last: int,
    device: torch.device,
) -> Tensor:
    """Return which tiles the last row of each block sees: bool [blocks, last - first]."""
    starts = torch.arange(first, last, device=device) * tile
    ends = torch.arange(_ROWS, qo_len + _ROWS, _ROWS, device=device).clamp(max=qo_len) - 1
    limit = ends + kv_len - qo_len if case.causal else torch.full_like(ends, kv_len - 1)
    return (starts <= limit[:, None]) & (starts < kv_len)
