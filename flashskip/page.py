"""Writing new keys and values into a paged cache."""

from __future__ import annotations

import torch

from flashskip._checks import check_indptr, check_pages_contents, check_vector
from flashskip._options import check_choice, check_no_gradient, refusal
from flashskip._outputs import check_no_self_overlap
from flashskip._paged import cache_tensors, kv_lengths, split_cache


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
    written, where n is ``k.shape[0] / batch_size``; of a request without pages, none. Works on any
    device, never waits for the GPU, can be captured in a CUDA graph. Where requests share a page
    that is written, the result is undefined.

    Parameters
    ----------
    k, v : torch.Tensor
        ``[batch_size * n, num_kv_heads, head_dim]``, request by request; of the cache's dtype.
    paged_kv_cache : torch.Tensor or tuple of torch.Tensor
        One 5-D tensor ``[pages, 2, ...]`` or a pair (k, v) of 4-D tensors in the layout.
    paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len : torch.Tensor
        int32 ``[batch_size + 1]``, ``[num_indices]``, ``[batch_size]``. Every request with pages
        must hold at least n tokens; this is checked for CPU tensors. On a GPU, of those that it
        lacks the first ones are not written.
    kv_layout : {"NHD", "HND"}
        ``[pages, (2,) page_size, num_kv_heads, head_dim]``, or with the middle two swapped.

    Raises
    ------
    ValueError, TypeError
        Shapes, dtypes or the page table do not fit together, or k or v requires a gradient;
        contents of the table are checked on the CPU only.
    """
    check_choice("kv_layout", kv_layout, ("NHD", "HND"))
    caches = _check_cache(cache_tensors(paged_kv_cache), kv_layout)
    device = caches[0].device
    batch_size = check_indptr("paged_kv_indptr", paged_kv_indptr)
    check_vector("paged_kv_indptr", paged_kv_indptr, batch_size + 1, device=device)
    check_vector("paged_kv_indices", paged_kv_indices, None, device=device)
    check_vector("paged_kv_last_page_len", paged_kv_last_page_len, batch_size, device=device)
    for name, new, cache in (("k", k, caches[0]), ("v", v, caches[1])):
        _check_new(name, new, cache)
    if k.shape[0] % (batch_size or k.shape[0] + 1) != 0 or k.shape[0] != v.shape[0]:
        raise refusal(
            f"k has shape {tuple(k.shape)} and v {tuple(v.shape)} for {batch_size} requests",
            "the same multiple of batch_size in dimension 0",
            "Pass the same number of new tokens for each request",
        )
    if 0 in (k.shape[0], paged_kv_indices.shape[0], caches[0].shape[0]):
        return  # no tokens, or no request has pages
    page_size = caches[0].shape[1]
    new_tokens = k.shape[0] // batch_size
    kv_len = kv_lengths(paged_kv_indptr, paged_kv_last_page_len, page_size)
    if kv_len.device.type == "cpu":
        check_pages_contents(
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, caches[0].shape[0]
        )
        if bool(((kv_len > 0) & (kv_len < new_tokens)).any()):
            raise refusal(
                f"a request holds fewer than {new_tokens} tokens",
                "a page table that includes the appended tokens",
                "Update indptr and last_page_len before the append",
            )
    first = (kv_len - new_tokens).unsqueeze(1)
    position = first + torch.arange(new_tokens, dtype=torch.int32, device=k.device)
    entry = paged_kv_indptr[:-1].unsqueeze(1) + position // page_size
    _write(caches, (k, v), paged_kv_indices, entry.flatten(), position.flatten())


def _write(
    caches: tuple[torch.Tensor, ...],
    news: tuple[torch.Tensor, ...],
    indices: torch.Tensor,
    entry: torch.Tensor,
    position: torch.Tensor,
) -> None:
    """Write tokens where an entry of the page table and a position say; none before position 0.

    How many those are is not known here, where nothing waits for the GPU: each repeats another
    token's write, of the same numbers to the same place, or what is there where no token counts.
    """
    counts = position >= 0
    which = torch.where(
        counts, torch.arange(len(counts), device=counts.device), counts.int().argmax()
    )
    page = indices[entry[which].clamp(0, len(indices) - 1).long()].long()
    any_counts = counts[which]  # of those that are written, all or none do
    page = torch.where(any_counts, page, 0)
    slot = (position[which] % caches[0].shape[1]).long()
    for cache, new in zip(caches, news, strict=True):
        bits = _INTEGERS[new.element_size()]  # torch selects from no 8-bit floats
        there = cache.view(bits)
        there[page, slot] = torch.where(
            any_counts[:, None, None], new.view(bits)[which], there[page, slot]
        )


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _check_cache(cache: tuple[torch.Tensor, ...], kv_layout: str) -> tuple[torch.Tensor, ...]:
    """Return views ``[pages, page_size, num_kv_heads, head_dim]`` of a cache, which is written."""
    names = ("paged_kv_cache",) if len(cache) == 1 else ("paged_kv_cache[0]", "paged_kv_cache[1]")
    for name, t in zip(names, cache, strict=True):
        if not isinstance(t, torch.Tensor):
            raise TypeError(
                f"{name} is {type(t).__name__}; expected a torch.Tensor. Pass one 5-D tensor or a "
                "pair (k, v)."
            )
        is_whole = t.dim() == 5 and t.shape[1] == 2 if len(cache) == 1 else t.dim() == 4
        if not is_whole:
            raise refusal(
                f"{name} has shape {tuple(t.shape)}",
                "[pages, 2, ...] with 5 dimensions, or a pair (k, v) of 4 dimensions each",
                "Pass one of these",
            )
        if t.requires_grad:
            raise refusal(f"{name} requires a gradient", "a cache without", "Pass it detached")
        check_no_self_overlap(name, t)
    if len(cache) == 2 and (cache[0].shape[:3], cache[0].device) != (
        cache[1].shape[:3],
        cache[1].device,
    ):
        raise refusal(
            f"paged_kv_cache[1] is {tuple(cache[1].shape)} on {cache[1].device}",
            f"the pages of paged_kv_cache[0], {tuple(cache[0].shape)} on {cache[0].device}",
            "Make both alike but for head_dim",
        )
    return split_cache(cache, kv_layout)


def _check_new(name: str, new: object, cache: torch.Tensor) -> None:
    """Raise unless these are tokens of the cache."""
    if not isinstance(new, torch.Tensor):
        raise TypeError(f"{name} is {type(new).__name__}; expected a torch.Tensor. Convert it.")
    check_no_gradient(name, new)
    fits = new.dim() == 3 and new.shape[1:] == cache.shape[2:]
    if not fits or (new.dtype, new.device) != (cache.dtype, cache.device):
        heads, head_dim = cache.shape[2:]
        raise refusal(
            f"{name} is {new.dtype} {tuple(new.shape)} on {new.device}",
            f"{cache.dtype} [tokens, {heads}, {head_dim}] on {cache.device}, as the cache",
            "Convert it, or check kv_layout",
        )
