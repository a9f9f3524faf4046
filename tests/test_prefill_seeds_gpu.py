"""Prefills of few queries on a GPU: seeded, packed by group, their keys divided; by the oracle.

Scores rise and fall from tile to tile, so that a running maximum and a seed decide differently.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import test_bound_gpu
import test_budget_gpu
import test_measure_gpu
import torch
from helpers import HeadDim, Ragged, head_dims, indptr, poison, poisoned, seen, show_tiles
from paged import to_pages
from prefill_gpu import (
    BF16,
    DEVICE,
    FP16,
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
from test_prefill_paged_gpu import both, plan_pages, run_pages

import flashskip
from flashskip import _wrapper, reference
from flashskip.geometry import ORDERS
from flashskip.variant import Variant

pytestmark = pytest.mark.gpu

LAMBDA = 0.02
STATS = {"causal": True, "collect_stats": True}

# Queries and keys: seeded and packed, seeded, packed, neither, and such that see few keys or none.
MIX = (
    (1, 16, 63, 64, 100, 5, 300, 0, 130, 40, 1, 512, 63, 3, 64, 30),
    (3000, 2000, 504, 512, 900, 0, 2500, 77, 130, 300, 7, 5000, 503, 24, 511, 20),
)
# Either side of the rule's lengths.
EDGES = ((1024, 1024, 1025), (8192, 8191, 8200))
FEW = ((1, 16, 40, 63, 100, 2), (1500, 900, 64, 520, 1000, 1))


def make_loud(
    qo_lens: tuple[int, ...] | list[int],
    kv_lens: tuple[int, ...] | list[int],
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: HeadDim = 128,
    dtype: torch.dtype = BF16,
    *,
    seed: int = 0,
) -> Ragged:
    """Scores of a level for each tile of 64 keys and KV head, in [0, 8], with noise of 0.3."""
    g = torch.Generator(device=DEVICE).manual_seed(seed)
    of_tiles = torch.Generator().manual_seed(seed)  # the same on every device
    dim, dim_vo = head_dims(head_dim)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device=DEVICE)

    levels = [8 * torch.rand(-(-n // 64), num_kv_heads, generator=of_tiles) for n in kv_lens]
    by_key = [x.repeat_interleave(64, 0)[:n] for x, n in zip(levels, kv_lens, strict=True)]
    level = torch.cat(by_key)[..., None].to(DEVICE)
    direction = torch.nn.functional.normalize(normal(dim), dim=0)
    q = 0.3 * normal(sum(qo_lens), num_qo_heads, dim) + direction * dim**0.5
    k = 0.3 * normal(sum(kv_lens), num_kv_heads, dim) + level * direction
    v = normal(sum(kv_lens), num_kv_heads, dim_vo)
    starts = (indptr(qo_lens, DEVICE), indptr(kv_lens, DEVICE))
    return Ragged(q.to(dtype), k.to(dtype), v.to(dtype), *starts)


def request(batch: Ragged, i: int) -> Ragged:
    """Request `i` alone."""
    qo, kv = batch.spans()[i]
    starts = (indptr([x.stop - x.start], DEVICE) for x in (qo, kv))
    return Ragged(batch.q[qo], batch.k[kv], batch.v[kv], *starts)


def assert_seeds_matter(
    wrapper: Any, batch: Ragged, exact: reference.Result, threshold: float
) -> None:
    """Seeds skip what a running maximum keeps, and keep what it skips."""
    seedless = dataclasses.replace(wrapper.geometry, seed_short_queries=False)
    other = reference.attention(
        batch.q, batch.k, batch.v, qo_indptr=batch.qo_indptr, kv_indptr=batch.kv_indptr,
        geometry=seedless, thresholds=[threshold] * (len(batch.qo_indptr) - 1),
    )  # fmt: skip
    assert exact.skip_map is not None
    assert other.skip_map is not None
    pairs = list(zip(exact.skip_map, other.skip_map, strict=True))
    assert any((a.skipped & b.kept).any() for a, b in pairs)
    assert any((a.kept & b.skipped).any() for a, b in pairs)


def judge(batch: Ragged, threshold: float = LAMBDA, **options: Any) -> Any:
    """Run twice and compare with the oracle; returns the wrapper, output, LSE and the oracle's."""
    wrapper = plan(batch, skip_softmax_threshold=threshold, **options)
    out, lse = run(wrapper, batch)
    exact = oracle(wrapper, batch, [threshold] * (len(batch.qo_indptr) - 1))
    assert_matches(batch, out, lse, exact)
    assert_counts(wrapper, exact)
    again = run(wrapper, batch)
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1])
    return wrapper, out, lse, exact


# ---- outputs, LSE and counters -------------------------------------------------------------------

DIMS = [(64, BF16), (128, BF16), (128, FP16), (256, BF16), ((192, 128), BF16), (96, BF16)]


def kernels(head_dim: HeadDim, dtype: torch.dtype) -> list[Variant]:
    counting = variant(head_dim, dtype, skip_softmax_threshold=0.1, **STATS)
    return [counting, variant(head_dim, dtype, causal=True)]


@pytest.mark.variants(lambda dims: kernels(*dims))
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_mixed_requests(dims: tuple[HeadDim, torch.dtype]) -> None:
    batch = make_loud(*MIX, 6, 2, *dims)
    wrapper, *_, exact = judge(batch, **STATS)
    assert_seeds_matter(wrapper, batch, exact, LAMBDA)
    dense = attend(batch, causal=True)
    assert_matches(batch, *dense, oracle(wrapper, batch, None))
    for threshold in (0.0, 1e-30):
        nothing = plan(batch, skip_softmax_threshold=threshold, **STATS)
        for found, expected in zip(run(nothing, batch), dense, strict=True):
            assert torch.equal(found, expected)
        assert nothing.stats[..., 0].sum() == 0
    check(batch, 1.0, causal=True)


@pytest.mark.variants(kernels(128, BF16))
def test_lengths_at_the_edges_of_the_rule() -> None:
    batch = make_loud(*EDGES, 3, 1)
    wrapper, *_, exact = judge(batch, **STATS)
    judged = [m.geometry.judged_against for m in exact.skip_map]
    assert judged == ["seed", "running_max", "running_max"]
    assert_seeds_matter(wrapper, batch, exact, LAMBDA)
    dense, zero = attend(batch, causal=True), plan(batch, skip_softmax_threshold=0.0, **STATS)
    assert all(torch.equal(a, b) for a, b in zip(run(zero, batch), dense, strict=True))


@pytest.mark.variants(kernels(64, BF16))
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (4, 4), (8, 2), (7, 1), (16, 1), (71, 1)])
def test_any_group(heads: tuple[int, int]) -> None:
    batch = make_loud(*FEW, *heads, 64)
    _, *_, exact = judge(batch, **STATS)
    assert exact.counts[0, :, 0].sum() > 0
    check(batch, causal=True)


def merges(wrapper: flashskip.BatchPrefillWrapper, batch: Ragged) -> bool:
    """Whether a run leaves states of pieces to be merged; their counters are 0 again after it."""
    buffers = wrapper._planned().buffers
    buffers["partial"].fill_(255)
    run(wrapper, batch)
    assert not buffers["merge_counter"].any()
    return bool((buffers["partial"] != 255).any())


def in_order(order: str, vote_kv: int, causal: bool) -> dict[str, Any]:
    return {"order": order, "vote_kv": vote_kv, "causal": causal, "collect_stats": True}


@pytest.mark.variants(
    lambda vote_kv, causal: [
        variant(skip_softmax_threshold=0.1, **in_order(order, vote_kv, causal)) for order in ORDERS
    ]
)
@pytest.mark.parametrize("vote_kv", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_order_is_without_effect_on_seeded_requests(causal: bool, vote_kv: int) -> None:
    batch = make_loud(*MIX, 3, 1)
    stats = []
    for order in ORDERS:
        wrapper, *_, exact = judge(batch, **in_order(order, vote_kv, causal))
        stats.append(wrapper.stats)
    seeded = [m.geometry.judged_against == "seed" for m in exact.skip_map]
    assert all(torch.equal(x[seeded], stats[0][seeded]) for x in stats)
    assert not torch.equal(stats[0], stats[2])


ALL = {"window_left": 1, "logits_soft_cap": 1.0, "sinks": torch.empty(0)}


def with_all(**options: Any) -> list[Variant]:
    return [variant(**options, **ALL, skip_softmax_threshold=0.1, collect_stats=True),
            variant(**options, **ALL)]  # fmt: skip


@pytest.mark.variants(lambda head_dim, causal: with_all(head_dim=head_dim, causal=causal))
@pytest.mark.parametrize(("head_dim", "causal"), [(64, False), ((192, 128), True)])
@pytest.mark.parametrize("window_left", [0, 200, 2000])
def test_window_soft_cap_and_sinks(window_left: int, head_dim: HeadDim, causal: bool) -> None:
    batch = make_loud(*MIX, 4, 2, head_dim)
    sinks = torch.tensor([-3.0, 2.0, 0.0, 5.0], device=DEVICE)
    options = {"window_left": window_left, "logits_soft_cap": 20.0, "sinks": sinks}
    check(batch, 0.1, causal=causal, **options)
    check(batch, causal=causal, **options)


@pytest.mark.variants(kernels(128, BF16))
def test_a_study_can_do_without_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_loud(*MIX, 6, 2)
    seeded, *_ = judge(batch, **STATS)
    monkeypatch.setattr(flashskip.BatchPrefillWrapper, "_seeded", False)
    wrapper, *_, exact = judge(batch, **STATS)
    assert {m.geometry.judged_against for m in exact.skip_map} == {"running_max"}
    assert not torch.equal(wrapper.stats, seeded.stats)
    long = make_loud((512,), (40_000,), 2, 1)
    wrapper, *_ = judge(long, **STATS)
    assert not merges(wrapper, long)


# ---- skip maps -----------------------------------------------------------------------------------

SHOWN = ((16, 100, 64, 63, 500, 1, 30), (4000, 2000, 8192, 503, 4500, 8100, 200))


@pytest.mark.variants(
    lambda vote_kv, causal: [
        variant(skip_softmax_threshold=0.1, **in_order(ORDERS[0], vote_kv, causal))
    ]
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("vote_kv", [64, 128])
@pytest.mark.parametrize("heads", [(3, 1), (8, 2)])
def test_maps_are_the_oracles(heads: tuple[int, int], vote_kv: int, causal: bool) -> None:
    batch = make_loud(*SHOWN, *heads)
    show_tiles(batch, vote_kv)
    options = in_order(ORDERS[0], vote_kv, causal)
    wrapper, out, _, exact = judge(batch, **options)
    wrapper.reset_stats()
    run(wrapper, batch)
    for i, ((qo, _), m) in enumerate(zip(batch.spans(), exact.skip_map, strict=True)):
        kept, certain = seen(out[qo], m), m.margin.abs() > ROUNDING_BAND
        assert certain.double().mean() > 0.98
        assert torch.equal(kept & certain, m.kept & certain)
        assert torch.equal(wrapper.stats[i, :, 0], m.count(m.visited & ~kept))


@pytest.mark.variants(
    lambda vote_kv: [variant(skip_softmax_threshold=0.1, **in_order(ORDERS[0], vote_kv, True))]
)
@pytest.mark.parametrize("vote_kv", [64, 128])
def test_maps_are_the_same_alone_in_a_batch_and_on_any_number_of_ctas(
    vote_kv: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_loud(*SHOWN, 8, 2)
    show_tiles(batch, vote_kv)
    options = {"skip_softmax_threshold": LAMBDA, **in_order(ORDERS[0], vote_kv, True)}
    together = plan(batch, **options)
    out, _ = run(together, batch)
    for ctas in (132, 1, 7, 40):
        monkeypatch.setattr(_wrapper, "multiprocessors", lambda device, n=ctas: n)
        wrapper = plan(batch, **options)
        found, _ = run(wrapper, batch)
        assert torch.equal(wrapper.stats, together.stats)
        assert torch.equal(found > 0, out > 0)
        for i, (qo, _) in enumerate(batch.spans()):
            wrapper = plan(request(batch, i), **options)
            found, _ = run(wrapper, request(batch, i))
            assert torch.equal(wrapper.stats[0], together.stats[i])
            assert torch.equal(found > 0, out[qo] > 0)


# ---- paged, bound, measure, budget ---------------------------------------------------------------


@pytest.mark.variants(lambda head_dim, page_size: both(head_dim, page_size))
@pytest.mark.parametrize("page_size", [3, 16, 192])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_paged_is_ragged_bit_for_bit(head_dim: HeadDim, page_size: int) -> None:
    batch = make_loud(*MIX, 6, 2, head_dim)
    for options in ({"causal": True}, {**STATS, "skip_softmax_threshold": LAMBDA}):
        ragged = plan(batch, **options)
        expected = run(ragged, batch)
        for layout, form in (("NHD", "tensor"), ("HND", "strided")):
            pages = to_pages(batch, page_size, layout, form)
            wrapper = plan_pages(batch, pages, **options)
            for actual, wanted in zip(run_pages(wrapper, batch, pages), expected, strict=True):
                assert torch.equal(actual, wanted)
            if "collect_stats" in options:
                assert torch.equal(wrapper.stats, ragged.stats)


BOUND = {"causal": True, "skip_softmax_threshold": LAMBDA, **test_bound_gpu.BOUND}


@pytest.mark.variants([variant(**BOUND)])
def test_bound() -> None:
    for lengths, heads in ((MIX, (6, 2)), (((512,), (60_000,)), (2, 1))):
        batch = make_loud(*lengths, *heads)
        wrapper = plan(batch, **BOUND)
        *_, bound = wrapper.run(batch.q, batch.k, batch.v, return_lse=True)
        exact = oracle(wrapper, batch, [LAMBDA] * len(lengths[0]))
        test_bound_gpu.assert_bound(bound, exact, oracle(wrapper, batch, None), 0.5)
        assert merges(wrapper, batch) or len(lengths[0]) > 1
        again = wrapper.run(batch.q, batch.k, batch.v, return_lse=True)
        assert torch.equal(bound, again[2])


MEASURE = {"causal": True, "skip_criterion": "measure"}


@pytest.mark.variants([variant(**MEASURE), variant(causal=True)])
def test_measure() -> None:
    batch = make_loud(*MIX, 6, 2)
    wrapper = plan(batch, **MEASURE)
    out, lse = run(wrapper, batch)
    exact = oracle(wrapper, batch, None)
    test_measure_gpu.assert_gaps(wrapper.gaps, exact)
    assert torch.equal(wrapper.gaps.sum(2), exact.counts[..., 1])
    dense = attend(batch, causal=True)
    assert torch.equal(out, dense[0])
    assert torch.equal(lse, dense[1])
    for i in range(len(MIX[0])):
        alone = plan(request(batch, i), **MEASURE)
        run(alone, request(batch, i))
        assert torch.equal(alone.gaps[0], wrapper.gaps[i])


BUDGET = {"causal": True, "skip_criterion": "budget", "skip_budget": 0.05, **test_bound_gpu.BOUND}


@pytest.mark.variants([variant(**BUDGET)])
def test_budget_packs_and_has_no_seed() -> None:
    batch = make_loud(*MIX, 6, 2)
    wrapper = plan(batch, **BUDGET)
    out, lse, bound = wrapper.run(batch.q, batch.k, batch.v, return_lse=True)
    exact = test_budget_gpu.exact_result(wrapper, batch, 0.05)
    sure = test_bound_gpu.sure_rows(exact)
    assert sure.double().mean() > 0.8
    torch.testing.assert_close(lse[sure].double(), exact.lse[sure], rtol=0, atol=1e-4)
    torch.testing.assert_close(bound[sure].double(), exact.bound[sure], rtol=1e-3, atol=1e-30)
    torch.testing.assert_close(out[sure].double(), exact.out[sure], rtol=2**-6, atol=2**-8)
    assert torch.equal(wrapper.stats[..., 1], exact.counts[..., 1])
    assert (bound <= 0.05).all()


# ---- what a request may depend on ----------------------------------------------------------------


@pytest.mark.variants(kernels(128, BF16))
@pytest.mark.parametrize("threshold", [None, LAMBDA])
def test_neighbours_change_nothing(threshold: float | None) -> None:
    batch = make_loud(*MIX, 6, 2)
    options = (
        {"causal": True} if threshold is None else {**STATS, "skip_softmax_threshold": threshold}
    )
    clean, clean_lse = attend(batch, **options)
    for i in (0, 1, 2, 6, 8, 11):
        hurt = dataclasses.replace(batch, q=batch.q.clone(), k=batch.k.clone(), v=batch.v.clone())
        qo, kv = batch.spans()[i]
        for t, rows in ((hurt.q, qo), (hurt.k, kv), (hurt.v, kv)):
            poison(t[rows])
        out, lse = attend(hurt, **options)
        others = torch.ones(len(out), dtype=torch.bool, device=DEVICE)
        others[qo] = False
        assert torch.equal(out[others], clean[others])
        assert torch.equal(lse[others], clean_lse[others])
        assert out[qo].isnan().all()


@pytest.mark.variants(kernels(128, BF16))
def test_a_row_of_nan_hurts_its_own_row_alone() -> None:
    batch = make_loud(*FEW, 4, 1)
    clean, _ = attend(batch, **STATS, skip_softmax_threshold=0.0)
    batch.q[5, 2] = torch.nan
    out, _ = attend(batch, **STATS, skip_softmax_threshold=0.0)
    assert out[5, 2].isnan().all()
    clean[5, 2] = out[5, 2] = 0
    assert torch.equal(out, clean)


@pytest.mark.variants(kernels(128, BF16))
@pytest.mark.parametrize("threshold", [None, LAMBDA])
def test_graph_follows_lengths_from_one_rule_to_another(threshold: float | None) -> None:
    batch = make_loud((600, 600, 64, 40), (9000, 5000, 3000, 700), 8, 2)
    options = (
        {"causal": True} if threshold is None else {**STATS, "skip_softmax_threshold": threshold}
    )
    wrapper = plan(batch, **options)
    out, lse = run(wrapper, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(batch.q, batch.k, batch.v, out=out, lse=lse)
    for qo_lens, kv_lens in (
        ((600, 600, 64, 40), (9000, 5000, 3000, 700)),
        ((16, 1, 63, 64), (9000, 7, 503, 513)),
        ((64, 0, 0, 1025), (17_000, 0, 0, 700)),
        ((1, 1, 1, 1), (4000, 4000, 4000, 5000)),
        ((1000, 3, 100, 200), (8000, 24, 799, 200)),
        ((1304, 0, 0, 0), (17_700, 0, 0, 0)),
        ((0, 0, 0, 1024), (0, 50, 0, 8192)),
    ):
        batch.qo_indptr.copy_(indptr(qo_lens, DEVICE))
        batch.kv_indptr.copy_(indptr(kv_lens, DEVICE))
        rows = sum(qo_lens)
        for t in (out, lse):
            poison(t)
        if threshold is not None:
            wrapper.reset_stats()
        graph.replay()
        thresholds = None if threshold is None else [threshold] * 4
        exact = oracle(wrapper, batch, thresholds)
        assert_matches(batch, out, torch.where(lse.isnan(), -math.inf, lse), exact)
        assert not lse[:rows].isnan().any()
        assert out[rows:].isnan().all()
        if threshold is not None:
            assert_counts(wrapper, exact)


@pytest.mark.variants(kernels(64, BF16))
@pytest.mark.parametrize("requests", [1, 2, 31, 33, 200])
def test_many_requests(requests: int) -> None:
    g = torch.Generator().manual_seed(requests)
    qo_lens = torch.randint(0, 80, (requests,), generator=g)
    times = torch.randint(1, 40, (requests,), generator=g)
    kv_lens = (qo_lens * times).clamp(max=1500) + torch.randint(0, 9, (requests,), generator=g)
    batch = make_loud(qo_lens.tolist(), kv_lens.tolist(), 4, 1, 64)
    judge(batch, **STATS)
    again = attend(batch, causal=True)
    zero = plan(batch, skip_softmax_threshold=0.0, **STATS)
    assert all(torch.equal(a, b) for a, b in zip(run(zero, batch), again, strict=True))


@pytest.mark.variants([variant(64, BF16, skip_softmax_threshold=0.1, **STATS)])
def test_thousands_of_requests_of_a_token() -> None:
    """Each is packed, and the few that have keys are seeded; the others attend nothing."""
    n = 20_000
    batch = make_loud((1,) * 4, (700, 64, 0, 300), 4, 1, 64)
    expected = run(plan(batch, skip_softmax_threshold=LAMBDA, **STATS), batch)
    lens = [0] * n
    places = torch.tensor([0, 777, 9_999, n - 1], device=DEVICE)
    for place, kv_len in zip(places.tolist(), (700, 64, 0, 300), strict=True):
        lens[place] = kv_len
    q = batch.q.new_zeros(n, *batch.q.shape[1:]).index_copy(0, places, batch.q)
    starts = (indptr([1] * n, DEVICE), indptr(lens, DEVICE))
    large = Ragged(q, batch.k, batch.v, *starts)
    out, lse = run(plan(large, skip_softmax_threshold=LAMBDA, **STATS), large)
    torch.testing.assert_close(out[places], expected[0], rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(lse[places], expected[1], rtol=0, atol=1e-5)
    out[places], lse[places] = 0, -math.inf
    assert (out == 0).all()
    assert lse.isneginf().all()


@pytest.mark.variants(kernels(128, BF16))
@pytest.mark.parametrize(
    "lengths",
    [((16, 1), (131_072, 70_001)), ((512,), (131_072,)), ((64, 0, 1000), (100_000, 3, 20_000))],
    ids=str,
)
def test_long_caches(lengths: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    batch = make_loud(*lengths, 2, 1)
    together, out, lse, exact = judge(batch, **STATS)
    assert merges(together, batch)
    for i, (qo, _) in enumerate(batch.spans()):
        wrapper = plan(request(batch, i), skip_softmax_threshold=LAMBDA, **STATS)
        alone = run(wrapper, request(batch, i))
        close = exact.skip_map[i].count(exact.skip_map[i].margin.abs() < ROUNDING_BAND)
        assert ((wrapper.stats[0] - exact.counts[i])[:, 0].abs() <= close).all()
        torch.testing.assert_close(alone[0], out[qo], rtol=2**-6, atol=2**-9)
        torch.testing.assert_close(alone[1], lse[qo], rtol=0, atol=1e-5)
    dense, zero = attend(batch, causal=True), plan(batch, skip_softmax_threshold=0.0, **STATS)
    assert all(torch.equal(a, b) for a, b in zip(run(zero, batch), dense, strict=True))


CUT = {**ALL, "logits_soft_cap": 20.0, **BOUND, "skip_softmax_threshold": 0.1}


@pytest.mark.variants(lambda head_dim, causal: [variant(head_dim, **CUT | {"causal": causal})])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, (192, 128), 256], ids=str)
@pytest.mark.parametrize("window_left", [9_000, 30_000])
def test_packed_and_shared_rows_cut_with_everything(
    window_left: int, head_dim: HeadDim, causal: bool
) -> None:
    batch = make_loud((16, 300), (20_000, 24_000), 4, 2, head_dim)
    sinks = torch.tensor([-3.0, 2.0, 0.0, 5.0], device=DEVICE)
    options = CUT | {"causal": causal, "window_left": window_left, "sinks": sinks}
    wrapper = plan(batch, **options)
    out, lse, bound = wrapper.run(batch.q, batch.k, batch.v, return_lse=True)
    exact = oracle(wrapper, batch, [CUT["skip_softmax_threshold"]] * 2)
    assert_matches(batch, out, lse, exact)
    assert_counts(wrapper, exact)
    test_bound_gpu.assert_bound(bound, exact, oracle(wrapper, batch, None), 0.5)
    assert merges(wrapper, batch)


@pytest.mark.variants([variant(causal=False)])
def test_short_requests_without_a_limit_are_cut_over_units_or_keys() -> None:
    """Short caches leave the last wave to units, long ones to pieces of their keys."""
    for kv_len, cut_over_keys in ((3000, False), (30_000, True)):
        batch = make_loud((300, 370), (kv_len, kv_len), 8, 2)
        check(batch, causal=False)
        assert merges(plan(batch, causal=False), batch) == cut_over_keys


@pytest.mark.variants([variant(causal=True)])
def test_pieces_fill_the_workspace_and_nothing_more() -> None:
    """88 items of three full units each, cut into three: two pieces for each of 132 CTAs."""
    ctas = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    if ctas != 132:
        pytest.skip(f"the batch fills the workspace of 132 CTAs; this GPU has {ctas}")
    batch = make_loud((384,), (40_000,), 44, 11)
    wrapper = plan(batch, causal=True)
    expected = run(wrapper, batch)
    size, states = wrapper.workspace_bytes, 2 * ctas * 3
    memory = torch.full((size + 4096,), 255, dtype=torch.uint8, device=DEVICE)
    small = flashskip.BatchPrefillWrapper(memory[:size])
    small.plan(batch.qo_indptr, batch.kv_indptr, 44, 11, 128, q_data_type=BF16, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(run(small, batch), expected, strict=True))
    assert (memory[:size].view(states, -1) != 255).any(1).all()
    assert (memory[size:] == 255).all()


@pytest.mark.variants(kernels(128, BF16))
def test_wrappers_share_a_workspace() -> None:
    batch = make_loud((512, 16), (30_000, 40_000), 4, 1)
    shape = (4, 1, 128)
    several = ({"causal": True}, {**STATS, "skip_softmax_threshold": LAMBDA})
    expected = [attend(batch, **options) for options in several]
    wrappers = [plan(batch, **options) for options in several]
    sizes = [wrapper.workspace_bytes for wrapper in wrappers]
    workspace = torch.full((max(sizes),), 255, dtype=torch.uint8, device=DEVICE)
    wrappers = [flashskip.BatchPrefillWrapper(workspace) for _ in several]
    for wrapper, options in zip(wrappers, several, strict=True):
        wrapper.plan(batch.qo_indptr, batch.kv_indptr, *shape, q_data_type=BF16, **options)
    for _ in range(2):
        for wrapper, wanted in zip(wrappers, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(run(wrapper, batch), wanted, strict=True))
    small = flashskip.BatchPrefillWrapper(workspace[:-1])
    with pytest.raises(ValueError, match=str(max(sizes))):
        small.plan(batch.qo_indptr, batch.kv_indptr, *shape, q_data_type=BF16, causal=True)


@pytest.mark.variants([variant(causal=True)])
def test_rows_past_the_last_request_are_not_written() -> None:
    batch = make_loud((16, 100, 70), (900, 900, 70), 8, 2)
    batch.qo_indptr[3] = batch.qo_indptr[2]
    wrapper = plan(batch, causal=True)
    wide = poisoned((186, 10, 192), BF16, DEVICE)
    wrapper.run(batch.q, batch.k, batch.v, out=wide[:, 1:9, 32:160])
    assert not wide[:116, 1:9, 32:160].isnan().any()
    wide[:116, 1:9, 32:160] = torch.nan
    assert wide.isnan().all()
