"""What goes into the oracle: paged caches, and thresholds from their sources."""

import math

import pytest
import torch
from torch import Tensor

from flashskip.reference import final_thresholds, gather_pages

NAN = math.nan
INF = math.inf


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# ---- pages --------------------------------------------------------------------------------------


def filled_cache(pages: int, page_size: int, ids: list[int], length: int) -> Tensor:
    """Fill an NHD cache with NaN, and the entries of one request with K 0, 1, 2 ... and V = -K."""
    cache = torch.full((pages, 2, page_size, 3, 4), NAN)
    for i in range(length):
        cache[ids[i // page_size], 0, i % page_size] = i
        cache[ids[i // page_size], 1, i % page_size] = -i
    return cache


@pytest.mark.parametrize("page_size", [1, 3, 16, 40])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("pair", [False, True])
def test_pages_are_gathered_in_order_and_unused_slots_left(
    page_size: int, layout: str, pair: bool
) -> None:
    length = 37
    pages = -(-length // page_size)
    ids = torch.randperm(pages + 2, generator=torch.Generator().manual_seed(0))[:pages]
    cache = filled_cache(pages + 2, page_size, ids.tolist(), length)
    if layout == "HND":
        cache = cache.transpose(2, 3).contiguous()
    # The other requests: one without pages, whose last page length is then ignored.
    k, v, kv_indptr = gather_pages(
        tuple(cache.unbind(1)) if pair else cache,
        int32(0, 0, pages),
        ids.int(),
        int32(7, length - (pages - 1) * page_size),
        layout,
    )
    expected = torch.arange(37.0)[:, None, None].expand(37, 3, 4)
    assert torch.equal(k, expected)
    assert torch.equal(v, -expected)
    assert kv_indptr.tolist() == [0, 0, 37]
    assert kv_indptr.dtype == torch.int32


def test_pages_outside_the_cache_read_as_zeros() -> None:
    cache = filled_cache(2, 4, [0, 1], 8)
    k, v, _ = gather_pages(cache, int32(0, 4), int32(-1, 1, 2, 0), int32(2))
    assert k[:, 0, 0].tolist() == [0, 0, 0, 0, 4, 5, 6, 7, 0, 0, 0, 0, 0, 1]
    assert v[:, 0, 0].tolist() == [0, 0, 0, 0, -4, -5, -6, -7, 0, 0, 0, 0, 0, -1]


def test_cache_without_pages() -> None:
    cache = torch.zeros(0, 2, 16, 3, 4)
    k, v, kv_indptr = gather_pages(cache, int32(0, 0, 1), int32(5), int32(1, 3))
    assert k.shape == v.shape == (3, 3, 4)
    assert not k.any()
    assert kv_indptr.tolist() == [0, 0, 3]


def test_head_dims_may_differ_in_a_pair() -> None:
    k, v, _ = gather_pages(
        (torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 3, 6)), int32(0, 1), int32(1), int32(4)
    )
    assert (k.shape, v.shape) == ((4, 3, 8), (4, 3, 6))


def test_bad_contents_are_bounded() -> None:
    cache = filled_cache(2, 4, [0, 1], 8)
    indptr = int32(0, 2, 1, 99)  # decreasing, then past the indices
    _, _, kv_indptr = gather_pages(cache, indptr, int32(0, 1), int32(9, 2, -3))
    assert kv_indptr.tolist() == [0, 8, 8, 8]


def test_unknown_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_layout is 'HDN'; it must be 'NHD' or 'HND'"):
        gather_pages(torch.zeros(1, 2, 4, 3, 4), int32(0, 1), int32(0), int32(1), "HDN")


# ---- thresholds ---------------------------------------------------------------------------------


def test_no_source_means_dense() -> None:
    assert final_thresholds([5, 6]) == [None, None]


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
def test_threshold_given_directly_is_final(threshold: float) -> None:
    assert final_thresholds([5, 0], threshold=threshold) == [threshold, threshold]


def test_device_thresholds_are_sanitised() -> None:
    given = torch.tensor([0.25, NAN, -1.0, 1.5, INF, 0.0])
    assert final_thresholds([9] * 6, threshold=given) == [0.25, 0.0, 0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("bad", [NAN, -0.1, INF, 1.01])
def test_host_thresholds_are_checked(bad: float) -> None:
    with pytest.raises(ValueError, match=r"skip_softmax_threshold is .*in \[0, 1\]"):
        final_thresholds([9], threshold=bad)


@pytest.mark.parametrize("bad", [NAN, -0.1, INF])
def test_host_factors_are_checked(bad: float) -> None:
    with pytest.raises(ValueError, match=r"skip_softmax_threshold_scale_factor is .*finite"):
        final_thresholds([9], scale_factor=bad)


def test_factor_is_divided_by_each_requests_own_length() -> None:
    assert final_thresholds([1000, 4000], scale_factor=500.0) == [0.5, 0.125]
    assert final_thresholds([10, 20], scale_factor=50.0, length_exponent=2.0) == [0.5, 0.125]
    assert final_thresholds([10], scale_factor=0.5, length_exponent=0.0) == [0.5]


@pytest.mark.parametrize(("overflow", "beyond"), [("dense", None), ("clamp", 1.0)])
def test_factor_beyond_the_length_follows_overflow(overflow: str, beyond: float | None) -> None:
    result = final_thresholds([100, 200, 400, 0], scale_factor=200.0, overflow=overflow)
    assert result == [beyond, beyond, 0.5, beyond]


def test_lengths_to_divide_by_may_be_given() -> None:
    lengths = torch.tensor([1000, 2000], dtype=torch.int32)
    assert final_thresholds([10, 20], scale_factor=500.0, threshold_kv_len=lengths) == [0.5, 0.25]


def test_device_factors_are_sanitised() -> None:
    given = torch.tensor([NAN, -5.0, INF, 50.0])
    assert final_thresholds([100] * 4, scale_factor=given) == [0.0, 0.0, None, 0.5]


def test_thresholds_are_single_precision() -> None:
    assert final_thresholds([3], scale_factor=1.0) == [float(torch.tensor(1 / 3))]
    assert final_thresholds([3], threshold=0.1) == [float(torch.tensor(0.1))]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.1, "scale_factor": 1.0}, "give one of them"),
        ({"threshold": 0.1, "length_exponent": 2.0}, "only have an effect with"),
        ({"threshold_kv_len": [5, 6]}, "only have an effect with"),
        ({"scale_factor": 1.0, "overflow": "skip"}, "overflow is 'skip'"),
        ({"threshold": torch.zeros(3)}, "one value per request"),
    ],
)
def test_senseless_combinations_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        final_thresholds([5, 6], **options)
