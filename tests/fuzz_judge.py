"""Runs a random call of the GPU fuzzer and judges it by the oracle."""

from __future__ import annotations

import math
import random

import torch
from fuzz_examples import DTYPES, Example, draw, spread, variants
from helpers import assert_within_budget, eager_attention, kept_keys, poison, poisoned
from paged import ROUNDING_BAND
from torch import Tensor

from flashskip import reference
from flashskip.variant import Variant


def run(x: Example, out: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run into a poisoned `out` and LSE; the counters are of this run alone."""
    counts = x.options.get("collect_stats", False)
    if counts:
        x.wrapper.reset_stats()
    lse = poisoned(x.q.shape[:2], torch.float32, x.q.device)
    x.wrapper.run(*x.inputs, out=poison(out), lse=lse, lse_base=x.lse_base)
    return out.clone(), lse, x.wrapper.stats.clone() if counts else None


def oracle(x: Example) -> reference.Result:
    """The reference in float64."""
    o, lengths = x.options, torch.tensor(x.kv).diff().tolist()
    thresholds = None
    if "skip_softmax_threshold" in o:
        thresholds = reference.final_thresholds(lengths, threshold=o["skip_softmax_threshold"])
    elif "skip_softmax_threshold_scale_factor" in o:
        thresholds = reference.final_thresholds(
            lengths, scale_factor=o["skip_softmax_threshold_scale_factor"],
            length_exponent=o["length_exponent"], threshold_kv_len=o.get("threshold_kv_len"),
            overflow=o["overflow"],
        )  # fmt: skip
    return reference.attention(
        x.q, x.k, x.v, qo_indptr=x.qo, kv_indptr=x.kv, geometry=x.wrapper.geometry,
        sm_scale=o["sm_scale"], logits_soft_cap=o.get("logits_soft_cap"), sinks=o.get("sinks"),
        thresholds=thresholds,
    )  # fmt: skip


def close_calls(skip_map: reference.SkipMap) -> Tensor:
    """Decisions that rounding may flip. A margin of exactly 0 is a maximum compared to itself."""
    return (skip_map.margin.abs() < ROUNDING_BAND) & (skip_map.margin != 0)


def assert_matches(x: Example, out: Tensor, lse: Tensor, stats: Tensor | None) -> tuple[int, int]:
    """Outputs, LSE and counters against the oracle; returns how many rows it decided, of how many.

    Rows of a unit in which rounding may flip a decision must only be finite.
    """
    exact, decided, rows_in_all = oracle(x), 0, 0
    assert exact.skip_map is not None
    for i, skip_map in enumerate(exact.skip_map):
        close = close_calls(skip_map)
        if stats is not None:
            assert torch.equal(stats[i, :, 1], exact.counts[i, :, 1]), f"visits of request {i}"
            off = (stats[i, :, 0] - exact.counts[i, :, 0]).abs()
            assert (off <= close.sum((1, 2))).all(), f"skips of request {i} are off by {off}"
        rows, keys = slice(*x.qo[i : i + 2]), slice(*x.kv[i : i + 2])
        if rows.stop == rows.start:
            continue
        assert torch.isfinite(out[rows]).all(), f"request {i} is not finite"
        by_row = close.any(2).repeat_interleave(skip_map.geometry.rows_per_vote, 1)
        sure = ~by_token(by_row[:, : skip_map.geometry.num_rows], rows).T
        assert_request(x, out[rows], exact.out[rows], skip_map, rows, keys, sure)
        expected = exact.lse[rows] * (1.0 if x.lse_base == "log2" else math.log(2))
        torch.testing.assert_close(lse[rows].double()[sure], expected[sure], rtol=0, atol=1e-4)
        decided, rows_in_all = decided + int(sure.sum()), rows_in_all + sure.numel()
    return decided, rows_in_all


def by_token(rows_of_sequences: Tensor, rows: slice) -> Tensor:
    """From ``[sequence, row, ...]``, rows token-major, to ``[num_qo_heads, token, ...]``."""
    tokens = rows.stop - rows.start
    return rows_of_sequences.unflatten(1, (tokens, -1)).transpose(1, 2).flatten(0, 1)


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
    kept = by_token(kept_keys(skip_map), rows)
    q, k, v = x.q[rows], x.k[keys], x.v[keys]
    scale = q.shape[2] ** -0.5 if x.options["sm_scale"] is None else x.options["sm_scale"]
    soft_cap, sinks = x.options.get("logits_soft_cap"), x.options.get("sinks")
    eager = eager_attention(q, k, v, kept, scale, soft_cap, sinks)
    # The kernel rounds weights relative to another maximum than eager code does, so an output that
    # is finer than the weights is held to their precision.
    coarser = max(out.dtype, v.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    assert_within_budget(out.to(coarser)[sure], exact[sure], eager.to(coarser)[sure])
    sees_nothing = ~kept.any(2).T
    assert (out[sees_nothing & sure] == 0).all(), "a row that sees nothing is not 0"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits, NaN included."""
    ints = {2: torch.int16, 4: torch.int32}[a.element_size()]
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
    assert first[0][x.rows :].isnan().all(), "output rows past the last request were written"
    assert first[1][x.rows :].isnan().all(), "LSE rows past the last request were written"
    decided = assert_matches(x, *first)
    again = run(x, out)
    assert same_bits(first[0], again[0]), "the same call gave other output bits"
    assert same_bits(first[1], again[1]), "the same call gave other LSE bits"
    assert first[2] is None or torch.equal(first[2], again[2]), "the same call counted otherwise"
    if x.alone:
        assert_neighbours_change_nothing(x, out, first, rng.randrange(len(x.alone)))
    return decided


def assert_neighbours_change_nothing(
    x: Example, out: Tensor, clean: tuple[Tensor, Tensor, Tensor | None], i: int
) -> None:
    """Make request `i` NaN: no other request's bits or counters change."""
    for t, place in x.alone[i]:
        t[place] = math.nan
    after = run(x, out)
    others = torch.ones(len(out), dtype=torch.bool, device=out.device)
    others[x.qo[i] : x.qo[i + 1]] = False
    assert same_bits(after[0][others], clean[0][others]), f"NaN in request {i} changed outputs"
    assert same_bits(after[1][others], clean[1][others]), f"NaN in request {i} changed LSE"
    if clean[2] is not None and after[2] is not None:
        rest = torch.arange(len(x.alone), device=out.device) != i
        assert torch.equal(after[2][rest], clean[2][rest]), f"NaN in request {i} changed counts"
