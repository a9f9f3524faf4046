"""Between a ragged batch ``[tokens, heads, dim]`` and the sequences of rows that vote."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from flashskip.geometry import RequestGeometry


def spans(indptr: Tensor | Sequence[int], limit: int) -> list[slice]:
    """Each request's part of a tensor of `limit` rows; empty where `indptr` decreases."""
    points = indptr.tolist() if isinstance(indptr, Tensor) else list(indptr)
    points = [min(max(point, 0), limit) for point in points]
    return [slice(start, max(start, stop)) for start, stop in pairwise(points)]


def to_rows(x: Tensor, geometry: RequestGeometry) -> Tensor:
    """``[tokens, heads, dim]`` -> ``[sequences, rows, dim]``, rows token-major."""
    tokens, heads, dim = x.shape
    group = geometry.heads_per_vote
    by_sequence = x.reshape(tokens, heads // group, group, dim).transpose(0, 1)
    return by_sequence.reshape(heads // group, tokens * group, dim)


def to_tokens(x: Tensor, geometry: RequestGeometry) -> Tensor:
    """``[sequences, rows, dim]`` -> ``[tokens, heads, dim]``."""
    sequences, rows, dim = x.shape
    group = geometry.heads_per_vote
    by_token = x.reshape(sequences, rows // group, group, dim).transpose(0, 1)
    return by_token.reshape(rows // group, sequences * group, dim)


def to_counters(x: Tensor, geometry: RequestGeometry) -> Tensor:
    """int64 ``[sequences, units, n]`` -> ``[counters, n]``: sums of the units that count there."""
    units = [unit for block in geometry.blocks() for unit in geometry.units(block)]
    per_sequence = geometry.heads_per_vote // geometry.heads_per_counter
    counts = torch.zeros((len(units), per_sequence), dtype=torch.float64)
    for unit, own in zip(units, counts, strict=True):
        own[geometry.counters(unit)] = 1
    # In float64, which has a matrix product on every device and holds such counts exactly.
    return torch.einsum("sun,uc->scn", x.double(), counts.to(x.device)).flatten(0, 1).long()


def to_padded_keys(x: Tensor, multiple: int, dtype: torch.dtype) -> Tensor:
    """``[keys, heads, dim]`` -> ``[heads, keys, dim]``, zeros up to a multiple of keys."""
    keys, heads, dim = x.shape
    padded = x.new_zeros((heads, -(-keys // multiple) * multiple, dim), dtype=dtype)
    padded[:, :keys] = x.transpose(0, 1)
    return padded


def matmul_grouped(x: Tensor, y: Tensor) -> Tensor:
    """``[sequences, m, k] @ [kv heads, k, n]``: neighbouring sequences share a KV head."""
    sequences, rows, _ = x.shape
    return (x.reshape(y.shape[0], -1, x.shape[2]) @ y).view(sequences, rows, y.shape[2])
