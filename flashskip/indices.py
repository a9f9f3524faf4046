"""The contents of index tensors, wherever they are."""

from __future__ import annotations

import torch

from flashskip._checks import check_count, check_indptr, check_vector
from flashskip._options import refusal
from flashskip._paged import check_page_table


def check_indices(
    *,
    qo_indptr: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None,
    paged_kv_indptr: torch.Tensor | None = None,
    paged_kv_indices: torch.Tensor | None = None,
    paged_kv_last_page_len: torch.Tensor | None = None,
    page_size: int | None = None,
    num_pages: int | None = None,
) -> None:
    """Check the contents of index tensors, wherever they are.

    `plan()` checks contents on the CPU only, because reading a CUDA tensor waits for the GPU; this
    function does wait.

    Parameters
    ----------
    qo_indptr, kv_indptr : torch.Tensor, optional
        int32 ``[batch_size + 1]``.
    paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len : torch.Tensor, optional
        The page table, all three or none: int32 ``[batch_size + 1]``, ``[num_indices]``,
        ``[batch_size]``.
    page_size : int, optional
        Tokens of a page; needed with a page table, and without effect otherwise.
    num_pages : int, optional
        Pages of the cache, with a page table; without it page ids have no upper limit.

    Raises
    ------
    ValueError, TypeError
        If offsets do not start at 0 or decrease, batch sizes differ, a last page is empty or
        overfull, a page id lies outside the cache, or an argument has no effect.
    """
    batch_size = None
    for name, indptr in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
        if indptr is not None:
            check_vector(name, indptr, None)
            batch_size = check_indptr(name, indptr.cpu(), batch_size)
    table = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
    names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
    for name, t in zip(names, table, strict=True):
        if t is not None:
            check_vector(name, t, None)
    given = [t.cpu() for t in table if t is not None]
    if len(given) not in (0, 3) or (len(given) == 3) != (page_size is not None):
        raise refusal(
            f"{len(given)} of the three page table tensors are given, page_size is {page_size}",
            "paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len and page_size together",
            "Pass all four, or none",
        )
    if num_pages is not None:
        check_count("num_pages", num_pages, least=0)
        if not given:
            raise refusal(
                f"num_pages is {num_pages} without a page table, where it has no effect",
                "num_pages only with the page table tensors",
                "Drop num_pages",
            )
    if given:
        assert page_size is not None
        check_count("page_size", page_size)
        indptr, indices, last_page_len = given
        check_page_table(
            indptr, indices, last_page_len, page_size, batch_size, "paged_kv_", num_pages
        )
