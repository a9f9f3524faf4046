"""From the results of an accuracy run to tables and figures. Everything derived is derived here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.pages import fill, table

Results = dict[str, Any]
Record = dict[str, Any]
PHASES = ("prefill", "decode", "both")
LIMIT = 0.01  # of perplexity, that counts as harm
BAR_AT = 0.5  # the achieved sparsity at which perplexity is judged
AROUND_HALF = (0.45, 0.55)  # levels measured for that alone


def change(record: Record) -> float:
    """Perplexity over that of dense attention on the same tokens, minus 1."""
    return math.expm1(record["loss"] - record["dense"])


def achieved(record: Record) -> float:
    """Return the share of skipped decisions; of both phases their mean."""
    found = record["achieved"]
    return float(np.mean(list(found.values()))) if isinstance(found, dict) else float(found)


def change_at(records: Sequence[Record], share: float) -> float | None:
    """Return the change of one text at an achieved share, between the levels around it."""
    points = sorted((achieved(r), change(r)) for r in records)
    if not points or not points[0][0] <= share <= points[-1][0]:
        return None
    shares, changes = zip(*points, strict=True)
    return float(np.interp(share, shares, changes))


def write_page(results: Results, page: Path) -> None:
    """Replace what stands between the page's pairs of marks."""
    fill(page, tables(results))


def tables(results: Results) -> dict[str, str]:
    """Return each table of the page as Markdown, by its name."""
    makers: dict[str, Callable[[Results], str]] = {
        "machine": machine_line,
        "calibration": calibration_table,
        "perplexity": perplexity_table,
        "at-half": half_table,
        "retrieval": retrieval_table,
        "budget": budget_table,
        "bound": bound_table,
    }
    not_run = results.get("not_run", {})
    sources = {"budget": "budget", "bound": "local_errors"}
    return {
        name: f"Not run: {not_run[sources[name]]}"
        if sources.get(name) in not_run
        else make(results)
        for name, make in makers.items()
    }


def machine_line(results: Results) -> str:
    m = results["machine"]
    where = m.get("gpu", m["device"])
    return (
        f"{results['date'][:10]}, {where}, torch {m['torch']}, Python {m['python']}, sources "
        f"`{m['sources_sha256'][:12]}`; {len(results['texts'])} texts; "
        f"{sum(results['seconds'].values()):.0f} s in all. {results.get('note', '')}".strip()
    )


def calibration_table(results: Results) -> str:
    """Return the formulas and, of held-out texts where λ < 1, how far from the target they end."""
    header = [
        "phase", "λ at L keys", "R²", "residual, nats", "points", "judged on", "cases (λ < 1)",
        "mean miss", "worst", "bias", "capped",
    ]  # fmt: skip
    body = []
    for phase, x in results["calibration"].items():
        formula = f"{x['a']:.4g}·exp({x['b']:.2f} τ)/L^{x['c']:.2f}"
        about = [phase, formula, f"{x['r_squared']:.3f}", f"{x['residual']:.2f}", str(x["points"])]
        for name, key in (("texts", "held_out"), ("single pieces", "held_out_pieces")):
            missed = misses(x[key])
            body.append([
                *about, name, str(len(missed)), f"{abs(missed).mean():.1f}",
                f"{abs(missed).max():.1f}", f"{missed.mean():+.1f}", str(len(x[key]) - len(missed)),
            ])  # fmt: skip
            about = ["", "", "", "", ""]
    return table(header, body)


def misses(cases: Iterable[Record]) -> npt.NDArray[np.float64]:
    """Return achieved minus target sparsity, in points, of the cases that are in reach."""
    return 100 * np.array([c["achieved"] - c["target"] for c in cases if not c["capped"]])


def perplexity_table(results: Results) -> str:
    """Achieved sparsity, and the mean change of perplexity (worst text)."""
    records = results["perplexity"]
    levels = sorted({r["level"] for r in records} - set(AROUND_HALF))
    header = ["tokens", "phase", "dense", *(f"target {100 * x:.0f} %" for x in levels)]
    body = []
    for tokens in _values(records, "tokens"):
        for phase in PHASES:
            own = [r for r in records if (r["tokens"], r["phase"]) == (tokens, phase)]
            dense = math.exp(np.mean([r["dense"] for r in own]))
            cells = [_changes([r for r in own if r["level"] == x]) for x in levels]
            body.append([str(tokens), phase, f"{dense:.2f}", *cells])
    return table(header, body)


def half_table(results: Results) -> str:
    """Return the change of perplexity at 50 % achieved sparsity, and where it passes 1 %."""
    records = results["perplexity"]
    kinds = _values(records, "kind")
    header = [
        "tokens",
        "phase",
        "all texts",
        "worst text",
        *kinds,
        f"{_percent(LIMIT)} is reached at",
    ]
    body = []
    for tokens in _values(records, "tokens"):
        for phase in PHASES:
            of_text = at_half(records, tokens, phase)
            if not of_text:
                body.append([str(tokens), phase, "out of reach", *["–"] * (2 + len(kinds))])
                continue
            cells = [_percent(np.mean(list(of_text.values()))), _percent(max(of_text.values()))]
            for kind in kinds:
                own = [x for (_, k), x in of_text.items() if k == kind]
                cells.append(_percent(np.mean(own)) if own else "–")
            here = [r for r in records if (r["tokens"], r["phase"]) == (tokens, phase)]
            share = share_at(here, LIMIT)
            cells.append("–" if math.isnan(share) else f"{100 * share:.0f} %")
            body.append([str(tokens), phase, *cells])
    return table(header, body)


def share_at(records: Iterable[Record], limit: float) -> float:
    """Return the achieved share at which the mean change passes a limit; nan if it never does."""
    at: dict[float, list[tuple[float, float]]] = {}
    for r in records:
        at.setdefault(r["level"], []).append((achieved(r), change(r)))
    means = sorted(tuple(np.mean(pairs, axis=0)) for pairs in at.values())
    for (share, below), (next_share, above) in itertools.pairwise(means):
        if below <= limit < above:
            return float(np.interp(limit, (below, above), (share, next_share)))
    return math.nan


def at_half(records: Iterable[Record], tokens: int, phase: str) -> dict[tuple[str, str], float]:
    """Return each text's change at 50 %, by name and kind, where the text reaches it."""
    of_text: dict[tuple[str, str], list[Record]] = {}
    for r in records:
        if (r["tokens"], r["phase"]) == (tokens, phase):
            of_text.setdefault((r["text"], r["kind"]), []).append(r)
    found = {name: change_at(own, BAR_AT) for name, own in of_text.items()}
    return {name: x for name, x in found.items() if x is not None}


def retrieval_table(results: Results) -> str:
    """Right answers, and the mean log-probability of a digit."""
    records = results["retrieval"]
    levels = sorted({r["level"] for r in records if r["phase"] != "dense"})
    header = ["tokens", "keys", "phase", "dense", *(f"target {100 * x:.0f} %" for x in levels)]
    body = []
    for tokens in _values(records, "tokens"):
        for keys in _values(records, "keys"):
            own = [r for r in records if (r["tokens"], r["keys"]) == (tokens, keys)]
            dense = _answers([r for r in own if r["phase"] == "dense"])
            for phase in PHASES:
                at = [[r for r in own if (r["phase"], r["level"]) == (phase, x)] for x in levels]
                body.append([str(tokens), str(keys), phase, dense, *map(_answers, at)])
    return table(header, body)


def budget_table(results: Results) -> str:
    """Return the same as `perplexity_table`, of prefill with the budget criterion."""
    records = results["budget"]
    budgets = sorted({r["budget"] for r in records})
    header = ["tokens", *(f"ε = {x:g}" for x in budgets), "at 50 % achieved"]
    body = []
    for tokens in _values(records, "tokens"):
        own = [r for r in records if r["tokens"] == tokens]
        halves = [
            change_at([r for r in own if r["text"] == text], BAR_AT)
            for text in _values(own, "text")
        ]
        reached = [x for x in halves if x is not None]
        half = _percent(np.mean(reached)) if reached else "out of reach"
        cells = [_changes([r for r in own if r["budget"] == x]) for x in budgets]
        body.append([str(tokens), *cells, half])
    return table(header, body)


def bound_table(results: Results) -> str:
    """Means over rows, heads, layers and texts, in percent."""
    records = results["local_errors"]
    header = [
        "tokens", "target", "achieved", "certified bound", "omitted mass", "bound / omitted",
        "output error",
    ]  # fmt: skip
    body = []
    for tokens in _values(records, "tokens"):
        for level in _values(records, "level"):
            own = [r for r in records if (r["tokens"], r["level"]) == (tokens, level)]
            x = {n: float(np.mean([r[n] for r in own])) for n in _LOCAL}
            ratio = x["bound"] / x["omitted"] if x["omitted"] > 0 else math.nan
            body.append([
                str(tokens), f"{100 * level:.0f} %", f"{100 * x['achieved']:.1f} %",
                f"{100 * x['bound']:.2f} %", f"{100 * x['omitted']:.3f} %", f"{ratio:.1f}",
                f"{100 * x['output_error']:.2f} %",
            ])  # fmt: skip
    figure = "![bound, omitted mass and output error](figures/accuracy_bound.svg)"
    return f"{table(header, body)}\n\n{figure}"


_LOCAL = ("achieved", "bound", "omitted", "output_error")


def _changes(records: Sequence[Record]) -> str:
    """Say what was achieved, and the mean and worst change; "cap" where λ was clamped to 1."""
    shares = "/".join(f"{100 * x:.0f}" for x in _mean_achieved(records))
    changes = [change(r) for r in records]
    capped = " cap" if any(r.get("capped") for r in records) else ""
    return f"{shares} %{capped}: {_percent(np.mean(changes))} ({_percent(max(changes))})"


def _mean_achieved(records: Sequence[Record]) -> list[float]:
    """Return the mean share of each phase."""
    found = [
        list(r["achieved"].values()) if isinstance(r["achieved"], dict) else [r["achieved"]]
        for r in records
    ]
    return [float(x) for x in np.mean(found, axis=0)]


def _answers(records: Sequence[Record]) -> str:
    right = sum(r["right"] for r in records)
    chance = np.mean([r["log_probability"] for r in records])
    return f"{right}/{len(records)} ({chance:.2f})"


def _values(records: Iterable[Record], key: str) -> list[Any]:
    return sorted({r[key] for r in records})


def _percent(x: float) -> str:
    return f"{100 * x:+.2f} %"
