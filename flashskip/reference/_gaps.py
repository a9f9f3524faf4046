"""Decisions counted by the threshold above which they skip."""

from __future__ import annotations

from torch import Tensor

from ._result import SkipMap
from ._rows import to_counters

GAP_BINS = 256
BINS_PER_UNIT = 8  # of log2
LOWEST = -32.0


def histogram(skip_map: SkipMap) -> Tensor:
    """Count the decisions of one request by the threshold above which they skip.

    Parameters
    ----------
    skip_map : flashskip.reference.SkipMap
        Decisions of a request; of a dense one too.

    Returns
    -------
    torch.Tensor
        int64 ``[counters, 256]``: of query heads in prefill, of KV heads in decode. Bin k holds
        the visited decisions with a gap of at least ``-32 + k / 8`` and less than
        ``-32 + (k + 1) / 8``. The first bin also holds all below, the last one all above: those
        that no threshold skips.
    """
    bins = ((skip_map.gap - LOWEST) * BINS_PER_UNIT).floor().clamp(0, GAP_BINS - 1).long()
    counts = bins.new_zeros((*bins.shape[:2], GAP_BINS))
    counts.scatter_add_(2, bins, skip_map.visited.long())
    return to_counters(counts, skip_map.geometry)
