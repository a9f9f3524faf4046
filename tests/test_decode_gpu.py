"""The decode kernel on a GPU against the reference: outputs, LSE, skip maps and counters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from paged import (
    FP8,
    LAMBDA,
    ROUNDING_BAND,
    Paged,
    assert_counts,
    assert_matches,
    check,
    make_paged,
    oracle,
    page_table,
    plan,
    run,
    skipping,
    variant,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BF16, FP16 = torch.bfloat16, torch.float16

# Lengths: none, one key, around one tile, several tiles, whole pages.
MIX = (0, 1, 63, 64, 65, 1000, 0, 2048, 300, 129)


ALL_OPTIONS = {"window_left": 1, "logits_soft_cap": 1.0, "sinks": torch.empty(0)}

# ---- shapes --------------------------------------------------------------------------------------


@pytest.mark.variants(
    lambda page_size: [variant(page_size=page_size), skipping(page_size=page_size)]
)
@pytest.mark.parametrize("threshold", [None, LAMBDA])
@pytest.mark.parametrize(
    ("layout", "form"), [("NHD", "tensor"), ("HND", "pair"), ("NHD", "strided")]
)
@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 32, 48, 64, 100, 256])
def test_page_sizes_layouts_and_strides(
    page_size: int, layout: str, form: str, threshold: float | None
) -> None:
    check(make_paged(MIX, 8, 2, 128, page_size, layout=layout, form=form), threshold)


@pytest.mark.variants(lambda group_size, page_size: [skipping(group_size, 64, page_size)])
@pytest.mark.parametrize("page_size", [16, 5])
@pytest.mark.parametrize("group_size", [1, 3, 4, 5, 7, 8, 16, 24, 33, 48, 64, 71, 130])
def test_any_group_size(group_size: int, page_size: int) -> None:
    check(make_paged(MIX, 2 * group_size, 2, 64, page_size), LAMBDA)


@pytest.mark.variants(lambda group_size, q_len: [skipping(group_size, 64, q_len=q_len)])
@pytest.mark.parametrize(("group_size", "q_len"), [(2, 1), (3, 4), (71, 1)])
@pytest.mark.parametrize("num_kv_heads", [3, 5, 8, 12, 44])
def test_strands_of_heads(num_kv_heads: int, group_size: int, q_len: int) -> None:
    """On 132 CTAs: 3, 1, 4, 12 and 44 strands of 1, 5, 2, 1 and 1 heads; one or two row units."""
    check(make_paged(MIX, num_kv_heads * group_size, num_kv_heads, 64, q_len=q_len), LAMBDA)


@pytest.mark.variants(
    lambda group_size, head_dim: [variant(group_size, head_dim), skipping(group_size, head_dim)]
)
@pytest.mark.parametrize("threshold", [None, LAMBDA])
@pytest.mark.parametrize(
    ("group_size", "head_dim"), [(16, 128), (40, 128), (64, 128), (48, 256), (80, 256), (130, 256)]
)
def test_many_rows(group_size: int, head_dim: int, threshold: float | None) -> None:
    """Of 256 channels 40 rows are a unit: 2, 2 and 4 of them."""
    check(make_paged(MIX, group_size, 1, head_dim), threshold)


@pytest.mark.variants(
    lambda head_dim, dtype, o_dtype: [skipping(4, head_dim, 16, dtype, o_data_type=o_dtype)]
)
@pytest.mark.parametrize("o_dtype", [BF16, FP16])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_dtypes(head_dim: int, dtype: torch.dtype, o_dtype: torch.dtype) -> None:
    check(make_paged(MIX, 8, 2, head_dim, 16, dtype), LAMBDA, o_data_type=o_dtype)


@pytest.mark.variants(
    lambda group_size, head_dim, page_size, q_len: [
        variant(group_size, head_dim, page_size, q_len=q_len, **ALL_OPTIONS),
        skipping(group_size, head_dim, page_size, q_len=q_len, **ALL_OPTIONS),
    ]
)
@pytest.mark.parametrize("threshold", [None, LAMBDA])
@pytest.mark.parametrize(("group_size", "q_len"), [(4, 1), (3, 5), (40, 1)])
@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 5])
@pytest.mark.parametrize("head_dim", [96, 256])
def test_other_head_dims(
    head_dim: int, page_size: int, group_size: int, q_len: int, threshold: float | None
) -> None:
    batch = make_paged(
        (*MIX, 9000), 2 * group_size, 2, head_dim, page_size, q_len=q_len, gain=7.5, layout="HND"
    )
    sinks = torch.linspace(-3, 3, 2 * group_size, device=DEVICE)
    check(batch, threshold, window_left=4000, logits_soft_cap=20.0, sinks=sinks)


@pytest.mark.variants(lambda page_size: [variant(4, 64, page_size), skipping(4, 64, page_size)])
@pytest.mark.parametrize("threshold", [None, LAMBDA])
@pytest.mark.parametrize("page_size", [8, 64, 1024, 7])
@pytest.mark.parametrize("kv_lens", [(300_000,), (70_001, 131_072, 5)])
def test_long_requests_are_split_and_merged(
    kv_lens: tuple[int, ...], page_size: int, threshold: float | None
) -> None:
    check(make_paged(kv_lens, 8, 2, 64, page_size), threshold)


@pytest.mark.variants([skipping(2, 64)])
@pytest.mark.parametrize("kv_lens", [(77,) * 500, (0,) * 200, ((0,) * 37 + (3, 64, 65)) * 50])
def test_many_small_and_empty_requests(kv_lens: tuple[int, ...]) -> None:
    check(make_paged(kv_lens, 4, 2, 64), LAMBDA)


@pytest.mark.variants([skipping(2, 64)])
def test_a_batch_of_200_000() -> None:
    lens = [0] * 200_000
    lens[0], lens[77_777], lens[-1] = 100, 200, 65
    batch = make_paged([*lens[:1], 200, 65], 4, 2, 64)
    wrapper = plan(batch, collect_stats=True, skip_softmax_threshold=LAMBDA)
    expected = run(wrapper, batch)
    batch.q = batch.q.new_zeros(len(lens), *batch.q.shape[1:]).index_copy(
        0, torch.tensor([0, 77_777, 199_999], device=DEVICE), batch.q
    )
    pages = batch.indices
    batch.indptr, _, batch.last_page_len = page_table(lens, 16, pages)
    out, lse = run(plan(batch, collect_stats=True, skip_softmax_threshold=LAMBDA), batch)
    filled = torch.tensor([0, 77_777, 199_999], device=DEVICE)
    torch.testing.assert_close(out[filled], expected[0], rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(lse[filled], expected[1], rtol=0, atol=1e-5)
    out[filled], lse[filled] = 0, -math.inf
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.variants([skipping(4, 128, 64)])
def test_a_cache_of_no_pages() -> None:
    batch = make_paged((0, 0), 8, 2, 128, 64)
    batch.k = batch.v = batch.k[:0]
    batch.cache = (batch.k, batch.v)
    check(batch, LAMBDA)


@pytest.mark.variants([variant()])
def test_lse_in_base_e() -> None:
    batch = make_paged(MIX, 8, 2)
    wrapper = plan(batch)
    natural = run(wrapper, batch, lse_base="e")[1]
    torch.testing.assert_close(natural, run(wrapper, batch)[1] * math.log(2))


# ---- several tokens, window, soft cap, sinks -----------------------------------------------------


@pytest.mark.variants(
    lambda group_size, q_len: [
        variant(group_size, q_len=q_len),
        skipping(group_size, q_len=q_len),
    ]
)
@pytest.mark.parametrize("threshold", [None, LAMBDA])
@pytest.mark.parametrize("group_size", [1, 4, 12, 71])
@pytest.mark.parametrize("q_len", [2, 5, 8])
def test_several_tokens_of_a_request(q_len: int, group_size: int, threshold: float | None) -> None:
    lens = (0, 1, 4, 64, 65, 66, 130, 135, 1000, 2048, 2053, 40_000)
    check(make_paged(lens, 2 * group_size, 2, q_len=q_len, gain=7.5), threshold)


@pytest.mark.variants(
    lambda page_size, q_len: [
        variant(page_size=page_size, q_len=q_len, window_left=1),
        skipping(page_size=page_size, q_len=q_len, window_left=1),
    ]
)
@pytest.mark.parametrize("threshold", [None, LAMBDA])
@pytest.mark.parametrize("page_size", [16, 3])
@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("window_left", [0, 63, 64, 700, 100_000])
def test_window(window_left: int, q_len: int, page_size: int, threshold: float | None) -> None:
    lens = (0, 1, 4, 64, 65, 130, 135, 1000, 2048, 9000)
    batch = make_paged(lens, 8, 2, 128, page_size, q_len=q_len, gain=7.5)
    check(batch, threshold, window_left=window_left)


@pytest.mark.variants(
    [
        variant(3, 64, logits_soft_cap=1.0, sinks=torch.empty(0)),
        skipping(3, 64, logits_soft_cap=1.0, sinks=torch.empty(0)),
        variant(3, 64, logits_soft_cap=1.0),
        skipping(3, 64, logits_soft_cap=1.0),
        variant(3, 64, sinks=torch.empty(0)),
        skipping(3, 64, sinks=torch.empty(0)),
    ]
)
@pytest.mark.parametrize("threshold", [None, LAMBDA])
@pytest.mark.parametrize("sinks", [None, [-3.0, 2.0, 30.0]])
@pytest.mark.parametrize("cap", [None, 5.0, 30.0])
def test_soft_cap_and_sinks(
    cap: float | None, sinks: list[float] | None, threshold: float | None
) -> None:
    batch = make_paged((*MIX, 20_000), 3, 1, 64)
    given = None if sinks is None else torch.tensor(sinks, device=DEVICE)
    check(batch, threshold, logits_soft_cap=cap, sinks=given)


# ---- thresholds ----------------------------------------------------------------------------------


@pytest.mark.variants(
    lambda page_size: [variant(page_size=page_size), skipping(page_size=page_size)]
)
@pytest.mark.parametrize("page_size", [16, 3])
def test_nothing_skipped_is_dense_bit_for_bit(page_size: int) -> None:
    batch = make_paged((*MIX, 40_000), 8, 2, 128, page_size, hot=None)
    dense = run(plan(batch), batch)
    for threshold in (0.0, 1e-30):
        wrapper = plan(batch, skip_softmax_threshold=threshold, collect_stats=True)
        out, lse = run(wrapper, batch)
        assert wrapper.stats[..., 0].sum() == 0
        assert torch.equal(out, dense[0])
        assert torch.equal(lse, dense[1])


@pytest.mark.variants([skipping()])
def test_threshold_one_keeps_the_seed() -> None:
    out, _ = check(make_paged(MIX, 8, 2), 1.0)
    assert torch.isfinite(out).all()


@pytest.mark.variants([skipping()])
def test_live_threshold_of_each_request() -> None:
    batch = make_paged(MIX, 8, 2)
    live = torch.zeros(len(MIX), device=DEVICE)
    wrapper = plan(batch, skip_softmax_threshold=live, collect_stats=True)
    for values in ([0.0] * 10, [LAMBDA] * 10, [10.0**-i for i in range(10)]):
        live.copy_(torch.tensor(values))
        wrapper.reset_stats()
        out, lse = run(wrapper, batch)
        exact = oracle(wrapper, batch, live.tolist())
        assert_matches(batch, out, lse, exact)
        assert_counts(wrapper.stats, exact)


@pytest.mark.variants([skipping()])
@pytest.mark.parametrize(("overflow", "short"), [("dense", None), ("clamp", 1.0)])
def test_scale_factor_and_its_overflow(overflow: str, short: float | None) -> None:
    batch = make_paged(MIX, 8, 2)
    wrapper = plan(
        batch,
        skip_softmax_threshold_scale_factor=100.0,
        overflow=overflow,
        collect_stats=True,
    )
    out, lse = run(wrapper, batch)
    exact = oracle(wrapper, batch, [100 / n if n > 100 else short for n in MIX])
    assert_matches(batch, out, lse, exact)
    assert_counts(wrapper.stats, exact)


# ---- decisions -----------------------------------------------------------------------------------


def probe_tiles(batch: Paged) -> None:
    """Make V of each key the one-hot of its tile's index: the output shows what was kept."""
    for request, pages in enumerate(batch.indptr.diff().tolist()):
        n = (pages - 1) * batch.k.shape[1] + int(batch.last_page_len[request]) if pages else 0
        keys = torch.arange(n, device=DEVICE)
        one_hot = torch.nn.functional.one_hot(keys // 64, batch.v.shape[3]).to(batch.v.dtype)
        batch.v[batch.place(request, keys)] = one_hot[:, None].expand(-1, batch.v.shape[2], -1)


@pytest.mark.variants(lambda group_size: [skipping(group_size)])
@pytest.mark.parametrize("group_size", [4, 71])
@pytest.mark.parametrize("threshold", [1e-4, LAMBDA, 1.0])
def test_skip_map_is_the_oracles(group_size: int, threshold: float) -> None:
    batch = make_paged((8192, 5000, 64, 65, 1, 700), 2 * group_size, 2, gain=7.5)
    probe_tiles(batch)
    wrapper = plan(batch, skip_softmax_threshold=threshold, collect_stats=True)
    out, _ = run(wrapper, batch)
    exact = oracle(wrapper, batch, threshold)
    assert exact.skip_map is not None
    for request, skip_map in enumerate(exact.skip_map):
        units = torch.arange(group_size, device=DEVICE) // 64
        weights = out[request].view(2, group_size, -1)[..., : skip_map.state.shape[2]]
        kept = torch.stack([(weights[:, units == u] > 0).any(1) for u in units.unique()], 1)
        sure = skip_map.margin.abs() >= ROUNDING_BAND
        assert torch.equal(kept & sure, skip_map.kept & sure)
        assert (skip_map.kept | skip_map.skipped).all()


@pytest.mark.variants(lambda page_size: [skipping(page_size=page_size)])
@pytest.mark.parametrize("page_size", [16, 64, 3])
def test_v_of_skipped_tiles_is_never_read(page_size: int) -> None:
    batch = make_paged((8192, 3000, 100), 8, 2, 128, page_size)
    wrapper = plan(batch, skip_softmax_threshold=LAMBDA, collect_stats=True)
    before = run(wrapper, batch)
    exact = oracle(wrapper, batch, LAMBDA)
    assert exact.skip_map is not None
    poisoned_tiles = 0
    for request, skip_map in enumerate(exact.skip_map):
        skipped = skip_map.skipped & (skip_map.margin.abs() >= ROUNDING_BAND)
        for head, _, tile in skipped.nonzero().tolist():
            end = min(64 * tile + 64, skip_map.geometry.kv_len)
            pages, slots = batch.place(request, torch.arange(64 * tile, end, device=DEVICE))
            batch.v[pages, slots, head] = math.nan
            poisoned_tiles += 1
    assert poisoned_tiles > 100
    after = run(wrapper, batch)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


@pytest.mark.variants([skipping()])
def test_decisions_are_the_requests_own() -> None:
    lens = (20_000, 64, 3000, 0, 40_000, 7777)
    batch = make_paged(lens, 8, 2, gain=7.5)
    together = plan(batch, skip_softmax_threshold=LAMBDA, collect_stats=True)
    out, lse = run(together, batch)
    for i in range(len(lens)):
        start, end = batch.indptr[i : i + 2].tolist()
        alone = Paged(
            batch.q[i : i + 1],
            batch.cache,
            batch.k,
            batch.v,
            batch.layout,
            torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE),
            batch.indices[start:end].clone(),
            batch.last_page_len[i : i + 1].clone(),
        )
        wrapper = plan(alone, skip_softmax_threshold=LAMBDA, collect_stats=True)
        single = run(wrapper, alone)
        assert torch.equal(wrapper.stats[0], together.stats[i])
        torch.testing.assert_close(single[0][0], out[i], rtol=2**-6, atol=2**-9)
        torch.testing.assert_close(single[1][0], lse[i], rtol=0, atol=1e-5)


# ---- index contents, streams, graphs -------------------------------------------------------------


@pytest.mark.variants(lambda page_size: [skipping(page_size=page_size)])
@pytest.mark.parametrize("page_size", [16, 3])
def test_bad_page_tables_are_bounded(page_size: int) -> None:
    batch = make_paged((500, 200, 300), 8, 2, 128, page_size)
    batch.indices[5], batch.indices[7] = -4, len(batch.k) + 100  # read as zeros
    check(batch, LAMBDA)
    unused = batch.k.isnan()  # slots that a wrong last_page_len reaches
    batch.k[unused], batch.v[unused] = 1, 1
    batch.last_page_len[:] = torch.tensor([10**6, -5, page_size], device=DEVICE)
    batch.indptr[:] = torch.tensor([0, 4, 2, 10**6], device=DEVICE)  # request 1 decreases
    wrapper = plan(batch, skip_softmax_threshold=LAMBDA, collect_stats=True)
    out, lse = run(wrapper, batch)
    assert torch.isfinite(out).all()
    assert (out[1] == 0).all()
    assert (lse[1] == -math.inf).all()
    keys = [4 * page_size, 0, (len(batch.indices) - 2) * page_size]
    assert wrapper.stats[:, 0, 1].tolist() == [-(-n // 64) for n in keys]


@pytest.mark.variants([skipping()])
def test_runs_on_the_current_stream() -> None:
    batch = make_paged(MIX, 8, 2)
    wrapper = plan(batch, skip_softmax_threshold=LAMBDA, collect_stats=True)
    expected = run(wrapper, batch)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000)
        out, lse = run(wrapper, batch)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


LENGTHS = (60, 0, 1000, 15, 8127, 40_000)  # at step 0; each step adds a key


def growing(steps: int, page_size: int, **options: Any) -> tuple[Paged, Callable[[int], None]]:
    """A batch, and what writes its page table, keys and queries of a step over those before."""
    longest = make_paged([n + steps for n in LENGTHS], 8, 2, 128, page_size, **options)
    k, v, starts = longest.gathered()
    batch = dataclasses.replace(longest, q=longest.q.clone())
    pages = torch.randperm(len(batch.k), device=DEVICE)

    def set_step(step: int) -> None:
        now = [n + step for n in LENGTHS]
        ptr, indices, last = page_table(now, page_size, pages)
        batch.indptr.copy_(ptr)
        batch.indices[: len(indices)] = indices
        batch.last_page_len.copy_(last)
        for i, (start, n) in enumerate(zip(starts.tolist(), now, strict=False)):
            place = batch.place(i, torch.arange(n, device=DEVICE))
            batch.k[place] = k[start : start + n].to(batch.k.dtype)
            batch.v[place] = v[start : start + n].to(batch.v.dtype)
        batch.q.copy_(longest.q.roll(step, 2))

    nan = torch.full_like(batch.k, math.nan, dtype=torch.float32)
    batch.k.copy_(nan)
    batch.v.copy_(nan)
    return batch, set_step


@pytest.mark.variants(
    lambda page_size, kv_dtype, dense: [
        (variant if dense else skipping)(page_size=page_size, kv_data_type=kv_dtype)
    ]
)
@pytest.mark.parametrize(
    ("kv_dtype", "steps", "dense"),
    [(BF16, 200, False), (FP8, 40, False), (BF16, 40, True), (FP8, 40, True)],
)
@pytest.mark.parametrize("page_size", [16, 3])
def test_graph_replays_follow_growing_requests(
    page_size: int, kv_dtype: torch.dtype, steps: int, dense: bool
) -> None:
    batch, set_step = growing(steps, page_size, kv_dtype=kv_dtype)
    live = torch.zeros(len(LENGTHS), device=DEVICE)
    skips: dict[str, Any] = {}
    if not dense:
        skips = {"skip_softmax_threshold": live, "collect_stats": True}
    wrapper = plan(batch, **skips)
    out, lse = run(wrapper, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(batch.q, batch.cache, out=out, lse=lse)
    for step in range(steps):
        set_step(step)
        live.fill_(LAMBDA if step % 2 else 1e-3)
        if skips:
            wrapper.reset_stats()
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        exact = oracle(wrapper, batch, live.tolist() if skips else None)
        assert_matches(batch, out, lse, exact)
        if skips:
            assert_counts(wrapper.stats, exact)


@pytest.mark.variants(
    lambda page_size: [variant(page_size=page_size), skipping(page_size=page_size)]
)
@pytest.mark.parametrize("threshold", [None, LAMBDA])
@pytest.mark.parametrize("page_size", [16, 3])
def test_new_lengths_count_from_the_next_run(page_size: int, threshold: float | None) -> None:
    """One plan, no graph."""
    batch, set_step = growing(20, page_size)
    skips: dict[str, Any] = {}
    if threshold is not None:
        skips = {"skip_softmax_threshold": threshold, "collect_stats": True}
    wrapper = plan(batch, **skips)
    for step in (0, 1, 4, 5, 19):
        set_step(step)
        if skips:
            wrapper.reset_stats()
        out, lse = run(wrapper, batch)
        exact = oracle(wrapper, batch, threshold)
        assert_matches(batch, out, lse, exact)
        if skips:
            assert_counts(wrapper.stats, exact)


@pytest.mark.variants([skipping()])
def test_many_runs_are_bitwise_equal() -> None:
    batch = make_paged((131_072, 9, 4096, 70_000), 8, 2)
    wrapper = plan(batch, skip_softmax_threshold=LAMBDA, collect_stats=True)
    expected = run(wrapper, batch)
    for _ in range(50):
        out, lse = run(wrapper, batch)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
