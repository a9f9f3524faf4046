"""Figures from result files; matplotlib is needed here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.rows import RATES, Results, rows

_INK, _MUTED = "#222222", "#8a8a8a"
_SWEEP = 3  # points that make a curve; a line through fewer would claim more than was measured
_COLOURS = ("#1f6fb4", "#c4541a", "#2a8a57", "#8a4fa3", "#b08900", "#5a6b7b", "#b03060", "#3b9aa8")


def write_figures(all_results: Iterable[Results], folder: Path) -> list[Path]:
    """Draw the speed-up curves of each result file; return what was written."""
    mpl.rcParams["svg.hashsalt"] = "flashskip"  # the same file from the same results
    mpl.rcParams["font.size"] = 9
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for results in all_results:
        ops = [op for op in RATES if any(curves(results, op).values())]
        if ops:
            path = folder / f"speedup_{results['group']}.svg"
            draw(results, ops).savefig(path, metadata={"Date": None})
            written.append(path)
    return written


def curves(results: Results, op: str) -> dict[str, list[tuple[float, float]]]:
    """Return achieved skip rates and gains over own dense of each case that was swept."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows(results, op):
        if row.skipped is not None and row.gain is not None:
            found.setdefault(row.case, []).append((row.skipped, row.gain))
    return {case: sorted(points) for case, points in found.items() if len(points) >= _SWEEP}


def draw(results: Results, ops: list[str]) -> Figure:
    """Draw one panel per operation: gain over the own dense kernel, beside the ideal."""
    figure = Figure(figsize=(5.2 * len(ops), 4.4), layout="constrained")
    for axes, op in zip(figure.subplots(1, len(ops), squeeze=False)[0], ops, strict=True):
        _panel(axes, results, op)
    m = results["machine"]
    figure.supxlabel(f"{m['gpu']}, {results['date'][:10]}", fontsize=7.5, color=_MUTED)
    return figure


def _panel(axes: Any, results: Results, op: str) -> None:
    assert isinstance(axes, Axes)
    share = [i / 100 for i in range(96)]
    ideal = [2 / (2 - s) for s in share]
    axes.plot(share, ideal, color=_INK, lw=1, ls=(0, (4, 2)), label="2/(2 − s)")
    for colour, (case, points) in zip(cycle(_COLOURS), curves(results, op).items()):
        x, y = zip(*points, strict=True)
        axes.plot(x, y, "o-", ms=4, lw=1.4, color=colour, label=case.removeprefix(f"{op}-"))
    axes.set_title(op.capitalize(), loc="left", color=_INK)
    axes.set_xlabel("achieved share of skipped tiles s")
    axes.set_ylabel("speed-up over the dense kernel")
    axes.set_xlim(-0.02, 0.97)
    axes.grid(color="#e6e6e6", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
