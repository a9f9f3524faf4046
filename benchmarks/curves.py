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

    def add(self, name: tuple[Any, ...], at: int, counts: Tensor, lse: Tensor, dense: Tensor):
        """Add what one run at the threshold of number `at` counted, and its LSEs (base 2)."""
        shift = (dense - lse).double()
        omitted = (-torch.expm1(-shift * math.log(2))).clamp(min=0)
        self.add_omitted(name, at, counts, omitted, shift)

    def add_omitted(
        self, name: tuple[Any, ...], at: int, counts: Tensor, omitted: Tensor, shift: Tensor
    ) -> None:
        """`counts` ends in (skipped, visited); the others have a number for each row."""
        rows = torch.full((), omitted.numel(), device=omitted.device)
        skipped, visited = counts.reshape(-1, 2).sum(0).double()
        found = torch.stack([skipped, visited, omitted.sum(), shift.sum(), rows])
        if name not in self._sums:
            self._sums[name] = found.new_zeros(len(LOG2), 5)
        self._sums[name][at] += found

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


def sweep(wrapper: Any, threshold: Tensor, run: Callable[[], Tensor]) -> Any:
    """Run at each threshold; yield its number, the counts and what `run` returns."""
    for at, log2 in enumerate(LOG2):
        threshold.fill_(2.0**log2)
        wrapper.reset_stats()
        result = run()
        yield at, wrapper.stats, result


def rate_at(curve: Curve, omitted: float = OMITTED) -> tuple[float, bool]:
    """Return the share skipped where that much is omitted, and whether a threshold reaches it.

    Between two thresholds the share is linear in the logarithm of the omitted mass.
    """
    if curve["omitted"][-1] < omitted:
        return curve["skipped"][-1], False
    mass = np.log(np.maximum(curve["omitted"], 1e-12))
    return float(np.interp(math.log(omitted), mass, curve["skipped"])), True
