"""The decode kernel on an FP8 (e4m3) cache: the oracle attends to the numbers it stands for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from paged import (
    FP8,
    LAMBDA,
    Paged,
    assert_counts,
    assert_matches,
    check,
    make_paged,
    oracle,
    plan,
    run,
    skipping,
    variant,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BF16, FP16 = torch.bfloat16, torch.float16
MIX = (0, 1, 63, 64, 65, 1000, 0, 2048, 300, 129)


def fp8(kv_lens: tuple[int, ...], *args: Any, **options: Any) -> Paged:
    return make_paged(kv_lens, *args, kv_dtype=FP8, **options)


def dense(*args: Any, **options: Any) -> Any:
    return variant(*args, kv_data_type=FP8, **options)


def sparse(*args: Any, **options: Any) -> Any:
    return skipping(*args, kv_data_type=FP8, **options)


@pytest.mark.variants(lambda page_size: [dense(page_size=page_size), sparse(page_size=page_size)])
@pytest.mark.parametrize("threshold", [None, LAMBDA])
@pytest.mark.parametrize(
    ("layout", "form"), [("NHD", "tensor"), ("HND", "pair"), ("NHD", "strided")]
)
@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 64, 100, 256])
def test_page_sizes_layouts_and_strides(
    page_size: int, layout: str, form: str, threshold: float | None
) -> None:
    check(fp8(MIX, 8, 2, 128, page_size, layout=layout, form=form), threshold)


@pytest.mark.variants(
    lambda head_dim, page_size, dtype, o_dtype: [
        sparse(4, head_dim, page_size, dtype, o_data_type=o_dtype)
    ]
)
@pytest.mark.parametrize("page_size", [16, 5])
@pytest.mark.parametrize(("dtype", "o_dtype"), [(BF16, BF16), (FP16, FP16), (BF16, FP16)])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_head_dims_and_dtypes(
    head_dim: int, page_size: int, dtype: torch.dtype, o_dtype: torch.dtype
) -> None:
    check(fp8(MIX, 8, 2, head_dim, page_size, dtype), LAMBDA, o_data_type=o_dtype)


@pytest.mark.variants(
    lambda group_size, head_dim: [sparse(group_size, head_dim), dense(group_size, head_dim)]
)
@pytest.mark.parametrize("threshold", [None, LAMBDA])
@pytest.mark.parametrize(
    ("group_size", "head_dim"), [(1, 128), (3, 128), (16, 128), (40, 128), (71, 128), (40, 256)]
)
def test_groups(group_size: int, head_dim: int, threshold: float | None) -> None:
    check(fp8(MIX, 2 * group_size, 2, head_dim), threshold)


@pytest.mark.variants(lambda page_size: [dense(4, 64, page_size), sparse(4, 64, page_size)])
@pytest.mark.parametrize("threshold", [None, LAMBDA])
@pytest.mark.parametrize("page_size", [64, 7])
def test_long_requests_are_split_and_merged(page_size: int, threshold: float | None) -> None:
    batch = fp8((70_001, 131_072, 5), 8, 2, 64, page_size)
    batch.scales = {"k_scale": 0.75, "v_scale": torch.tensor([3.0, 0.2], device=DEVICE)}
    check(batch, threshold)


@pytest.mark.variants(lambda page_size: [dense(page_size=page_size, dtype=FP16)])
@pytest.mark.parametrize("page_size", [16, 3])
def test_every_number_is_dequantised_exactly(page_size: int) -> None:
    """Requests of one key: the output is V, and each query looks at one channel of K."""
    requests, heads = 32, torch.arange(8, device=DEVICE)
    batch = fp8((1,) * requests, 8, 2, 128, page_size, FP16)
    codes = [code for code in range(256) if code % 128 != 127]  # but NaN
    finite = torch.tensor(codes, dtype=torch.uint8, device=DEVICE).view(FP8)
    of_kv_heads = torch.stack([finite.view(torch.uint8)[i : i + 128] for i in (0, 126)]).view(FP8)
    for request in range(requests):
        page, slot = batch.place(request, torch.zeros(1, dtype=torch.long, device=DEVICE))
        batch.k[page, slot], batch.v[page, slot] = of_kv_heads, of_kv_heads
    channel = 4 * torch.arange(requests, device=DEVICE)[:, None] + heads % 4
    batch.q = torch.nn.functional.one_hot(channel, 128).to(FP16)
    out, lse = run(plan(batch), batch)
    numbers = of_kv_heads.double().repeat_interleave(4, 0)
    assert torch.equal(out.double(), numbers.expand_as(out))
    scores = numbers[heads, channel] * 128**-0.5 * math.log2(math.e)
    torch.testing.assert_close(lse.double(), scores, rtol=2**-21, atol=0)


ALL = {"window_left": 700, "logits_soft_cap": 9.0, "sinks": torch.empty(0)}


@pytest.mark.variants(lambda q_len: [sparse(q_len=q_len), dense(q_len=q_len)])
@pytest.mark.parametrize("threshold", [None, LAMBDA])
@pytest.mark.parametrize("q_len", [2, 8])
def test_several_tokens_of_a_request(q_len: int, threshold: float | None) -> None:
    lengths = (0, q_len, 64, 66, 135, 1000, 9000)
    check(fp8(lengths, 8, 2, q_len=q_len, gain=7.5), threshold)


@pytest.mark.variants(lambda q_len: [sparse(q_len=q_len, **ALL), dense(q_len=q_len, **ALL)])
@pytest.mark.parametrize("threshold", [None, LAMBDA])
@pytest.mark.parametrize("q_len", [1, 2, 3, 8])
def test_all_options_together(q_len: int, threshold: float | None) -> None:
    batch = fp8((0, 1, 4, 64, 66, 135, 1000, 9000), 8, 2, q_len=q_len, gain=7.5)
    batch.scales = {"k_scale": torch.tensor([1.5, 0.7], device=DEVICE), "v_scale": 0.1}
    sinks = torch.linspace(-3, 3, 8, device=DEVICE)
    check(batch, threshold, window_left=700, logits_soft_cap=9.0, sinks=sinks)


@pytest.mark.variants(lambda page_size: [dense(page_size=page_size), sparse(page_size=page_size)])
@pytest.mark.parametrize("page_size", [16, 3])
def test_nothing_skipped_is_dense_bit_for_bit(page_size: int) -> None:
    batch = fp8((*MIX, 40_000), 8, 2, 128, page_size, hot=None)
    expected = run(plan(batch), batch)
    wrapper = plan(batch, skip_softmax_threshold=0.0, collect_stats=True)
    assert all(map(torch.equal, run(wrapper, batch), expected))


@pytest.mark.variants(lambda dtype: [sparse(dtype=dtype)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_live_scales_in_a_graph(dtype: torch.dtype) -> None:
    batch = fp8((*MIX, 20_000), 8, 2, dtype=dtype, gain=7.5)
    scales = {"k_scale": torch.ones(1, device=DEVICE), "v_scale": torch.ones(2, device=DEVICE)}
    batch.scales = scales
    wrapper = plan(batch, skip_softmax_threshold=LAMBDA, collect_stats=True)
    out, lse = run(wrapper, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(batch.q, batch.cache, out=out, lse=lse, **scales)
    for k_scale, v_scale in ((1.0, [1.0, 1.0]), (0.4, [3.0, 0.01]), (1.7, [0.3, 100.0])):
        scales["k_scale"].fill_(k_scale)
        scales["v_scale"].copy_(torch.tensor(v_scale))
        wrapper.reset_stats()
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        exact = oracle(wrapper, batch, LAMBDA)
        assert_matches(batch, out, lse, exact)
        assert_counts(wrapper.stats, exact)


@pytest.mark.variants([sparse()])
@pytest.mark.parametrize("exponent", [-100, -20, 20, 100])
def test_queries_beyond_fp16_keep_their_bits(exponent: int) -> None:
    batch = fp8(MIX, 8, 2)
    expected = run(plan(batch, skip_softmax_threshold=LAMBDA), batch)
    batch.q = batch.q * 2.0**exponent
    batch.scales = {"k_scale": 2.0**-exponent}
    found = run(plan(batch, skip_softmax_threshold=LAMBDA), batch)
    assert all(map(torch.equal, found, expected))


@pytest.mark.variants([sparse()])
def test_v_of_skipped_tiles_is_never_read() -> None:
    batch = fp8((8192, 3000, 100), 8, 2)
    wrapper = plan(batch, skip_softmax_threshold=LAMBDA, collect_stats=True)
    before = run(wrapper, batch)
    exact = oracle(wrapper, batch, LAMBDA)
    assert exact.skip_map is not None
    for request, skip_map in enumerate(exact.skip_map):
        skipped = skip_map.skipped & (skip_map.margin.abs() >= 1e-3)
        for head, _, tile in skipped.nonzero().tolist():
            end = min(64 * tile + 64, skip_map.geometry.kv_len)
            pages, slots = batch.place(request, torch.arange(64 * tile, end, device=DEVICE))
            nan = torch.full((len(pages), 128), math.nan, device=DEVICE).to(FP8)
            batch.v[pages, slots, head] = nan
    assert batch.v.isnan().sum() > 100 * 64 * 128
    assert all(map(torch.equal, run(wrapper, batch), before))
