"""A calibration in tables and figures."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashskip.calibration.curve import Measurement
from flashskip.calibration.fit import Fit, misses
from flashskip.policy.formula import describe

TARGETS = (0.3, 0.5, 0.7)


def write_report(
    fits: Mapping[str, Fit],
    measurements: Sequence[Measurement],
    folder: str | os.PathLike[str],
    *,
    held_out: Sequence[Measurement] = (),
) -> Path:
    """Write ``calibration.md`` and, for each phase, two figures.

    The figures are the measured sparsity against the scale factor, one line per length, with the
    fit; and the residuals against the target.

    Parameters
    ----------
    fits : mapping of str to Fit
        From `calibrate`.
    measurements : sequence of Measurement
        What was fitted.
    folder : str or os.PathLike
        Where to; made if missing.
    held_out : sequence of Measurement
        Texts that were not fitted: achieved against target.

    Returns
    -------
    pathlib.Path
        The page.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["# Calibration", ""]
    for phase, fitted in fits.items():
        lines += _fit_lines(phase, fitted)
        for name, texts in (("Fitted texts", measurements), ("Held-out texts", held_out)):
            own = [m for m in texts if m.phase == phase]
            if own:
                lines += [f"### {name}", "", *_miss_lines(fitted, own), ""]
        own = [m for m in measurements if m.phase == phase]
        _plot(phase, fitted, own, folder)
        lines += [f"![sparsity]({phase}_sparsity.png)", f"![residuals]({phase}_residuals.png)", ""]
    page = folder / "calibration.md"
    page.write_text("\n".join(lines), encoding="utf-8")
    return page


def _fit_lines(phase: str, fitted: Fit) -> list[str]:
    """Say what was fitted, on what, and how well."""
    x = fitted.coefficients
    assert x.sparsity_range is not None
    assert x.length_range is not None
    assert x.measured_in is not None
    return [
        f"## {phase}",
        "",
        f"threshold = {x.a:.6g} * exp({x.b:.4f} * target) / L^{x.c:.4f}",
        "",
        f"- measured in: {describe(x.measured_in)}",
        f"- targets {x.sparsity_range[0]:.2f} to {x.sparsity_range[1]:.2f}, lengths "
        f"{x.length_range[0]} to {x.length_range[1]}, {len(fitted.targets)} points",
        f"- R² {x.r_squared:.4f}, residual {x.residual:.3f} nats (standard deviation), worst "
        f"{np.abs(fitted.residuals).max():.3f}",
        "",
    ]


def _miss_lines(fitted: Fit, measurements: Sequence[Measurement]) -> list[str]:
    """Tabulate achieved against target, and the mean and worst miss where it is in reach."""
    targets = [t for t in TARGETS if _in_range(t, fitted.coefficients.sparsity_range)]
    head = " | ".join(f"at {target:g}" for target in targets)
    lines = [f"| text | keys | highest | {head} |", "|---|---|---|" + "---|" * len(targets)]
    found = misses(fitted.coefficients, measurements, targets)
    for i, m in enumerate(measurements):
        own = found[i * len(targets) : (i + 1) * len(targets)]
        cells = " | ".join(f"{x.achieved:.3f}{' (cap)' if x.capped else ''}" for x in own)
        lines.append(f"| {m.text} | {m.kv_len} | {m.curve.highest:.3f} | {cells} |")
    reached = [abs(x.error) for x in found if not x.capped]
    if reached:
        lines += [
            "",
            f"Achieved minus target, {len(reached)} cases with a threshold below 1: mean "
            f"{100 * float(np.mean(reached)):.1f} points, worst {100 * max(reached):.1f}.",
        ]
    return lines


def _in_range(target: float, limits: tuple[float, float] | None) -> bool:
    return limits is None or limits[0] <= target <= limits[1]


def _plot(phase: str, fitted: Fit, measurements: Sequence[Measurement], folder: Path) -> None:
    figure_of = _figures()
    x = fitted.coefficients
    lengths = sorted({m.kv_len for m in measurements})
    colors = {length: f"C{i % 10}" for i, length in enumerate(lengths)}
    exponents = np.arange(-255, 0) / 8

    figure, axes = figure_of()
    for m in measurements:
        factors = 2.0**exponents * m.kv_len**x.c
        shares = [m.curve.sparsity(e) for e in exponents]
        axes.plot(factors, shares, color=colors[m.kv_len], linewidth=0.8, alpha=0.7)
    for length in lengths:
        axes.plot([], [], color=colors[length], label=f"{length} keys")
    targets = np.linspace(*(x.sparsity_range or (0.0, 1.0)), 50)
    fit_line = [x.factor(float(t)) for t in targets]
    axes.plot(fit_line, targets, "k--", label="a·exp(b·target)")
    axes.set_xscale("log")
    low = math.log10(fit_line[0])
    axes.set_xlim(10 ** (low - 2), fit_line[-1] * 10)
    axes.set_xlabel(f"scale factor: threshold × keys^{x.c:.2f}")
    axes.set_ylabel("sparsity")
    axes.legend()
    figure.savefig(folder / f"{phase}_sparsity.png", dpi=150)

    figure, axes = figure_of()
    for length in sorted(set(fitted.lengths)):
        at = fitted.lengths == length
        axes.plot(fitted.targets[at], fitted.residuals[at], "o", label=f"{length:.0f} keys")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xlabel("target sparsity")
    axes.set_ylabel("residual of ln(threshold)")
    axes.legend()
    figure.savefig(folder / f"{phase}_residuals.png", dpi=150)


def _figures() -> Any:
    """Return what makes a figure with axes, without touching a display."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "matplotlib is not installed; expected it for the figures of a report. Install "
            "flashskip[bench]."
        ) from error

    def figure_of() -> tuple[Any, Any]:
        figure = Figure(figsize=(6, 4), layout="constrained")
        FigureCanvasAgg(figure)
        return figure, figure.add_subplot()

    return figure_of
