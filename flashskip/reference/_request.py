"""The attention of one request, block of rows by block of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashskip.geometry import RequestGeometry

from ._block import Block
from ._budget import BOUND_INFLATION, budget_gaps
from ._result import KEPT, NOT_VISITED, SKIPPED, SkipMap
from ._rows import matmul_grouped, to_padded_keys, to_rows, to_tokens

LOG2_E = math.log2(math.e)

# Scores held at a time; heads are taken in chunks that stay below it where they can.
_MAX_SCORES = 1 << 21


class Request:
    """One request: its rows and keys by head, and its results so far.

    Of each row: its maximum ``m``, and relative to ``2**m`` the kept mass, an upper bound on the
    omitted mass, and the kept sum of ``p v``.
    """

    def __init__(
        self,
        geometry: RequestGeometry,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sm_scale: float,
        soft_cap: float | None,
        log2_threshold: float | None,
        spends_budget: bool,
        dtype: torch.dtype,
        wants_gaps: bool,
    ) -> None:
        self.geometry = geometry
        self.spends_budget = spends_budget
        self.log2_threshold = -math.inf if log2_threshold is None else log2_threshold
        self.takes_maxima = wants_gaps or log2_threshold is not None
        self.soft_cap_log2 = soft_cap * LOG2_E if soft_cap else None
        # With a soft cap the product is what tanh takes, without one it is the score.
        scale = sm_scale / soft_cap if soft_cap else sm_scale * LOG2_E
        self.q = to_rows(q.to(dtype) * scale, geometry)
        self.k = to_padded_keys(k, geometry.keys_per_load, dtype)
        self.v = to_padded_keys(v, geometry.keys_per_load, dtype)
        sequences, rows, _ = self.q.shape
        self.m = self.q.new_full((sequences, rows), -math.inf)
        self.kept_mass = self.q.new_zeros((sequences, rows))
        self.omitted_mass = self.q.new_zeros((sequences, rows))
        self.pv = self.q.new_zeros((sequences, rows, v.shape[2]))
        # Whole load tiles here; the tiles past the last key are cut off in the end.
        tiles = self.k.shape[1] // geometry.keys_per_vote
        decisions = (sequences, geometry.num_units, tiles)
        self.state = torch.full(decisions, NOT_VISITED, dtype=torch.int8, device=q.device)
        self.gap = self.q.new_full(decisions, -math.inf)

    def attend(self) -> None:
        """Visit every block of rows."""
        for rows in self.geometry.blocks():
            load_tiles = self.geometry.load_tiles(rows)
            if not load_tiles:
                continue
            block = Block(self.geometry, rows, load_tiles, self.q.device)
            for sequences, kv_heads in self._head_chunks(block):
                self._attend_block(block, sequences, kv_heads)

    def _head_chunks(self, block: Block) -> Iterator[tuple[slice, slice]]:
        """Cut the sequences into chunks of whole KV heads or, where too large, parts of one."""
        num_kv_heads = self.k.shape[0]
        group = self.q.shape[0] // num_kv_heads
        fitting = max(1, _MAX_SCORES // (block.padded_rows * block.num_keys))
        step = max(1, fitting // group)
        size = min(fitting, step * group)
        for kv_head in range(0, num_kv_heads, step):
            kv_heads = slice(kv_head, min(kv_head + step, num_kv_heads))
            end = kv_heads.stop * group
            for first in range(kv_head * group, end, size):
                yield slice(first, min(first + size, end)), kv_heads

    def _attend_block(self, block: Block, sequences: slice, kv_heads: slice) -> None:
        """Score, decide, and compute what is kept."""
        rows = (sequences, block.rows)
        tiles = (sequences, block.units, block.tiles)
        num_rows = block.rows.stop - block.rows.start
        s = self._scores(block, self.q[rows], self.k[kv_heads, block.keys])
        v = self.v[kv_heads, block.keys]
        visited = block.visited.expand(s.shape[0], -1, -1)
        if self.takes_maxima:
            t = torch.unflatten(s, -1, (block.num_tiles, -1)).amax(-1)
            m = t.amax(-1)
            self.gap[tiles] = self._gaps(block, s, t)
            skipped = visited & (self.gap[tiles] < self.log2_threshold)
        else:
            m = s.amax(-1)
            skipped = torch.zeros_like(visited)
        reference = m.masked_fill(m == -math.inf, 0)[..., None]
        if skipped.any():
            kept_mass, pv = _softmax_kept(block, s, reference, v, visited & ~skipped)
            omitted = block.num_visible * torch.exp2(t - reference)
            omitted = omitted.where(skipped.repeat_interleave(block.rows_per_unit, 1), 0)
            self.omitted_mass[rows] = omitted.sum(-1)[:, :num_rows]
        else:
            p = s.sub_(reference).exp2_()
            kept_mass, pv = p.sum(-1), matmul_grouped(p, v)
        self.m[rows] = m[:, :num_rows]
        self.kept_mass[rows] = kept_mass[:, :num_rows]
        self.pv[rows] = pv[:, :num_rows]
        self.state[tiles] = (visited * KEPT).masked_fill_(skipped, SKIPPED).to(torch.int8)

    def _gaps(self, block: Block, s: Tensor, t: Tensor) -> Tensor:
        """Compare each decision with its threshold: ``[sequences, units, tiles]``."""
        if self.spends_budget:
            return budget_gaps(block, s, t, self.log2_threshold)
        return block.gaps(t)

    def _scores(self, block: Block, q: Tensor, k: Tensor) -> Tensor:
        """Scores ``[sequences, padded rows, keys]``, ``-inf`` where not visible."""
        s = matmul_grouped(pad(q, (0, 0, 0, block.padded_rows - q.shape[1])), k.mT)
        if self.soft_cap_log2 is not None:
            s = s.tanh_().mul_(self.soft_cap_log2)
        for columns, hidden in block.hidden:
            s[..., columns].masked_fill_(hidden, -math.inf)
        return s

    def finish(self, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Output, LSE and bound by token; the sinks join the denominator here and only here."""
        m, mass, omitted, pv = self.m, self.kept_mass, self.omitted_mass, self.pv
        if sinks is not None:
            logits = (sinks.to(m) * LOG2_E)[None, :, None].expand(self.geometry.qo_len, -1, -1)
            sink = to_rows(logits, self.geometry)[..., 0]
            m = torch.maximum(self.m, sink)
            reference = m.masked_fill(m == -math.inf, 0)
            rescale = torch.exp2(self.m - reference)
            mass = mass * rescale + torch.exp2(sink - reference)
            omitted, pv = omitted * rescale, pv * rescale[..., None]
        has_mass = mass != 0
        out = torch.where(has_mass[..., None], pv / mass[..., None], 0)
        lse = torch.where(has_mass, m + torch.log2(mass), -math.inf)
        share = torch.where(omitted != 0, omitted / (mass + omitted), 0)
        by_row = (out, lse[..., None], share[..., None] * BOUND_INFLATION)
        out, lse, bound = (to_tokens(x, self.geometry) for x in by_row)
        return out, lse[..., 0], bound[..., 0]

    def skip_map(self) -> SkipMap:
        """Wrap up the decisions."""
        tiles = slice(self.geometry.num_tiles)
        state, gap = self.state[..., tiles], self.gap[..., tiles]
        return SkipMap(self.geometry, state, gap, self.log2_threshold)


def _softmax_kept(
    block: Block, s: Tensor, reference: Tensor, v: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """Exponentials and P V of the kept tiles alone: the mass and the sum of ``p v``."""
    group = s.shape[0] // v.shape[0]
    mass = s.new_zeros(s.shape[:2])
    pv = s.new_zeros((*s.shape[:2], v.shape[2]))
    s = torch.unflatten(s, -1, (block.num_tiles, -1))
    v = torch.unflatten(v, 1, (block.num_tiles, -1))
    # One unit at a time: its kept tiles side by side make one large product.
    num_kept = kept.sum(-1).flatten().tolist()
    for i, tiles in enumerate(torch.split(kept.nonzero()[:, 2], num_kept)):
        sequence, unit = divmod(i, kept.shape[1])
        rows = (sequence, slice(unit * block.rows_per_unit, (unit + 1) * block.rows_per_unit))
        p = s[rows].index_select(1, tiles).flatten(1).sub_(reference[rows]).exp2_()
        mass[rows] = p.sum(-1)
        pv[rows] = p @ v[sequence // group].index_select(0, tiles).flatten(0, 1)
    return mass, pv
