"""Figures from result files; matplotlib is needed here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.rows import RATES, Results, curves, dense_rates, figures, rows

_INK, _MUTED = "#222222", "#8a8a8a"
_COLOURS = ("#1f6fb4", "#c4541a", "#2a8a57", "#8a4fa3", "#b08900", "#5a6b7b", "#b03060", "#3b9aa8")


def write_figures(all_results: Iterable[Results], folder: Path) -> list[Path]:
    """Draw the speed-up curves and the dense rates of each result file; return what was written."""
    mpl.rcParams["svg.hashsalt"] = "flashskip"  # the same file from the same results
    mpl.rcParams["font.size"] = 9
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    drawings = {"dense": draw_dense, "speedup": draw_speedup}
    for results in all_results:
        for name, ops in figures(results).items():
            path = folder / f"{name}_{results['group']}.svg"
            drawings[name](results, ops).savefig(path, metadata={"Date": None})
            written.append(path)
    return written


def draw_speedup(results: Results, ops: list[str]) -> Figure:
    """Draw one panel per operation: gain over the own dense kernel, beside the ideal."""
    figure = Figure(figsize=(5.2 * len(ops), 4.4), layout="constrained")
    for axes, op in zip(figure.subplots(1, len(ops), squeeze=False)[0], ops, strict=True):
        _speedup_panel(axes, results, op)
    _sign(figure, results)
    return figure


def draw_dense(results: Results, ops: list[str]) -> Figure:
    """Draw one panel per operation: a line per case, a mark per contestant."""
    most = max(len(dense_rates(results, op)) for op in ops)
    figure = Figure(figsize=(7.2 * len(ops), 1.3 + 0.27 * most), layout="constrained")
    for axes, op in zip(figure.subplots(1, len(ops), squeeze=False)[0], ops, strict=True):
        _dense_panel(axes, results, op)
    _sign(figure, results)
    return figure


def _dense_panel(axes: Any, results: Results, op: str) -> None:
    """Draw every contestant's rate over that of our dense kernel, which stands beside the case."""
    assert isinstance(axes, Axes)
    ours = {row.case: row.own_dense for row in rows(results, op) if row.share == 0}
    rates = {case: r for case, r in dense_rates(results, op).items() if ours[case]}
    names = list(dict.fromkeys(name for found in rates.values() for name in found))
    for colour, mark, name in zip(cycle(_COLOURS), cycle("osD^vPX"), names):
        points = [
            (found[name] / found[ours[case]], y)
            for y, (case, found) in enumerate(rates.items())
            if name in found
        ]
        x, y = zip(*points, strict=True)
        own = name in ours.values()
        axes.scatter(
            x, y, s=46 if own else 26, marker=mark, edgecolors=colour,
            facecolors=colour if own else "none", label=name, zorder=2 if own else 3,
        )  # fmt: skip
    labels = [
        f"{case.removeprefix(f'{op}-')}  {found[ours[case]]:.0f}" for case, found in rates.items()
    ]
    axes.set_yticks(range(len(rates)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color=_INK, lw=0.8, zorder=1)
    axes.set_title(f"{op.capitalize()}, dense", loc="left", color=_INK)
    axes.set_xlabel(f"rate over that of flashskip, whose {RATES[op][0]} stand beside each case")
    tidy(axes)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _sign(figure: Figure, results: Results) -> None:
    m = results["machine"]
    figure.supxlabel(f"{m['gpu']}, {results['date'][:10]}", fontsize=7.5, color=_MUTED)


def tidy(*panels: Any) -> None:
    """Give the axes of each panel a pale grid and no frame."""
    for axes in panels:
        axes.grid(color="#e6e6e6", lw=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)


def _speedup_panel(axes: Any, results: Results, op: str) -> None:
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
    tidy(axes)
    axes.legend(frameon=False, fontsize=8)
