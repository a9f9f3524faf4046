"""Paged batches, NaN wherever no key lies, and how to run and judge decode on them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from helpers import (
    Ragged,
    assert_within_budget,
    eager_attention,
    indptr,
    kept_keys,
    poisoned,
)
from torch import Tensor

import flashskip
from flashskip import reference
from flashskip._options import PlanOptions
from flashskip.variant import Variant

LAMBDA = 1e-2
FP8 = torch.float8_e4m3fn

# Scores are fp32 sums of exact products: their error is far below this, in log2 units. A decision
# whose margin is smaller may fall either way.
ROUNDING_BAND = 1e-3


@dataclass
class Paged:
    """The same number of query tokens for each request on a paged cache.

    `cache` is what `run` takes; `k`, `v` are its ``[pages, page_size, num_kv_heads, dim]`` views.
    `scales` are the k_scale and v_scale of an FP8 cache.
    """

    q: Tensor
    cache: Tensor | tuple[Tensor, Tensor]
    k: Tensor
    v: Tensor
    layout: str
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    scales: dict[str, float | Tensor] = field(default_factory=dict)

    @property
    def table(self) -> tuple[Tensor, Tensor, Tensor]:
        """The page table, in the order of `plan`."""
        return self.indptr, self.indices, self.last_page_len

    def gathered(self) -> tuple[Tensor, Tensor, Tensor]:
        """K and V of all requests in a row as the numbers they are, and where each starts."""
        k, v, kv_indptr = reference.gather_pages((self.k, self.v), *self.table)
        if k.dtype == FP8:
            k, v = (t.double() * self._scale(n) for n, t in (("k_scale", k), ("v_scale", v)))
        return k, v, kv_indptr

    def _scale(self, name: str) -> float | Tensor:
        scale = self.scales.get(name, 1.0)
        return scale.double().view(-1, 1) if isinstance(scale, Tensor) else scale

    def place(self, request: int, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Page and slot of a request's keys."""
        page_size = self.k.shape[1]
        pages = self.indices[int(self.indptr[request]) + keys // page_size].long()
        return pages, keys % page_size


def page_table(
    kv_lens: Sequence[int], page_size: int, pages: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """indptr, indices and last_page_len of requests that take `pages` in turn."""
    counts = [-(-n // page_size) for n in kv_lens]
    last = [(n - 1) % page_size + 1 if n else 1 for n in kv_lens]
    return (
        indptr(counts, pages.device),
        pages[: sum(counts)].int(),
        torch.tensor(last, dtype=torch.int32, device=pages.device),
    )


def make_paged(
    kv_lens: Sequence[int],
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int = 128,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    *,
    kv_dtype: torch.dtype | None = None,
    layout: str = "NHD",
    form: str = "tensor",
    hot: float | None = 0.3,
    gain: float = 12.0,
    seed: int = 0,
    q_len: int = 1,
    device: str | torch.device = "cuda",
) -> Paged:
    """Normal q, k, v; with `hot`, that share of the 64-key tiles and tile 0 draw all queries.

    `form` is ``"tensor"`` (5-D), ``"pair"``, or ``"strided"``: a pair with gaps in every stride.
    """
    g = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device)

    num_pages = sum(-(-n // page_size) for n in kv_lens) + 3
    table = page_table(kv_lens, page_size, torch.randperm(num_pages, generator=g, device=device))
    cache, k, v = empty_cache(
        (num_pages, page_size, num_kv_heads, head_dim), kv_dtype or dtype, layout, form, device
    )
    q = normal(len(kv_lens) * q_len, num_qo_heads, head_dim)
    direction = torch.nn.functional.normalize(normal(head_dim), dim=0) * gain
    if hot is not None:
        q = q * 0.5 + direction
    batch = Paged(q.to(dtype), cache, k, v, layout, *table)
    for request, n in enumerate(kv_lens):
        place = batch.place(request, torch.arange(n, device=device))
        keys, values = normal(2, n, num_kv_heads, head_dim).unbind()
        if hot is not None:
            tiles = torch.rand(-(-n // 64), generator=g, device=device) < hot
            tiles[:1] = True
            keys = keys * 0.5 + tiles.repeat_interleave(64)[:n, None, None] * direction
        k[place], v[place] = keys.to(k.dtype), values.to(v.dtype)
    return batch


@dataclass(frozen=True)
class Pages:
    """The keys of a ragged batch in a cache that is NaN wherever no key lies; `k`, `v`: NHD views.

    `places` are the pages and slots of each request's keys.
    """

    cache: Tensor | tuple[Tensor, Tensor]
    k: Tensor
    v: Tensor
    layout: str
    page_size: int
    table: tuple[Tensor, Tensor, Tensor]
    places: list[tuple[Tensor, Tensor]]


def to_pages(batch: Ragged, page_size: int, layout: str = "NHD", form: str = "tensor") -> Pages:
    """Scatter the keys of `batch` over pages in random order; ids that are not used are bad."""
    lengths, device = batch.kv_indptr.diff().tolist(), batch.q.device
    num_pages = sum(-(-n // page_size) for n in lengths) + 3
    g = torch.Generator(device=device).manual_seed(1)
    table = page_table(lengths, page_size, torch.randperm(num_pages, generator=g, device=device))
    shape = (num_pages, page_size, *batch.k.shape[1:])
    cache, k, v = empty_cache(shape, batch.k.dtype, layout, form, device, batch.v.shape[2])
    places = []
    for first, (_, rows) in zip(table[0].tolist(), batch.spans(), strict=False):
        key = torch.arange(rows.stop - rows.start, device=device)
        places.append((table[1][first + key // page_size].long(), key % page_size))
        k[places[-1]], v[places[-1]] = batch.k[rows], batch.v[rows]
    unused = torch.tensor([10**9, -7], dtype=torch.int32, device=device)
    ids = torch.cat([table[1], unused])
    return Pages(cache, k, v, layout, page_size, (table[0], ids, table[2]), places)


def empty_cache(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    layout: str,
    form: str,
    device: str | torch.device,
    head_dim_vo: int | None = None,
) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, Tensor]:
    """A cache full of NaN in the given layout and form, and NHD views of its K and V."""
    pages, page_size, heads, dim = shape
    inner = (page_size, heads, dim) if layout == "NHD" else (heads, page_size, dim)
    nan = float("nan")
    cache: Tensor | tuple[Tensor, Tensor]
    if form == "tensor":
        cache = torch.full((pages, 2, *inner), nan, dtype=dtype, device=device)
        k, v = cache[:, 0], cache[:, 1]
    else:
        gap = 1 if form == "strided" else 0
        dims = (dim, dim if head_dim_vo is None else head_dim_vo)
        sizes = [
            (pages + gap, inner[0] + gap, inner[1] + 2 * gap, d + gap * 16 // dtype.itemsize)
            for d in dims
        ]
        both = [torch.full(size, nan, dtype=dtype, device=device) for size in sizes]
        k, v = (t[gap:, gap:, gap : inner[1] + gap, :d] for t, d in zip(both, dims, strict=True))
        cache = (k, v)
    if layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    return cache, k, v


def variant(
    group_size: int = 4,
    head_dim: int = 128,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    q_len: int = 1,
    **options: Any,
) -> Variant:
    """Return the kernel that a plan with these options launches."""
    wrapper = flashskip.BatchDecodeWrapper(torch.empty(0))
    wrapper._page_size, wrapper._q_len_per_req = page_size, q_len
    return wrapper._variant(PlanOptions(q_data_type=dtype, **options), head_dim, group_size)


def skipping(*args: Any, **options: Any) -> Variant:
    """The same with a skip test and counters."""
    return variant(*args, skip_softmax_threshold=LAMBDA, collect_stats=True, **options)


def plan(batch: Paged, **options: Any) -> flashskip.BatchDecodeWrapper:
    """Plan for `batch` on its device."""
    wrapper = flashskip.BatchDecodeWrapper(kv_layout=batch.layout)
    (tokens, heads, head_dim), (_, page_size, num_kv_heads, _) = batch.q.shape, batch.k.shape
    options = {"q_data_type": batch.q.dtype, "kv_data_type": batch.k.dtype, **options}
    q_len = tokens // len(batch.last_page_len)
    wrapper.plan(
        *batch.table, heads, num_kv_heads, head_dim, page_size, q_len_per_req=q_len, **options
    )
    return wrapper


def run(
    wrapper: flashskip.BatchDecodeWrapper, batch: Paged, **outputs: Any
) -> tuple[Tensor, Tensor]:
    """Run into poisoned outputs."""
    out = poisoned(batch.q.shape, wrapper._planned().options.o_dtype, batch.q.device)
    lse = poisoned(batch.q.shape[:2], torch.float32, batch.q.device)
    wrapper.run(batch.q, batch.cache, out=out, lse=lse, **batch.scales, **outputs)
    return out, lse


def oracle(
    wrapper: flashskip.BatchDecodeWrapper,
    batch: Paged,
    threshold: float | list[float | None] | None = None,
) -> reference.Result:
    """The reference in float64, with the plan's geometry."""
    k, v, kv_indptr = batch.gathered()
    requests, options = len(batch.last_page_len), wrapper._planned().options
    q_len = len(batch.q) // requests
    return reference.attention(
        batch.q,
        k,
        v,
        qo_indptr=list(range(0, requests * q_len + 1, q_len)),
        kv_indptr=kv_indptr,
        geometry=wrapper.geometry,
        logits_soft_cap=options.logits_soft_cap,
        sinks=options.sinks,
        thresholds=threshold if isinstance(threshold, list) else [threshold] * requests,
    )


def assert_matches(
    batch: Paged,
    out: Tensor,
    lse: Tensor,
    exact: reference.Result,
    *soft_cap_and_sinks: Any,
) -> None:
    """Outputs within the budget of each request, LSE to 1e-4, rows that see nothing exactly 0."""
    k, v, kv_indptr = batch.gathered()
    assert exact.skip_map is not None
    q_len, sm_scale = len(batch.q) // len(batch.last_page_len), batch.q.shape[2] ** -0.5
    for i, (start, end) in enumerate(itertools.pairwise(kv_indptr)):
        rows = slice(i * q_len, (i + 1) * q_len)
        kept = kept_keys(exact.skip_map[i])
        tensors = (batch.q[rows], k[start:end], v[start:end])
        p_dtype = torch.float16 if batch.k.dtype == FP8 else batch.k.dtype
        eager = eager_attention(*tensors, kept, sm_scale, *soft_cap_and_sinks, p_dtype=p_dtype)
        assert_within_budget(out[rows], exact.out[rows], eager.to(out.dtype))
        assert (out[rows][~kept.any(2).T] == 0).all()
    torch.testing.assert_close(lse.double(), exact.lse, rtol=0, atol=1e-4)


def assert_counts(stats: Tensor, exact: reference.Result) -> None:
    """Counters equal the oracle's, but for decisions within the rounding band."""
    assert exact.skip_map is not None
    torch.testing.assert_close(stats[..., 1], exact.counts[..., 1], rtol=0, atol=0)
    close = torch.stack([m.count(m.margin.abs() < ROUNDING_BAND) for m in exact.skip_map])
    assert ((stats - exact.counts)[..., 0].abs() <= close).all()


def check(batch: Paged, threshold: float | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """Run and compare with the oracle, twice, bit for bit the same."""
    if threshold is not None:
        options = {"collect_stats": True, "skip_softmax_threshold": threshold, **options}
    wrapper = plan(batch, **options)
    out, lse = run(wrapper, batch)
    exact = oracle(wrapper, batch, threshold)
    capped_and_sunk = (options.get("logits_soft_cap"), options.get("sinks"))
    assert_matches(batch, out, lse, exact, *capped_and_sunk)
    if threshold is not None:
        assert_counts(wrapper.stats, exact)
    again = run(wrapper, batch)
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1])
    return out, lse
