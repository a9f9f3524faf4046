"""FlashInfer on Hopper: prefill (FA3 backend), the skipping fmha_v2, and three ways to decode.

FlashInfer compiles its kernels on first use, which takes minutes; with FLASHINFER_DISABLE_JIT=1 it
runs those alone that were compiled before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case, DecodeCase, PrefillCase
from benchmarks.contestant import FP8_ROUNDING, NOT_ASKED, Contestant, Prepared, Unsupported
from benchmarks.data import PREFILL_TILE, THRESHOLD, Data, DecodeData, PrefillData
from benchmarks.peers.probe import skipped_share

_WORKSPACE_BYTES = 512 << 20
_XQA_PAGES = (16, 32, 64, 128)


@cache
def available() -> str:
    """Return why FlashInfer cannot run here."""
    if not torch.cuda.is_available():
        return "FlashInfer needs a GPU"
    try:
        importlib.import_module("flashinfer")
    except Exception as error:  # a broken installation is no reason to stop either
        return f"not installed ({error}); pip install flashinfer-python"
    return ""


@cache
def _workspace(device: torch.device, use: str) -> Tensor:
    """Return scratch memory, zero at first, as fmha_v2 and XQA need it."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _built_kernels_only(
    prepare: Callable[[Case, Data], Prepared],
) -> Callable[[Case, Data], Prepared]:
    """Report a kernel that is not there and must not be compiled as an unsupported case."""

    @wraps(prepare)
    def checked(case: Case, data: Data) -> Prepared:
        missing = importlib.import_module("flashinfer.jit.core").MissingJITCacheError
        try:
            prepared = prepare(case, data)
            prepared.run()
        except missing as error:
            raise Unsupported("its kernel is not built, and must not be compiled here") from error
        return prepared

    return checked


def _kinds(data: Data) -> dict[str, Any]:
    return {"q_data_type": data.q.dtype, "kv_data_type": data.k.dtype}


def _output(case: Case, data: Data) -> Tensor:
    head_dim = case.head_dim_vo if isinstance(case, PrefillCase) else case.head_dim
    return data.q.new_full((*data.q.shape[:2], head_dim), float("nan"))


@_built_kernels_only
def prepare_ragged(case: Case, data: Data) -> Prepared:
    """Prefill of ragged K and V; plan() is given CPU tensors, which it reads on the CPU."""
    if not isinstance(case, PrefillCase) or case.page_size:
        raise Unsupported(NOT_ASKED)
    assert isinstance(data, PrefillData)
    prefill = importlib.import_module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper
    wrapper = prefill(_workspace(data.q.device, "float"), "NHD", backend="fa3")
    plan = partial(
        wrapper.plan, data.qo_indptr.cpu(), data.kv_indptr.cpu(), case.num_qo_heads,
        case.num_kv_heads, case.head_dim_qk, head_dim_vo=case.head_dim_vo, causal=case.causal,
        **_kinds(data),
    )  # fmt: skip
    plan()
    out = _output(case, data)
    return Prepared(partial(wrapper.run, data.q, data.k, data.v, out=out), plan=plan)


@_built_kernels_only
def prepare_paged(case: Case, data: Data) -> Prepared:
    """Prefill of a paged cache."""
    if not isinstance(case, PrefillCase) or not case.page_size:
        raise Unsupported(NOT_ASKED)
    assert isinstance(data, PrefillData)
    assert data.pages is not None
    pages = data.pages
    prefill = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    wrapper = prefill(_workspace(data.q.device, "float"), "NHD", backend="fa3")
    plan = partial(
        wrapper.plan, data.qo_indptr.cpu(), pages.indptr.cpu(), pages.indices,
        pages.last_page_len.cpu(), case.num_qo_heads, case.num_kv_heads, case.head_dim_qk,
        case.page_size, head_dim_vo=case.head_dim_vo, causal=case.causal, **_kinds(data),
    )  # fmt: skip
    plan()
    out = _output(case, data)
    return Prepared(partial(wrapper.run, data.q, (pages.k, pages.v), out=out), plan=plan)


@_built_kernels_only
def prepare_fmha_v2(case: Case, data: Data) -> Prepared:
    """Prefill with TensorRT-LLM's skip test, at the same threshold; it has no plan."""
    if not isinstance(case, PrefillCase) or case.page_size:
        raise Unsupported(NOT_ASKED)
    assert isinstance(data, PrefillData)
    if not case.uniform or case.qo_lens != case.kv_lens:
        raise Unsupported("one threshold factor for all lengths; prompts without a cache")
    attend = importlib.import_module("flashinfer.prefill").trtllm_fmha_v2_prefill
    length, out = case.kv_lens[0], _output(case, data)
    lens = torch.full_like(data.kv_indptr[1:], length)

    def run(v: Tensor) -> Tensor:
        return attend(
            (data.q, data.k, v), "SEPARATE_Q_K_V", _workspace(data.q.device, "fmha_v2"), lens,
            length, length, case.head_dim_qk**-0.5, 1.0, len(case.kv_lens), data.qo_indptr,
            data.kv_indptr, out=out, mask_mode="causal" if case.causal else "padding",
            skip_softmax_threshold_scale_factor=THRESHOLD * length,
        )  # fmt: skip

    share = partial(skipped_share, case, data, run, PREFILL_TILE)
    return Prepared(partial(run, data.v), skipped_share=share)


def _prepare_decode(case: Case, data: Data, use_tensor_cores: bool) -> Prepared:
    if not isinstance(case, DecodeCase):
        raise Unsupported(NOT_ASKED)
    assert isinstance(data, DecodeData)
    decode = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper
    workspace = _workspace(data.q.device, "float")
    wrapper = decode(workspace, "NHD", use_tensor_cores=use_tensor_cores, backend="fa2")
    plan = partial(
        wrapper.plan, data.indptr.cpu(), data.indices, data.last_page_len.cpu(), case.num_qo_heads,
        case.num_kv_heads, case.head_dim, case.page_size, **_kinds(data),
    )  # fmt: skip
    plan()
    out = _output(case, data)
    return Prepared(partial(wrapper.run, data.q, (data.k, data.v), out=out), plan=plan)


@_built_kernels_only
def prepare_cuda_cores(case: Case, data: Data) -> Prepared:
    """Decode with ordinary arithmetic."""
    return _prepare_decode(case, data, use_tensor_cores=False)


@_built_kernels_only
def prepare_tensor_cores(case: Case, data: Data) -> Prepared:
    """Decode with its prefill kernel, the heads of a group as rows."""
    return _prepare_decode(case, data, use_tensor_cores=True)


@_built_kernels_only
def prepare_xqa(case: Case, data: Data) -> Prepared:
    """Decode with TensorRT-LLM's XQA; it has no plan, and computes in 8 bits on an 8-bit cache."""
    if not isinstance(case, DecodeCase):
        raise Unsupported(NOT_ASKED)
    assert isinstance(data, DecodeData)
    if case.page_size not in _XQA_PAGES:
        raise Unsupported(f"pages of {', '.join(map(str, _XQA_PAGES))} only")
    attend = importlib.import_module("flashinfer.decode").trtllm_batch_decode_with_kv_cache
    table, out = data.page_table.int(), _output(case, data)
    lens = torch.full_like(data.last_page_len, case.kv_len)
    run = partial(
        attend, data.q, (data.k, data.v), _workspace(data.q.device, "xqa"), table, lens,
        case.kv_len, bmm1_scale=case.head_dim**-0.5, bmm2_scale=1.0, out=out, kv_layout="NHD",
        backend="xqa",
    )  # fmt: skip
    if case.kv_dtype:
        return Prepared(run, rounding=FP8_ROUNDING, note="q and P in 8 bits")
    return Prepared(run)


CONTESTANTS = (
    Contestant("flashinfer ragged", prepare_ragged, available),
    Contestant("flashinfer paged", prepare_paged, available),
    Contestant("flashinfer fmha_v2 skip", prepare_fmha_v2, available, skips=True),
    Contestant("flashinfer cuda cores", prepare_cuda_cores, available),
    Contestant("flashinfer tensor cores", prepare_tensor_cores, available),
    Contestant("flashinfer xqa", prepare_xqa, available),
)
