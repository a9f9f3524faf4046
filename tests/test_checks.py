"""Tensors that do not match a plan are refused before anything runs."""

import pytest
import torch

import flashskip
from flashskip._checks import check_workspace

BF16 = torch.bfloat16


def _ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def _prefill(**options):
    wrapper = flashskip.BatchPrefillWrapper(torch.empty(0))
    wrapper.plan(_ints(0, 3, 7), _ints(0, 5, 9), 4, 2, 64, q_data_type=BF16, **options)
    return wrapper


def _inputs():
    return torch.randn(7, 4, 64).to(BF16), *torch.randn(2, 9, 2, 64).to(BF16)


PREFILL_PLANS = [
    (
        (_ints(0, 3).long(), _ints(0, 5), 4, 2, 64),
        "qo_indptr has dtype torch.int64; expected torch.int32",
    ),
    (
        (_ints(0, 3)[None], _ints(0, 5), 4, 2, 64),
        "qo_indptr has shape .1, 2.; expected one dimension",
    ),
    ((_ints(0, 1, 3, 1)[::3], _ints(0, 5), 4, 2, 64), "qo_indptr has stride"),
    ((_ints(1, 3), _ints(0, 5), 4, 2, 64), r"qo_indptr\[0\] is 1; expected 0"),
    (
        (_ints(0, 3, 2), _ints(0, 5, 5), 4, 2, 64),
        r"qo_indptr\[2\] is 2 after 3; expected offsets that never",
    ),
    ((_ints(0, 3), _ints(0, 5, 9), 4, 2, 64), "kv_indptr has 3 entries; expected 2"),
    ((_ints(), _ints(0), 4, 2, 64), "qo_indptr is empty"),
    (
        (_ints(0, 3), _ints(0, 5), 5, 2, 64),
        "num_qo_heads is 5 with num_kv_heads=2; expected a multiple",
    ),
    ((_ints(0, 3), _ints(0, 5), 4, 0, 64), "num_kv_heads is 0; expected at least 1"),
    (
        (_ints(0, 3), _ints(0, 5), 1025, 1, 64),
        "num_qo_heads is 1025 with num_kv_heads=1: 1025 query heads a KV head; expected at most",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), PREFILL_PLANS, ids=lambda x: str(x)[:30])
def test_prefill_plan_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        flashskip.BatchPrefillWrapper(torch.empty(0)).plan(*arguments, q_data_type=BF16)


def test_a_workspace_without_memory_of_its_own_is_refused():
    with pytest.raises(ValueError, match=r"float_workspace_buffer is not contiguous: strides"):
        check_workspace(torch.empty(1, dtype=torch.uint8).expand(1 << 20), 1 << 20)
    check_workspace(torch.empty(1 << 10, dtype=torch.uint8), 1 << 10)


def test_an_index_list_is_no_tensor():
    with pytest.raises(TypeError, match=r"qo_indptr is list; expected a torch.Tensor"):
        flashskip.BatchPrefillWrapper().plan([0, 3], _ints(0, 5), 4, 2, 64, q_data_type=BF16)


def test_run_before_plan_says_so():
    with pytest.raises(RuntimeError, match="BatchPrefillWrapper has no plan"):
        flashskip.BatchPrefillWrapper().run(*_inputs())


def _changed(which, change):
    tensors = dict(zip("qkv", _inputs(), strict=True))
    tensors[which] = change(tensors[which])
    return tensors


PREFILL_RUNS = [
    (
        _changed("q", lambda t: t[:, :3]),
        "q has shape .7, 3, 64.; expected .any, 4, 64., as planned",
    ),
    (_changed("k", lambda t: t[:, :, :32]), "k has shape .9, 2, 32."),
    (_changed("v", lambda t: t[:5]), "v has shape .5, 2, 64.; expected .9, 2, 64."),
    (_changed("k", lambda t: t.half()), "k has dtype torch.float16; expected torch.bfloat16"),
    (_changed("q", lambda t: t.transpose(0, 2).contiguous().transpose(0, 2)), "q has stride"),
    (
        _changed("q", lambda t: torch.cat([t, t[:, :, :4]], 2)[:, :, :64]),
        "q has stride 136 bytes in dimension 1; expected a multiple of 16",
    ),
    (
        _changed("q", lambda t: torch.cat([t.flatten(), t.flatten()[:8]])[1:-7].view(t.shape)),
        "16-byte",
    ),
    (_changed("q", lambda t: t.requires_grad_()), "q requires a gradient"),
]


@pytest.mark.parametrize(("tensors", "message"), PREFILL_RUNS, ids=lambda x: str(x)[:30])
def test_prefill_run_refuses(tensors, message):
    with pytest.raises(ValueError, match=message):
        _prefill().run(**tensors)


def test_wrong_outputs_are_refused():
    wrapper = _prefill()
    with pytest.raises(ValueError, match=r"out has dtype torch.float32"):
        wrapper.run(*_inputs(), out=torch.empty(7, 4, 64))
    with pytest.raises(ValueError, match=r"lse is torch.float32 .4, 7."):
        wrapper.run(*_inputs(), lse=torch.empty(4, 7))
    with pytest.raises(ValueError, match="lse_base is 'ln'; expected one of 'log2', 'e'"):
        wrapper.run(*_inputs(), lse_base="ln")
    with pytest.raises(ValueError, match="lse_base is 'e' in a run without an LSE"):
        wrapper.run(*_inputs(), lse_base="e")


def test_a_gradient_is_no_fault_under_no_grad():
    q, k, v = _inputs()
    with torch.no_grad():
        _prefill().run(q.requires_grad_(), k, v)


def test_stats_without_counters_are_refused():
    with pytest.raises(ValueError, match="stats is read on a plan without counters"):
        _ = _prefill().stats


def _decode(**changed):
    arguments = {
        "indptr": _ints(0, 2, 3),
        "indices": _ints(0, 1, 2),
        "last_page_len": _ints(4, 1),
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "page_size": 4,
        "q_data_type": BF16,
    }
    wrapper = flashskip.BatchDecodeWrapper(torch.empty(0))
    wrapper.plan(**{**arguments, **changed})
    return wrapper


DECODE_PLANS = [
    ({"last_page_len": _ints(4, 0)}, r"last_page_len\[1\] is 0; expected 1 to page_size .4."),
    ({"last_page_len": _ints(5, 1)}, r"last_page_len\[0\] is 5; expected 1 to page_size .4."),
    ({"last_page_len": _ints(5)}, "last_page_len has 1 entries; expected 2"),
    ({"indices": _ints(0, 1)}, "indptr ends at 3; expected at most len.indices., 2"),
    ({"indices": _ints(0, -1, 2)}, r"indices\[1\] is -1; expected 0 or more"),
    ({"page_size": 0}, "page_size is 0; expected at least 1"),
    ({"head_dim": 60}, "head_dim is 60; expected a multiple of 8"),
    ({"q_len_per_req": 9}, "q_len_per_req is 9; expected 1 to 8"),
    ({"causal": True}, "causal is given to decode, where it has no effect"),
    ({"order": "ascending", "skip_softmax_threshold": 0.1}, "order is given to decode"),
]


@pytest.mark.parametrize(("changed", "message"), DECODE_PLANS, ids=lambda x: str(x)[:30])
def test_decode_plan_refuses(changed, message):
    with pytest.raises(ValueError, match=message):
        _decode(**changed)


def test_decode_run_refuses():
    q, cache = torch.randn(2, 4, 64).to(BF16), torch.randn(3, 2, 4, 2, 64).to(BF16)
    wrapper = _decode()
    wrapper.run(q, cache)
    with pytest.raises(ValueError, match=r"paged_kv_cache has shape .3, 2, 2, 4, 64."):
        wrapper.run(q, cache.transpose(2, 3).contiguous())
    with pytest.raises(ValueError, match=r"q has shape .1, 4, 64.; expected .2, 4, 64."):
        wrapper.run(q[:1], cache)
    for tensors in ((), (cache[:, 0], cache[:, 1], None)):
        with pytest.raises(ValueError, match=f"paged_kv_cache has {len(tensors)} tensors"):
            wrapper.run(q, tensors)
    with pytest.raises(ValueError, match=r"k_scale is given with a torch.bfloat16 cache"):
        wrapper.run(q, cache, k_scale=2.0)
    with pytest.raises(
        ValueError, match=r"indices\[2\] is 2; expected 0 to 1, the pages of the cache"
    ):
        wrapper.run(q, cache[:2])


def test_check_indices_finds_what_plan_does_not_read():
    flashskip.check_indices(qo_indptr=_ints(0, 2), kv_indptr=_ints(0, 5))
    with pytest.raises(ValueError, match=r"kv_indptr\[1\] is -1"):
        flashskip.check_indices(kv_indptr=_ints(0, -1))
    table = {
        "paged_kv_indptr": _ints(0, 1),
        "paged_kv_indices": _ints(7),
        "paged_kv_last_page_len": _ints(2),
    }
    flashskip.check_indices(**table, page_size=4)
    with pytest.raises(ValueError, match=r"paged_kv_indices\[0\] is 7; expected 0 to 3"):
        flashskip.check_indices(**table, page_size=4, num_pages=4)
    with pytest.raises(ValueError, match="page_size is None"):
        flashskip.check_indices(**table)


CHECKED_INDICES = [
    ({"page_size": 16}, "0 of the three page table tensors are given, page_size is 16"),
    ({"num_pages": 3}, "num_pages is 3 without a page table, where it has no effect"),
    ({"num_pages": -1}, "num_pages is -1; expected at least 0"),
    ({"num_pages": "3"}, "num_pages is '3'; expected an int"),
    ({"num_pages": 0, "page_size": 4, "table": True}, "is 0; expected no page id, as the cache"),
    ({"kv_indptr": _ints(0, 1, 2)}, "kv_indptr has 3 entries; expected 2"),
    ({"qo_indptr": _ints(0, 1, 2), "page_size": 4, "table": True}, "paged_kv_indptr has 2 entries"),
]


@pytest.mark.parametrize(("given", "message"), CHECKED_INDICES)
def test_check_indices_takes_nothing_without_effect(given, message):
    given = {"qo_indptr": _ints(0, 1), **given}
    if given.pop("table", False):
        names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        given |= dict(zip(names, (_ints(0, 1), _ints(0), _ints(1)), strict=True))
    with pytest.raises((ValueError, TypeError), match=message):
        flashskip.check_indices(**given)


def test_offsets_that_decrease_by_more_than_32_bits_hold():
    far = _ints(0, 2**31 - 1, -(2**31))
    with pytest.raises(ValueError, match=r"qo_indptr\[2\] is -2147483648 after 2147483647"):
        flashskip.check_indices(qo_indptr=far)
    with pytest.raises(ValueError, match=r"qo_indptr\[2\] is -2147483648"):
        flashskip.BatchPrefillWrapper(torch.empty(0)).plan(
            far, _ints(0, 0, 0), 2, 2, 64, q_data_type=BF16
        )
    with pytest.raises(ValueError, match=r"indptr\[2\] is -2147483648"):
        _decode(indptr=far)


def test_head_dims_whose_rows_cannot_lie_16_bytes_apart_are_refused():
    for dims, message in (((60,), "head_dim_qk is 60"), ((64, 60), "head_dim_vo is 60")):
        wrapper = flashskip.BatchPrefillWrapper(torch.empty(0))
        with pytest.raises(ValueError, match=f"{message}; expected a multiple of 8"):
            wrapper.plan(_ints(0, 3), _ints(0, 5), 4, 2, *dims, q_data_type=BF16)


def test_decode_refuses_a_vote_that_it_does_not_have():
    options = {"skip_softmax_threshold": 0.1}
    for vote_kv in (None, 64):
        _decode(vote_kv=vote_kv, **options)
    with pytest.raises(flashskip.UnsupportedVariant, match="vote_kv is 128 in decode; supported"):
        _decode(vote_kv=128, **options)


def test_index_tensors_are_on_a_device_that_holds_numbers():
    meta = _ints(0, 3).to("meta")
    wrapper = flashskip.BatchPrefillWrapper(torch.empty(0))
    for indices in ((meta, meta), (_ints(0, 3), meta), (meta, _ints(0, 3))):
        with pytest.raises(
            ValueError, match=r"(qo|kv)_indptr is on meta; expected a CPU or CUDA tensor"
        ):
            wrapper.plan(*indices, 4, 2, 64, q_data_type=BF16)
    with pytest.raises(ValueError, match="indptr is on meta; expected a CPU or CUDA tensor"):
        _decode(
            **{n: _ints(0, 1).to("meta") for n in ("indptr", "indices")},
            last_page_len=_ints(1).to("meta"),
        )
    wrapper = flashskip.BatchPrefillWrapper(torch.empty(0, device="meta"))
    with pytest.raises(ValueError, match="float_workspace_buffer is on meta"):
        wrapper.plan(_ints(0, 3), _ints(0, 3), 4, 2, 64, q_data_type=BF16)
