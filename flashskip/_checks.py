"""Tensors against what a plan expects. Only properties are looked at here, and CPU contents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from flashskip._options import check_no_gradient, refusal

BATCH_SIZE = "the batch size, which is len(indptr) - 1"
MOST = 2**31 - 1  # of any count: kernels hold them in 32 bits


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raise unless `value` is an int of at least `least` that kernels can hold."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; expected an int. Pass a Python int.")
    if value < least:
        raise refusal(f"{name} is {value}", f"at least {least}", "Correct the value")
    if value > MOST:
        raise refusal(f"{name} is {value}", f"at most {MOST}", "Correct the value")


def check_head_dim(name: str, value: object) -> None:
    """Raise unless rows of so many elements can lie multiples of 16 bytes apart, as they must."""
    check_count(name, value)
    assert isinstance(value, int)
    if value % 8 != 0:
        raise refusal(f"{name} is {value}", "a multiple of 8", "Pad q, k and v with zeros")


MOST_HEADS_OF_A_GROUP = 1024  # kernels divide rows by it through a rounded reciprocal


def check_heads(num_qo_heads: object, num_kv_heads: object) -> int:
    """Return the GQA group size, an integer ratio."""
    check_count("num_qo_heads", num_qo_heads)
    check_count("num_kv_heads", num_kv_heads)
    assert isinstance(num_qo_heads, int)
    assert isinstance(num_kv_heads, int)
    if num_qo_heads % num_kv_heads != 0:
        raise refusal(
            f"num_qo_heads is {num_qo_heads} with num_kv_heads={num_kv_heads}",
            "a multiple of num_kv_heads",
            "Every KV head must serve the same number of query heads",
        )
    group_size = num_qo_heads // num_kv_heads
    if group_size > MOST_HEADS_OF_A_GROUP:
        raise refusal(
            f"num_qo_heads is {num_qo_heads} with num_kv_heads={num_kv_heads}: {group_size} query "
            "heads a KV head",
            f"at most {MOST_HEADS_OF_A_GROUP} query heads for each KV head",
            "Run part of the query heads at a time",
        )
    return group_size


def check_vector(
    name: str,
    t: object,
    length: int | None,
    *,
    dtype: torch.dtype = torch.int32,
    device: torch.device | None = None,
    length_is: str = BATCH_SIZE,
) -> None:
    """Raise unless `t` is a contiguous vector of this dtype, length and device."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} is {type(t).__name__}; expected a torch.Tensor. Convert it first.")
    if t.dtype != dtype:
        raise refusal(
            f"{name} has dtype {t.dtype}",
            str(dtype),
            f"Convert it with {name}.to({dtype})",
        )
    if t.dim() != 1:
        raise refusal(
            f"{name} has shape {tuple(t.shape)}",
            "one dimension",
            "Flatten it",
        )
    if length is not None and t.shape[0] != length:
        raise refusal(
            f"{name} has {t.shape[0]} entries",
            f"{length}",
            f"Make it match {length_is}",
        )
    if not t.is_contiguous():
        raise refusal(
            f"{name} has stride {t.stride()}",
            "a contiguous tensor",
            "Call .contiguous(), and write later changes into that copy",
        )
    if device is not None and t.device != device:
        raise refusal(
            f"{name} is on {t.device}",
            f"{device}, where the other tensors are",
            "Move it there",
        )


def check_indptr(name: str, t: object, batch_size: int | None = None) -> int:
    """Return the batch size; the contents are looked at on the CPU only."""
    check_vector(name, t, None if batch_size is None else batch_size + 1)
    assert isinstance(t, torch.Tensor)
    if t.shape[0] == 0:
        raise refusal(
            f"{name} is empty",
            "batch_size + 1 entries",
            "Begin it with 0",
        )
    if t.device.type == "cpu":
        check_indptr_contents(name, t)
    return t.shape[0] - 1


def check_indptr_contents(name: str, t: torch.Tensor) -> None:
    """Raise unless `t` starts at 0 and never decreases."""
    if int(t[0]) != 0:
        raise refusal(
            f"{name}[0] is {int(t[0])}",
            "0",
            "Offsets count from the first row",
        )
    decreases = t[1:] < t[:-1]  # a difference could wrap
    if bool(decreases.any()):
        i = int(decreases.nonzero()[0])
        raise ValueError(
            f"{name}[{i + 1}] is {int(t[i + 1])} after {int(t[i])}; expected offsets that never "
            f"decrease. "
            "Sort the requests' offsets."
        )


def check_reach(name: str, t: torch.Tensor, index_name: str, reach: Mapping[str, int]) -> None:
    """Raise if CPU index tensors pointed past the rows or pages of `t`."""
    needed = reach.get(index_name, 0)
    if t.shape[0] < needed:
        raise refusal(
            f"{name} has {t.shape[0]} in dimension 0",
            f"at least {needed}, as far as {index_name} reaches",
            f"Pass all of {name}, or correct {index_name} and plan again",
        )


def check_pages_contents(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    page_size: int,
    num_pages: int | None = None,
    prefix: str = "paged_kv_",
) -> None:
    """Raise unless a page table describes pages that exist, filled within their size.

    The arguments' names in messages begin with `prefix`.
    """
    if int(indptr[-1]) > indices.shape[0]:
        raise refusal(
            f"{prefix}indptr ends at {int(indptr[-1])}",
            f"at most len({prefix}indices), {indices.shape[0]}",
            "Pass the page ids of every request",
        )
    has_pages = indptr[1:] > indptr[:-1]
    bad = has_pages & ((last_page_len < 1) | (last_page_len > page_size))
    if bool(bad.any()):
        i = int(bad.nonzero()[0])
        raise ValueError(
            f"{prefix}last_page_len[{i}] is {int(last_page_len[i])}; expected 1 to page_size "
            f"({page_size}). "
            f"Drop empty pages from {prefix}indices instead."
        )
    used = indices[: int(indptr[-1])]
    outside = used < 0
    if num_pages is not None:
        outside |= used >= num_pages
    if bool(outside.any()):
        i = int(outside.nonzero()[0])
        if num_pages is None:
            limit = "0 or more"
        elif num_pages == 0:
            limit = "no page id, as the cache has no pages"
        else:
            limit = f"0 to {num_pages - 1}, the pages of the cache"
        raise ValueError(
            f"{prefix}indices[{i}] is {int(used[i])}; expected {limit}. Correct the page table."
        )


def check_tensor(
    name: str,
    t: object,
    shape: tuple[int | None, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise unless `t` has this shape (None: any), dtype, device, and readable strides."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} is {type(t).__name__}; expected a torch.Tensor. Convert it first.")
    if t.layout != torch.strided:
        raise refusal(f"{name} has the layout {t.layout}", "torch.strided", "Call .to_dense()")
    matches = t.dim() == len(shape) and all(
        b is None or a == b for a, b in zip(t.shape, shape, strict=True)
    )
    if not matches:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise refusal(
            f"{name} has shape {tuple(t.shape)}",
            f"({wanted}), as planned",
            "Reshape it or plan again",
        )
    if t.dtype != dtype:
        raise refusal(
            f"{name} has dtype {t.dtype}",
            f"{dtype}, as planned",
            "Plan again",
        )
    if t.device != device:
        raise refusal(
            f"{name} is on {t.device}",
            f"{device}",
            "Move it there or plan again",
        )
    check_strides(name, t)


def check_strides(name: str, t: torch.Tensor) -> None:
    """Raise unless rows are contiguous and 16-byte aligned, which the copy engine needs."""
    if t.numel() == 0:
        return
    if t.shape[-1] > 1 and t.stride(-1) != 1:
        raise refusal(
            f"{name} has stride {t.stride(-1)} in its last dimension",
            "1",
            "Call .contiguous()",
        )
    size = t.element_size()
    for i in range(t.dim() - 1):
        if t.shape[i] > 1 and t.stride(i) * size % 16 != 0:
            raise refusal(
                f"{name} has stride {t.stride(i) * size} bytes in dimension {i}",
                "a multiple of 16 bytes",
                "Call .contiguous() or pad the rows",
            )
    if t.data_ptr() % 16 != 0:
        raise refusal(
            f"{name} starts at an address that is not a multiple of 16 bytes",
            "16-byte alignment",
            "Call .clone(), or slice at another element",
        )


def check_workspace(workspace: torch.Tensor, needed: int) -> None:
    """Raise unless partial results fit."""
    if not workspace.is_contiguous():
        raise refusal(
            f"float_workspace_buffer is not contiguous: strides {tuple(workspace.stride())}",
            "contiguous memory, every byte of which may be written",
            "Pass torch.empty(bytes, dtype=torch.uint8, device=device), or None",
        )
    size = workspace.numel() * workspace.element_size()
    if size < needed or workspace.data_ptr() % 16 != 0:
        raise refusal(
            f"float_workspace_buffer has {size} bytes at address {workspace.data_ptr():#x}",
            f"at least {needed} bytes, 16-byte aligned",
            "Pass a larger one, or None",
        )


def check_device(q: torch.Tensor, device: torch.device) -> None:
    """Raise unless `q` is where the plan runs."""
    if q.device != device:
        raise refusal(
            f"q is on {q.device}",
            f"{device}, where the plan runs",
            "Move it, or make the wrapper with a workspace where q is and plan again",
        )


def check_inputs(
    names: Sequence[str], inputs: Sequence[torch.Tensor], sinks: torch.Tensor | None
) -> None:
    """Raise unless these are tensors, and none where a gradient would be expected."""
    for i, t in enumerate(inputs):
        if not isinstance(t, torch.Tensor) or t.dim() == 0:
            found = "a scalar" if isinstance(t, torch.Tensor) else type(t).__name__
            raise TypeError(
                f"{names[i]} is {found}; expected a torch.Tensor with rows. Convert it."
            )
    for name, given in (*zip(names, inputs, strict=False), ("sinks", sinks)):
        if given is not None:
            check_no_gradient(name, given)
