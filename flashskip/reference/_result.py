"""What an attention call returns."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from flashskip.geometry import RequestGeometry

from ._rows import to_counters

NOT_VISITED, KEPT, SKIPPED = 0, 1, 2


@dataclass(frozen=True)
class SkipMap:
    """The decisions of one request.

    Attributes
    ----------
    geometry : RequestGeometry
        Where the decisions come from.
    state : Tensor
        int8 ``[sequences, units, tiles]``: ``NOT_VISITED``, ``KEPT`` or ``SKIPPED``.  A sequence
        holds the rows of ``heads_per_vote`` query heads: one in prefill, those of a KV head in
        decode and in a prefill of fewer than 64 queries.
    gap : Tensor
        ``[sequences, units, tiles]``: the largest ``(t - M) * log2(e)`` of the voting rows.  The
        tile is skipped where ``gap < log2_threshold``.  ``inf`` where a row had nothing to be
        judged against or a NaN, ``-inf`` where not visited.
    log2_threshold : float
        ``log2`` of the request's threshold; ``-inf`` for a dense request.
    """

    geometry: RequestGeometry
    state: Tensor
    gap: Tensor
    log2_threshold: float

    @property
    def margin(self) -> Tensor:
        """Distance of the decisive row from the threshold in log2 units; negative: skipped.

        ``inf`` everywhere for a dense request or a threshold of 0.
        """
        margin = self.gap - self.log2_threshold
        return margin.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)

    @property
    def kept(self) -> Tensor:
        """Where a tile was computed."""
        return self.state == KEPT

    @property
    def skipped(self) -> Tensor:
        """Where a tile was skipped."""
        return self.state == SKIPPED

    @property
    def visited(self) -> Tensor:
        """Where a decision was taken."""
        return self.state != NOT_VISITED

    def count(self, decisions: Tensor) -> Tensor:
        """Count decisions as the kernels do: once for each counter that has a row in the unit.

        Parameters
        ----------
        decisions : Tensor
            bool ``[sequences, units, tiles]``.

        Returns
        -------
        Tensor
            int64 ``[counters]``: of query heads in prefill, of KV heads in decode.
        """
        return to_counters(decisions.sum(2, keepdim=True), self.geometry)[:, 0]


@dataclass(frozen=True)
class Result:
    """What :func:`flashskip.reference.attention` returns.

    Attributes
    ----------
    out : Tensor
        ``[nnz_qo, num_qo_heads, head_dim_vo]``, in the dtype of the computation.
    lse : Tensor
        ``[nnz_qo, num_qo_heads]``, base 2, over the kept keys and the sink.
    bound : Tensor
        ``[nnz_qo, num_qo_heads]``: certified upper bound on the omitted share of the softmax mass.
    counts : Tensor
        int64 ``[batch_size, counters, 2]``: skipped and visited decisions, summed over row units.
        There is a counter for each query head in prefill, for each KV head in decode.
    skip_map : list of SkipMap or None
        The decisions of each request, where asked for.
    """

    out: Tensor
    lse: Tensor
    bound: Tensor
    counts: Tensor
    skip_map: list[SkipMap] | None
