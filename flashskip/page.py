"""Writing new keys and values into a paged cache."""

from __future__ import annotations

import torch

from flashskip._checks import check_indptr, check_pages_contents, check_vector
from flashskip._options import check_choice, refusal
from flashskip._paged import cache_tensors, split_cache


def append_paged_kv_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    paged_kv_indptr: torch.Tensor,
    paged_kv_indices: torch.Tensor,
    paged_kv_last_page_len: torch.Tensor,
    *,
    kv_layout: str = "NHD",
) -> None:
    """Write the newest tokens of every request into its pages.

    The page table describes the cache *after* the append: the last n tokens of each request are
    written, where n is ``k.shape[0] / batch_size``. Works on any device, never waits for the GPU,
    can be
    captured in a CUDA graph.

    Parameters
    ----------
    k, v : torch.Tensor
        ``[batch_size * n, num_kv_heads, head_dim]``, request by request; of the cache's dtype.
    paged_kv_cache : torch.Tensor or tuple of torch.Tensor
        One 5-D tensor ``[pages, 2, ...]`` or a pair (k, v) of 4-D tensors in the layout.
    paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len : torch.Tensor
        int32 ``[batch_size + 1]``, ``[num_indices]``, ``[batch_size]``. Every request must hold at
        least n
        tokens; this is checked for CPU tensors.
    kv_layout : {"NHD", "HND"}
        ``[pages, (2,) page_size, num_kv_heads, head_dim]``, or with the middle two swapped.

    Raises
    ------
    ValueError, TypeError
        Shapes, dtypes or the page table do not fit together; contents of the table are checked on
        the CPU only.
    """
    check_choice("kv_layout", kv_layout, ("NHD", "HND"))
    batch_size = check_indptr("paged_kv_indptr", paged_kv_indptr)
    check_vector("paged_kv_indices", paged_kv_indices, None, device=k.device)
    check_vector("paged_kv_last_page_len", paged_kv_last_page_len, batch_size, device=k.device)
    if k.shape[0] % (batch_size or k.shape[0] + 1) != 0 or k.shape[:2] != v.shape[:2]:
        raise refusal(
            f"k has shape {tuple(k.shape)} and v {tuple(v.shape)} for {batch_size} requests",
            "the same multiple of batch_size in dimension 0",
            "Pass the same number of new tokens for each request",
        )
    if batch_size == 0:
        return
    caches = split_cache(cache_tensors(paged_kv_cache), kv_layout)
    for cache, new in zip(caches, (k, v), strict=True):
        if cache.dtype != new.dtype or cache.shape[2:] != new.shape[1:]:
            raise refusal(
                f"new tokens are {new.dtype} {tuple(new.shape)} for a cache {cache.dtype} "
                f"{tuple(cache.shape)}",
                "the cache's dtype, heads and head_dim",
                "Convert them, or check kv_layout",
            )
    page_size = caches[0].shape[1]
    new_tokens = k.shape[0] // batch_size
    pages = paged_kv_indptr[1:] - paged_kv_indptr[:-1]
    kv_len = (pages - 1) * page_size + paged_kv_last_page_len
    if kv_len.device.type == "cpu":
        check_pages_contents(
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, caches[0].shape[0]
        )
        short = (kv_len < new_tokens) | (pages < 1)
        if bool(short.any()):
            raise refusal(
                f"a request holds fewer than {new_tokens} tokens",
                "a page table that includes the appended tokens",
                "Update indptr and last_page_len before the append",
            )
    first = (kv_len - new_tokens).unsqueeze(1)
    position = first + torch.arange(new_tokens, dtype=torch.int32, device=k.device)
    entry = paged_kv_indptr[:-1].unsqueeze(1) + position // page_size
    page = paged_kv_indices[entry.flatten().long()].long()
    slot = (position % page_size).flatten().long()
    for cache, new in zip(caches, (k, v), strict=True):
        cache[page, slot] = new
