"""Prefill on a paged cache on the CPU: the keys of a ragged batch, wherever they lie."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import HeadDim, Ragged, make_ragged
from paged import Pages, to_pages

import flashskip

QO, KV = (70, 0, 5, 1), (130, 77, 0, 200)
OPTIONS = {"causal": True, "skip_softmax_threshold": 0.02, "collect_stats": True}


def batch_of(head_dim: HeadDim = 64) -> Ragged:
    return make_ragged(QO, KV, 4, 2, head_dim, device="cpu", hot=0.3, gain=8.0)


def plan_pages(batch: Ragged, pages: Pages, **options) -> flashskip.BatchPrefillWrapper:
    wrapper = flashskip.BatchPrefillWrapper(torch.empty(0), pages.layout)
    wrapper.plan_paged(
        batch.qo_indptr, *pages.table, 4, 2, batch.q.shape[2], pages.page_size,
        head_dim_vo=batch.v.shape[2], **{"q_data_type": batch.q.dtype, **OPTIONS, **options},
    )  # fmt: skip
    return wrapper


@pytest.mark.parametrize("head_dim", [64, (192, 128)], ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 100])
def test_paged_is_ragged(page_size, head_dim):
    batch = batch_of(head_dim)
    ragged = flashskip.BatchPrefillWrapper(torch.empty(0))
    dims = (batch.q.shape[2], batch.v.shape[2])
    ragged.plan(batch.qo_indptr, batch.kv_indptr, 4, 2, *dims, q_data_type=batch.q.dtype, **OPTIONS)
    out, lse = ragged.run(batch.q, batch.k, batch.v, return_lse=True)
    forms = ["pair", "strided"] + ["tensor"] * (dims[0] == dims[1])
    for layout, form in ((layout, form) for layout in ("NHD", "HND") for form in forms):
        pages = to_pages(batch, page_size, layout, form)
        wrapper = plan_pages(batch, pages)
        assert wrapper.geometry == ragged.geometry
        again = wrapper.run(batch.q, pages.cache, return_lse=True)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)
        assert torch.equal(wrapper.stats, ragged.stats)
        assert torch.equal(wrapper.run(batch.q, paged_kv_cache=pages.cache), out)


def test_lengths_and_pages_written_in_place_are_read_by_the_next_run():
    batch = batch_of()
    pages = to_pages(batch, 16)
    wrapper = plan_pages(batch, pages)
    starts, ids, last = pages.table
    out = wrapper.run(batch.q, pages.cache)
    last[0] -= 1
    shorter = wrapper.run(batch.q, pages.cache)
    assert not torch.equal(shorter[:70], out[:70])
    assert torch.equal(shorter[70:], out[70:])
    ids[starts[2]] = len(pages.k)
    with pytest.raises(ValueError, match=r"paged_kv_indices\[\d+\] is \d+; expected 0 to"):
        wrapper.run(batch.q, pages.cache)


def test_a_factor_divides_by_each_requests_keys():
    batch = batch_of()
    pages = to_pages(batch, 16)
    lengths = torch.tensor(KV, dtype=torch.float32)
    factor = {"skip_softmax_threshold": None, "skip_softmax_threshold_scale_factor": 20.0}
    live = {"skip_softmax_threshold": (20.0 / lengths).nan_to_num(posinf=0).clamp(max=1)}
    a, b = plan_pages(batch, pages, **factor), plan_pages(batch, pages, **live)
    assert torch.equal(a.run(batch.q, pages.cache), b.run(batch.q, pages.cache))
    assert torch.equal(a.stats, b.stats)


def test_a_layout_without_effect_is_refused():
    batch = batch_of()
    wrapper = flashskip.BatchPrefillWrapper(torch.empty(0), "HND")
    with pytest.raises(ValueError, match="kv_layout is 'HND' in a plan of ragged K and V"):
        wrapper.plan(batch.qo_indptr, batch.kv_indptr, 4, 2, 64, q_data_type=batch.q.dtype)


def test_run_takes_what_the_plan_is_for():
    batch = batch_of()
    pages = to_pages(batch, 16)
    paged = plan_pages(batch, pages)
    ragged = flashskip.BatchPrefillWrapper(torch.empty(0))
    ragged.plan(batch.qo_indptr, batch.kv_indptr, 4, 2, 64, q_data_type=batch.q.dtype)
    with pytest.raises(TypeError, match=r"run\(\) after plan_paged\(\) got k and v; expected"):
        paged.run(batch.q, batch.k, batch.v)
    with pytest.raises(TypeError, match=r"after plan_paged\(\) got no cache"):
        paged.run(batch.q)
    with pytest.raises(TypeError, match=r"run\(\) after plan\(\) got no k and v; expected"):
        ragged.run(batch.q, pages.cache)
    with pytest.raises(TypeError, match=r"after plan\(\) got paged_kv_cache; expected"):
        ragged.run(batch.q, paged_kv_cache=pages.cache)
    with pytest.raises(TypeError, match="paged_kv_cache is int; expected one 5-D tensor or a pair"):
        paged.run(batch.q, 3)
    with pytest.raises(ValueError, match="paged_kv_cache has 3 tensors; expected one 5-D tensor"):
        paged.run(batch.q, (pages.k, pages.v, pages.v))


def test_caches_that_do_not_match_the_plan_are_refused():
    batch, other = batch_of(), batch_of((192, 128))
    pages = to_pages(batch, 16)
    wrapper = plan_pages(batch, pages)
    with pytest.raises(ValueError, match=r"paged_kv_cache has shape .*\(any, 2, 16, 2, 64"):
        wrapper.run(batch.q, pages.cache.transpose(2, 3))
    with pytest.raises(ValueError, match=r"paged_kv_cache\[1\] has shape"):
        wrapper.run(batch.q, (pages.k, pages.v[1:]))
    with pytest.raises(ValueError, match="paged_kv_cache has 2 in dimension 0; expected at least"):
        wrapper.run(batch.q, pages.cache[:2])
    wrapper = plan_pages(other, to_pages(other, 16, form="pair"))
    with pytest.raises(ValueError, match=r"expected a pair \(k, v\), as K and V differ"):
        wrapper.run(other.q, torch.zeros(60, 2, 16, 2, 192, dtype=other.q.dtype))


def test_page_tables_are_checked_by_name():
    batch = batch_of()
    pages = to_pages(batch, 16)
    starts, ids, last = pages.table
    for table, message in (
        ((starts, ids, last + 17), r"paged_kv_last_page_len\[\d\] is \d+; expected 1 to page_size"),
        ((starts, ids, last[1:]), "paged_kv_last_page_len has 3 entries; expected 4"),
        ((starts + 9, ids, last), r"paged_kv_indptr\[0\] is 9; expected 0"),
        ((starts[:-1], ids, last[:-1]), "paged_kv_indptr has 4 entries; expected 5"),
        ((starts, ids.long(), last), "paged_kv_indices has dtype torch.int64"),
    ):
        wrapper = flashskip.BatchPrefillWrapper(torch.empty(0))
        with pytest.raises(ValueError, match=message):
            wrapper.plan_paged(batch.qo_indptr, *table, 4, 2, 64, 16, q_data_type=batch.q.dtype)


def test_no_pages_at_all():
    q = torch.randn(5, 4, 64, dtype=torch.bfloat16)
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([0, 5], [0, 0], [], [-7])]
    wrapper = flashskip.BatchPrefillWrapper(torch.empty(0))
    wrapper.plan_paged(*ints, 4, 2, 64, 16, q_data_type=q.dtype)
    out, lse = wrapper.run(q, torch.empty(0, 2, 16, 2, 64, dtype=q.dtype), return_lse=True)
    assert not out.any()
    assert (lse == -math.inf).all()
