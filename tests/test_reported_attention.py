"""Cases from public bug reports: edges, masks, numerics (E), strides and layouts (L)."""

from __future__ import annotations

import math

import pytest
import torch
from reported import (
    BF16,
    FP16,
    PREFILLS,
    Request,
    assert_right,
    decode,
    decode_variant,
    normal,
    on_both,
    paged,
    prefill,
    prefill_paged,
    prefill_variant,
    prefill_variants,
    workspace,
)

import flashskip
from flashskip import merge_state, merge_states
from flashskip.variant import DOMAINS

DENSE, CAUSAL = prefill_variants(), prefill_variants(causal=True)
CAUSAL_STATS = prefill_variants(causal=True, skip_softmax_threshold=0.1, collect_stats=True)
ATTENDS = (*PREFILLS, decode)
DECODE = decode_variant()
DECODE_STATS = decode_variant(skip_softmax_threshold=0.1, collect_stats=True)
NAN, INF = math.nan, math.inf


def ints(*values: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


# ---- E01: empty requests, empty batches ----------------------------------------------------------


@on_both(*DENSE, *CAUSAL)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("attend", PREFILLS)
def test_reported_E01_empty_requests_in_prefill(device: str, attend, causal: bool) -> None:
    requests = normal(0, [3, 0, 1, 130, 2], [0, 17, 0, 0, 64])
    answer = attend(requests, device, causal=causal)
    for i, request in enumerate(requests):
        assert_right(request, answer.out[i], answer.lse[i], causal=causal)


@on_both(DECODE)
def test_reported_E01_empty_requests_in_decode(device: str) -> None:
    requests = normal(0, [1] * 5, [0, 1, 0, 16, 33])
    answer = decode(requests, device)
    for i, request in enumerate(requests):
        assert_right(request, answer.out[i], answer.lse[i])


@on_both(*DENSE, DECODE)
def test_reported_E01_no_requests_at_all(device: str) -> None:
    q, k = (torch.zeros(0, heads, 128, dtype=BF16, device=device) for heads in (8, 2))
    wrapper = flashskip.BatchPrefillWrapper(workspace(device))
    for pointers in (ints(0, device=device), ints(0, 0, 0, device=device)):
        wrapper.plan(pointers, pointers, 8, 2, 128, q_data_type=BF16)
        out, lse = wrapper.run(q, k, k, return_lse=True)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (
            (0, 8, 128),
            BF16,
            (0, 8),
            torch.float32,
        )
    none = ints(device=device)
    decoder = flashskip.BatchDecodeWrapper(workspace(device))
    decoder.plan(ints(0, device=device), none, none, 8, 2, 128, 16, q_data_type=BF16)
    for pages in (0, 3):
        cache = torch.zeros(pages, 2, 16, 2, 128, dtype=BF16, device=device)
        out, lse = decoder.run(q, cache, return_lse=True)
        assert (out.shape, lse.shape) == ((0, 8, 128), (0, 8))
        for pointers, last in (
            (ints(0, device=device), none),
            (ints(0, 0, device=device), ints(1)),
        ):
            wrapper.plan_paged(
                pointers, pointers, none, last.to(device), 8, 2, 128, 16, q_data_type=BF16
            )
            out, lse = wrapper.run(q, cache, return_lse=True)
            assert (out.shape, lse.shape) == ((0, 8, 128), (0, 8))
    if device == "cuda":
        torch.cuda.synchronize()


@on_both(*prefill_variants(64))
@pytest.mark.parametrize("attend", PREFILLS)
def test_reported_E01_longest_query_of_one(device: str, attend) -> None:
    requests = normal(0, [0, 1, 0, 1], [0, 3, 0, 5], (9, 3), 64)
    answer = attend(requests, device)
    for i, request in enumerate(requests):
        assert_right(request, answer.out[i], answer.lse[i])


# ---- E03: more queries than keys -----------------------------------------------------------------


def blind_rows() -> Request:
    shape = (32, 8, 128)
    ones = torch.ones(shape, dtype=BF16)
    return torch.zeros(65, 32, 128, dtype=BF16), ones * 0, ones


def assert_blind_rows(out: torch.Tensor, lse: torch.Tensor) -> None:
    assert (out[:33] == 0).all()
    assert (lse[:33] == -INF).all()
    assert lse[:33].numel() == 1056
    assert (out[33:] == 1).all()
    expected = torch.arange(1, 33).log()[:, None].expand(-1, 32)
    torch.testing.assert_close(lse[33:], expected, rtol=1e-5, atol=1e-3)


@on_both(*CAUSAL)
@pytest.mark.parametrize("attend", PREFILLS)
def test_reported_E03_rows_that_see_nothing(device: str, attend) -> None:
    answer = attend([blind_rows()], device, causal=True)
    assert_blind_rows(answer.out[0], answer.lse[0])


@on_both(*CAUSAL)
@pytest.mark.parametrize("attend", PREFILLS)
def test_reported_E03_300_queries_on_one_key(device: str, attend) -> None:
    (request,) = normal(2, [300], [1])
    answer = attend([request], device, causal=True)
    assert (answer.out[0][:299] == 0).all()
    assert (answer.lse[0][:299] == -INF).all()
    assert torch.equal(answer.out[0][299], request[2][0].repeat_interleave(4, 0))


@on_both(*CAUSAL_STATS)
@pytest.mark.parametrize("attend", PREFILLS)
def test_reported_E03_while_skipping(device: str, attend) -> None:
    (second,) = normal(3, [7], [40], (32, 8))
    options = {"causal": True, "collect_stats": True}
    answer = attend(
        [blind_rows(), second], device, skip_softmax_threshold_scale_factor=32.0, **options
    )
    assert_blind_rows(answer.out[0], answer.lse[0])
    assert not answer.wrapper.stats[1, :, 0].any()  # one tile, which holds the maximum
    assert_right(second, answer.out[1], answer.lse[1], causal=True)


# ---- E06: unused slots of the cache --------------------------------------------------------------


UNUSED = (1, 17, 40, 64, 8192)  # the last one is split over CTAs


E06_COUNTS = {"skip_softmax_threshold": 0.1, "collect_stats": True}


@on_both(
    *(
        make(d, t, **options)
        for d in (64, 128)
        for t in (BF16, FP16)
        for options in ({}, E06_COUNTS)
        for make in (
            lambda d, t, **o: decode_variant(4, d, t, **o),
            lambda d, t, **o: prefill_variant(d, t, 16, **o),
        )
    )
)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("factor", [None, 32.0])
@pytest.mark.parametrize("attend", [decode, prefill_paged])
def test_reported_E06_unused_slots_change_no_bit(
    device: str, attend, head_dim: int, dtype: torch.dtype, factor: float | None
) -> None:
    lengths = UNUSED if device == "cuda" else (*UNUSED[:4], 300)
    several = attend is prefill_paged and device == "cuda"
    qo_lens = [1, 3, 40, 64, 2] if several else [1] * 5
    requests = normal(6, qo_lens, lengths, head_dim=head_dim, dtype=dtype)
    options = {"skip_softmax_threshold_scale_factor": factor, "collect_stats": factor is not None}
    clean = attend(requests, device, fill=0.0, **options)
    for fill in (NAN, INF, -INF, 65504.0):
        answer = attend(requests, device, fill=fill, **options)
        assert answer.same_as(clean)
        if factor is not None:
            assert torch.equal(answer.wrapper.stats, clean.wrapper.stats)
    assert all(t.isfinite().all() for t in clean.out)


@on_both(DENSE[0], prefill_variant(skip_softmax_threshold=0.1, collect_stats=True))
@pytest.mark.parametrize("factor", [None, 32.0])
def test_reported_E06_rows_past_the_last_key_change_no_bit(
    device: str, factor: float | None
) -> None:
    requests = normal(6, [3, 17, 40, 64], [1, 17, 40, 64])
    options = {"skip_softmax_threshold_scale_factor": factor, "collect_stats": factor is not None}
    clean = prefill(requests, device, surplus=0.0, **options)
    for surplus in (NAN, INF, -INF):
        assert prefill(requests, device, surplus=surplus, **options).same_as(clean)
    assert all(t.isfinite().all() for t in clean.out)


# ---- E07: group sizes and head dims --------------------------------------------------------------


GROUPS = [(3, 1), (5, 1), (6, 1), (7, 1), (12, 4), (14, 2), (24, 4), (28, 4), (40, 8)]
KV = (1, 16, 129, 1000)


@on_both(
    *(
        v
        for t in (BF16, FP16)
        for v in (decode_variant(4, 128, t), *prefill_variants(128, t, causal=True))
    )
)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("heads", GROUPS, ids=str)
def test_reported_E07_any_group_size(
    device: str, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    requests = normal(7, [1] * 4, KV, heads, dtype=dtype)
    answer = decode(requests, device)
    for i, request in enumerate(requests):
        assert_right(request, answer.out[i], answer.lse[i])
    requests = normal(7, [1, 16, 129, 3], KV, heads, dtype=dtype)
    for attend in PREFILLS if device == "cuda" else (prefill,):
        answer = attend(requests, device, causal=True)
        for i, request in enumerate(requests):
            assert_right(request, answer.out[i], answer.lse[i], causal=True)


@on_both(
    *DENSE, DECODE, decode_variant(4, 64),
    *(v for head_dim in (64, 96, 256) for v in prefill_variants(head_dim)),
)  # fmt: skip
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 192, 256])
def test_reported_E07_a_head_dim_is_right_or_refused(device: str, head_dim: int) -> None:
    requests = normal(7, [1] * 4, KV, head_dim=head_dim)
    for attend in ATTENDS:
        op = "decode" if attend is decode else "prefill"
        if device == "cuda" and head_dim not in DOMAINS[op]["head_dim_vo"]:
            with pytest.raises(flashskip.UnsupportedVariant, match=r"head_dim.*supported: \d+"):
                attend(requests, device)
            continue
        answer = attend(requests, device)
        for i, request in enumerate(requests):
            assert_right(request, answer.out[i], answer.lse[i])


@pytest.mark.parametrize("attend", ATTENDS)
def test_reported_E07_heads_that_do_not_divide(attend) -> None:
    with pytest.raises(ValueError, match="num_qo_heads is 10 with num_kv_heads=4"):
        attend(normal(7, [1], [5], (10, 4)), "cpu")


# ---- E08: all logits hugely negative -------------------------------------------------------------


def huge(keys: int, qo_len: int = 1) -> Request:
    shape = (keys, 1, 128)
    return (
        torch.full((qo_len, 1, 128), 64.0, dtype=BF16),
        torch.full(shape, -64.0, dtype=BF16),
        torch.ones(shape, dtype=BF16),
    )


@on_both(*DENSE, decode_variant(1))
@pytest.mark.parametrize("attend", ATTENDS)
def test_reported_E08_one_key_of_minus_half_a_million(device: str, attend) -> None:
    answer = attend([huge(1)], device)
    assert (answer.out[0] == 1).all()
    assert abs(answer.lse[0].item() + 46340.95) <= 0.05


@on_both(
    *DENSE,
    decode_variant(1),
    *prefill_variants(skip_softmax_threshold=0.1, collect_stats=True),
    decode_variant(1, skip_softmax_threshold=0.1, collect_stats=True),
)
@pytest.mark.parametrize("factor", [None, 0.01])
@pytest.mark.parametrize("attend", ATTENDS)
def test_reported_E08_the_larger_of_two_wins(device: str, attend, factor: float | None) -> None:
    q, k, v = huge(2)
    k[1, :, 0] = -62
    v[0] = 0
    options = {"skip_softmax_threshold_scale_factor": factor, "collect_stats": factor is not None}
    answer = attend([(q, k, v)], device, **options)
    out = answer.out[0]
    if factor is not None:  # the only tile holds every maximum
        assert answer.wrapper.stats[..., 0].sum() == 0
        assert (answer.wrapper.stats[..., 1] > 0).all()
    torch.testing.assert_close(
        out.float(), torch.full_like(out.float(), 0.99999), rtol=0, atol=4e-3
    )


@on_both(*CAUSAL)
@pytest.mark.parametrize("attend", PREFILLS)
def test_reported_E08_300_identical_keys(device: str, attend) -> None:
    out = attend([huge(300, 300)], device, causal=True).out[0]
    assert (out == 1).all()


# ---- E11: base of the LSE, merging ---------------------------------------------------------------


@on_both(*DENSE, DECODE)
def test_reported_E11_the_base_is_documented_and_kept(device: str) -> None:
    (request,) = normal(10, [1], [1000])
    request = (request[0] * 0, *request[1:])
    for attend in ATTENDS:
        torch.testing.assert_close(
            attend([request], device).lse[0], torch.full((1, 8), 6.9078), rtol=0, atol=1e-3
        )
    q, k, v = (t.to(device) for t in request)
    wrapper = flashskip.BatchPrefillWrapper(workspace(device))
    wrapper.plan(
        ints(0, 1, device=device), ints(0, 1000, device=device), 8, 2, 128, q_data_type=BF16
    )
    lse = wrapper.run(q, k, v, return_lse=True)[1]
    torch.testing.assert_close(lse.cpu(), torch.full((1, 8), 9.9658), rtol=0, atol=1e-3)
    assert "Base of the logarithm" in (flashskip.BatchPrefillWrapper.run.__doc__ or "")
    assert "base 2" in (merge_state.__doc__ or "")


@on_both(*DENSE, DECODE)
@pytest.mark.parametrize("attend", ATTENDS)
def test_reported_E11_parts_merge_to_the_whole(device: str, attend) -> None:
    (request,) = normal(10, [1], [3136])
    q, k, v = request
    whole = attend([request], device)
    parts = [
        attend([(q, k[rows], v[rows])], device) for rows in (slice(0, 3072), slice(3072, None))
    ]
    log2 = [p.lse[0] / math.log(2) for p in parts]
    out, lse = merge_state(parts[0].out[0], log2[0], parts[1].out[0], log2[1])
    assert ((out.double() - whole.out[0].double()).abs() <= 1e-3).all()
    torch.testing.assert_close(lse * math.log(2), whole.lse[0], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_reported_E11_merging_empty_states(device: str) -> None:
    x = torch.randn(5, 4, 64, dtype=BF16, device=device)
    s = torch.randn(5, 4, device=device)
    nothing, none = torch.zeros_like(x), torch.full_like(s, -INF)
    for a, b in ((x, s), (nothing, none)), ((nothing, none), (x, s)):
        out, lse = merge_state(*a, *b)
        assert torch.equal(out, x)
        assert torch.equal(lse, s)
    out, lse = merge_state(nothing, none, nothing, none)
    assert torch.equal(out, nothing)
    assert torch.equal(lse, none)
    mask = torch.tensor([0, 1, 0, 1, 0], device=device, dtype=torch.bool)[:, None]
    v = torch.stack(
        [x.where(mask[..., None], nothing), x.where(~mask[..., None], nothing), nothing], 1
    )
    out, lse = merge_states(v, torch.stack([s.where(mask, none), s.where(~mask, none), none], 1))
    assert torch.equal(out, x)
    assert torch.equal(lse, s)


# ---- L01: queries cut out of a packed tensor -----------------------------------------------------


def views(device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(12)
    packed = torch.randn(4, 48 * 128, generator=g).to(device=device, dtype=dtype)
    wide = torch.randn(4, 32, 136, generator=g).to(device=device, dtype=dtype)
    return {
        "packed": packed[:, :4096].view(4, 32, 128),
        "one row": packed[0, :4096].as_strided((1, 32, 128), (4608, 128, 1)),
        "head stride": wide[..., :128],
        "keys": packed[:, 4096:5120].view(4, 8, 128),
        "values": packed[:, 5120:].view(4, 8, 128),
        "last dim": torch.randn(4, 32, 256, generator=g).to(device=device, dtype=dtype)[..., ::2],
    }


@on_both(
    *(
        v
        for t in (BF16, FP16)
        for v in (*prefill_variants(128, t, causal=True), decode_variant(4, 128, t))
    )
)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", ["packed", "one row", "head stride"])
def test_reported_L01_views_equal_copies(device: str, name: str, dtype: torch.dtype) -> None:
    tensors = views(device, dtype)
    q, k, v = tensors[name], tensors["keys"], tensors["values"]
    before = q.clone()
    wrapper = flashskip.BatchPrefillWrapper(workspace(device))
    qo, kv = ints(0, len(q), device=device), ints(0, 4, device=device)
    wrapper.plan(qo, kv, 32, 8, 128, q_data_type=dtype, causal=True)
    expected = wrapper.run(*(t.contiguous().clone() for t in (q, k, v)))
    assert torch.equal(wrapper.run(q, k, v), expected)
    requests = normal(12, [1] * len(q), [5, 16, 40, 1][: len(q)], (32, 8), dtype=dtype)
    cache = paged(requests, device)
    decoder = flashskip.BatchDecodeWrapper(workspace(device))
    decoder.plan(*cache.table, 32, 8, 128, 16, q_data_type=dtype)
    single = torch.arange(len(q) + 1, dtype=torch.int32, device=device)
    wrapper.plan_paged(single, *cache.table, 32, 8, 128, 16, q_data_type=dtype, causal=True)
    for each in (decoder, wrapper):
        assert torch.equal(each.run(q, cache.pages), each.run(q.contiguous().clone(), cache.pages))
    assert torch.equal(q, before)


@on_both(DENSE[0], DECODE)
def test_reported_L01_channels_apart_are_refused(device: str) -> None:
    tensors = views(device, BF16)
    wrapper = flashskip.BatchPrefillWrapper(workspace(device))
    wrapper.plan(ints(0, 4, device=device), ints(0, 4, device=device), 32, 8, 128, q_data_type=BF16)
    cache = paged(normal(12, [1] * 4, [5, 16, 40, 1], (32, 8)), device)
    decoder = flashskip.BatchDecodeWrapper(workspace(device))
    decoder.plan(*cache.table, 32, 8, 128, 16, q_data_type=BF16)
    for _ in range(2):  # the second time too: a refused tensor is not remembered as checked
        with pytest.raises(ValueError, match="q has stride 2 in its last dimension"):
            wrapper.run(tensors["last dim"], tensors["keys"], tensors["values"])
        with pytest.raises(ValueError, match="q has stride 2 in its last dimension"):
            decoder.run(tensors["last dim"], cache.pages)


# ---- L03: layouts --------------------------------------------------------------------------------


@on_both(decode_variant(2), decode_variant(1), DENSE[1])
@pytest.mark.parametrize("kv_heads", [4, 16])  # with 16 the shapes are the same in both layouts
@pytest.mark.parametrize("attend", [decode, prefill_paged])
def test_reported_L03_layouts_hold_the_same(device: str, attend, kv_heads: int) -> None:
    requests = normal(14, [1] * 3, [3, 16, 50], (kv_heads * (2 if kv_heads == 4 else 1), kv_heads))
    answers = [attend(requests, device, layout=layout) for layout in ("NHD", "HND")]
    assert answers[0].same_as(answers[1])
    for i, request in enumerate(requests):
        assert_right(request, answers[0].out[i], answers[0].lse[i])


def test_reported_L03_a_cache_of_the_other_layout_is_refused() -> None:
    requests = normal(14, [1] * 3, [3, 16, 50], (8, 4))
    cache = paged(requests, "cpu")
    wrapper = flashskip.BatchDecodeWrapper(torch.empty(0), "HND")
    wrapper.plan(*cache.table, 8, 4, 128, 16, q_data_type=BF16)
    prefiller = flashskip.BatchPrefillWrapper(torch.empty(0), "HND")
    prefiller.plan_paged(ints(0, 1, 2, 3), *cache.table, 8, 4, 128, 16, q_data_type=BF16)
    q = torch.cat([r[0] for r in requests])
    for each in (wrapper, prefiller, wrapper, prefiller):
        with pytest.raises(
            ValueError, match=r"shape .9, 2, 16, 4, 128.; expected .any, 2, 4, 16, 128."
        ):
            each.run(q, cache.pages)
    for name in ("nhd", "XYZ"):
        for kind in (flashskip.BatchDecodeWrapper, flashskip.BatchPrefillWrapper):
            with pytest.raises(
                ValueError, match=f"kv_layout is '{name}'; expected one of 'NHD', 'HND'"
            ):
                kind(kv_layout=name)


def test_reported_L03_ragged_tensors_have_one_layout() -> None:
    """A flag for a cache has no effect on them, so it is refused."""
    requests = normal(14, [5, 3], [16, 50])
    q, k, v = (torch.cat(parts) for parts in zip(*requests, strict=True))
    indices = ints(0, 5, 8), ints(0, 16, 66)
    wrapper = flashskip.BatchPrefillWrapper(torch.empty(0))
    wrapper.plan(*indices, 8, 2, 128, q_data_type=BF16)
    for i, request in enumerate(requests):
        assert_right(request, wrapper.run(q, k, v).split([5, 3])[i])
    with pytest.raises(ValueError, match=r"kv_layout is 'HND' in a plan of ragged K and V"):
        flashskip.BatchPrefillWrapper(torch.empty(0), "HND").plan(
            *indices, 8, 2, 128, q_data_type=BF16
        )
