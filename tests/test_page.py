"""Appending to pages, against a plain loop."""

import pytest
import torch

import flashskip


def _table():
    indptr = torch.tensor([0, 2, 3], dtype=torch.int32)
    indices = torch.tensor([4, 1, 3], dtype=torch.int32)
    last_page_len = torch.tensor([1, 4], dtype=torch.int32)  # lengths 5 and 4 with pages of 4
    return indptr, indices, last_page_len


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("as_pair", [False, True])
def test_the_last_tokens_land_in_their_slots_and_nothing_else_changes(layout, as_pair):
    shape = (6, 2, 4, 3, 8) if layout == "NHD" else (6, 2, 3, 4, 8)
    cache = torch.full(shape, float("nan"))
    k, v = torch.randn(2, 4, 3, 8)
    target = (cache[:, 0], cache[:, 1]) if as_pair else cache
    flashskip.append_paged_kv_cache(k, v, target, *_table(), kv_layout=layout)
    nhd = cache if layout == "NHD" else cache.transpose(2, 3)
    for i, new in enumerate((k, v)):
        # request 0: tokens 3 and 4 are the last of page 4 and the first of page 1
        assert torch.equal(nhd[4, i, 3], new[0])
        assert torch.equal(nhd[1, i, 0], new[1])
        assert torch.equal(nhd[3, i, 2], new[2])
        assert torch.equal(nhd[3, i, 3], new[3])
    assert int((~cache.isnan()).sum()) == k.numel() + v.numel()


def test_a_request_shorter_than_what_is_appended_is_refused():
    k, v = torch.randn(2, 12, 3, 8)
    with pytest.raises(ValueError, match="fewer than 6 tokens"):
        flashskip.append_paged_kv_cache(k, v, torch.zeros(6, 2, 4, 3, 8), *_table())


def test_a_cache_of_another_dtype_is_refused():
    k, v = torch.randn(2, 4, 3, 8)
    with pytest.raises(ValueError, match="cache's dtype"):
        flashskip.append_paged_kv_cache(k, v, torch.zeros(6, 2, 4, 3, 8).bfloat16(), *_table())
