"""The oracle's output against plain attention, and properties of the whole call."""

import math

import pytest
import torch
from plain_attention import INF, LOG2_E, one_request, plain, plain_scores, random_qkv
from plain_attention import one_thread as one_thread  # a fixture
from torch import Tensor

from flashskip.geometry import Geometry
from flashskip.reference import attention

SHAPES = [
    # qo_len, kv_len, (query heads, KV heads)
    (300, 300, (6, 2)),
    (5, 700, (6, 2)),
    (200, 70, (4, 4)),
    (1, 1, (1, 1)),
    (65, 129, (7, 1)),
    (193, 500, (9, 3)),
]


@pytest.mark.parametrize("window_left", [-1, 0, 40])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_dense_prefill_is_plain_attention(
    shape: tuple[int, int, tuple[int, int]], causal: bool, window_left: int
) -> None:
    qo_len, kv_len, heads = shape
    q, k, v = random_qkv(0, qo_len, kv_len, heads)
    geometry = Geometry.prefill(causal=causal, window_left=window_left)
    check_dense(q, k, v, geometry)


@pytest.mark.parametrize("window_left", [-1, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_dense_decode_is_plain_attention(
    shape: tuple[int, int, tuple[int, int]], window_left: int
) -> None:
    qo_len, kv_len, heads = shape
    q, k, v = random_qkv(1, qo_len, kv_len, heads)
    check_dense(q, k, v, Geometry.decode(heads[0] // heads[1], window_left=window_left))


def check_dense(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> None:
    request = geometry.of(len(q), len(k))
    s = plain_scores(q, k, 0.3, request)
    out, lse = plain(s, v.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(0, 1))
    blind = (s == -INF).all(-1)
    for threshold in (None, 0.0):
        result = one_request(q, k, v, geometry, sm_scale=0.3, thresholds=[threshold])
        expected = out.masked_fill(blind[..., None], 0).transpose(0, 1)
        torch.testing.assert_close(result.out, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(result.lse, lse.T, rtol=1e-12, atol=1e-12)
        assert not result.bound.any()
        assert not result.skip_map[0].skipped.any()
    assert not result.out.transpose(0, 1)[blind].any()
    assert (result.lse.T[blind] == -INF).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_soft_cap_and_default_scale(dtype: torch.dtype) -> None:
    q, k, v = random_qkv(2, 70, 200)
    geometry = Geometry.prefill(causal=True)
    result = one_request(q, k, v, geometry, logits_soft_cap=5.0, dtype=dtype)
    s = plain_scores(q, k, 0.25, geometry.of(70, 200), soft_cap=5.0)
    out, lse = plain(s, v.repeat_interleave(2, 1).transpose(0, 1))
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(result.out, out.transpose(0, 1).to(dtype), rtol=0, atol=tolerance)
    torch.testing.assert_close(result.lse, lse.T.to(dtype), rtol=tolerance, atol=tolerance)


def test_sinks_join_the_denominator_as_one_more_key_without_value() -> None:
    q, k, v = random_qkv(3, 90, 60)
    sinks = torch.tensor([-2.0, 0.5, 30.0, -INF])
    geometry = Geometry.prefill(causal=True)
    result = one_request(q, k, v, geometry, sinks=sinks)
    s = plain_scores(q, k, 0.25, geometry.of(90, 60))
    s = torch.cat([s, sinks.double()[:, None, None].expand(-1, 90, 1)], -1)
    v = torch.cat([v.repeat_interleave(2, 1), torch.zeros(1, 4, 8)]).transpose(0, 1)
    out, lse = plain(s, v)
    torch.testing.assert_close(
        result.out, out.nan_to_num(0).transpose(0, 1), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(result.lse, lse.T, rtol=1e-12, atol=1e-12)
    # Rows that see no key: only the sink is left of their LSE.
    assert torch.equal(result.lse[0], (sinks.double() * LOG2_E))
    assert not result.out[:30].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_zero_never_skips_and_equals_dense_and_any_threshold_that_skips_nothing(
    dtype: torch.dtype,
) -> None:
    q, k, v = random_qkv(4, 300, 300)
    geometry = Geometry.prefill(causal=True)
    dense, zero, tiny_threshold = (
        one_request(q, k, v, geometry, sm_scale=0.01, thresholds=[x], dtype=dtype, skip_map=False)
        for x in (None, 0.0, 1e-30)
    )
    assert dense.skip_map is None
    assert tiny_threshold.counts[..., 0].sum() == 0
    for result in (zero, tiny_threshold):
        assert torch.equal(result.out, dense.out)
        assert torch.equal(result.lse, dense.lse)
        assert torch.equal(result.counts, dense.counts)


def test_decisions_do_not_depend_on_batch_mates_and_runs_repeat() -> None:
    lengths = [(100, 260), (0, 40), (30, 0), (1, 300), (130, 130)]
    parts = [random_qkv(i, *length) for i, length in enumerate(lengths)]
    q, k, v = (torch.cat(tensors).float() for tensors in zip(*parts, strict=True))
    qo_indptr = torch.tensor([0, *(n for n, _ in lengths)]).cumsum(0).int()
    kv_indptr = torch.tensor([0, *(n for _, n in lengths)]).cumsum(0).int()
    thresholds = [0.3, 0.3, 0.3, None, 0.02]
    # Rows and keys past the last request hold NaN.
    q, k, v = (torch.cat([x, torch.full_like(x[:5], math.nan)]) for x in (q, k, v))
    for geometry in (Geometry.prefill(causal=True), Geometry.decode(2)):
        batch, again = (
            attention(
                q,
                k,
                v,
                qo_indptr=qo_indptr,
                kv_indptr=kv_indptr,
                geometry=geometry,
                thresholds=thresholds,
                dtype=torch.float32,
            )
            for _ in range(2)
        )
        assert torch.equal(batch.out, again.out)
        assert torch.equal(batch.lse, again.lse)
        assert not batch.out[qo_indptr[-1] :].any()
        for i, (threshold, part) in enumerate(zip(thresholds, parts, strict=True)):
            alone = one_request(
                *(x.float() for x in part), geometry, thresholds=[threshold], dtype=torch.float32
            )
            rows = slice(qo_indptr[i], qo_indptr[i + 1])
            assert torch.equal(batch.skip_map[i].gap, alone.skip_map[0].gap)
            assert torch.equal(batch.skip_map[i].state, alone.skip_map[0].state)
            assert torch.equal(batch.out[rows], alone.out)
            assert torch.equal(batch.lse[rows], alone.lse)
            assert torch.equal(batch.bound[rows], alone.bound)
            assert torch.equal(batch.counts[i], alone.counts[0])


def test_float32_decides_as_float64_outside_a_rounding_band() -> None:
    q, k, v = random_qkv(5, 400, 400, (4, 2), (64, 64))
    q, k, v = (x.bfloat16() for x in (q, k, v))
    for geometry in (Geometry.prefill(causal=True), Geometry.decode(2)):
        exact, single = (
            one_request(q, k, v, geometry, sm_scale=0.02, thresholds=[0.1], dtype=dtype)
            for dtype in (torch.float64, torch.float32)
        )
        exact_map, single_map = exact.skip_map[0], single.skip_map[0]
        differs = exact_map.state != single_map.state
        assert not (differs & (exact_map.margin.abs() > 1e-4)).any()
        assert exact.counts[..., 0].sum() > 0
        if not differs.any():
            torch.testing.assert_close(single.out.double(), exact.out, rtol=0, atol=2e-4)
            torch.testing.assert_close(single.lse.double(), exact.lse, rtol=0, atol=2e-4)
            torch.testing.assert_close(single.bound.double(), exact.bound, rtol=1e-3, atol=0)


def test_chunks_of_heads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = random_qkv(6, 130, 200, (12, 4))
    expected = one_request(q, k, v, Geometry.prefill(causal=True), thresholds=[0.1])
    for limit in (1, 2 * 128 * 256, 5 * 128 * 256, 7 * 128 * 256):
        monkeypatch.setattr("flashskip.reference._request._MAX_SCORES", limit)
        result = one_request(q, k, v, Geometry.prefill(causal=True), thresholds=[0.1])
        assert torch.equal(result.skip_map[0].state, expected.skip_map[0].state)
        torch.testing.assert_close(result.out, expected.out, rtol=0, atol=1e-13)


def test_skipped_tiles_cost_no_exponential_and_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = random_qkv(7, 64, 1024, (2, 1))
    v[:, :] = math.nan
    v[-128:] = 1.0
    # Only the last load tile is kept, so that the NaN of all other values is never touched.
    k[:-128] = -k[-1:] * 10
    q[:] = k[-1]
    geometry = Geometry.prefill(order="descending")
    result = one_request(q, k, v, geometry, thresholds=[0.5])
    assert result.skip_map[0].skipped.sum() >= 2 * 14
    torch.testing.assert_close(result.out, torch.ones_like(result.out))


def test_indptr_is_clamped_to_the_tensors() -> None:
    q, k, v = random_qkv(8, 10, 20)
    geometry = Geometry.prefill(causal=True)
    result = attention(
        q, k, v, qo_indptr=[0, 4, 2, 99], kv_indptr=[0, 30, 5, 20], geometry=geometry
    )
    assert [m.geometry.qo_len for m in result.skip_map] == [4, 0, 8]
    assert [m.geometry.kv_len for m in result.skip_map] == [20, 0, 15]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.zeros(4, 2, 8)}, "q and k in head_dim"),
        ({"v": torch.zeros(5, 2, 16)}, "k and v must agree"),
        ({"q": torch.zeros(4, 16)}, "q has shape"),
        ({"q": torch.zeros(4, 3, 16)}, "q has 3 heads and k has 2"),
        ({"sinks": torch.zeros(2)}, "sinks has shape"),
        ({"thresholds": [0.1, 0.1]}, "thresholds has 2 entries"),
        ({"thresholds": [1.5]}, "thresholds holds 1.5"),
        ({"thresholds": [math.nan]}, "thresholds holds nan"),
        ({"kv_indptr": [0, 4, 4]}, "kv_indptr has 3 entries"),
    ],
)
def test_misfits_are_refused(changes: dict[str, object], message: str) -> None:
    given = {
        "q": torch.zeros(4, 4, 16),
        "k": torch.zeros(4, 2, 16),
        "v": torch.zeros(4, 2, 16),
        "qo_indptr": [0, 4],
        "kv_indptr": [0, 4],
        "geometry": Geometry.prefill(),
    } | changes
    with pytest.raises(ValueError, match=message):
        attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)
