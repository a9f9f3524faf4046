"""Paged keys and values, gathered."""

from __future__ import annotations

import torch
from torch import Tensor

from ._rows import spans


def gather_pages(
    paged_kv_cache: Tensor | tuple[Tensor, Tensor],
    paged_kv_indptr: Tensor,
    paged_kv_indices: Tensor,
    paged_kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather the keys and values of a paged cache, request after request.

    Parameters
    ----------
    paged_kv_cache : Tensor or (Tensor, Tensor)
        NHD: ``[pages, 2, page_size, num_kv_heads, head_dim]``, HND with the last but two swapped;
        or a pair (k, v) of such tensors without the dimension of 2.
    paged_kv_indptr : Tensor
        int32 ``[batch_size + 1]``: where each request's pages start in `paged_kv_indices`.
    paged_kv_indices : Tensor
        int32 page ids.  Pages outside the cache read as zeros.
    paged_kv_last_page_len : Tensor
        int32 ``[batch_size]``: valid entries of the last page; ignored for requests without pages.
    kv_layout : str
        ``"NHD"`` or ``"HND"``.

    Returns
    -------
    k, v, kv_indptr : Tensor
        ``[nnz_kv, num_kv_heads, head_dim]`` each, and int32 ``[batch_size + 1]`` on the CPU.

    Raises
    ------
    ValueError
        Another layout.
    """
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout is {kv_layout!r}; it must be 'NHD' or 'HND'")
    if isinstance(paged_kv_cache, Tensor):
        paged_kv_cache = (paged_kv_cache[:, 0], paged_kv_cache[:, 1])
    caches = list(paged_kv_cache)
    if kv_layout == "HND":
        caches = [cache.transpose(1, 2) for cache in caches]
    page_size = caches[0].shape[1]
    pieces: list[list[Tensor]] = [[cache[:0].flatten(0, 1)] for cache in caches]
    ends = [0]
    last_page_lens = paged_kv_last_page_len.tolist()
    for i, span in enumerate(spans(paged_kv_indptr, len(paged_kv_indices))):
        ids = paged_kv_indices[span].long()
        last = min(max(last_page_lens[i], 0), page_size) if len(ids) else 0
        ends.append(ends[-1] + len(ids[:-1]) * page_size + last)
        for cache, piece in zip(caches, pieces, strict=True):
            piece.append(_pages(cache, ids[:-1]).flatten(0, 1))
            piece.append(_pages(cache[:, :last], ids[-1:]).flatten(0, 1))
    k, v = (torch.cat(piece) for piece in pieces)
    return k, v, torch.tensor(ends, dtype=torch.int32)


def _pages(cache: Tensor, ids: Tensor) -> Tensor:
    """Pages of an NHD cache; zeros for ids outside it."""
    inside = (ids >= 0) & (ids < cache.shape[0])
    if inside.all():
        return cache[ids]
    pages = cache.new_zeros((len(ids), *cache.shape[1:]))
    pages[inside] = cache[ids[inside]]
    return pages
