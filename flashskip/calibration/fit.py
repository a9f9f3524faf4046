"""One formula through the curves of many texts: ln(threshold) = ln(a) + b * target - c * ln(L)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flashskip._options import refusal
from flashskip.calibration.curve import Measurement
from flashskip.geometry import ORDERS
from flashskip.policy import PHASES, Coefficients, SkipSoftmaxConfig
from flashskip.policy.formula import check_number, describe, differs

# An exponential fits the middle of the curves. Their ends bend away from it, and a fit that follows
# them misses more in the middle, where targets are.
TARGETS = tuple(round(0.05 * i, 2) for i in range(4, 17))  # 0.20 to 0.80
# Lengths closer together than this say nothing about the exponent.
_LENGTH_RATIO = 1.5
_FEWEST_POINTS = 8


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A fitted phase.

    Attributes
    ----------
    coefficients : Coefficients
        The result, with the observed ranges, the geometry and the fit error.
    targets, lengths, log_thresholds, residuals : numpy.ndarray
        float64 ``[points]``: the fitted points, ln of the threshold, and measured minus fitted.
    """

    coefficients: Coefficients
    targets: npt.NDArray[np.float64]
    lengths: npt.NDArray[np.float64]
    log_thresholds: npt.NDArray[np.float64]
    residuals: npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Miss:
    """What a target achieves on one text.

    Attributes
    ----------
    text : str
        Name of the measurement.
    kv_len : int
        Its length.
    target, achieved : float
        Sparsity.
    capped : bool
        The formula asked for more than 1: the text cannot reach the target.
    """

    text: str
    kv_len: int
    target: float
    achieved: float
    capped: bool

    @property
    def error(self) -> float:
        """Achieved minus target."""
        return self.achieved - self.target


def fit(
    measurements: Sequence[Measurement],
    *,
    length_exponent: float | None = None,
    targets: Sequence[float] = TARGETS,
) -> Fit:
    """Fit the coefficients of one phase, by least squares in log space, all points pooled.

    Parameters
    ----------
    measurements : sequence of Measurement
        Of one phase and one geometry.
    length_exponent : float, optional
        A given c; 1 is the two-parameter form that other engines read. Default: fitted where
        lengths differ by a factor of 1.5 or more, else 1.
    targets : sequence of float
        Sparsities at which curves are read; those that a text cannot reach are left out.

    Returns
    -------
    Fit

    Raises
    ------
    ValueError
        Phases or geometries are mixed, or there is too little to fit.

    References
    ----------
    Calibration of Skip-Softmax: arXiv 2512.12087, algorithm 2, here with an exponent of length.
    """
    _check_alike(measurements)
    tau, lengths, log_thresholds = _points(measurements, targets)
    if length_exponent is None and lengths.max() < _LENGTH_RATIO * lengths.min():
        length_exponent = 1.0
    columns = [np.ones_like(tau), tau]
    known = np.zeros_like(tau)
    if length_exponent is None:
        columns.append(-np.log(lengths))
    else:
        check_number("length_exponent", length_exponent, least=0.0)
        known = -length_exponent * np.log(lengths)
    design, observed = np.stack(columns, 1), log_thresholds - known
    solution = np.linalg.lstsq(design, observed, rcond=None)[0]
    if length_exponent is None and solution[2] < 0:
        raise refusal(
            f"the fitted exponent of the length is {solution[-1]:.2f}: longer texts skipped less",
            "at least 0",
            "Measure more texts at each length, or pass length_exponent=1.0",
        )
    residuals = observed - design @ solution
    spread = float(((observed - observed.mean()) ** 2).sum())
    log_a, b = (float(x) for x in solution[:2])
    coefficients = Coefficients(
        a=math.exp(log_a),
        b=b,
        c=float(solution[2]) if length_exponent is None else float(length_exponent),
        sparsity_range=(float(tau.min()), float(tau.max())),
        length_range=(int(lengths.min()), int(lengths.max())),
        measured_in=measurements[0].geometry,
        r_squared=1 - float((residuals**2).sum()) / spread if spread > 0 else 1.0,
        residual=float(residuals.std()),
    )
    return Fit(
        coefficients=coefficients,
        targets=tau,
        lengths=lengths,
        log_thresholds=log_thresholds,
        residuals=residuals,
    )


def _points(
    measurements: Sequence[Measurement], targets: Sequence[float]
) -> npt.NDArray[np.float64]:
    """Read the curves: rows of targets, lengths and ln(threshold); refuse too few."""
    points = []
    for measurement in measurements:
        curve = measurement.curve
        for target in targets:
            log2_threshold = curve.log2_threshold(target)
            if log2_threshold is not None:
                points.append((target, measurement.kv_len, log2_threshold * math.log(2)))
    if len(points) < _FEWEST_POINTS or len({target for target, *_ in points}) < 2:
        raise refusal(
            f"the measurements reach {len(points)} of the targets",
            f"at least {_FEWEST_POINTS} points at several targets",
            "Measure more or longer texts",
        )
    columns: npt.NDArray[np.float64] = np.array(points, dtype=np.float64).T
    return columns


def _check_alike(measurements: Sequence[Measurement]) -> None:
    """Refuse to pool what does not belong together."""
    if not measurements:
        raise refusal(
            "there are no measurements",
            "at least one",
            "Measure some texts",
        )
    first = measurements[0]
    for other in measurements:
        if other.phase != first.phase:
            raise refusal(
                f"{first.text!r} is {first.phase} and {other.text!r} is {other.phase}",
                "one phase",
                "Use calibrate(), which fits each phase",
            )
        if differs(first.geometry, other.geometry):
            raise refusal(
                f"{first.text!r} was measured in ({describe(first.geometry)}) and "
                f"{other.text!r} in ({describe(other.geometry)})",
                "one geometry",
                "Measure all texts with the same kernels",
            )


def calibrate(
    measurements: Iterable[Measurement], *, length_exponent: float | None = None
) -> dict[str, Fit]:
    """Fit each phase that was measured.

    Parameters
    ----------
    measurements : iterable of Measurement
        Of any phases.
    length_exponent : float, optional
        As for `fit`.

    Returns
    -------
    dict of str to Fit
        By phase.
    """
    everything = list(measurements)
    if not everything:
        raise refusal(
            "there are no measurements",
            "at least one",
            "Measure some texts",
        )
    by_phase = {p: [m for m in everything if m.phase == p] for p in PHASES}
    return {p: fit(ms, length_exponent=length_exponent) for p, ms in by_phase.items() if ms}


def misses(
    coefficients: Coefficients, measurements: Iterable[Measurement], targets: Sequence[float]
) -> list[Miss]:
    """Say what targets achieve on texts, best held-out ones, with ``overflow="clamp"``.

    Parameters
    ----------
    coefficients : Coefficients
        To be judged.
    measurements : iterable of Measurement
        Of the same phase and geometry.
    targets : sequence of float
        Target sparsities.

    Returns
    -------
    list of Miss
        For each text and target.

    Raises
    ------
    ValueError
        If a text was measured in another geometry.
    """
    found = []
    for measurement in measurements:
        measured_in = coefficients.measured_in
        if measured_in is not None and differs(measured_in, measurement.geometry):
            raise refusal(
                f"{measurement.text!r} was measured in ({describe(measurement.geometry)})",
                f"the geometry of the coefficients ({measured_in and describe(measured_in)})",
                "Measure it with the same kernels",
            )
        for target in targets:
            threshold = coefficients.threshold(target, measurement.kv_len)
            achieved = measurement.curve.sparsity(math.log2(min(threshold, 1.0)))
            found.append(
                Miss(
                    text=measurement.text,
                    kv_len=measurement.kv_len,
                    target=target,
                    achieved=achieved,
                    capped=threshold >= 1,
                )
            )
    return found


def to_config(
    fits: Mapping[str, Fit], target_sparsity: float | Mapping[str, float | None] | None = None
) -> SkipSoftmaxConfig:
    """Return a configuration that runs at a target, and exports to checkpoints.

    Parameters
    ----------
    fits : mapping of str to Fit
        From `calibrate`.
    target_sparsity : float or mapping, optional
        For all phases that were fitted, or per phase. None: for the user to choose later.

    Returns
    -------
    SkipSoftmaxConfig
        With ``overflow="clamp"``, as the calibration counts, and the measured order.

    Raises
    ------
    ValueError
        If a target lies outside the sparsities that were measured.
    """
    if isinstance(target_sparsity, (int, float)):
        target_sparsity = dict.fromkeys(fits, float(target_sparsity))
    arguments: dict[str, Any] = {}
    geometry = fits["prefill"].coefficients.measured_in if "prefill" in fits else None
    if geometry is not None and geometry.order != ORDERS[0]:
        arguments["order"] = geometry.order
    config = SkipSoftmaxConfig(
        coefficients={phase: fitted.coefficients for phase, fitted in fits.items()},
        target_sparsity=target_sparsity,
        overflow="clamp",
        **arguments,
    )
    for phase in target_sparsity or {}:
        config.options(phase)  # refuses what is out of range
    return config
