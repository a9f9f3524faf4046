"""What the cases from public bug reports share: data, plain attention in float64, tolerances.

A request is a triple (q, k, v) of CPU tensors in their stored dtype, ``[tokens, heads, dim]``. LSE
are in natural-log units throughout: the runs here ask for ``lse_base="e"``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import indptr, poisoned
from torch import Tensor

import flashskip
from flashskip._options import PlanOptions
from flashskip.variant import Variant

BF16, FP16 = torch.bfloat16, torch.float16
Request = tuple[Tensor, Tensor, Tensor]


# ---- data ----------------------------------------------------------------------------------------


def normal(
    seed: int,
    qo_lens: Sequence[int],
    kv_lens: Sequence[int],
    heads: tuple[int, int] = (8, 2),
    head_dim: int = 128,
    dtype: torch.dtype = BF16,
) -> list[Request]:
    """N(0, 1) requests, drawn on the CPU in float32 so that every machine has the same."""
    g = torch.Generator().manual_seed(seed)

    def draw(tokens: int, num_heads: int) -> Tensor:
        return torch.randn(tokens, num_heads, head_dim, generator=g).to(dtype)

    pairs = zip(qo_lens, kv_lens, strict=True)
    return [(draw(qo, heads[0]), draw(kv, heads[1]), draw(kv, heads[1])) for qo, kv in pairs]


def dial(
    logits: Tensor,
    qo_len: int,
    heads: tuple[int, int] = (2, 1),
    head_dim: int = 128,
    block: int = 64,
) -> Request:
    """Keys with the given logits at sm_scale 1; V shows in channel d the mass of key block d."""
    q = torch.zeros(qo_len, heads[0], head_dim)
    k = torch.zeros(len(logits), heads[1], head_dim)
    q[..., 0], k[..., 0] = 1, logits[:, None]
    channel = torch.arange(len(logits)) // block
    v = torch.nn.functional.one_hot(channel, head_dim)[:, None].expand(-1, heads[1], -1)
    return q.to(BF16), k.to(BF16), v.to(BF16).contiguous()


def twin_peak(length: int, peak: float, qo_len: int, **options: Any) -> Request:
    """The first and the last 256 keys have logit `peak`, all others 0."""
    logits = torch.zeros(length)
    logits[:256] = logits[-256:] = peak
    return dial(logits, qo_len, **options)


# ---- plain attention -----------------------------------------------------------------------------


def scores(request: Request, causal: bool = False, sm_scale: float | None = None) -> Tensor:
    """Masked scores ``[heads, qo_len, kv_len]`` in float64."""
    q, k, _ = request
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = torch.einsum("qhd,khd->hqk", q.double(), keys) * (sm_scale or q.shape[2] ** -0.5)
    if causal:
        visible = torch.arange(len(k)) <= torch.arange(len(q))[:, None] + len(k) - len(q)
        s = s.masked_fill(~visible, -math.inf)
    return s


def ref64(
    request: Request, causal: bool = False, sm_scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Output and LSE; a row without keys is 0 and -inf."""
    q, k, v = request
    s = scores(request, causal, sm_scale)
    values = v.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    lse = s.logsumexp(-1) if len(k) else s.new_full(s.shape[:2], -math.inf)
    p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0)[..., None])
    return torch.einsum("hqk,khd->qhd", p, values), lse.T


def assert_right(
    request: Request,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
) -> None:
    """Within TB or TH of plain attention, LSE within TL; rows without keys exactly 0 and -inf."""
    expected, expected_lse = ref64(request, causal, sm_scale)
    assert_close(out, expected, request[0].dtype)
    blind = expected_lse == -math.inf
    assert (out[blind] == 0).all()
    if lse is not None:
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-3)


def assert_close(out: Tensor, expected: Tensor, dtype: torch.dtype = BF16) -> None:
    """TB for bfloat16, TH for float16."""
    atol, rtol = {BF16: (4e-3, 1e-2), FP16: (1e-3, 2e-3)}[dtype]
    torch.testing.assert_close(out.double(), expected.double(), rtol=rtol, atol=atol)


# ---- runs ----------------------------------------------------------------------------------------


@dataclass
class Answer:
    """Outputs and LSE of each request on the CPU, and the wrapper that computed them."""

    out: list[Tensor]
    lse: list[Tensor]
    wrapper: Any

    def same_as(self, other: Answer) -> bool:
        """Whether two answers are equal, bit for bit."""
        pairs = zip([*self.out, *self.lse], [*other.out, *other.lse], strict=True)
        return all(torch.equal(a, b) for a, b in pairs)


def workspace(device: str) -> Tensor | None:
    """A CPU workspace says that the plan runs there."""
    return torch.empty(0) if device == "cpu" else None


def prefill(
    requests: Sequence[Request], device: str, *, surplus: float | None = None, **options: Any
) -> Answer:
    """Run ragged requests into poisoned outputs; `surplus` fills 64 more rows of K and V."""
    q, k, v = (torch.cat(parts) for parts in zip(*requests, strict=True))
    qo_lens, kv_lens = [len(r[0]) for r in requests], [len(r[1]) for r in requests]
    if surplus is not None:
        k, v = (torch.cat([t, torch.full_like(t[:1], surplus).expand(64, -1, -1)]) for t in (k, v))
    wrapper = flashskip.BatchPrefillWrapper(workspace(device))
    indices = (indptr(qo_lens, device), indptr(kv_lens, device))
    options = {"q_data_type": q.dtype, **options}
    wrapper.plan(*indices, q.shape[1], k.shape[1], q.shape[2], **options)
    out, lse = poisoned(q.shape, q.dtype, device), poisoned(q.shape[:2], torch.float32, device)
    wrapper.run(*(t.to(device) for t in (q, k, v)), out=out, lse=lse, lse_base="e")
    return Answer(list(out.cpu().split(qo_lens)), list(lse.cpu().split(qo_lens)), wrapper)


@dataclass
class Cache:
    """A page table and NHD pages that hold some requests; unused slots hold `fill`."""

    pages: Tensor  # [pages, 2, page_size, heads, dim]
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor

    @property
    def table(self) -> tuple[Tensor, Tensor, Tensor]:
        """The page table, in the order of `plan`."""
        return self.indptr, self.indices, self.last_page_len


def paged(
    requests: Sequence[Request], device: str, page_size: int = 16, fill: float = math.nan
) -> Cache:
    """Lay K and V of requests into shuffled pages with gaps between them."""
    lengths = [len(k) for _, k, _ in requests]
    counts = [-(-n // page_size) for n in lengths]
    num_pages = sum(counts) + 3
    ids = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0))[: sum(counts)]
    heads, head_dim = requests[0][1].shape[1:]
    pages = torch.full((num_pages, 2, page_size, heads, head_dim), fill, dtype=requests[0][1].dtype)
    for (_, k, v), mine in zip(requests, ids.split(counts), strict=True):
        place = mine.repeat_interleave(page_size)[: len(k)], torch.arange(len(k)) % page_size
        pages[place[0], 0, place[1]], pages[place[0], 1, place[1]] = k, v
    last = [(n - 1) % page_size + 1 if n else 1 for n in lengths]
    return Cache(
        pages.to(device),
        indptr(counts, device),
        ids.to(device=device, dtype=torch.int32),
        torch.tensor(last, dtype=torch.int32, device=device),
    )


def decode(
    requests: Sequence[Request],
    device: str,
    *,
    page_size: int = 16,
    layout: str = "NHD",
    fill: float = math.nan,
    **options: Any,
) -> Answer:
    """Run the same number of query tokens of each request on a paged cache."""
    cache = paged(requests, device, page_size, fill)
    q = torch.cat([r[0] for r in requests])
    wrapper = flashskip.BatchDecodeWrapper(workspace(device), layout)
    shape = (q.shape[1], requests[0][1].shape[1], q.shape[2], page_size)
    options = {"q_data_type": q.dtype, **options}
    wrapper.plan(*cache.table, *shape, **options)
    out, lse = poisoned(q.shape, q.dtype, device), poisoned(q.shape[:2], torch.float32, device)
    pages = cache.pages if layout == "NHD" else cache.pages.transpose(2, 3).contiguous()
    wrapper.run(q.to(device), pages, out=out, lse=lse, lse_base="e")
    rows = len(q) // len(requests)
    return Answer(list(out.cpu().split(rows)), list(lse.cpu().split(rows)), wrapper)


def prefill_paged(
    requests: Sequence[Request],
    device: str,
    *,
    page_size: int = 16,
    layout: str = "NHD",
    fill: float = math.nan,
    **options: Any,
) -> Answer:
    """Run prefill on a paged cache, into poisoned outputs."""
    cache = paged(requests, device, page_size, fill)
    q, qo_lens = torch.cat([r[0] for r in requests]), [len(r[0]) for r in requests]
    wrapper = flashskip.BatchPrefillWrapper(workspace(device), layout)
    shape = (q.shape[1], requests[0][1].shape[1], q.shape[2], page_size)
    options = {"q_data_type": q.dtype, **options}
    wrapper.plan_paged(indptr(qo_lens, device), *cache.table, *shape, **options)
    out, lse = poisoned(q.shape, q.dtype, device), poisoned(q.shape[:2], torch.float32, device)
    pages = cache.pages if layout == "NHD" else cache.pages.transpose(2, 3).contiguous()
    wrapper.run(q.to(device), pages, out=out, lse=lse, lse_base="e")
    return Answer(list(out.cpu().split(qo_lens)), list(lse.cpu().split(qo_lens)), wrapper)


PREFILLS = (prefill, prefill_paged)  # what is said of one holds for the other


# ---- the same test on the CPU path and on a GPU --------------------------------------------------


def prefill_variant(
    head_dim: int = 128, dtype: torch.dtype = BF16, page_size: int = 0, **options: Any
) -> Variant:
    """The kernel that a prefill with these options launches."""
    wrapper = flashskip.BatchPrefillWrapper(torch.empty(0))
    return wrapper._variant(
        PlanOptions(q_data_type=dtype, **options), head_dim, head_dim, page_size
    )


def prefill_variants(*args: Any, **options: Any) -> list[Variant]:
    """The kernels of PREFILLS."""
    return [prefill_variant(*args, page_size=size, **options) for size in (0, 16)]


def decode_variant(
    group_size: int = 4, head_dim: int = 128, dtype: torch.dtype = BF16, **options: Any
) -> Variant:
    """The kernel that a decode of pages of 16 tokens with these options launches."""
    wrapper = flashskip.BatchDecodeWrapper(torch.empty(0))
    wrapper._page_size, wrapper._q_len_per_req = 16, 1
    return wrapper._variant(PlanOptions(q_data_type=dtype, **options), head_dim, group_size)


def on_both(*variants: Variant) -> pytest.MarkDecorator:
    """Parametrize `device`: the reference behind the wrappers, and the kernels of `variants`."""
    marks = [pytest.mark.gpu, pytest.mark.variants(list(variants))]
    return pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=marks)])
