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


def test_nothing_is_written_of_a_request_without_pages():
    """The slots of a graph that no request fills: they have no pages, or all are of that kind."""
    k, v = torch.randn(2, 6, 3, 8)
    indptr = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    last_page_len = torch.tensor([1, 3, 4], dtype=torch.int32)
    cache = torch.full((6, 2, 4, 3, 8), float("nan"))
    flashskip.append_paged_kv_cache(k, v, cache, indptr, _table()[1], last_page_len)
    written = torch.full_like(cache, float("nan"))
    kept = [0, 1, 4, 5]
    flashskip.append_paged_kv_cache(k[kept], v[kept], written, *_table())
    assert torch.equal(cache.nan_to_num(7), written.nan_to_num(7))
    for indices in (_table()[1], _table()[1][:0]):
        flashskip.append_paged_kv_cache(k, v, cache, indptr * 0, indices, last_page_len)
        assert torch.equal(cache.nan_to_num(7), written.nan_to_num(7))


def test_what_a_gpu_does_with_tokens_that_a_request_lacks(monkeypatch):
    """There nothing is refused, since no content is read on the host: they are not written."""
    monkeypatch.setattr("flashskip.page.check_pages_contents", lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "any", lambda *_: torch.tensor(False))
    k, v = torch.randn(2, 12, 3, 8)  # six of each, of requests of 5 and 4 tokens
    cache = torch.full((6, 2, 4, 3, 8), float("nan"))
    flashskip.append_paged_kv_cache(k, v, cache, *_table())
    for i, new in enumerate((k, v)):
        assert torch.equal(torch.cat([cache[4, i], cache[1, i, :1]]), new[1:6])
        assert torch.equal(cache[3, i], new[8:])
    assert int((~cache.isnan()).sum()) == 2 * 9 * 3 * 8


def test_a_request_shorter_than_what_is_appended_is_refused():
    k, v = torch.randn(2, 12, 3, 8)
    with pytest.raises(ValueError, match="fewer than 6 tokens"):
        flashskip.append_paged_kv_cache(k, v, torch.zeros(6, 2, 4, 3, 8), *_table())


def test_a_cache_of_another_dtype_is_refused():
    k, v = torch.randn(2, 4, 3, 8)
    with pytest.raises(ValueError, match=r"k is torch.float32 .4, 3, 8.*torch.bfloat16 .tokens, 3"):
        flashskip.append_paged_kv_cache(k, v, torch.zeros(6, 2, 4, 3, 8).bfloat16(), *_table())


def _append(**changed):
    k, v = torch.ones(2, 4, 3, 8)
    indptr, indices, last_page_len = _table()
    given = {
        "k": k, "v": v, "paged_kv_cache": torch.zeros(6, 2, 4, 3, 8), "paged_kv_indptr": indptr,
        "paged_kv_indices": indices, "paged_kv_last_page_len": last_page_len, **changed,
    }  # fmt: skip
    flashskip.append_paged_kv_cache(**given)
    return given["paged_kv_cache"]


PAIR = torch.zeros(6, 4, 3, 8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": [1.0]}, "k is list; expected a torch.Tensor"),
        ({"v": None}, "v is NoneType; expected a torch.Tensor"),
        ({"k": torch.ones(4, 8)}, r"k is torch.float32 .4, 8. on cpu; expected .*tokens, 3, 8"),
        ({"k": torch.ones(1, 4, 3, 8)}, r"k is torch.float32 .1, 4, 3, 8. on cpu"),
        ({"v": torch.ones(4, 3, 8, device="meta")}, r"v is .* on meta; expected .* on cpu"),
        ({"v": torch.ones(2, 3, 8)}, "expected the same multiple of batch_size"),
        ({"k": torch.ones(3, 3, 8), "v": torch.ones(3, 3, 8)}, "the same multiple of batch_size"),
        ({"paged_kv_cache": None}, "paged_kv_cache is NoneType"),
        ({"paged_kv_cache": 3}, "paged_kv_cache is int"),
        ({"paged_kv_cache": "ab"}, "paged_kv_cache is str"),
        ({"paged_kv_cache": (PAIR,)}, r"paged_kv_cache has shape .*or a pair"),
        ({"paged_kv_cache": (PAIR, PAIR, PAIR)}, "paged_kv_cache has 3 tensors"),
        ({"paged_kv_cache": (PAIR, 5)}, r"paged_kv_cache\[1\] is int"),
        ({"paged_kv_cache": PAIR}, r"paged_kv_cache has shape .*expected \[pages, 2, "),
        ({"paged_kv_cache": torch.zeros(6, 1, 4, 3, 8)}, r"paged_kv_cache has shape"),
        ({"paged_kv_cache": (PAIR, PAIR[:2])}, r"paged_kv_cache\[1\] is .*expected the pages of"),
        ({"paged_kv_cache": (PAIR, PAIR[:1].expand(6, -1, -1, -1))}, "elements lie apart"),
        ({"paged_kv_cache": torch.zeros(6, 2, 4, 3, 8).requires_grad_()}, "requires a gradient"),
        ({"k": torch.ones(4, 3, 8).requires_grad_()}, "k requires a gradient; expected"),
        ({"v": torch.ones(4, 3, 8).requires_grad_()}, "v requires a gradient; expected"),
        ({"paged_kv_indices": torch.zeros(3, dtype=torch.int32, device="meta")}, "is on meta"),
        ({"paged_kv_indptr": [0, 2, 3]}, "paged_kv_indptr is list"),
    ],
)
def test_wrong_arguments_are_named_and_nothing_is_written(changed, message):
    with pytest.raises((ValueError, TypeError), match=message):
        _append(**changed)
    assert not PAIR.any()
    assert int(_append().sum()) == 2 * 4 * 3 * 8


def test_k_and_v_may_differ_in_head_dim():
    cache = torch.zeros(6, 4, 3, 8), torch.zeros(6, 4, 3, 16)
    _append(v=torch.ones(4, 3, 16), paged_kv_cache=cache)
    assert [int(t.sum()) for t in cache] == [4 * 3 * 8, 4 * 3 * 16]
