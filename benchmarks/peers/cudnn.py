"""cuDNN through torch's SDPA; in decode on unpaged K and V, as a ceiling."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.cases import Case, DecodeCase, PrefillCase
from benchmarks.contestant import Contestant, Prepared, Unsupported
from benchmarks.data import Data, DecodeData, PrefillData
from benchmarks.timing import Clock

BACKEND = SDPBackend.CUDNN_ATTENTION


def available() -> str:
    """Return why cuDNN's attention cannot run here."""
    if not torch.cuda.is_available():
        return "cuDNN attention needs a GPU"
    return "" if torch.backends.cudnn.is_available() else "this torch has no cuDNN"


def prepare(case: Case, data: Data) -> Prepared:
    """Make the call on views of the data."""
    if isinstance(case, PrefillCase):
        return _prepare_prefill(case, data)
    return _prepare_decode(case, data)


def _prepare_prefill(case: PrefillCase, data: PrefillData) -> Prepared:
    if len(set(case.qo_lens)) > 1 or len(set(case.kv_lens)) > 1:
        raise Unsupported("torch SDPA needs requests of equal length")
    if case.causal and case.qo_lens != case.kv_lens:
        raise Unsupported("torch SDPA aligns the causal limit top-left")
    batch = len(case.qo_lens)
    q, k, v = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (data.q, data.k, data.v))

    def run() -> Tensor:
        with sdpa_kernel(BACKEND):
            return scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=True)

    return Prepared(
        run,
        to_rows=lambda out: out.transpose(1, 2).flatten(0, 1),
        paged=not case.page_size,  # it reads the same K and V without their pages
    )


def _prepare_decode(case: DecodeCase, data: DecodeData) -> Prepared:
    """Take the faster of two ways to give cuDNN the query heads of a group."""
    if case.kv_len % case.page_size:
        raise Unsupported("torch SDPA cannot skip the empty slots of last pages")
    batch = data.q.shape[0]
    k, v = (x.view(batch, -1, *x.shape[2:]).transpose(1, 2) for x in (data.k, data.v))

    def group_as_rows() -> Tensor:
        q = data.q.unflatten(1, (case.num_kv_heads, -1))
        with sdpa_kernel(BACKEND):
            return scaled_dot_product_attention(q, k, v)

    def group_as_heads() -> Tensor:
        with sdpa_kernel(BACKEND):
            return scaled_dot_product_attention(data.q.unsqueeze(2), k, v, enable_gqa=True)

    best, note = _fastest(group_as_rows, group_as_heads, clock=Clock(data.q.device))
    return Prepared(
        best, to_rows=lambda out: out.reshape_as(data.q), paged=False, note=f"unpaged, {note}"
    )


def _fastest(*calls: Callable[[], Tensor], clock: Clock) -> tuple[Callable[[], Tensor], str]:
    seconds, refusals = {}, []
    for call in calls:
        try:
            call()
            seconds[call] = clock.estimate(call)[0]
        except RuntimeError as error:  # what SDPA raises where a backend refuses
            refusals.append(str(error).splitlines()[0])
    if not seconds:
        raise Unsupported("; ".join(refusals))
    best = min(seconds, key=seconds.__getitem__)
    return best, best.__name__.replace("_", " ")


CONTESTANTS = (Contestant("cudnn", prepare, available),)
