"""Both wrappers on CPU tensors: the reference behind the API that the kernels have."""

import math

import pytest
import torch

import flashskip
from flashskip import reference

BF16 = torch.bfloat16


def _ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def _plain(q, k, v, causal):
    """Softmax attention of one request in float64, and its LSE in base 2."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    s = torch.einsum("qhd,khd->hqk", q.double(), k) / math.sqrt(q.shape[2])
    if causal:
        s = s.masked_fill(torch.ones(s.shape[1:]).tril(k.shape[0] - q.shape[0]) == 0, -math.inf)
    return torch.einsum("hqk,khd->qhd", s.softmax(-1), v), s.logsumexp(-1).T / math.log(2)


def _prefill_inputs(qo, kv, heads=(6, 2), dim=64, seed=0):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(qo, heads[0], dim, generator=g).to(BF16)
    k, v = torch.randn(2, kv, heads[1], dim, generator=g).to(BF16)
    return q, k, v


def _with_sink(q, k, starts=(0,)):
    """Make the first 64 keys of each request outweigh the others by about e**8."""
    u = torch.nn.functional.normalize(
        torch.randn(64, generator=torch.Generator().manual_seed(3)), dim=0
    )
    q = (q + 8 * u).to(BF16)
    for start in starts:
        k[start : start + 64] += (8 * u).to(BF16)
    return q, k


@pytest.mark.parametrize("causal", [False, True])
def test_dense_prefill_is_softmax_attention(causal):
    q, k, v = _prefill_inputs(330, 450)
    qo, kv = _ints(0, 130, 130, 330), _ints(0, 200, 210, 450)
    wrapper = flashskip.BatchPrefillWrapper(torch.empty(0))
    wrapper.plan(qo, kv, 6, 2, 64, q_data_type=BF16, causal=causal)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    natural = wrapper.run(q, k, v, return_lse=True, lse_base="e")[1]
    for a, b, c, d in ((0, 130, 0, 200), (130, 330, 210, 450)):
        expected, expected_lse = _plain(q[a:b], k[c:d], v[c:d], causal)
        torch.testing.assert_close(out[a:b].double(), expected, rtol=2**-8, atol=1e-5)
        torch.testing.assert_close(lse[a:b].double(), expected_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(natural, lse * math.log(2))


def test_skipping_takes_the_oracles_decisions_and_counts_them():
    q, k, v = _prefill_inputs(500, 500)
    q, k = _with_sink(q, k)
    indptr = _ints(0, 500)
    wrapper = flashskip.BatchPrefillWrapper(torch.empty(0))
    wrapper.plan(
        indptr, indptr, 6, 2, 64, q_data_type=BF16, causal=True,
        skip_softmax_threshold=0.3, collect_stats=True, collect_bound=True,
    )  # fmt: skip
    out, bound = wrapper.run(q, k, v)
    oracle = reference.attention(
        q, k, v, qo_indptr=indptr, kv_indptr=indptr, geometry=wrapper.geometry, thresholds=[0.3]
    )
    assert torch.equal(wrapper.stats, oracle.counts)
    assert int(wrapper.stats[..., 0].sum()) > 0
    torch.testing.assert_close(out.double(), oracle.out, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(bound.double(), oracle.bound, rtol=1e-4, atol=1e-6)
    wrapper.run(q, k, v)
    assert torch.equal(wrapper.stats, 2 * oracle.counts)
    wrapper.reset_stats()
    assert not wrapper.stats.any()


def test_measuring_is_dense_and_counts_gaps_until_they_are_reset():
    q, k, v = _prefill_inputs(500, 500)
    q, k = _with_sink(q, k)
    indptr = _ints(0, 200, 500)
    wrapper = flashskip.BatchPrefillWrapper(torch.empty(0))
    options = {"q_data_type": BF16, "causal": True}
    wrapper.plan(indptr, indptr, 6, 2, 64, **options)
    dense = wrapper.run(q, k, v)
    with pytest.raises(ValueError, match="gaps is read on a plan with skip_criterion='threshold'"):
        _ = wrapper.gaps
    with pytest.raises(ValueError, match="stats is read on a plan without counters"):
        wrapper.reset_stats()
    chosen = {"order": "ascending", "vote_kv": 128}
    wrapper.plan(indptr, indptr, 6, 2, 64, skip_criterion="measure", **options, **chosen)
    assert (wrapper.geometry.order, wrapper.geometry.keys_per_vote) == ("ascending", 128)
    assert torch.equal(wrapper.run(q, k, v), dense)
    oracle = reference.attention(
        q, k, v, qo_indptr=indptr, kv_indptr=indptr, geometry=wrapper.geometry, dtype=torch.float32
    )
    gaps = torch.stack([reference.histogram(m) for m in oracle.skip_map])
    assert gaps.shape == (2, 6, 256)
    assert torch.equal(wrapper.gaps, gaps)
    assert torch.equal(wrapper.gaps.sum(2), oracle.counts[..., 1])
    wrapper.run(q, k, v)
    assert torch.equal(wrapper.gaps, 2 * gaps)
    with pytest.raises(ValueError, match="stats is read"):
        _ = wrapper.stats
    wrapper.reset_stats()
    assert not wrapper.gaps.any()


def test_decode_measures_per_kv_head():
    cache = torch.randn(4, 2, 16, 2, 64).to(BF16)
    q = torch.randn(2, 6, 64).to(BF16)
    wrapper = flashskip.BatchDecodeWrapper(torch.empty(0))
    table = (_ints(0, 4, 4), _ints(0, 1, 2, 3), _ints(5, 1))
    wrapper.plan(*table, 6, 2, 64, 16, q_data_type=BF16, skip_criterion="measure", vote_kv=64)
    wrapper.run(q, cache)
    assert wrapper.gaps.shape == (2, 2, 256)
    # One tile, which is its own seed, and a request without keys.
    assert wrapper.gaps[..., 255].tolist() == [[1, 1], [0, 0]]
    assert int(wrapper.gaps.sum()) == 2


def test_live_thresholds_and_lengths_are_read_by_each_run():
    q, k, v = _prefill_inputs(700, 700)
    q, k = _with_sink(q, k)
    indptr, threshold = _ints(0, 700), torch.tensor([0.0])
    wrapper = flashskip.BatchPrefillWrapper(torch.empty(0))
    wrapper.plan(
        indptr, indptr, 6, 2, 64,
        q_data_type=BF16, causal=True, skip_softmax_threshold=threshold, collect_stats=True,
    )  # fmt: skip
    wrapper.run(q, k, v)
    assert not wrapper.stats[..., 0].any()
    threshold.fill_(0.5)
    wrapper.run(q, k, v)
    assert wrapper.stats[..., 0].any()
    visited = int(wrapper.stats[..., 1].sum())
    indptr[1] = 100
    wrapper.reset_stats()
    out = torch.full((700, 6, 64), math.nan, dtype=BF16)
    wrapper.run(q, k, v, out=out)
    assert 0 < int(wrapper.stats[..., 1].sum()) < visited / 4
    assert not out[:100].isnan().any()
    assert out[100:].isnan().all()  # rows past qo_indptr[-1] are not written


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_decode_reads_pages_and_nothing_else(layout, page_size):
    lengths = [0, 1, 37, 130]
    counts = [-(-n // page_size) for n in lengths]
    pages = sum(counts) + 2
    g = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, pages, page_size, 2, 64, generator=g).to(BF16)
    indptr = torch.cumsum(torch.tensor([0, *counts]), 0).to(torch.int32)
    indices = torch.randperm(pages, generator=g)[: sum(counts)].to(torch.int32)
    last = torch.tensor([(n - 1) % page_size + 1 for n in lengths], dtype=torch.int32)
    used = torch.zeros(pages, page_size, dtype=torch.bool)
    for i, n in enumerate(lengths):
        for token in range(n):
            used[indices[indptr[i] + token // page_size], token % page_size] = True
    k[~used] = v[~used] = math.nan
    q = torch.randn(4, 6, 64, generator=g).to(BF16)
    cache = torch.stack([k, v], 1)
    wrapper = flashskip.BatchDecodeWrapper(torch.empty(0), layout)
    wrapper.plan(indptr, indices, last, 6, 2, 64, page_size, q_data_type=BF16)
    if layout == "HND":
        cache, k, v = (t.transpose(-3, -2).contiguous() for t in (cache, k, v))
    out, lse = wrapper.run(q, cache, return_lse=True)
    assert torch.equal(out, wrapper.run(q, (k, v)))
    assert not out[0].any()
    assert (lse[0] == -math.inf).all()
    nhd = (k, v) if layout == "NHD" else (k.transpose(1, 2), v.transpose(1, 2))
    for i in (1, 2, 3):
        ids = indices[indptr[i] : indptr[i + 1]].long()
        keys, values = (t[ids].flatten(0, 1)[: lengths[i]] for t in nhd)
        expected, expected_lse = _plain(q[i : i + 1], keys, values, causal=False)
        torch.testing.assert_close(out[i : i + 1].double(), expected, rtol=2**-8, atol=1e-5)
        torch.testing.assert_close(lse[i : i + 1].double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_several_new_tokens_are_causal_among_themselves():
    cache = torch.randn(4, 2, 16, 2, 64).to(BF16)
    table = (_ints(0, 4), _ints(0, 1, 2, 3), _ints(5))
    q = torch.randn(3, 4, 64).to(BF16)
    wrapper = flashskip.BatchDecodeWrapper(torch.empty(0))
    wrapper.plan(*table, 4, 2, 64, 16, q_len_per_req=3, q_data_type=BF16)
    k, v = (cache[:, i].flatten(0, 1)[:53] for i in (0, 1))
    expected, _ = _plain(q, k, v, causal=True)
    torch.testing.assert_close(wrapper.run(q, cache).double(), expected, rtol=2**-8, atol=1e-5)


def test_factors_follow_each_requests_length_and_overflow_runs_dense():
    q, k, v = _prefill_inputs(1300, 1300)
    q, k = _with_sink(q, k, (0, 600))
    indptr = _ints(0, 600, 1300)
    wrapper = flashskip.BatchPrefillWrapper(torch.empty(0))
    options = {"q_data_type": BF16, "causal": True, "collect_stats": True}
    wrapper.plan(
        indptr, indptr, 6, 2, 64, skip_softmax_threshold_scale_factor=660.0, **options
    )  # lambda is 1.1 for the first request, 0.94 for the second
    wrapper.run(q, k, v)
    assert not wrapper.stats[0, :, 0].any()
    assert wrapper.stats[1, :, 0].any()
    wrapper.plan(
        indptr, indptr, 6, 2, 64,
        skip_softmax_threshold_scale_factor=660.0, overflow="clamp", **options,
    )  # fmt: skip
    wrapper.run(q, k, v)
    assert wrapper.stats[0, :, 0].any()


def test_run_compiles_as_one_graph():
    indptr = _ints(0, 90)
    wrapper = flashskip.BatchPrefillWrapper(torch.empty(0))
    wrapper.plan(indptr, indptr, 6, 2, 64, q_data_type=BF16, causal=True)
    q, k, v = _prefill_inputs(90, 90)

    def twice(q, k, v):
        out, lse = wrapper.run(q, k, v, return_lse=True)
        return out * 2, lse + 1

    out, lse = torch.compile(twice, fullgraph=True, backend="aot_eager")(q, k, v)
    expected, expected_lse = wrapper.run(q, k, v, return_lse=True)
    assert torch.equal(out, expected * 2)
    assert torch.equal(lse, expected_lse + 1)


def test_a_batch_of_no_requests_and_a_request_without_keys():
    wrapper = flashskip.BatchPrefillWrapper(torch.empty(0))
    q, k, v = _prefill_inputs(5, 0)
    wrapper.plan(_ints(0, 5), _ints(0, 0), 6, 2, 64, q_data_type=BF16)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    assert not out.any()
    assert (lse == -math.inf).all()
    wrapper.plan(_ints(0), _ints(0), 6, 2, 64, q_data_type=BF16)
    assert wrapper.run(q[:0], k, v).shape == (0, 6, 64)


@pytest.mark.parametrize(
    ("dim", "group_size", "q_len", "dtype", "rows"),
    [
        (128, 130, 1, BF16, (64, 64)),
        (256, 40, 1, BF16, (40, 64)),
        (256, 16, 3, BF16, (40, 40)),
        (256, 17, 1, torch.float8_e4m3fn, (16, 16)),
    ],
)
def test_rows_that_a_decode_kernel_cannot_take_together_decide_apart(
    dim, group_size, q_len, dtype, rows
):
    wrapper = flashskip.BatchDecodeWrapper(torch.empty(0))
    table = _ints(0, 1), _ints(0), _ints(16)
    options = {"q_data_type": BF16, "kv_data_type": dtype, "q_len_per_req": q_len}
    wrapper.plan(*table, group_size, 1, dim, 16, **options)
    assert (wrapper.variant.rows, wrapper.geometry.rows_per_vote) == rows
