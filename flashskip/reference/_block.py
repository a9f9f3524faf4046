"""A block of rows: what it sees, and what it decides."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashskip.geometry import RequestGeometry


class Block:
    """A block of rows, cut into units of equal height, and the keys of the tiles that it visits.

    The last unit is padded with rows that see nothing and therefore have no vote.  Tiles and keys
    are counted from the first visited load tile.

    Attributes
    ----------
    rows, keys, units, tiles : slice
        The block's part of its request, without padding rows.
    padded_rows, rows_per_unit, num_keys, num_tiles : int
        Its sizes.
    hidden : list of (slice, Tensor)
        Columns of keys that some row does not see, and where: bool ``[padded rows, columns]``.
    num_visible : Tensor
        int64 ``[padded rows, tiles]``: keys that a row sees of a tile.
    visited : Tensor
        bool ``[units, tiles]``: a row of the unit sees a key of the tile.
    """

    def __init__(
        self, geometry: RequestGeometry, rows: range, load_tiles: list[int], device: torch.device
    ) -> None:
        units = geometry.units(rows)
        first_unit = rows.start // geometry.rows_per_vote
        self.rows = slice(rows.start, rows.stop)
        self.units = slice(first_unit, first_unit + len(units))
        self.rows_per_unit = len(units[0])
        self.padded_rows = len(units) * self.rows_per_unit

        first_load, end_load = min(load_tiles), max(load_tiles) + 1
        self.load_order = [tile - first_load for tile in load_tiles]
        self.tiles_per_load = geometry.keys_per_load // geometry.keys_per_vote
        first_tile = first_load * self.tiles_per_load
        self.tiles = slice(first_tile, end_load * self.tiles_per_load)
        self.num_tiles = self.tiles.stop - self.tiles.start
        self.keys = slice(first_load * geometry.keys_per_load, end_load * geometry.keys_per_load)
        self.num_keys = self.keys.stop - self.keys.start

        limits = torch.zeros((2, self.padded_rows, 1), dtype=torch.int64)
        visible = [geometry.visible(row) for row in rows]
        limits[0, : len(rows), 0] = torch.tensor([keys.start for keys in visible])
        limits[1, : len(rows), 0] = torch.tensor([keys.stop for keys in visible])
        first, end = limits.to(device) - self.keys.start
        self.hidden = self._hidden(first, end, len(rows))
        start = torch.arange(self.num_tiles, device=device) * geometry.keys_per_vote
        stop = start + geometry.keys_per_vote
        self.num_visible = (torch.minimum(end, stop) - torch.maximum(first, start)).clamp_(min=0)
        self.visited = torch.unflatten(self.num_visible > 0, 0, (-1, self.rows_per_unit)).any(1)

        self.seeds: Tensor | None = None
        if geometry.judged_against == "seed":
            # A row without seeds sees nothing, so any tile will do for it.
            tiles = [geometry.seed_tiles(row) or (first_tile,) for row in rows]
            tiles += [(first_tile,)] * (self.padded_rows - len(rows))
            first_and_last = [(tile[0], tile[-1]) for tile in tiles]
            self.seeds = torch.tensor(first_and_last, device=device) - first_tile

    def _hidden(self, first: Tensor, end: Tensor, num_rows: int) -> list[tuple[slice, Tensor]]:
        """Find the margins on either side that are hidden from some row and not from others."""
        column = torch.arange(self.num_keys, device=first.device)
        left, right = int(first[:num_rows].max()), max(int(end[:num_rows].min()), 0)
        hidden = []
        if left > 0:
            hidden.append((slice(0, left), column[:left] < first))
        if right < self.num_keys:
            hidden.append((slice(right, self.num_keys), column[right:] >= end))
        return hidden

    def gaps(self, t: Tensor) -> Tensor:
        """Compare tile maxima ``[sequences, padded rows, tiles]`` with what judges them.

        Returns the largest gap of the voting rows, ``[sequences, units, tiles]``: what decides.
        """
        m = self._running_max(t) if self.seeds is None else self._seed(t, self.seeds)
        # A NaN never lets a tile go; neither does a row that sees keys and has no M yet.
        gap = (t - m).nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        gap.masked_fill_(self.num_visible == 0, -math.inf)
        return torch.unflatten(gap, 1, (-1, self.rows_per_unit)).amax(2)

    def _running_max(self, t: Tensor) -> Tensor:
        """Take each row's maximum over the load tiles visited before."""
        per_load = torch.unflatten(t, -1, (-1, self.tiles_per_load)).amax(-1)
        running = per_load[..., self.load_order].cummax(-1).values
        before = torch.full_like(per_load, -math.inf)
        before[..., self.load_order[1:]] = running[..., :-1]
        return before.repeat_interleave(self.tiles_per_load, -1)

    def _seed(self, t: Tensor, seeds: Tensor) -> Tensor:
        """Take each row's maximum over its seed tiles."""
        return t.gather(-1, seeds.expand(t.shape[0], -1, -1)).amax(-1, keepdim=True)
