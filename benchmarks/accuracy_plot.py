"""Figures of an accuracy run; matplotlib is needed here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from benchmarks.accuracy_report import PHASES, Record, Results, achieved, change
from benchmarks.plot import tidy

_COLOURS = ("#1f6fb4", "#c4541a", "#2a8a57")
_INK, _MUTED = "#222222", "#8a8a8a"
_BAR = 1.0  # percent of perplexity


def write_figures(results: Results, folder: Path) -> list[Path]:
    """Draw perplexity and, where it was measured, the certified bound against sparsity."""
    mpl.rcParams["svg.hashsalt"] = "flashskip"  # the same file from the same results
    mpl.rcParams["font.size"] = 9
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"accuracy_perplexity": perplexity(results)}
    if results.get("local_errors"):
        figures["accuracy_bound"] = bound(results)
    written = []
    for name, figure in figures.items():
        figure.supxlabel(_source(results), fontsize=7.5, color=_MUTED)
        written.append(folder / f"{name}.svg")
        figure.savefig(written[-1], metadata={"Date": None})
    return written


def perplexity(results: Results) -> Figure:
    """One panel per phase, one line per length; the budget criterion dashed."""
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    for axes, phase in zip(figure.subplots(1, 3), PHASES, strict=True):
        records = [r for r in results["perplexity"] if r["phase"] == phase]
        _lines(axes, records, "level", "o-", "{tokens} tokens")
        if phase == "prefill" and results.get("budget"):
            _lines(axes, results["budget"], "budget", "s--", "{tokens}, budget criterion")
        axes.axhline(_BAR, color=_MUTED, lw=0.8, ls=(0, (4, 2)))
        axes.set_title(phase.capitalize(), loc="left", color=_INK)
        axes.set_xlabel("achieved sparsity")
        axes.set_ylabel("perplexity over dense, %")
        axes.set_yscale("symlog", linthresh=1.0)
        axes.set_ylim(-0.5, 100)
        axes.set_yticks([0, 1, 3, 10, 30, 100], labels=["0", "1", "3", "10", "30", "100"])
        _style(axes)
    return figure


def bound(results: Results) -> Figure:
    """Certified bound, omitted mass and output error of prefill, one panel per length."""
    records = results["local_errors"]
    lengths = sorted({r["tokens"] for r in records})
    figure = Figure(figsize=(4 * len(lengths), 4), layout="constrained")
    names = {
        "bound": "certified bound",
        "omitted": "omitted softmax mass",
        "output_error": "output error",
    }
    for axes, length in zip(
        figure.subplots(1, len(lengths), squeeze=False)[0], lengths, strict=True
    ):
        own = [r for r in records if r["tokens"] == length]
        for colour, (key, label) in zip(_COLOURS, names.items(), strict=True):
            x, y = _means(own, "level", lambda r, key=key: 100 * r[key])
            axes.plot(x, y, "o-", ms=4, lw=1.4, color=colour, label=label)
        axes.set_title(f"{length} tokens", loc="left", color=_INK)
        axes.set_xlabel("achieved sparsity")
        axes.set_ylabel("mean over rows, heads and layers, %")
        axes.set_yscale("log")
        _style(axes)
    return figure


def _lines(axes: Any, records: Sequence[Record], knob: str, style: str, label: str) -> None:
    lengths = sorted({r["tokens"] for r in records})
    for colour, length in zip(_COLOURS, lengths, strict=False):
        own = [r for r in records if r["tokens"] == length]
        x, y = _means(own, knob, lambda r: 100 * change(r))
        name = label.format(tokens=length)
        axes.plot(x, y, style, ms=4, lw=1.4, color=colour, label=name)


def _means(records: Iterable[Record], knob: str, value: Any) -> tuple[list[float], list[float]]:
    """Return mean achieved share and mean value at each setting of a knob."""
    at: dict[float, list[tuple[float, float]]] = {}
    for r in records:
        at.setdefault(r[knob], []).append((achieved(r), value(r)))
    points = sorted(tuple(np.mean(pairs, axis=0)) for pairs in at.values())
    return [float(x) for x, _ in points], [float(y) for _, y in points]


def _style(axes: Any) -> None:
    axes.set_xlim(-0.02, 0.97)
    tidy(axes)
    axes.legend(frameon=False, fontsize=8)


def _source(results: Results) -> str:
    m = results["machine"]
    return f"SmolLM2-135M-Instruct, {m.get('gpu', m['device'])}, {results['date'][:10]}"
