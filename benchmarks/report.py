"""From result files to the tables of docs/benchmarks.md. Everything derived is derived here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.timing import Timing, speedup

Results = dict[str, Any]
RATES = {"prefill": ("TFLOP/s", 1e9, "gemm_tflops"), "decode": ("GB/s", 1e6, "read_gbps")}


@dataclass(frozen=True)
class Row:
    """One record, with what follows from its times."""

    op: str
    case: str
    share: float  # as asked of the data
    work: float
    timings: dict[str, Timing]
    entries: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, record: dict[str, Any]) -> Row:
        """Read a record of a result file."""
        entries = record["contestants"]
        timings = {
            name: Timing(entry["rounds_ms"], entry["reps"])
            for name, entry in entries.items()
            if "rounds_ms" in entry
        }
        return cls(record["op"], record["case"], record["share"], record["work"], timings, entries)

    def rate(self, name: str) -> float | None:
        """Return dense-equivalent TFLOP/s or GB/s."""
        if name not in self.timings:
            return None
        return self.work / self.timings[name].median_ms / RATES[self.op][1]

    def speedup(self, base: str | None, other: str | None) -> float | None:
        """Return how many times faster `other` is than `base`, where both were timed."""
        if base not in self.timings or other not in self.timings:
            return None
        return speedup(self.timings[base], self.timings[other])

    @property
    def own_dense(self) -> str | None:
        """Our contestant without a skip test."""
        return self._first(ours=True, skips=False)

    @property
    def own_skip(self) -> str | None:
        """Our contestant with one."""
        return self._first(ours=True, skips=True)

    @property
    def best_dense_peer(self) -> str | None:
        """The fastest dense contestant that is not ours."""
        peers = [n for n in self.timings if self._is(n, ours=False, skips=False)]
        return min(peers, key=lambda n: self.timings[n].median_ms, default=None)

    @property
    def skipped(self) -> float | None:
        """The achieved share of skipped decisions."""
        entry = self.entries.get(self.own_skip or "", {})
        return entry.get("skipped")

    @property
    def ideal(self) -> float | None:
        """Gain over dense if a skipped tile's second half of the work cost nothing."""
        return None if self.skipped is None else 2 / (2 - self.skipped)

    @property
    def gain(self) -> float | None:
        """Gain of our skip kernel over our dense one."""
        return self.speedup(self.own_dense, self.own_skip)

    def _is(self, name: str, **wanted: bool) -> bool:
        return all(self.entries[name][key] == value for key, value in wanted.items())

    def _first(self, **wanted: bool) -> str | None:
        return next((n for n in self.timings if self._is(n, **wanted)), None)


def rows(results: Results, op: str) -> list[Row]:
    """Return the records of prefill or decode."""
    return [Row.of(r) for r in results["records"] if r["op"] == op]


def load_results(folder: Path) -> list[Results]:
    """Return every result file measured on a GPU, oldest first."""
    found = []
    for path in sorted(folder.glob("*.json")):
        results = json.loads(path.read_text())
        if "records" in results and results["machine"]["device"] == "cuda":
            found.append(results | {"file": path.name})
    return sorted(found, key=lambda r: r["date"])


def write_tables(all_results: Iterable[Results], page: Path) -> None:
    """Replace what stands between the page's two marks."""
    text = page.read_text()
    tables = "\n".join(section(results) for results in all_results)
    pattern = r"(<!-- tables: begin -->\n).*(<!-- tables: end -->)"
    new, count = re.subn(pattern, lambda m: f"{m[1]}{tables}{m[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{page} has {count} places for tables; expected one pair of marks")
    page.write_text(new)


def section(results: Results) -> str:
    """Return everything that one result file says, as Markdown."""
    parts = [f"## Group `{results['group']}`", _machine(results)]
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


def dense_table(results: Results, op: str) -> str:
    """Dense contestants, and our skip kernel where nothing can be skipped."""
    unit, _, ceiling = RATES[op]
    chosen = [row for row in rows(results, op) if row.share == 0]
    names = list(dict.fromkeys(n for row in chosen for n in row.timings))
    header = [
        "case", *(f"{n}, {unit}" for n in names),
        "dense over best peer", "skip over dense", "dense, % of ceiling",
    ]  # fmt: skip
    body = []
    for row in chosen:
        own = row.rate(row.own_dense or "")
        limit = results["ceilings"].get(ceiling)
        percent = None if own is None or limit is None else 100 * own / limit
        rates = [_number(row.rate(n), 0) for n in names]
        ratios = [_number(row.speedup(row.best_dense_peer, row.own_dense)), _number(row.gain)]
        body.append([row.case, *rates, *ratios, _number(percent, 0)])
    return _table(header, body)


def skip_table(results: Results, op: str) -> str:
    """Return our skip kernel against our dense kernel and the best dense peer."""
    header = [
        "case", "skipped", "dense, ms", "skip, ms (quartiles)", "gain", "ideal", "gain / ideal",
        "over best dense peer", "executed, % of ceiling",
    ]  # fmt: skip
    body = []
    for row in rows(results, op):
        if row.share == 0 or row.gain is None:
            continue
        low, high = row.timings[row.own_skip].quartiles_ms
        time = row.timings[row.own_skip].median_ms
        share = None if row.skipped is None else 100 * row.skipped
        relative = None if row.ideal is None else row.gain / row.ideal
        limit = results["ceilings"].get(RATES[op][2])
        known = row.ideal is not None and limit is not None
        executed = 100 * row.rate(row.own_skip) / row.ideal / limit if known else None
        body.append([
            row.case, f"{_number(share, 1)} %", _number(row.timings[row.own_dense].median_ms, 3),
            f"{time:.3f} ({low:.3f} to {high:.3f})", _number(row.gain), _number(row.ideal),
            _number(relative, 3), _number(row.speedup(row.best_dense_peer, row.own_skip)),
            _number(executed, 0),
        ])  # fmt: skip
    return _table(header, body)


def host_table(results: Results) -> str:
    """Median CPU microseconds of plan() and run()."""
    body = [
        [case, name, _number(times.get("plan_us"), 1), _number(times.get("run_us"), 1)]
        for case, found in results["host"].items()
        for name, times in found.items()
    ]
    return _table(["case", "contestant", "plan(), µs", "run(), µs"], body)


def kernel_table(results: Results) -> str:
    """Return seconds of a cold first plan and milliseconds of a cache hit, by kernel."""
    body = [
        [f"`{symbol}`", _number(t.get("first_plan_s"), 2), _number(t.get("cache_hit_ms"), 2)]
        for symbol, t in results["kernels"].items()
    ]
    return _table(["kernel", "cold, s", "cache hit, ms"], body)


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
    line = (
        f"{results['date'][:10]}, {m['gpu']} (driver {m['driver']}), torch {m['torch']}, cuDNN "
        f"{m['cudnn']}, cuda-bindings {m['cuda-bindings']}, NVRTC {m['nvrtc']}; sources "
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
    lines = []
    for record in results["records"]:
        for name, entry in record["contestants"].items():
            reason = entry.get("unsupported") or entry.get("failed")
            if reason:
                lines.append(f"- {record['case']} at {record['share']}, {name}: {reason}")
    for case, found in results["host"].items():
        failed = {name: times["failed"] for name, times in found.items() if "failed" in times}
        lines += [f"- host time of {case}, {name}: {reason}" for name, reason in failed.items()]
    for death in results["died"]:
        lines.append(f"- {death['step']}: given up in {death['contestant']} ({death['reason']})")
    lines += [f"- {key}: not run (time budget)" for key in results["not_run"]]
    if lines:
        yield "### Without a number"
        yield "\n".join(dict.fromkeys(lines))


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _table(header: list[str], body: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
