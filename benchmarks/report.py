"""From result files to the tables of docs/benchmarks.md. Everything derived is derived here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks import bars
from benchmarks.machine import PEERS
from benchmarks.pages import fill, table
from benchmarks.rows import RATES, Results, Row, figures, rows

_CAPTIONS = {
    "dense": "Rates of the dense contestants",
    "speedup": "Speed-up over the own dense kernel against the achieved skip rate",
}


def write_tables(all_results: Iterable[Results], page: Path) -> None:
    """Replace what stands between the page's two marks, the newest group first."""
    newest = sorted(all_results, key=lambda results: results["date"], reverse=True)
    tables = "\n".join(section(results) for results in newest)
    fill(page, {"tables": tables.removesuffix("\n")})


def section(results: Results) -> str:
    """Return everything that one result file says, as Markdown."""
    parts = [f"## Group `{results['group']}`", _machine(results)]
    if bars.bars(results):
        parts += ["### Bars", bar_table(results)]
    for name in figures(results):
        parts.append(f"![{_CAPTIONS[name]}](figures/{name}_{results['group']}.svg)")
    for op in RATES:
        if rows(results, op):
            parts += [f"### {op.capitalize()}, dense", dense_table(results, op)]
            parts += [f"### {op.capitalize()}, skipping", skip_table(results, op)]
    if results["host"]:
        parts += ["### Host time", host_table(results)]
    if results["kernels"]:
        parts += ["### Kernels: first plan and cache hit", kernel_table(results)]
    parts += list(_failures(results))
    return "\n\n".join(parts) + "\n"


def bar_table(results: Results) -> str:
    """Return what was to be reached, the figure, and whether it was."""
    body = [
        [b.what, b.where, _number(b.figure, 3), f"{'≤' if b.most else '≥'} {b.needed:g}", b.verdict]
        for b in bars.bars(results)
    ]
    return table(["what", "case", "figure", "asked", "verdict"], body)


def bar_lines(results: Results) -> str:
    """Return the bars as text, those that were missed first."""
    found = sorted(bars.bars(results), key=lambda b: b.verdict)
    lines = [
        f"{b.verdict.strip('*'):<13}{_number(b.figure, 3):>8} {'≤' if b.most else '≥'} "
        f"{b.needed:<5g} {b.what}: {b.where}"
        for b in found
    ]
    return "\n".join([f"{results['file']}: {len(found)} bars", *lines])


def dense_table(results: Results, op: str) -> str:
    """Dense contestants, and our skip kernel where nothing can be skipped."""
    unit, _, ceiling = RATES[op]
    chosen = [row for row in rows(results, op) if row.share == 0]
    names = list(dict.fromkeys(n for row in chosen for n in row.timings))
    header = [
        "case", *(f"{n}, {unit}" for n in names),
        "dense over best peer", "over unpaged peer", "skip over dense", "dense, % of ceiling",
    ]  # fmt: skip
    body = []
    for row in chosen:
        own = row.rate(row.own_dense or "")
        limit = results["ceilings"].get(ceiling)
        percent = None if own is None or limit is None else 100 * own / limit
        rates = [_number(row.rate(n), 0) for n in names]
        ratios = [row.speedup(peer, row.own_dense) for peer in (row.best_dense_peer, row.ceiling)]
        body.append([row.case, *rates, *map(_number, (*ratios, row.gain)), _number(percent, 0)])
    return table(*_without_empty_columns(header, body))


def skip_table(results: Results, op: str) -> str:
    """Return our skip kernel against our dense kernel and the best peers."""
    header = [
        "case", "skipped", "dense, ms", "skip, ms (quartiles)", "gain", "ideal", "gain / ideal",
        "over best dense peer", "over skipping peer (its skipped)", "executed, % of ceiling",
    ]  # fmt: skip
    body = []
    for row in rows(results, op):
        if row.share == 0 or row.gain is None:
            continue
        low, high = row.timings[row.own_skip].quartiles_ms
        time = row.timings[row.own_skip].median_ms
        relative = None if row.ideal is None else row.gain / row.ideal
        limit = results["ceilings"].get(RATES[op][2])
        known = row.ideal is not None and limit is not None
        executed = 100 * row.rate(row.own_skip) / row.ideal / limit if known else None
        body.append([
            row.case, _percent(row.skipped), _number(row.timings[row.own_dense].median_ms, 3),
            f"{time:.3f} ({low:.3f} to {high:.3f})", _number(row.gain), _number(row.ideal),
            _number(relative, 3), _number(row.speedup(row.best_dense_peer, row.own_skip)),
            _over_skipping_peer(row), _number(executed, 0),
        ])  # fmt: skip
    return table(*_without_empty_columns(header, body))


def _over_skipping_peer(row: Row) -> str:
    peer = row.best_skipping_peer
    if peer is None:
        return _number(None)
    return f"{_number(row.speedup(peer, row.own_skip))} ({_percent(row.skipped_by(peer))})"


def host_table(results: Results) -> str:
    """Median CPU microseconds of plan(), run() and both."""
    columns = {"plan_us": "plan(), µs", "run_us": "run(), µs", "plan_run_us": "plan() + run(), µs"}
    body = [
        [case, name, *(_number(times.get(key), 1) for key in columns)]
        for case, found in results["host"].items()
        for name, times in found.items()
    ]
    return table(["case", "contestant", *columns.values()], body)


def kernel_table(results: Results) -> str:
    """Return seconds of a cold first plan and milliseconds of a cache hit, by kernel."""
    body = [
        [f"`{symbol}`", _number(t.get("first_plan_s"), 2), _number(t.get("cache_hit_ms"), 2)]
        for symbol, t in results["kernels"].items()
    ]
    return table(["kernel", "cold, s", "cache hit, ms"], body)


def summary(results: Results, key: str) -> str:
    """Return one line about the step that was just done."""
    if not results["records"] or key in ("ceilings", "kernels") or key.startswith("host"):
        values = results["ceilings"] if key == "ceilings" else results["host"].get(key[5:], "")
        return f"{key} {values}"
    row = Row.of(results["records"][-1])
    parts = [key]
    for name, entry in row.entries.items():
        if name in row.timings:
            unit = RATES[row.op][0]
            parts.append(
                f"{name} {row.timings[name].median_ms:.3f} ms {row.rate(name):.0f} {unit}"
                f" err {entry['check']['error']:.1e}"
            )
        else:
            parts.append(f"{name}: {entry.get('unsupported') or entry.get('failed')}")
    over_peer = row.speedup(row.best_dense_peer, row.own_skip)
    parts.append(f"skipped {_number(row.skipped, 3)} gain {_number(row.gain, 3)}")
    parts.append(f"ideal {_number(row.ideal, 3)} over peer {_number(over_peer, 3)}")
    return " | ".join(parts)


def _machine(results: Results) -> str:
    m, c = results["machine"], results["ceilings"]
    peers = "".join(f"{name} {m[name]}, " for name in PEERS if name in m)
    line = (
        f"{results['date'][:10]}, {m['gpu']} (driver {m['driver']}), torch {m['torch']}, cuDNN "
        f"{m['cudnn']}, {peers}cuda-bindings {m['cuda-bindings']}, NVRTC {m['nvrtc']}; sources "
        f"`{m['sources_sha256'][:12]}`, commit `{m['commit'][:12]}`; file `{results['file']}`."
    )
    if c:
        line += (
            f" Ceilings in the same run: matrix product {c['gemm_tflops']:.0f} TFLOP/s, copy "
            f"{c['copy_gbps']:.0f} GB/s, read {c['read_gbps']:.0f} GB/s."
        )
    return line


def _failures(results: Results) -> Iterator[str]:
    """Say what has no number, and why."""
    where: dict[str, list[str]] = {}  # the cases of each contestant and reason
    for record in results["records"]:
        for name, entry in record["contestants"].items():
            reason = entry.get("unsupported") or entry.get("failed")
            if reason:
                where.setdefault(f"{name}: {reason}", []).append(record["case"])
    for case, found in results["host"].items():
        for name, times in found.items():
            if "failed" in times:
                where.setdefault(f"{name}, host time: {times['failed']}", []).append(case)
    lines = [f"- {name}: {reason}" for name, reason in results.get("absent", {}).items()]
    for what, cases in where.items():
        lines.append(f"- {' '.join(what.split())} ({', '.join(dict.fromkeys(cases))})")
    for death in results["died"]:
        lines.append(f"- {death['step']}: given up in {death['contestant']} ({death['reason']})")
    lines += [f"- {key}: not run (time budget)" for key in results["not_run"]]
    if lines:
        yield "### Without a number"
        yield "\n".join(dict.fromkeys(lines))


def _without_empty_columns(
    header: list[str], body: list[list[str]]
) -> tuple[list[str], list[list[str]]]:
    kept = [i for i in range(len(header)) if any(line[i] != _number(None) for line in body)]
    return [header[i] for i in kept], [[line[i] for i in kept] for line in body]


def _percent(share: float | None) -> str:
    return _number(None) if share is None else f"{100 * share:.1f} %"


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
