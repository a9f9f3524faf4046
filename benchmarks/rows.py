"""What result files say: one row per workload and share, with what follows from its times."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.timing import Timing, speedup

Results = dict[str, Any]
_SWEEP = 3  # points that make a curve; a line through fewer would claim more than was measured
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
        return self._first(ours=True, skips=False, unpaged=False)

    @property
    def own_unpaged(self) -> str | None:
        """Our dense contestant on ragged K and V where the case has pages."""
        return self._first(ours=True, skips=False, unpaged=True)

    @property
    def own_skip(self) -> str | None:
        """Our contestant with one."""
        return self._first(ours=True, skips=True)

    @property
    def best_dense_peer(self) -> str | None:
        """The fastest dense contestant that is not ours, among those that use the page table."""
        return self._best(skips=False, unpaged=False)

    @property
    def best_skipping_peer(self) -> str | None:
        """The fastest contestant with a skip test that is not ours."""
        return self._best(skips=True, unpaged=False)

    @property
    def ceiling(self) -> str | None:
        """The fastest contestant that is not ours and takes pages as they lie."""
        return self._best(skips=False, unpaged=True)

    @property
    def skipped(self) -> float | None:
        """The achieved share of skipped decisions of our skip kernel."""
        return self.skipped_by(self.own_skip)

    @property
    def ideal(self) -> float | None:
        """Gain over dense if a skipped tile's second half of the work cost nothing."""
        return None if self.skipped is None else 2 / (2 - self.skipped)

    @property
    def gain(self) -> float | None:
        """Gain of our skip kernel over our dense one."""
        return self.speedup(self.own_dense, self.own_skip)

    def skipped_by(self, name: str | None) -> float | None:
        """Return the achieved share of skipped decisions of a contestant."""
        return self.entries[name].get("skipped") if name else None

    def _is(self, name: str, **wanted: bool) -> bool:
        return all(self.entries[name].get(key, False) == value for key, value in wanted.items())

    def _first(self, **wanted: bool) -> str | None:
        return next((n for n in self.timings if self._is(n, **wanted)), None)

    def _best(self, **wanted: bool) -> str | None:
        peers = [n for n in self.timings if self._is(n, ours=False, **wanted)]
        return min(peers, key=lambda n: self.timings[n].median_ms, default=None)


def rows(results: Results, op: str) -> list[Row]:
    """Return the records of prefill or decode."""
    return [Row.of(r) for r in results["records"] if r["op"] == op]


def curves(results: Results, op: str) -> dict[str, list[tuple[float, float]]]:
    """Return achieved skip rates and gains over own dense of each case that was swept."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows(results, op):
        if row.skipped is not None and row.gain is not None:
            found.setdefault(row.case, []).append((row.skipped, row.gain))
    return {case: sorted(points) for case, points in found.items() if len(points) >= _SWEEP}


def dense_rates(results: Results, op: str) -> dict[str, dict[str, float]]:
    """Return the rate of every dense contestant that reads what the case asks for, by case."""
    found: dict[str, dict[str, float]] = {}
    for row in rows(results, op):
        dense = [n for n in row.timings if not row.entries[n]["skips"]]
        if row.share == 0:
            found[row.case] = {n: row.work / row.timings[n].median_ms / RATES[op][1] for n in dense}
    return found


def figures(results: Results) -> dict[str, list[str]]:
    """Return the operations that each kind of figure has something to show of."""
    found = {
        "dense": [op for op in RATES if any(row.own_dense for row in rows(results, op))],
        "speedup": [op for op in RATES if curves(results, op)],
    }
    return {name: ops for name, ops in found.items() if ops}


def load_results(folder: Path) -> list[Results]:
    """Return every result file measured on a GPU, oldest first."""
    found = []
    for path in sorted(folder.glob("*.json")):
        results = json.loads(path.read_text())
        if "records" in results and results["machine"]["device"] == "cuda":
            found.append(results | {"file": path.name})
    return sorted(found, key=lambda r: r["date"])
