"""FlashAttention-4 in prefill, and FlashAttention-3 as vLLM builds it on paged caches."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cases import Case, DecodeCase, PrefillCase
from benchmarks.contestant import FP8_ROUNDING, NOT_ASKED, Contestant, Prepared, Unsupported
from benchmarks.data import Data, DecodeData, PrefillData


@cache
def fa4_available() -> str:
    """Return why FlashAttention-4 cannot run here."""
    if not torch.cuda.is_available():
        return "FlashAttention-4 needs a GPU"
    try:
        importlib.import_module("flash_attn.cute")
    except Exception as error:  # a broken installation is no reason to stop either
        return f"not installed ({error}); pip install flash-attn-4"
    return ""


@cache
def fa3_available() -> str:
    """Return why FlashAttention-3 cannot run here."""
    if not torch.cuda.is_available():
        return "FlashAttention-3 needs a GPU"
    library = _fa3_library()
    if library is None:
        return "not installed; pip install vllm"
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return f"vLLM's build does not load here ({error})"
    return ""


def _fa3_library() -> Path | None:
    """Find the extension inside vLLM without importing vLLM."""
    package = importlib.util.find_spec("vllm")
    folders = package.submodule_search_locations if package else None
    found = [f for d in folders or () for f in Path(d).glob("vllm_flash_attn/_vllm_fa3_C*.so")]
    return found[0] if found else None


def prepare_fa4(case: Case, data: Data) -> Prepared:
    """Prefill: its plain call where requests have one length, its ragged one otherwise."""
    if not isinstance(case, PrefillCase) or case.page_size:
        raise Unsupported(NOT_ASKED)
    assert isinstance(data, PrefillData)
    library = importlib.import_module("flash_attn.cute")
    if case.uniform:
        inputs = (x.unflatten(0, (len(case.kv_lens), -1)) for x in (data.q, data.k, data.v))
        attend = partial(library.flash_attn_func, *inputs)
    else:
        attend = partial(
            library.flash_attn_varlen_func, data.q, data.k, data.v,
            cu_seqlens_q=data.qo_indptr, cu_seqlens_k=data.kv_indptr,
            max_seqlen_q=max(case.qo_lens), max_seqlen_k=max(case.kv_lens),
        )  # fmt: skip

    def run() -> Tensor:
        result = attend(softmax_scale=case.head_dim_qk**-0.5, causal=case.causal)
        return result[0] if isinstance(result, (tuple, list)) else result

    rows = (*data.q.shape[:2], case.head_dim_vo)
    return Prepared(run, to_rows=lambda out: out.reshape(rows))


def prepare_fa3(case: Case, data: Data) -> Prepared:
    """Decode on a page table, and the last tokens of a long prompt; it chooses its splits.

    vLLM builds the ragged form of it alone.
    """
    if isinstance(case, DecodeCase):
        return _prepare_fa3_decode(case, data)
    if case.qo_lens == case.kv_lens or case.page_size:
        raise Unsupported(NOT_ASKED)
    assert isinstance(data, PrefillData)
    out = torch.full_like(data.q, float("nan"))
    ragged = (data.qo_indptr, data.kv_indptr, None, None, None, max(case.qo_lens))
    lens = (*ragged, max(case.kv_lens), None)
    return Prepared(partial(_fa3, data.q, data.k, data.v, out, lens, case.head_dim_qk))


def _prepare_fa3_decode(case: DecodeCase, data: Data) -> Prepared:
    assert isinstance(data, DecodeData)
    q = data.q.unsqueeze(1).to(data.k.dtype)  # of an 8-bit cache, queries of 8 bits
    used = torch.full_like(data.last_page_len, case.kv_len)
    lens = (None, None, None, None, used, None, None, data.page_table.int())
    out = torch.full_like(data.q.unsqueeze(1), float("nan"))
    run = partial(_fa3, q, data.k, data.v, out, lens, case.head_dim)
    rounding, note = (FP8_ROUNDING, "q and P in 8 bits") if case.kv_dtype else (None, "")
    return Prepared(run, to_rows=lambda out: out.squeeze(1), rounding=rounding, note=note)


def _fa3(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lens: tuple, head_dim: int) -> Tensor:
    """Call the operator, whose arguments have no names: causal, no window, splits by itself.

    `lens` is cu_seqlens of q, k, new k; seqused of q, k; max_seqlen of q, k; the page table.
    """
    none = (None,) * 8
    return torch.ops._vllm_fa3_C.fwd(
        q, k, v, None, None, None, out,  # k_new, v_new, q_v
        *lens, *none,  # kv_batch_idx, leftpad, rotary, descale
        head_dim**-0.5, True, -1, -1, 0.0, True, None,  # causal, window, softcap, rotary, schedule
        0, None, 0, None, 1, 0, None,  # num_splits, pack_gqa, sm_margin, sinks, context parallel
    )[0]  # fmt: skip


CONTESTANTS = (
    Contestant("flash-attn 4", prepare_fa4, fa4_available),
    Contestant("flash-attn 3", prepare_fa3, fa3_available),
)
