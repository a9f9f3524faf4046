"""Prefill on a paged cache on a GPU: bit for bit what the ragged kernel does with the same keys."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import HeadDim, Ragged, indptr, make_ragged, poison, poisoned
from paged import Pages, page_table, to_pages
from prefill_gpu import (
    BF16,
    DEVICE,
    HEAD_DIMS,
    LONG,
    MIX,
    assert_counts,
    assert_matches,
    attend,
    oracle,
    plan,
    run,
    variant,
)

import flashskip
from flashskip.variant import Variant

pytestmark = pytest.mark.gpu


def plan_pages(batch: Ragged, pages: Pages, **options: Any) -> flashskip.BatchPrefillWrapper:
    """Plan for `batch` with its keys in `pages`."""
    wrapper = flashskip.BatchPrefillWrapper(kv_layout=pages.layout)
    shape = (batch.q.shape[1], batch.k.shape[1], batch.q.shape[2], pages.page_size)
    options = {"q_data_type": batch.q.dtype, "head_dim_vo": batch.v.shape[2], **options}
    wrapper.plan_paged(batch.qo_indptr, *pages.table, *shape, **options)
    return wrapper


def run_pages(
    wrapper: flashskip.BatchPrefillWrapper, batch: Ragged, pages: Pages
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run into poisoned outputs."""
    out = poisoned(batch.out_shape, batch.q.dtype, DEVICE)
    lse = poisoned(batch.q.shape[:2], torch.float32, DEVICE)
    wrapper.run(batch.q, pages.cache, out=out, lse=lse)
    return out, lse


def both(head_dim: HeadDim, page_size: int, causal: bool = True) -> list[Variant]:
    """Return the ragged and the paged kernel, dense and counting."""
    skips = {"skip_softmax_threshold": 0.1, "collect_stats": True}
    kinds = [(size, more) for size in (0, page_size) for more in ({}, skips)]
    return [variant(head_dim, BF16, size, causal=causal, **more) for size, more in kinds]


def sparse(head_dim: HeadDim) -> Ragged:
    """Few tiles are needed, most by every second unit of rows only."""
    lengths = (704, 64, 320, 1472), (5000, 9000, 2048, 1500)
    one, other = (
        make_ragged(*lengths, 4, 2, head_dim, device=DEVICE, hot=0.05, gain=12.0, seed=seed)
        for seed in (0, 1)
    )
    odd = (torch.arange(len(one.q), device=DEVICE) // 64 % 2 == 1)[:, None, None]
    return replace(one, q=torch.where(odd, other.q, one.q), k=one.k + other.k)


FORMS = (("NHD", "tensor"), ("HND", "tensor"), ("NHD", "pair"), ("HND", "strided"))


@pytest.mark.variants(lambda head_dim, page_size: both(head_dim, page_size))
@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 64, 128, 192, 256])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_paged_is_ragged_bit_for_bit(head_dim: HeadDim, page_size: int) -> None:
    batches = [make_ragged(*n, 4, 2, head_dim, hot=0.3, gain=12.0) for n in (MIX, LONG)]
    # Of three KV heads short requests have an odd number of items: pairs of CTAs straddle groups.
    odd = make_ragged(*MIX, 6, 3, head_dim, hot=0.3, gain=12.0)
    for batch in (*batches, odd, sparse(head_dim)):
        for threshold in (None, 0.02):
            skips: dict[str, Any] = {"causal": True}
            if threshold is not None:
                skips |= {"skip_softmax_threshold": threshold, "collect_stats": True}
            ragged = plan(batch, **skips)
            expected = run(ragged, batch)
            for layout, form in FORMS:
                if form == "tensor" and head_dim == (192, 128):
                    continue
                pages = to_pages(batch, page_size, layout, form)
                wrapper = plan_pages(batch, pages, **skips)
                assert wrapper.variant.kv_path.startswith("paged")
                for actual, wanted in zip(run_pages(wrapper, batch, pages), expected, strict=True):
                    assert torch.equal(actual, wanted)
                if threshold is not None:
                    assert torch.equal(wrapper.stats, ragged.stats)
                    assert 0 < wrapper.stats[..., 0].sum() < wrapper.stats[..., 1].sum()


@pytest.mark.variants(
    lambda causal: [variant(128, BF16, size, causal=causal) for size in (0, 3, 16)]
)
@pytest.mark.parametrize("causal", [True, False])
def test_any_number_of_items(causal: bool) -> None:
    """CTAs in pairs claim two at a time: the last one may be alone, or there is only one.

    Gathered pages are attended to by CTAs on their own.
    """
    for requests, qo_len in ((1, 10), (2, 10), (3, 10), (132, 9), (133, 9), (3, 200), (5, 400)):
        for heads in ((2, 1), (4, 2), (3, 3), (6, 3)):
            lengths = (qo_len,) * requests, tuple(qo_len + 37 * i for i in range(requests))
            batch = make_ragged(*lengths, *heads, 128)
            alone = to_pages(batch, 3)
            expected = run_pages(plan_pages(batch, alone, causal=causal), batch, alone)
            pages = to_pages(batch, 16)
            paged = run_pages(plan_pages(batch, pages, causal=causal), batch, pages)
            for actual in (paged, attend(batch, causal=causal)):
                assert all(map(torch.equal, actual, expected)), (requests, qo_len, heads)


@pytest.mark.variants(
    lambda head_dim, page_size: [
        variant(head_dim, BF16, page_size, skip_softmax_threshold=0.1, collect_stats=True)
    ]
)
@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_paged_without_a_causal_limit_matches_the_oracle(head_dim: HeadDim, page_size: int) -> None:
    batch = make_ragged(*MIX, 3, 1, head_dim, device=DEVICE, hot=0.3, gain=8.0)
    pages = to_pages(batch, page_size, "HND", "pair")
    wrapper = plan_pages(batch, pages, skip_softmax_threshold=0.02, collect_stats=True)
    out, lse = run_pages(wrapper, batch, pages)
    exact = oracle(wrapper, batch, [0.02] * len(MIX[0]))
    assert_matches(batch, out, lse, exact)
    assert_counts(wrapper, exact)


TWO_PATHS = pytest.mark.parametrize("page_size", [5, 16])


@pytest.mark.variants(lambda page_size: [variant(128, BF16, page_size, causal=True)])
@TWO_PATHS
def test_contents_of_device_tables_are_bounded(page_size: int) -> None:
    batch = make_ragged((300, 200, 400), (300, 200, 400), 2, 1, 128, device=DEVICE)
    pages = to_pages(batch, page_size)
    expected, expected_lse = run_pages(plan_pages(batch, pages, causal=True), batch, pages)
    starts, ids, last = (t.clone() for t in pages.table)
    starts[0], last[1], starts[3] = -4, 99, len(ids) + 50
    ids[starts[2] :][3:5] = torch.tensor([-1, 10**8], device=DEVICE)
    bad = replace(pages, table=(starts, ids, last))
    out, lse = run_pages(plan_pages(batch, bad, causal=True), batch, bad)
    assert torch.equal(out[:300], expected[:300])
    assert torch.equal(lse[:300], expected_lse[:300])
    starts[1] = starts[2]  # decreases: the second request has no pages
    starts[2] -= 1
    out, lse = run_pages(plan_pages(batch, bad, causal=True), batch, bad)
    assert (out[300:500] == 0).all()
    assert lse[300:500].isneginf().all()


@pytest.mark.variants(
    lambda page_size: [variant(128, BF16, page_size, causal=True), variant(causal=True)]
)
@TWO_PATHS
def test_pages_outside_the_cache_read_as_zeros(page_size: int) -> None:
    batch = make_ragged((100, 300), (500, 300), 2, 1, 128, device=DEVICE)
    pages = to_pages(batch, page_size)
    pages.table[1][1], pages.table[1][4] = -3, len(pages.k)
    for page in (1, 4):
        rows = slice(page * page_size, (page + 1) * page_size)
        batch.k[rows] = batch.v[rows] = 0
    out, lse = run_pages(plan_pages(batch, pages, causal=True), batch, pages)
    expected, expected_lse = attend(batch, causal=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.variants(lambda page_size: [variant(128, BF16, page_size, causal=True)])
@TWO_PATHS
def test_a_cache_of_no_pages(page_size: int) -> None:
    batch = make_ragged((100, 7), (0, 0), 2, 1, 128, device=DEVICE)
    pages = to_pages(batch, page_size)
    empty = replace(pages, cache=pages.cache[:0], k=pages.k[:0], v=pages.v[:0])
    out, lse = run_pages(plan_pages(batch, empty, causal=True), batch, empty)
    assert (out == 0).all()
    assert lse.isneginf().all()


@pytest.mark.variants(
    lambda page_size: [
        variant(128, BF16, page_size, causal=True, skip_softmax_threshold=0.1, collect_stats=True)
    ]
)
@TWO_PATHS
def test_graph_follows_lengths_and_pages(page_size: int) -> None:
    batch = make_ragged(*LONG, 5, 1, 128, device=DEVICE, hot=0.3, gain=8.0)
    pages = to_pages(batch, page_size)
    options = {"causal": True, "skip_softmax_threshold": 0.02, "collect_stats": True}
    wrapper = plan_pages(batch, pages, **options)
    out, lse = run_pages(wrapper, batch, pages)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(batch.q, pages.cache, out=out, lse=lse)
    for kv_lens in ((2000, 500, 300, 900), (3, 1000, 40, 2600), (0, 10, 0, 1)):
        qo_lens = [min(n, 700) for n in kv_lens]
        rows = sum(qo_lens)
        batch.qo_indptr.copy_(indptr(qo_lens, DEVICE))
        starts, ids, last = page_table(kv_lens, page_size, torch.randperm(len(pages.k)).cuda())
        pages.table[0].copy_(starts)
        pages.table[1][: len(ids)] = ids
        pages.table[2].copy_(last)
        for t in (out, lse):
            poison(t)
        for t in (pages.k, pages.v):  # what held no key is NaN
            t.copy_(torch.randn(t.shape, device=DEVICE))
        graph.replay()
        gathered = flashskip.reference.gather_pages((pages.k, pages.v), *pages.table)
        ragged = Ragged(batch.q, *gathered[:2], batch.qo_indptr, gathered[2].to(DEVICE))
        exact = oracle(wrapper, ragged, [0.02] * 4)
        assert_matches(ragged, out, torch.where(lse.isnan(), -math.inf, lse), exact)
        assert not lse[:rows].isnan().any()
        assert out[rows:].isnan().all()


@pytest.mark.variants(
    lambda page_size: [variant(128, BF16, page_size, causal=True), variant(causal=True)]
)
@TWO_PATHS
def test_cache_beyond_31_bits(page_size: int) -> None:
    batch = make_ragged((300,), (300,), 2, 1, 128, device=DEVICE)
    pages = to_pages(batch, page_size)
    apart = 2**27  # elements from one page to the next
    count = len(pages.k)
    k = torch.empty(count * apart, dtype=BF16, device=DEVICE)
    k = k.as_strided(pages.k.shape, (apart, 128, 128, 1))
    k.copy_(pages.k)
    far = replace(pages, cache=(k, pages.v.contiguous()))
    assert (count - 1) * apart > 2**31
    out, lse = run_pages(plan_pages(batch, far, causal=True), batch, far)
    expected, expected_lse = attend(batch, causal=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.variants(lambda page_size: [variant(64, BF16, page_size)])
@TWO_PATHS
def test_many_requests(page_size: int) -> None:
    n = 100_000
    every = torch.arange(n + 1, dtype=torch.int32, device=DEVICE)
    ids = torch.randperm(n, device=DEVICE)
    last = torch.full((n,), 2, dtype=torch.int32, device=DEVICE)
    q = torch.randn(n, 2, 64, dtype=BF16, device=DEVICE)
    cache = poisoned((n, 2, page_size, 2, 64), BF16, DEVICE)
    cache[:, :, :2] = torch.randn(n, 2, 2, 2, 64, device=DEVICE)
    wrapper = flashskip.BatchPrefillWrapper()
    wrapper.plan_paged(every, every, ids.int(), last, 2, 2, 64, page_size, q_data_type=BF16)
    out = wrapper.run(q, cache)
    k, v = cache[ids, :, :2].float().unbind(1)  # [request, token, head, dim]
    weights = torch.einsum("rhd,rthd->rth", q.float(), k).div(8).softmax(1)
    expected = torch.einsum("rth,rthd->rhd", weights, v)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
