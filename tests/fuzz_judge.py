"""Runs a random call of the GPU fuzzer and judges it by the oracle."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import torch
from fuzz_examples import DTYPES, Example, draw, spread, variants
from helpers import (
    assert_within_budget,
    by_row,
    eager_attention,
    kept_keys,
    poison,
    poisoned,
)
from paged import ROUNDING_BAND
from torch import Tensor

from flashskip import reference
from flashskip.variant import Variant


class Answer(NamedTuple):
    """What a run wrote; None where the plan asks for none."""

    out: Tensor
    lse: Tensor
    bound: Tensor | None
    stats: Tensor | None
    gaps: Tensor | None

    def of_rows(self, rows: Any) -> list[Tensor]:
        """What was written for these rows of q."""
        return [t[rows] for t in (self.out, self.lse, self.bound) if t is not None]

    def counted(self) -> list[Tensor]:
        """Counters of each request."""
        return [t for t in (self.stats, self.gaps) if t is not None]


def run(x: Example, out: Tensor) -> Answer:
    """Run into a poisoned `out` and LSE; the counters are of this run alone."""
    counts = x.options.get("collect_stats", False)
    measures = x.options.get("skip_criterion") == "measure"
    if counts or measures:
        x.wrapper.reset_stats()
    lse = poisoned(x.q.shape[:2], torch.float32, x.q.device)
    given = {"out": poison(out), "lse": lse, "lse_base": x.lse_base, **x.scales}
    answer = x.wrapper.run(*x.inputs, **given)
    return Answer(
        out.clone(),
        lse,
        answer[1].clone() if x.options.get("collect_bound") else None,
        x.wrapper.stats.clone() if counts else None,
        x.wrapper.gaps.clone() if measures else None,
    )


def oracle(x: Example, *, skips: bool = True) -> reference.Result:
    """The reference in float64; without its skipping on request."""
    o, lengths = x.options, torch.tensor(x.kv).diff().tolist()
    judged: dict[str, Any] = {}
    if not skips:
        pass
    elif o.get("skip_criterion") == "budget":
        judged["budget"] = o["skip_budget"]
    elif "skip_softmax_threshold" in o:
        judged["thresholds"] = reference.final_thresholds(
            lengths, threshold=o["skip_softmax_threshold"]
        )
    elif "skip_softmax_threshold_scale_factor" in o:
        judged["thresholds"] = reference.final_thresholds(
            lengths, scale_factor=o["skip_softmax_threshold_scale_factor"],
            length_exponent=o["length_exponent"], threshold_kv_len=o.get("threshold_kv_len"),
            overflow=o["overflow"],
        )  # fmt: skip
    return reference.attention(
        x.q, x.k, x.v, qo_indptr=x.qo, kv_indptr=x.kv, geometry=x.wrapper.geometry,
        sm_scale=o["sm_scale"], logits_soft_cap=o.get("logits_soft_cap"), sinks=o.get("sinks"),
        **judged,
    )  # fmt: skip


def close_calls(skip_map: reference.SkipMap) -> Tensor:
    """Decisions that rounding may flip. A margin of exactly 0 is a maximum compared to itself."""
    return (skip_map.margin.abs() < ROUNDING_BAND) & (skip_map.margin != 0)


def assert_matches(x: Example, answer: Answer) -> tuple[int, int]:
    """Outputs, LSE and counters against the oracle; returns how many rows it decided, of how many.

    Rows of a unit in which rounding may flip a decision must only be finite. Requests of lambda = 1
    are not counted: it skips what is below a maximum by anything at all, so under a soft-cap that
    flattens the scores rounding may flip every decision.
    """
    exact, decided, rows_in_all = oracle(x), 0, 0
    dense = exact if answer.bound is None else oracle(x, skips=False)
    assert exact.skip_map is not None
    for i, skip_map in enumerate(exact.skip_map):
        close = close_calls(skip_map)
        if x.options.get("skip_criterion") == "budget":  # where later decisions follow from one
            close = close.any(2, keepdim=True) & skip_map.visited
        if answer.stats is not None:
            assert_counts(answer.stats[i], exact.counts[i], skip_map.count(close), i)
        if answer.gaps is not None:
            assert_gaps(answer.gaps[i], skip_map, i)
        rows, keys = slice(*x.qo[i : i + 2]), slice(*x.kv[i : i + 2])
        if rows.stop == rows.start:
            continue
        assert all(torch.isfinite(t).all() for t in answer.of_rows(rows)[::2]), f"request {i}"
        sure = ~by_row(close.any(2), skip_map.geometry).T
        assert_request(x, answer.out[rows], exact.out[rows], skip_map, rows, keys, sure)
        expected = exact.lse[rows] * (1.0 if x.lse_base == "log2" else math.log(2))
        found = answer.lse[rows].double()
        torch.testing.assert_close(found[sure], expected[sure], rtol=0, atol=1e-4)
        if answer.bound is not None:
            assert_bound(x, answer.bound[rows], exact, dense, rows, sure)
        if skip_map.log2_threshold != 0:
            decided, rows_in_all = decided + int(sure.sum()), rows_in_all + sure.numel()
    return decided, rows_in_all


def assert_counts(found: Tensor, exact: Tensor, close: Tensor, i: int) -> None:
    """As many decisions visited, and skipped but for those that rounding may flip."""
    assert torch.equal(found[:, 1], exact[:, 1]), f"visits of request {i}"
    off = (found[:, 0] - exact[:, 0]).abs()
    assert (off <= close).all(), f"skips of request {i} are off by {off}"


def assert_gaps(found: Tensor, skip_map: reference.SkipMap, i: int) -> None:
    """As many decisions below every edge of the histogram, but for those within rounding of it."""
    exact = reference.histogram(skip_map)
    assert torch.equal(found.sum(1), exact.sum(1)), f"decisions measured in request {i}"
    edges = torch.arange(1, found.shape[1], device=found.device) / 8 - 32
    gap = skip_map.gap[skip_map.visited].double()
    near = ((gap[:, None] - edges).abs() < ROUNDING_BAND).sum(0)
    off = (found.cumsum(1) - exact.cumsum(1))[:, :-1].abs()
    assert (off <= near).all(), f"gaps of request {i} are off by {off.max()}"


def assert_bound(
    x: Example,
    found: Tensor,
    exact: reference.Result,
    dense: reference.Result,
    rows: slice,
    sure: Tensor,
) -> None:
    """The bound is the oracle's, at least what is missing of the softmax, and within a budget."""
    exact_bound = exact.bound[rows][sure]
    torch.testing.assert_close(found[sure].double(), exact_bound, rtol=1e-3, atol=1e-30)
    missing = (1 - torch.exp2(exact.lse[rows] - dense.lse[rows])).nan_to_num(0)
    assert (found.double() + 1e-12 >= missing)[sure].all(), "the bound is below what is missing"
    if "skip_budget" in x.options:
        assert (found <= x.options["skip_budget"]).all(), "more was left out than the budget"


def assert_request(
    x: Example,
    out: Tensor,
    exact: Tensor,
    skip_map: reference.SkipMap,
    rows: slice,
    keys: slice,
    sure: Tensor,
) -> None:
    """Rows that are `sure` within the error budget, those that see nothing exactly 0."""
    kept = kept_keys(skip_map)
    q, k, v = x.q[rows], x.k[keys], x.v[keys]
    scale = q.shape[2] ** -0.5 if x.options["sm_scale"] is None else x.options["sm_scale"]
    soft_cap, sinks = x.options.get("logits_soft_cap"), x.options.get("sinks")
    # An FP8 cache is computed with as fp16; `v` are the numbers that it stands for.
    p_dtype = torch.float16 if x.scales or v.dtype == torch.float64 else v.dtype
    eager = eager_attention(q, k, v, kept, scale, soft_cap, sinks, p_dtype=p_dtype)
    # The kernel rounds weights relative to another maximum than eager code does, so an output that
    # is finer than the weights is held to their precision: fp16 to bf16's, but below fp16's normal
    # numbers (a sink can leave a row that little) to fp16's own.
    coarser = max(out.dtype, p_dtype, key=lambda dtype: torch.finfo(dtype).eps)
    least = torch.finfo(out.dtype).tiny * torch.finfo(out.dtype).eps
    assert_within_budget(out.to(coarser)[sure], exact[sure], eager.to(coarser)[sure], least)
    sees_nothing = ~kept.any(2).T
    assert (out[sees_nothing & sure] == 0).all(), "a row that sees nothing is not 0"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits, NaN included."""
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(ints), b.contiguous().view(ints))


def check(v: Variant, seed: int, device: str = "cuda", longest: int = 1500) -> tuple[int, int]:
    """Draw, run and judge one example; returns how many rows the oracle decided, of how many."""
    x = draw(v, seed, device, longest)
    try:
        return _check(x, random.Random(seed), v)
    except Exception as error:
        raise AssertionError(
            f"example {seed} of {v.symbol} on {device}: {type(error).__name__}: {error}\n{x.text}\n"
            f"again: FUZZ_SEED={seed} python -m pytest -m gpu_fuzz "
            f"'tests/test_fuzz_gpu.py::test_random_calls[{variants().index(v)}]'"
        ) from error


def _check(x: Example, rng: random.Random, v: Variant) -> tuple[int, int]:
    out = spread(poisoned((*x.q.shape[:2], v.head_dim_vo), DTYPES[v.o_dtype], x.q.device), rng)
    first = run(x, out)
    wide = out if out._base is None else out._base
    poison(out)
    assert wide.isnan().all(), "the gaps of the output were written"
    assert first.out[x.rows :].isnan().all(), "output rows past the last request were written"
    assert first.lse[x.rows :].isnan().all(), "LSE rows past the last request were written"
    decided = assert_matches(x, first)
    again = run(x, out)
    everything = slice(0, x.rows)
    assert_same(first.of_rows(everything), again.of_rows(everything), "the same call gave other")
    assert_same(first.counted(), again.counted(), "the same call counted other")
    if x.alone:
        assert_neighbours_change_nothing(x, out, first, rng.randrange(len(x.alone)))
    return decided


def assert_same(a: list[Tensor], b: list[Tensor], text: str) -> None:
    """Bit for bit."""
    for number, (found, expected) in enumerate(zip(a, b, strict=True)):
        assert same_bits(found, expected), f"{text} bits ({number})"


def assert_neighbours_change_nothing(x: Example, out: Tensor, clean: Answer, i: int) -> None:
    """Make request `i` NaN: no other request's bits or counters change."""
    for t, place in x.alone[i]:
        t[place] = math.nan
    after = run(x, out)
    others = torch.ones(len(out), dtype=torch.bool, device=out.device)
    others[x.qo[i] : x.qo[i + 1]] = False
    others[x.rows :] = False
    text = f"NaN in request {i} changed other"
    assert_same(after.of_rows(others), clean.of_rows(others), text)
    rest = torch.arange(len(x.alone), device=out.device) != i
    assert_same([t[rest] for t in after.counted()], [t[rest] for t in clean.counted()], text)
