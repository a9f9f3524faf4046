"""The prefill kernel's skipping on a GPU, its window, soft cap and sinks, against the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import HeadDim, make_ragged, seen, show_tiles
from prefill_gpu import (
    BF16,
    DEVICE,
    FP16,
    HEAD_DIMS,
    LONG,
    MIX,
    ROUNDING_BAND,
    assert_counts,
    assert_matches,
    attend,
    check,
    oracle,
    plan,
    run,
    variant,
)

from flashskip import reference
from flashskip.geometry import ORDERS
from flashskip.variant import Variant

pytestmark = pytest.mark.gpu

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
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("threshold", [0.0, 0.02, 1.0])
def test_thresholds(threshold: float, dtype: torch.dtype, head_dim: HeadDim) -> None:
    batch = make_ragged(*MIX, 3, 1, head_dim, dtype, hot=0.3, gain=8.0, device=DEVICE)
    check(batch, threshold, causal=True)


@pytest.mark.variants(lambda order, vote_kv, causal: skip_variants(order, vote_kv, causal))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("vote_kv", [64, 128])
def test_skip_map_seen_through_v(vote_kv: int, order: str, causal: bool) -> None:
    batch = make_ragged((1500, 700), (2000, 900), 3, 1, 128, device=DEVICE, hot=0.2, gain=8.0)
    show_tiles(batch, vote_kv)
    threshold = 0.02
    options = {"order": order, "vote_kv": vote_kv, "causal": causal}
    wrapper = plan(batch, skip_softmax_threshold=threshold, collect_stats=True, **options)
    out, _ = run(wrapper, batch)
    exact = oracle(wrapper, batch, [threshold] * 2)
    assert exact.skip_map is not None
    for (qo, _), skip_map in zip(batch.spans(), exact.skip_map, strict=True):
        certain = skip_map.margin.abs() > ROUNDING_BAND
        assert 0.05 < skip_map.skipped.double().mean() < 0.95
        assert certain.double().mean() > 0.99
        assert torch.equal(seen(out[qo], skip_map)[certain], skip_map.kept[certain])
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


@pytest.mark.variants(
    lambda head_dim: capped(
        head_dim=head_dim, causal=True, window_left=1, logits_soft_cap=1.0, sinks=torch.empty(0)
    )
)
@pytest.mark.parametrize("threshold", [None, 0.02])
@pytest.mark.parametrize("head_dim", [96, (192, 128), 256])
def test_everything_at_other_head_dims(head_dim: HeadDim, threshold: float | None) -> None:
    batch = make_ragged(*LONG, 4, 2, head_dim, device=DEVICE, hot=0.3, gain=6.0)
    sinks = torch.tensor([-3.0, 2.0, 0.0, 5.0], device=DEVICE)
    options = {"window_left": 700, "logits_soft_cap": 20.0, "sinks": sinks, "causal": True}
    check(batch, threshold, **options)


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


def dense_in_turns(causal: bool) -> list[Variant]:
    """Return the kernels of head dim 64 that issue P.V of a tile behind the next one's Q.K."""
    options: dict[str, Any] = {"causal": causal, "window_left": 1}
    return [variant(64, **options), variant(64, **options, sinks=torch.empty(0))]


@pytest.mark.variants(lambda causal: dense_in_turns(causal))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_left", [0, 63, 100, 256, 5000])
def test_window_and_sinks_where_warpgroups_take_turns(window_left: int, causal: bool) -> None:
    """Units pass over tiles before, between and after those that they see."""
    sinks = torch.tensor([-3.0, 2.0, 30.0], device=DEVICE)
    for lengths in (LONG, MIX):
        batch = make_ragged(*lengths, 3, 1, 64, device=DEVICE, hot=0.3, gain=8.0)
        check(batch, causal=causal, window_left=window_left)
        check(batch, causal=causal, window_left=window_left, sinks=sinks)


@pytest.mark.variants(capped(head_dim=64, window_left=1, logits_soft_cap=1.0, sinks=torch.empty(0)))
@pytest.mark.parametrize("threshold", [None, 0.02])
def test_window_soft_cap_and_sinks_together(threshold: float | None) -> None:
    batch = make_ragged(*MIX, 4, 2, 64, device=DEVICE, hot=0.3, gain=6.0)
    sinks = torch.tensor([-3.0, 2.0, 0.0, 5.0], device=DEVICE)
    check(batch, threshold, window_left=200, logits_soft_cap=10.0, sinks=sinks)
