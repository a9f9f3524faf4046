"""The prefill kernel on a GPU against the reference: outputs, LSE, launches."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from helpers import HeadDim, Ragged, indptr, make_ragged, poison, poisoned
from prefill_gpu import (
    BF16,
    DEVICE,
    FP16,
    HEAD_DIMS,
    LONG,
    MIX,
    assert_counts,
    assert_matches,
    attend,
    check,
    oracle,
    plan,
    run,
    variant,
)

pytestmark = pytest.mark.gpu

# ---- dense ---------------------------------------------------------------------------------------


@pytest.mark.variants(lambda head_dim, dtype, causal: [variant(head_dim, dtype, causal=causal)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_dense_ragged_mix(head_dim: HeadDim, dtype: torch.dtype, causal: bool) -> None:
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


STATS = {"causal": True, "collect_stats": True}


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
