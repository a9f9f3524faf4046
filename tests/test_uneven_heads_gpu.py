"""Heads of a group of which one skips most tiles and the other nothing, side by side on a GPU.

CTAs in pairs, which may attend to two such heads, wait for each other: that must change nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Ragged, make_ragged, seen, show_tiles
from paged import to_pages
from prefill_gpu import (
    DEVICE,
    ROUNDING_BAND,
    assert_counts,
    assert_matches,
    attend,
    oracle,
    plan,
    run,
    variant,
)
from test_prefill_paged_gpu import plan_pages, run_pages

from flashskip.variant import Variant

pytestmark = pytest.mark.gpu

# Whole prompts, so that all judge against running maxima and CTAs are paired; four items a CTA.
LENGTHS = ((3000, 700, 2200) * 2, (3000, 2500, 2200) * 2)
LAMBDA = 0.02
CASES = pytest.mark.parametrize(
    ("causal", "quiet"), [(c, q) for c in (False, True) for q in (0, 1)]
)


def kernels(causal: bool, page_size: int = 0) -> list[Variant]:
    """Return the counting and the dense kernel."""
    options = {"page_size": page_size, "causal": causal}
    return [variant(**options, **more) for more in (skips(LAMBDA), {})]


def skips(threshold: float) -> dict[str, Any]:
    return {"skip_softmax_threshold": threshold, "collect_stats": True}


def make_uneven(quiet: int) -> Ragged:
    """Of each two query heads, number `quiet` does not look where the hot tiles draw the other."""
    heads = (8, 2, 128)
    batch = make_ragged(*LENGTHS, *heads, device=DEVICE, hot=0.05, gain=12.0)
    hot = batch.q.mean((0, 1))
    for _, kv in batch.spans():
        batch.k[kv][:64] += hot  # tile 0 is among the first to be visited
    noise = make_ragged(*LENGTHS, *heads, device=DEVICE, seed=1)
    batch.q[:, quiet::2] = 0.5 * noise.q[:, quiet::2]
    return batch


def assert_uneven(stats: torch.Tensor, quiet: int) -> None:
    """Of each request, the quiet heads skip nothing, the others more than half."""
    assert (stats[:, quiet::2, 0] == 0).all()
    loud = stats[:, 1 - quiet :: 2]
    assert (loud[..., 0] > 0.5 * loud[..., 1]).all()


@pytest.mark.variants(lambda causal: kernels(causal))
@CASES
def test_outputs_and_counters_are_the_oracles(causal: bool, quiet: int) -> None:
    batch = make_uneven(quiet)
    wrapper = plan(batch, causal=causal, **skips(LAMBDA))
    out, lse = run(wrapper, batch)
    exact = oracle(wrapper, batch, [LAMBDA] * len(batch.spans()))
    assert_matches(batch, out, lse, exact)
    assert_counts(wrapper, exact)
    assert_uneven(wrapper.stats, quiet)
    counts = wrapper.stats.clone()
    for _ in range(3):
        wrapper.reset_stats()
        assert all(map(torch.equal, run(wrapper, batch), (out, lse)))
        assert torch.equal(wrapper.stats, counts)


@pytest.mark.variants(lambda causal: kernels(causal))
@CASES
def test_decisions_are_the_oracles(causal: bool, quiet: int) -> None:
    batch = make_uneven(quiet)
    show_tiles(batch)
    wrapper = plan(batch, causal=causal, **skips(LAMBDA))
    out, _ = run(wrapper, batch)
    exact = oracle(wrapper, batch, [LAMBDA] * len(batch.spans()))
    assert exact.skip_map is not None
    for (qo, _), m, stats in zip(batch.spans(), exact.skip_map, wrapper.stats, strict=True):
        kept, certain = seen(out[qo], m), m.margin.abs() > ROUNDING_BAND
        assert certain.double().mean() > 0.99
        assert torch.equal(kept[certain], m.kept[certain])
        assert torch.equal(m.count(m.visited & ~kept), stats[:, 0])


@pytest.mark.variants(lambda causal: kernels(causal))
@CASES
def test_threshold_zero_equals_dense_bitwise(causal: bool, quiet: int) -> None:
    batch = make_uneven(quiet)
    wrapper = plan(batch, causal=causal, **skips(0.0))
    assert all(map(torch.equal, run(wrapper, batch), attend(batch, causal=causal)))
    assert not wrapper.stats[..., 0].any()


@pytest.mark.variants(lambda causal: kernels(causal) + kernels(causal, 16))
@CASES
def test_pages_are_ragged_bit_for_bit(causal: bool, quiet: int) -> None:
    batch = make_uneven(quiet)
    pages = to_pages(batch, 16)
    ragged = plan(batch, causal=causal, **skips(LAMBDA))
    paged = plan_pages(batch, pages, causal=causal, **skips(LAMBDA))
    assert all(map(torch.equal, run_pages(paged, batch, pages), run(ragged, batch)))
    assert torch.equal(paged.stats, ragged.stats)
    assert_uneven(paged.stats, quiet)
