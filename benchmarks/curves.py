"""Skipped share and omitted softmax mass over a grid of thresholds, added up on the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

LOG2 = [x / 2 for x in range(-24, 1)]  # of the thresholds
OMITTED = 0.01  # at which rates are compared, in the mean over rows

Curve = dict[str, Any]


class Curves:
    """Sums over layers and texts, one curve per name."""

    def __init__(self) -> None:
        self._sums: dict[tuple[Any, ...], Tensor] = {}

    def add(self, name: tuple[Any, ...], counts: Tensor, lse: Tensor, dense: Tensor) -> None:
        """Add what runs at all thresholds counted, and their LSEs (base 2)."""
        shift = (dense - lse).double()
        self.add_omitted(name, counts, (-torch.expm1(-shift * math.log(2))).clamp(min=0), shift)

    def add_omitted(
        self, name: tuple[Any, ...], counts: Tensor, omitted: Tensor, shift: Tensor
    ) -> None:
        """Add counts ``[thresholds, ..., 2]``; the others have a number for each row."""
        counts, omitted, shift = (
            x.reshape(len(LOG2), -1, n) for x, n in ((counts, 2), (omitted, 1), (shift, 1))
        )
        rows = torch.full_like(omitted[:, :1, 0], omitted.shape[1])
        sums = [x.sum(1).double() for x in (counts, omitted, shift)]
        self._sums[name] = self._sums.get(name, 0) + torch.cat([*sums, rows], 1)

    def points(self) -> dict[tuple[Any, ...], Curve]:
        """Return each curve: at each threshold, the share skipped and what rows lost on average."""
        found = {}
        for name, sums in self._sums.items():
            skipped, visited, omitted, shift, rows = sums.cpu().T
            values = {
                "skipped": skipped / visited, "omitted": omitted / rows, "lse_shift": shift / rows
            }  # fmt: skip
            found[name] = {k: [float(f"{x:.4g}") for x in v.tolist()] for k, v in values.items()}
        return found


def sweep(wrapper: Any, threshold: Tensor, run: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Run at each threshold; return counts and LSEs, both ``[thresholds, ...]``."""
    counts, lses = [], []
    for log2 in LOG2:
        threshold.fill_(2.0**log2)
        wrapper.reset_stats()
        lses.append(run())
        counts.append(wrapper.stats.clone())
    return torch.stack(counts), torch.stack(lses)


def rate_at(curve: Curve, omitted: float = OMITTED) -> tuple[float, bool]:
    """Return the share skipped where that much is omitted, and whether a threshold reaches it.

    Between two thresholds the share is linear in the logarithm of the omitted mass.
    """
    if curve["omitted"][-1] < omitted:
        return curve["skipped"][-1], False
    mass = np.log(np.maximum(curve["omitted"], 1e-12))
    return float(np.interp(math.log(omitted), mass, curve["skipped"])), True
