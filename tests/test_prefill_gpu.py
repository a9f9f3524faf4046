"""The prefill kernel on a GPU against the reference: outputs, LSE, skip maps and counters."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from helpers import (
    Ragged,
    assert_within_budget,
    eager_attention,
    indptr,
    kept_keys,
    make_ragged,
    poison,
    poisoned,
)

import flashskip
from flashskip import reference
from flashskip._options import PlanOptions
from flashskip.geometry import ORDERS
from flashskip.variant import Variant

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BF16, FP16 = torch.bfloat16, torch.float16

# Queries and keys of requests: none, one, more queries than keys, partial tiles, whole blocks.
MIX = ((130, 0, 5, 300, 64, 700, 1, 192), (130, 77, 900, 300, 0, 500, 333, 1152))
LONG = ((2000, 1, 300, 700), (2000, 500, 300, 900))

# Scores are fp32 sums of exact products: their error is far below this, in log2 units. A decision
# whose margin is smaller may fall either way.
ROUNDING_BAND = 1e-3


def variant(head_dim: int = 128, dtype: torch.dtype = BF16, **options: Any) -> Variant:
    """Return the kernel that a plan with these options launches."""
    wrapper = flashskip.BatchPrefillWrapper(torch.empty(0))
    return wrapper._variant(PlanOptions(q_data_type=dtype, **options), head_dim, head_dim)


def plan(batch: Ragged, **options: Any) -> flashskip.BatchPrefillWrapper:
    """Plan for `batch` on the test's device."""
    wrapper = flashskip.BatchPrefillWrapper(torch.empty(0, device=DEVICE))
    (_, heads, head_dim), num_kv_heads = batch.q.shape, batch.k.shape[1]
    options = {"q_data_type": batch.q.dtype, **options}
    wrapper.plan(batch.qo_indptr, batch.kv_indptr, heads, num_kv_heads, head_dim, **options)
    return wrapper


def run(
    wrapper: flashskip.BatchPrefillWrapper, batch: Ragged, lse_base: str = "log2"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run into poisoned outputs."""
    out = poisoned(batch.q.shape, batch.q.dtype, DEVICE)
    lse = poisoned(batch.q.shape[:2], torch.float32, DEVICE)
    wrapper.run(batch.q, batch.k, batch.v, out=out, lse=lse, lse_base=lse_base)
    return out, lse


def attend(batch: Ragged, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Plan and run once."""
    return run(plan(batch, **options), batch)


def oracle(
    wrapper: flashskip.BatchPrefillWrapper, batch: Ragged, thresholds: list[float | None] | None
) -> reference.Result:
    """The reference in float64, with the plan's geometry and options."""
    options = wrapper._planned().options
    return reference.attention(
        batch.q,
        batch.k,
        batch.v,
        qo_indptr=batch.qo_indptr,
        kv_indptr=batch.kv_indptr,
        geometry=wrapper.geometry,
        logits_soft_cap=options.logits_soft_cap,
        sinks=options.sinks,
        thresholds=thresholds,
    )


def assert_matches(
    batch: Ragged,
    out: torch.Tensor,
    lse: torch.Tensor,
    exact: reference.Result,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Outputs within the budget of each request, LSE to 1e-4, all rows written."""
    assert exact.skip_map is not None
    sm_scale = batch.q.shape[-1] ** -0.5
    for (qo, kv), skip_map in zip(batch.spans(), exact.skip_map, strict=True):
        if qo.stop > qo.start:
            kept = kept_keys(skip_map)
            tensors = (batch.q[qo], batch.k[kv], batch.v[kv])
            eager = eager_attention(*tensors, kept, sm_scale, soft_cap, sinks)
            assert_within_budget(out[qo], exact.out[qo], eager)
            sees_nothing = ~kept.any(-1).mT
            assert (out[qo][sees_nothing] == 0).all()
    torch.testing.assert_close(lse.double(), exact.lse, rtol=0, atol=1e-4)


def assert_counts(wrapper: flashskip.BatchPrefillWrapper, exact: reference.Result) -> None:
    """Counters equal the oracle's, but for decisions within the rounding band."""
    assert exact.skip_map is not None
    stats = wrapper.stats.cpu()
    counts = exact.counts.cpu()
    torch.testing.assert_close(stats[..., 1], counts[..., 1], rtol=0, atol=0)
    close = [(m.margin.abs() < ROUNDING_BAND).sum((1, 2)).cpu() for m in exact.skip_map]
    assert ((stats - counts)[..., 0].abs() <= torch.stack(close)).all()


def check(batch: Ragged, threshold: float | None = None, **options: Any) -> None:
    """Attend and compare with the oracle: outputs, LSE, and the counters where there are some."""
    skips = (
        {} if threshold is None else {"collect_stats": True, "skip_softmax_threshold": threshold}
    )
    wrapper = plan(batch, **options, **skips)
    out, lse = run(wrapper, batch)
    thresholds = None if threshold is None else [threshold] * (len(batch.qo_indptr) - 1)
    exact = oracle(wrapper, batch, thresholds)
    capped_and_sunk = (options.get("logits_soft_cap"), options.get("sinks"))
    assert_matches(batch, out, lse, exact, *capped_and_sunk)
    if threshold is not None:
        assert_counts(wrapper, exact)


# ---- dense ---------------------------------------------------------------------------------------


@pytest.mark.variants(lambda head_dim, dtype, causal: [variant(head_dim, dtype, causal=causal)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_dense_ragged_mix(head_dim: int, dtype: torch.dtype, causal: bool) -> None:
    check(make_ragged(*MIX, 3, 1, head_dim, dtype, device=DEVICE), causal=causal)


@pytest.mark.variants([variant(causal=True)])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (3, 1), (10, 2), (7, 1), (16, 2)])
def test_any_group_size(heads: tuple[int, int]) -> None:
    check(make_ragged((200, 77), (300, 500), *heads, 128, device=DEVICE), causal=True)


@pytest.mark.variants([variant(causal=True), variant()])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 385])
def test_lengths_around_tile_edges(length: int, causal: bool) -> None:
    batch = make_ragged((length, 3, length), (length, length, 2 * length), 2, 1, 128, device=DEVICE)
    check(batch, causal=causal)


@pytest.mark.variants([variant(dtype=FP16, o_data_type=BF16, causal=True)])
def test_output_dtype_of_its_own() -> None:
    batch = make_ragged((300,), (300,), 2, 1, 128, FP16, device=DEVICE)
    wrapper = plan(batch, causal=True, o_data_type=BF16)
    out = wrapper.run(batch.q, batch.k, batch.v)
    assert out.dtype == BF16
    torch.testing.assert_close(
        out.float(), attend(batch, causal=True)[0].float(), rtol=8e-3, atol=8e-3
    )


@pytest.mark.variants([variant(causal=True)])
def test_lse_bases_and_without_lse() -> None:
    batch = make_ragged(*MIX, 3, 1, 128, device=DEVICE)
    wrapper = plan(batch, causal=True)
    out, log2 = run(wrapper, batch)
    out_e, natural = run(wrapper, batch, lse_base="e")
    assert torch.equal(out, out_e)
    torch.testing.assert_close(natural, log2 * math.log(2), rtol=1e-6, atol=0)
    assert torch.equal(wrapper.run(batch.q, batch.k, batch.v), out)


@pytest.mark.variants([variant(causal=True)])
def test_strided_views() -> None:
    batch = make_ragged((200, 130), (200, 130), 6, 2, 128, device=DEVICE)
    packed = torch.cat([batch.q, batch.k, batch.v], 1)
    views = dataclasses.replace(batch, **dict(zip("qkv", packed.split([6, 2, 2], 1), strict=True)))
    wrapper = plan(views, causal=True)
    wide = poisoned((330, 8, 192), BF16, DEVICE)
    wrapper.run(views.q, views.k, views.v, out=wide[:, 1:7, 32:160])
    expected, _ = attend(batch, causal=True)
    assert torch.equal(wide[:, 1:7, 32:160], expected)
    wide[:, 1:7, 32:160] = torch.nan
    assert wide.isnan().all()


@pytest.mark.variants([variant(causal=True), variant(causal=True, skip_softmax_threshold=0.1)])
@pytest.mark.parametrize("threshold", [None, 0.1])
def test_neighbours_change_nothing(threshold: float | None) -> None:
    batch = make_ragged(*MIX, 3, 1, 128, device=DEVICE)
    clean, clean_lse = attend(batch, causal=True, skip_softmax_threshold=threshold)
    poisoned_request = 3
    qo, kv = batch.spans()[poisoned_request]
    for t, rows in ((batch.q, qo), (batch.k, kv), (batch.v, kv)):
        poison(t[rows])
    out, lse = attend(batch, causal=True, skip_softmax_threshold=threshold)
    others = torch.ones(len(out), dtype=torch.bool, device=DEVICE)
    others[qo] = False
    assert torch.equal(out[others], clean[others])
    assert torch.equal(lse[others], clean_lse[others])
    assert out[qo].isnan().all()


@pytest.mark.variants([variant(causal=True)])
def test_rows_beyond_the_last_request_are_not_written() -> None:
    batch = make_ragged((100, 200), (100, 200), 2, 1, 128, device=DEVICE)
    batch.qo_indptr[2] = 250
    batch.kv_indptr[2] = 250
    poison(batch.q[250:])
    out, lse = attend(batch, causal=True)
    assert not out[:250].isnan().any()
    assert out[250:].isnan().all()
    assert lse[250:].isnan().all()


@pytest.mark.variants([variant(causal=True)])
def test_device_indices_are_bounded() -> None:
    batch = make_ragged((300, 400), (300, 400), 2, 1, 128, device=DEVICE)
    bad = dataclasses.replace(
        batch,
        qo_indptr=torch.tensor([0, 300, 200, 900], dtype=torch.int32, device=DEVICE),
        kv_indptr=torch.tensor([-5, 300, 300, 5000], dtype=torch.int32, device=DEVICE),
    )
    good = dataclasses.replace(
        batch,
        qo_indptr=torch.tensor([0, 300, 300, 700], dtype=torch.int32, device=DEVICE),
        kv_indptr=torch.tensor([0, 300, 300, 700], dtype=torch.int32, device=DEVICE),
    )
    out, lse = attend(bad, causal=True)  # the third request is rows 200 to 700 on keys 300 to 700
    expected, expected_lse = attend(good, causal=True)
    assert torch.equal(out[:200], expected[:200])
    torch.testing.assert_close(out[300:], expected[300:], rtol=0, atol=2e-2)  # in other row blocks
    torch.testing.assert_close(lse[300:], expected_lse[300:], rtol=0, atol=1e-4)


@pytest.mark.variants([variant(64)])
def test_many_requests() -> None:
    n = 200_000
    every = torch.arange(n + 1, dtype=torch.int32, device=DEVICE)
    q, k, v = torch.randn(3, n, 2, 64, dtype=BF16, device=DEVICE)
    out, lse = attend(Ragged(q, k, v, every, every))  # each token attends to itself
    assert torch.equal(out, v)
    torch.testing.assert_close(
        lse.double(), (q.double() * k.double()).sum(-1) / 8 * math.log2(math.e), rtol=0, atol=1e-5
    )


@pytest.mark.variants([variant(causal=True)])
def test_offsets_beyond_31_bits() -> None:
    heads, before = 32, 600_000
    small = make_ragged((300,), (300,), heads, 1, 128, device=DEVICE)
    q = torch.empty(before + 300, heads, 128, dtype=BF16, device=DEVICE)
    assert q.numel() > 2**31
    q[before:] = small.q
    batch = Ragged(q, small.k, small.v, indptr((before, 300), DEVICE), indptr((0, 300), DEVICE))
    out, lse = attend(batch, causal=True)
    expected, expected_lse = attend(small, causal=True)
    assert torch.equal(out[before:], expected)
    assert torch.equal(lse[before:], expected_lse)
    assert (out[:before] == 0).all()
    assert lse[:before].isneginf().all()


# ---- window, soft cap, sinks ------------------------------------------------------------------


@pytest.mark.variants(
    lambda causal: [
        variant(causal=causal, window_left=1),
        variant(causal=causal, window_left=1, skip_softmax_threshold=0.1, collect_stats=True),
    ]
)
@pytest.mark.parametrize("threshold", [None, 0.02])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_left", [0, 1, 63, 100, 256, 5000])
def test_window(window_left: int, causal: bool, threshold: float | None) -> None:
    batch = make_ragged(*LONG, 3, 1, 128, device=DEVICE, hot=0.3, gain=8.0)
    check(batch, threshold, causal=causal, window_left=window_left)
    batch = make_ragged(*MIX, 3, 1, 128, device=DEVICE)
    check(batch, threshold, causal=causal, window_left=window_left)


@pytest.mark.variants(
    lambda order: [
        variant(
            causal=True,
            window_left=1,
            order=order,
            skip_softmax_threshold=0.1,
            collect_stats=True,
        )
    ]
)
@pytest.mark.parametrize("order", ORDERS)
def test_window_in_each_order(order: str) -> None:
    batch = make_ragged(*LONG, 3, 1, 128, device=DEVICE, hot=0.3, gain=8.0)
    check(batch, 0.02, causal=True, window_left=300, order=order)


def capped(**options: Any) -> list[Variant]:
    """Return the dense and the counting kernel with options."""
    return [variant(**options), variant(**options, skip_softmax_threshold=0.1, collect_stats=True)]


@pytest.mark.variants(capped(causal=True, logits_soft_cap=1.0))
@pytest.mark.parametrize("threshold", [None, 0.02])
@pytest.mark.parametrize("cap", [1.5, 6.0, 50.0])
def test_soft_cap(cap: float, threshold: float | None) -> None:
    batch = make_ragged(*LONG, 3, 1, 128, device=DEVICE, hot=0.3, gain=8.0)
    check(batch, threshold, causal=True, logits_soft_cap=cap)


@pytest.mark.variants(capped(causal=True, sinks=torch.empty(0)))
@pytest.mark.parametrize("threshold", [None, 0.02])
def test_sinks(threshold: float | None) -> None:
    batch = make_ragged(*MIX, 3, 1, 128, device=DEVICE, hot=0.3, gain=8.0)
    sinks = torch.tensor([-3.0, 2.0, 30.0], device=DEVICE)
    check(batch, threshold, causal=True, sinks=sinks)


@pytest.mark.variants(capped(head_dim=64, window_left=1, logits_soft_cap=1.0, sinks=torch.empty(0)))
@pytest.mark.parametrize("threshold", [None, 0.02])
def test_window_soft_cap_and_sinks_together(threshold: float | None) -> None:
    batch = make_ragged(*MIX, 4, 2, 64, device=DEVICE, hot=0.3, gain=6.0)
    sinks = torch.tensor([-3.0, 2.0, 0.0, 5.0], device=DEVICE)
    check(batch, threshold, window_left=200, logits_soft_cap=10.0, sinks=sinks)


# ---- skipping ------------------------------------------------------------------------------------


def skip_variants(order: str, vote_kv: int, causal: bool) -> list[Variant]:
    """Return the counting kernel of an order and granularity."""
    options = {"order": order, "vote_kv": vote_kv, "causal": causal, "collect_stats": True}
    return [variant(skip_softmax_threshold=0.1, **options)]


@pytest.mark.variants(lambda order, vote_kv, causal: skip_variants(order, vote_kv, causal))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("vote_kv", [64, 128])
@pytest.mark.parametrize("order", ORDERS)
def test_skipping_matches_the_oracle(order: str, vote_kv: int, causal: bool) -> None:
    batch = make_ragged(*LONG, 5, 1, 128, hot=0.3, device=DEVICE)
    check(batch, 1e-4, order=order, vote_kv=vote_kv, causal=causal)


@pytest.mark.variants(
    lambda head_dim, dtype: [
        variant(head_dim, dtype, causal=True, skip_softmax_threshold=0.1, collect_stats=True)
    ]
)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("threshold", [0.0, 0.02, 1.0])
def test_thresholds(threshold: float, dtype: torch.dtype, head_dim: int) -> None:
    batch = make_ragged(*MIX, 3, 1, head_dim, dtype, hot=0.3, gain=8.0, device=DEVICE)
    check(batch, threshold, causal=True)


@pytest.mark.variants(lambda order, vote_kv, causal: skip_variants(order, vote_kv, causal))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("vote_kv", [64, 128])
def test_skip_map_seen_through_v(vote_kv: int, order: str, causal: bool) -> None:
    batch = make_ragged((1500, 700), (2000, 900), 3, 1, 128, device=DEVICE, hot=0.2, gain=8.0)
    for (
        _,
        kv,
    ) in batch.spans():  # V is one-hot in its vote tile, so the output tells which tiles were kept
        tile = torch.arange(kv.stop - kv.start, device=DEVICE) // vote_kv
        batch.v[kv] = torch.nn.functional.one_hot(tile, 128)[:, None].to(BF16)
    threshold = 0.02
    options = {"order": order, "vote_kv": vote_kv, "causal": causal}
    wrapper = plan(batch, skip_softmax_threshold=threshold, collect_stats=True, **options)
    out, _ = run(wrapper, batch)
    exact = oracle(wrapper, batch, [threshold] * 2)
    assert exact.skip_map is not None
    for (qo, _), skip_map in zip(batch.spans(), exact.skip_map, strict=True):
        units = skip_map.geometry.num_units
        weights = out[qo].transpose(0, 1)[..., : skip_map.state.shape[-1]]
        padding = units * 64 - weights.shape[1]
        rows = torch.nn.functional.pad(weights, (0, 0, 0, padding)).unflatten(1, (units, 64))
        certain = skip_map.margin.abs() > ROUNDING_BAND
        assert 0.05 < skip_map.skipped.double().mean() < 0.95
        assert certain.double().mean() > 0.99
        assert torch.equal((rows > 0).any(2)[certain], skip_map.kept[certain])
    assert_counts(wrapper, exact)


@pytest.mark.variants(
    lambda vote_kv: [
        variant(causal=True, vote_kv=vote_kv, skip_softmax_threshold=0.0),
        variant(causal=True),
    ]
)
@pytest.mark.parametrize("vote_kv", [64, 128])
def test_threshold_zero_equals_dense_bitwise(vote_kv: int) -> None:
    batch = make_ragged(*LONG, 5, 1, 128, device=DEVICE)
    dense = attend(batch, causal=True)
    for threshold in (0.0, 1e-30):
        skipping = attend(batch, causal=True, skip_softmax_threshold=threshold, vote_kv=vote_kv)
        assert torch.equal(skipping[0], dense[0])
        assert torch.equal(skipping[1], dense[1])


STATS = {"causal": True, "collect_stats": True}


@pytest.mark.variants([variant(skip_softmax_threshold=0.1, **STATS)])
def test_live_thresholds() -> None:
    batch = make_ragged(*LONG, 5, 1, 128, device=DEVICE, hot=0.3, gain=8.0)
    live = torch.zeros(4, device=DEVICE)
    wrapper = plan(batch, skip_softmax_threshold=live, **STATS)
    for values, meaning in (
        ((0.0, 0.5, 0.02, 1e-3), (0.0, 0.5, 0.02, 1e-3)),
        ((math.nan, -1.0, 7.0, math.inf), (0.0, 0.0, 1.0, 1.0)),
    ):
        live.copy_(torch.tensor(values))
        wrapper.reset_stats()
        out, lse = run(wrapper, batch)
        exact = oracle(wrapper, batch, list(meaning))
        assert_matches(batch, out, lse, exact)
        assert_counts(wrapper, exact)


@pytest.mark.variants([variant(skip_softmax_threshold=0.1, **STATS)])
@pytest.mark.parametrize("overflow", ["dense", "clamp"])
@pytest.mark.parametrize("with_kv_len", [False, True])
def test_scale_factor(overflow: str, with_kv_len: bool) -> None:
    batch = make_ragged(
        (700, 300, 500), (2000, 300, 900), 4, 1, 128, device=DEVICE, hot=0.3, gain=8.0
    )
    lengths = [2000, 300, 4000] if with_kv_len else [2000, 300, 900]
    options: dict[str, Any] = {"overflow": overflow} if overflow != "dense" else {}
    if with_kv_len:
        kv_len = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        options["threshold_kv_len"] = kv_len
    wrapper = plan(batch, skip_softmax_threshold_scale_factor=400.0, **options, **STATS)
    out, lse = run(wrapper, batch)
    thresholds = reference.final_thresholds(lengths, scale_factor=400.0, overflow=overflow)
    assert thresholds[1] == (None if overflow == "dense" else 1.0)
    exact = oracle(wrapper, batch, thresholds)
    assert_matches(batch, out, lse, exact)
    assert_counts(wrapper, exact)


# ---- how it is launched --------------------------------------------------------------------------


@pytest.mark.variants([variant(skip_softmax_threshold=0.1, **STATS), variant(causal=True)])
@pytest.mark.parametrize("threshold", [None, 0.02])
def test_repeats_and_batch_mates_change_no_bit(threshold: float | None) -> None:
    batch = make_ragged(*LONG, 5, 1, 128, device=DEVICE, hot=0.3, gain=8.0)
    options: dict[str, Any] = {"causal": True}
    if threshold is not None:
        options = {**STATS, "skip_softmax_threshold": threshold}
    wrapper = plan(batch, **options)
    out, lse = run(wrapper, batch)
    for _ in range(5):
        again, again_lse = run(wrapper, batch)
        assert torch.equal(again, out)
        assert torch.equal(again_lse, lse)
    for qo, kv in batch.spans():
        alone = Ragged(
            batch.q[qo],
            batch.k[kv],
            batch.v[kv],
            indptr([qo.stop - qo.start], DEVICE),
            indptr([kv.stop - kv.start], DEVICE),
        )
        assert torch.equal(attend(alone, **options)[0], out[qo])


@pytest.mark.variants([variant(causal=True)])
def test_on_another_stream() -> None:
    batch = make_ragged(*MIX, 3, 1, 128, device=DEVICE)
    wrapper = plan(batch, causal=True)
    expected, _ = run(wrapper, batch)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        out, _ = run(wrapper, batch)
        copy = out.clone()
    stream.synchronize()
    assert torch.equal(copy, expected)


@pytest.mark.variants([variant(skip_softmax_threshold=0.1, **STATS)])
def test_graph_follows_lengths_and_thresholds() -> None:
    batch = make_ragged(*LONG, 5, 1, 128, device=DEVICE, hot=0.3, gain=8.0)
    live = torch.full((4,), 0.02, device=DEVICE)
    wrapper = plan(batch, skip_softmax_threshold=live, **STATS)
    out, lse = run(wrapper, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(batch.q, batch.k, batch.v, out=out, lse=lse)
    for qo_lens, kv_lens, threshold in (
        ((2000, 1, 300, 700), (2000, 500, 300, 900), 0.02),
        ((1, 900, 0, 2100), (3, 1000, 40, 2600), 0.3),
        ((0, 0, 0, 1), (0, 10, 0, 1), 0.0),
        ((500, 500, 500, 500), (600, 700, 800, 900), 1.0),
    ):
        batch.qo_indptr.copy_(indptr(qo_lens, DEVICE))
        batch.kv_indptr.copy_(indptr(kv_lens, DEVICE))
        live.fill_(threshold)
        rows = sum(qo_lens)
        for t in (out, lse):
            poison(t)
        wrapper.reset_stats()
        graph.replay()
        exact = oracle(wrapper, batch, [threshold] * 4)
        assert_matches(batch, out, torch.where(lse.isnan(), -math.inf, lse), exact)
        assert not lse[:rows].isnan().any()
        assert out[rows:].isnan().all()
        assert_counts(wrapper, exact)
