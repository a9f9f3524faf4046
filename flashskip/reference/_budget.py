"""The budget criterion: what each row omits of its softmax is bounded while tiles are visited."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._block import Block

# Covers the rounding of a kernel's bound on what is omitted.
BOUND_INFLATION = 1 + 2.0**-10


def allowance(budget: float) -> float:
    """Return what a row may omit over what it keeps, so that the certified share is in budget."""
    return budget / BOUND_INFLATION


def budget_gaps(block: Block, s: Tensor, t: Tensor, log2_threshold: float) -> Tensor:
    """Visit the load tiles in order and skip tiles while every voting row can afford it.

    Each row keeps the mass ``l`` of what was kept and a bound ``e`` on the mass of what was
    skipped. With ``x``, the keys that it sees of a tile times the largest probability, it can spare
    the tile iff ``e + n x <= allowance * l``, for each of the ``n`` tiles of a load tile: so they
    are within the allowance together too, and none waits for the other's decision.

    Parameters
    ----------
    block : Block
        What the rows see.
    s, t : Tensor
        ``[sequences, padded rows, keys]`` and ``[..., tiles]``: scores and tile maxima, log2 units.
    log2_threshold : float
        log2 of the allowance.

    Returns
    -------
    Tensor
        ``[sequences, units, tiles]``: the largest ``log2((e + n x) / l)`` of the voting rows. A
        tile is skipped where that is below `log2_threshold`.
    """
    n = block.tiles_per_load
    m, kept, omitted = (t.new_full(t.shape[:2], x) for x in (-math.inf, 0.0, 0.0))
    gaps = t.new_full((t.shape[0], block.visited.shape[0], block.num_tiles), -math.inf)
    keys = s.shape[2] // block.num_tiles
    for load in block.load_order:
        tiles = slice(load * n, (load + 1) * n)
        t_load, seen = t[..., tiles], block.num_visible[:, tiles]
        x = (seen * torch.exp2(t_load - m[..., None])).where(seen > 0, 0)
        gap = torch.log2((omitted[..., None] + n * x) / kept[..., None])
        gap = gap.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        gap = gap.where(seen > 0, -math.inf)
        by_unit = torch.unflatten(gap, 1, (-1, block.rows_per_unit)).amax(2)
        gaps[..., tiles] = by_unit
        spared = (by_unit < log2_threshold).repeat_interleave(block.rows_per_unit, 1)
        m_new = torch.maximum(m, t_load.masked_fill(spared, -math.inf).amax(-1))
        shift = m_new.masked_fill(m_new == -math.inf, 0)
        rescale = torch.exp2(m - shift)
        s_load = s[..., load * n * keys : (load + 1) * n * keys]
        p = torch.exp2(s_load - shift[..., None])
        p = torch.unflatten(p, -1, (n, keys)).sum(-1).masked_fill(spared, 0)
        kept = kept * rescale + p.sum(-1)
        omitted = (omitted + x.where(spared, 0).sum(-1)) * rescale
        m = m_new
    return gaps
