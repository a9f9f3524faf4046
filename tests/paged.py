"""Paged batches for the decode tests: shuffled pages, and NaN wherever no key lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from helpers import indptr
from torch import Tensor

from flashskip import reference


@dataclass
class Paged:
    """The same number of query tokens for each request on a paged cache.

    `cache` is what `run` takes; `k`, `v` are its ``[pages, page_size, num_kv_heads, dim]`` views.
    """

    q: Tensor
    cache: Tensor | tuple[Tensor, Tensor]
    k: Tensor
    v: Tensor
    layout: str
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor

    @property
    def table(self) -> tuple[Tensor, Tensor, Tensor]:
        """The page table, in the order of `plan`."""
        return self.indptr, self.indices, self.last_page_len

    def gathered(self) -> tuple[Tensor, Tensor, Tensor]:
        """K and V of all requests in a row, and where each starts."""
        return reference.gather_pages((self.k, self.v), *self.table)

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
    cache, k, v = _empty_cache(
        (num_pages, page_size, num_kv_heads, head_dim), dtype, layout, form, device
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
        k[place], v[place] = keys.to(dtype), values.to(dtype)
    return batch


def _empty_cache(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    layout: str,
    form: str,
    device: str | torch.device,
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
        size = (pages + gap, inner[0] + gap, inner[1] + 2 * gap, dim + 8 * gap)
        both = [torch.full(size, nan, dtype=dtype, device=device) for _ in range(2)]
        k, v = (t[gap:, gap:, gap : inner[1] + gap, :dim] for t in both)
        cache = (k, v)
    if layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    return cache, k, v
