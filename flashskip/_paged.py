"""A page table and a paged cache as callers give them: both wrappers and the append take these."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashskip._checks import check_indptr, check_pages_contents, check_tensor, check_vector
from flashskip._options import refusal

PagedKV = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def check_page_table(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    page_size: int,
    batch_size: int | None = None,
    prefix: str = "",
    num_pages: int | None = None,
) -> dict[str, int]:
    """Raise unless these are a page table; return how many pages CPU indices reach.

    The arguments' names in messages begin with `prefix`.
    """
    batch_size = check_indptr(f"{prefix}indptr", indptr, batch_size)
    check_vector(f"{prefix}indices", indices, None, device=indptr.device)
    check_vector(f"{prefix}last_page_len", last_page_len, batch_size, device=indptr.device)
    if indptr.device.type != "cpu":
        return {}
    check_pages_contents(indptr, indices, last_page_len, page_size, num_pages, prefix)
    used = indices[: int(indptr[-1])]
    return {"indices": 1 + int(used.max()) if used.numel() else 0}


def kv_lengths(indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the number of keys of each request."""
    full = (indptr.diff() - 1).clamp(min=0) * page_size
    return (full + last_page_len).where(indptr.diff() > 0, 0)


def cache_tensors(paged_kv_cache: object) -> tuple[torch.Tensor, ...]:
    """Return the one or two tensors of a cache."""
    if isinstance(paged_kv_cache, torch.Tensor):
        return (paged_kv_cache,)
    if not isinstance(paged_kv_cache, (tuple, list)):
        raise TypeError(
            f"paged_kv_cache is {type(paged_kv_cache).__name__}; expected one 5-D tensor or a pair "
            "(k, v). Pass one of these."
        )
    if not 1 <= len(paged_kv_cache) <= 2:
        raise refusal(
            f"paged_kv_cache has {len(paged_kv_cache)} tensors",
            "one 5-D tensor or a pair (k, v)",
            "Pass one of these",
        )
    return tuple(paged_kv_cache)


def split_cache(cache: Sequence[torch.Tensor], kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of K and V ``[pages, page_size, num_kv_heads, head_dim]``."""
    k, v = (cache[0][:, 0], cache[0][:, 1]) if len(cache) == 1 else cache
    return (k, v) if kv_layout == "NHD" else (k.transpose(1, 2), v.transpose(1, 2))


def check_cache(
    cache: Sequence[torch.Tensor],
    kv_layout: str,
    page_size: int,
    num_kv_heads: int,
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise unless the tensors of a cache have the planned shape; `head_dims` are K's and V's."""
    inner = (page_size, num_kv_heads) if kv_layout == "NHD" else (num_kv_heads, page_size)
    if len(cache) == 1:
        if head_dims[0] != head_dims[1]:
            raise refusal(
                f"paged_kv_cache is one tensor for head dims {head_dims[0]} and {head_dims[1]}",
                "a pair (k, v), as K and V differ in head_dim",
                "Pass the two tensors",
            )
        check_tensor("paged_kv_cache", cache[0], (None, 2, *inner, head_dims[0]), dtype, device)
        return
    check_tensor("paged_kv_cache[0]", cache[0], (None, *inner, head_dims[0]), dtype, device)
    pages = cache[0].shape[0]
    check_tensor("paged_kv_cache[1]", cache[1], (pages, *inner, head_dims[1]), dtype, device)


def cache_record(k: torch.Tensor, v: torch.Tensor) -> dict[str, int]:
    """Return what a launch record holds of K and V by address, as views of `split_cache`."""
    record = {}
    for name, t in (("k", k), ("v", v)):
        record[f"{name}_cache"] = t.data_ptr()
        for dim, stride in zip(("page", "token", "head"), t.stride(), strict=False):
            record[f"{name}_stride_{dim}"] = stride
    return record
