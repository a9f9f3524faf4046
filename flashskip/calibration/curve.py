"""Histograms of gaps, and the sparsity at every threshold that follows from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flashskip._options import check_choice, refusal
from flashskip.geometry import Geometry
from flashskip.policy.formula import PHASES, check_number
from flashskip.reference._gaps import BINS_PER_UNIT, GAP_BINS, LOWEST


class Curve:
    """Sparsity as a function of the threshold.

    Parameters
    ----------
    gaps : torch.Tensor
        int64 ``[..., 256]``: histograms, summed over all leading dimensions.

    Attributes
    ----------
    lowest, highest : float
        The range of sparsity that the histogram resolves. The last bin mixes gaps just below 0
        with decisions that are never skipped and counts as the latter, so that `highest` is the
        sparsity at a threshold of ``2 ** -0.125``, about 0.92.

    Raises
    ------
    ValueError
        If the histogram has another shape, or is empty.
    """

    def __init__(self, gaps: Tensor) -> None:
        if gaps.dim() == 0 or gaps.shape[-1] != GAP_BINS or gaps.dtype != torch.int64:
            raise refusal(
                f"gaps is {gaps.dtype} {tuple(gaps.shape)}",
                f"int64 (..., {GAP_BINS})",
                "Pass .gaps of a wrapper, or flashskip.calibration.histogram()",
            )
        counts = gaps.reshape(-1, GAP_BINS).sum(0).cpu().numpy()
        total = int(counts.sum())
        if total == 0:
            raise refusal(
                "gaps holds no decisions",
                "at least one",
                "Measure a longer text",
            )
        # share[k]: what is skipped at a threshold of 2**edges[k].
        self._edges = LOWEST + np.arange(GAP_BINS) / BINS_PER_UNIT
        self._share = np.concatenate([[0], np.cumsum(counts)[: GAP_BINS - 1]]) / total
        self.lowest, self.highest = float(self._share[1]), float(self._share[-1])

    def sparsity(self, log2_threshold: float) -> float:
        """Return the share of visited decisions that a threshold skips; linear within a bin."""
        return float(np.interp(log2_threshold, self._edges, self._share))

    def log2_threshold(self, sparsity: float) -> float | None:
        """Return the lowest threshold with this sparsity, or None where it is out of reach."""
        if not self.lowest < sparsity <= self.highest:
            return None
        k = int(np.searchsorted(self._share, sparsity))
        part = (sparsity - self._share[k - 1]) / (self._share[k] - self._share[k - 1])
        return float(self._edges[k - 1] + part / BINS_PER_UNIT)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The gaps of one text in one phase.

    Attributes
    ----------
    phase : {"prefill", "decode"}
        Which wrapper.
    text : str
        A name for the report.
    kv_len : int
        Keys of the request: the length that the threshold is divided by.
    gaps : torch.Tensor
        int64 ``[..., 256]``, such as ``[layers, heads, 256]``.
    geometry : Geometry
        In which the decisions were taken: ``wrapper.geometry``.
    """

    phase: str
    text: str
    kv_len: int
    gaps: Tensor
    geometry: Geometry

    def __post_init__(self) -> None:  # noqa: D105
        check_choice("phase", self.phase, PHASES)
        check_number("kv_len", self.kv_len, least=1)
        Curve(self.gaps)  # refuses what is no histogram

    @property
    def curve(self) -> Curve:
        """Sparsity of all layers and heads together."""
        return Curve(self.gaps)


def pooled(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Add up the pieces of each text: measurements of the same text, phase and length.

    Parameters
    ----------
    measurements : iterable of Measurement
        Of any texts, phases and lengths.

    Returns
    -------
    list of Measurement
        One for each text, phase and length, in order of first occurrence.
    """
    found: dict[tuple[str, str, int], Measurement] = {}
    for m in measurements:
        key = (m.text, m.phase, m.kv_len)
        if key in found:
            m = dataclasses.replace(m, gaps=found[key].gaps + m.gaps)
        found[key] = m
    return list(found.values())
