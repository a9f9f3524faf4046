"""What the kernels are asked to reach, beside what a result file says they reached."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks import groups
from benchmarks.cases import Case
from benchmarks.rows import Results, Row, rows

_PREFILL_GAINS = {0.5: 1.25, 0.75: 1.52, 0.9: 1.75}  # over the best dense peer, by share
_OWN = "flashskip dense"
_DENSE_OVER_PEER = "dense over best peer"


@dataclass(frozen=True)
class Bar:
    """One figure and what it must be: at least `needed`, or at most where `most`."""

    what: str
    where: str
    figure: float | None
    needed: float
    most: bool = False

    @property
    def verdict(self) -> str:
        """Reached, missed, or not measured."""
        if self.figure is None:
            return "not measured"
        reached = self.figure <= self.needed if self.most else self.figure >= self.needed
        return "reached" if reached else "**missed**"


def bars(results: Results) -> list[Bar]:
    """Return the bars of a group, in the order of its kernel's list; other groups have none."""
    found: dict[str, Callable[[Results], Iterator[Bar]]] = {"prefill": _prefill, "decode": _decode}
    return list(found[results["group"]](results)) if results["group"] in found else []


class _Table:
    """Looks up the rows of a result file."""

    def __init__(self, results: Results, op: str) -> None:
        self._rows = {(row.case, row.share): row for row in rows(results, op)}

    def over_peer(self, case: Case) -> float | None:
        """Our dense kernel over the best peer."""
        row = self.get(case)
        return row and row.speedup(row.best_dense_peer, row.own_dense)

    def cost_of_test(self, case: Case) -> float | None:
        """Our skip kernel over our dense one, where nothing can be skipped."""
        row = self.get(case)
        return row and row.gain

    def rates(self, case: Case, base: Case) -> float | None:
        """Rate of our dense kernel on one case over that on another."""
        pair = [row and row.rate(row.own_dense or "") for row in (self.get(case), self.get(base))]
        return pair[0] / pair[1] if pair[0] and pair[1] else None

    def get(self, case: Case, share: float = 0.0) -> Row | None:
        return self._rows.get((case.name, share))


def _prefill(results: Results) -> Iterator[Bar]:
    table = _Table(results, "prefill")
    over_peer = [table.over_peer(case) for case in groups.PREFILL_DENSE]
    for case, figure in zip(groups.PREFILL_DENSE, over_peer, strict=True):
        yield Bar(_DENSE_OVER_PEER, case.name, figure, 0.97)
    mean = math.prod(over_peer) ** (1 / len(over_peer)) if all(over_peer) else None
    yield Bar(f"{_DENSE_OVER_PEER}, geometric mean", "the cases above", mean, 1.0)
    others = (*groups.PREFILL_PAGED.values(), groups.PREFILL_MIX, groups.PREFILL_CHUNK)
    for case in (*groups.PREFILL_DENSE, *groups.PREFILL_SWEPT[2:], *others):
        yield Bar("skip over dense, nothing skipped", case.name, table.cost_of_test(case), 0.98)
    for case in groups.PREFILL_SWEPT:
        for share, needed in _PREFILL_GAINS.items():
            row = table.get(case, share)
            where = f"{case.name}, {100 * share:.0f} %"
            gain = row and row.speedup(row.best_dense_peer, row.own_skip)
            yield Bar("skip over best dense peer", where, gain, needed)
            gain = row and row.speedup(row.best_skipping_peer, row.own_skip)
            yield Bar("skip over best skipping peer", where, gain, 1.15)
    for case in groups.PREFILL_HEAD_DIMS:
        yield Bar(_DENSE_OVER_PEER, case.name, table.over_peer(case), 1.0)
    mix, uniform = groups.PREFILL_MIX, groups.PREFILL_UNIFORM
    yield Bar("TFLOP/s over the uniform batch's", mix.name, table.rates(mix, uniform), 0.95)
    yield Bar(_DENSE_OVER_PEER, mix.name, table.over_peer(mix), 1.0)
    for page_size, case in groups.PREFILL_PAGED.items():
        row = table.get(case)
        paged = row and row.speedup(row.own_unpaged, row.own_dense)
        yield Bar("paged over ragged", case.name, paged, 0.8 if page_size == 1 else 0.95)
    chunk = groups.PREFILL_CHUNK
    yield Bar(_DENSE_OVER_PEER, chunk.name, table.over_peer(chunk), 1.0)
    _, ratio = _host_us(results, groups.HOST_PREFILL)
    yield Bar(
        "CPU time of plan and run over FlashInfer's", groups.HOST_PREFILL.name, ratio, 0.3, True
    )


def _decode(results: Results) -> Iterator[Bar]:
    table = _Table(results, "decode")
    for case in groups.DECODE_DENSE:
        yield Bar("dense over best paged peer", case.name, table.over_peer(case), 1.0)
    for case in groups.DECODE_LARGE.values():
        row = table.get(case)
        figure = row and row.speedup(row.ceiling, row.own_dense)
        yield Bar("dense over cuDNN on unpaged K and V", case.name, figure, 0.98)
    others = (groups.DECODE_PAGE_1, groups.DECODE_BF16, *groups.DECODE_GRAPHS)
    for case in (*groups.DECODE_DENSE, *others):
        yield Bar("skip over dense, nothing skipped", case.name, table.cost_of_test(case), 0.99)
    swept = (groups.DECODE_LARGE, groups.DECODE_USUAL, groups.DECODE_ONE)
    for case in (cases[page_size] for page_size in (64, 16) for cases in swept):
        for share in case.shares[1:]:
            row = table.get(case, share)
            figure = row.gain / row.ideal if row and row.gain and row.ideal else None
            where = f"{case.name}, {100 * share:.0f} %"
            yield Bar("gain over 2/(2 − s)", where, figure, 0.93 if case.batch_size == 1 else 0.97)
    usual = groups.DECODE_USUAL
    for case, needed in ((groups.DECODE_PAGE_1, 0.85), (usual[16], 0.97)):
        yield Bar("GB/s over that of page 64", case.name, table.rates(case, usual[64]), needed)
    fp8 = groups.DECODE_FP8
    yield Bar("GB/s over that of bf16", fp8.name, table.rates(fp8, groups.DECODE_BF16), 0.9)
    yield Bar("dense over best paged peer", fp8.name, table.over_peer(fp8), 1.0)
    for case in groups.DECODE_SHAPES:
        what = "GB/s over that of head dim 128, group 4"
        yield Bar(what, case.name, table.rates(case, usual[64]), 0.92)
    for case in groups.DECODE_GRAPHS:
        yield Bar("dense over best paged peer", case.name, table.over_peer(case), 1.0)
    own, ratio = _host_us(results, groups.HOST_DECODE)
    yield Bar("CPU time of plan and run, µs", groups.HOST_DECODE.name, own, 25.0, True)
    yield Bar(
        "CPU time of plan and run over FlashInfer's", groups.HOST_DECODE.name, ratio, 0.2, True
    )


def _host_us(results: Results, case: Case) -> tuple[float | None, float | None]:
    """Return our microseconds of plan() and run(), and their ratio to FlashInfer's least."""
    sums = {
        name: times.get("plan_run_us", times["plan_us"] + times["run_us"])
        for name, times in results["host"].get(case.name, {}).items()
        if "plan_us" in times
    }
    own = sums.get(_OWN)
    theirs = min((us for name, us in sums.items() if name.startswith("flashinfer")), default=None)
    return own, own / theirs if own and theirs else None
