"""Tensors that a kernel writes, against what a plan expects and against what it reads meanwhile."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import mul

import torch

from flashskip._options import check_choice, check_no_gradient, refusal

LSE_SCALES = {"log2": 1.0, "e": math.log(2.0)}


def check_lse_base(lse_base: object, wanted: bool) -> None:
    """Raise unless this is a base, and the default one where no LSE is `wanted`."""
    if isinstance(lse_base, str) and lse_base == "log2":
        return
    check_choice("lse_base", lse_base, tuple(LSE_SCALES))
    if not wanted:
        raise refusal(
            f"lse_base is {lse_base!r} in a run without an LSE, where it has no effect",
            "it with return_lse=True or lse",
            "Drop lse_base",
        )


def check_lse(
    lse: object, out: torch.Tensor, names: Sequence[str], inputs: Sequence[torch.Tensor]
) -> None:
    """Raise unless `lse` is None or a tensor that a kernel can write beside a checked `out`."""
    if lse is None:
        return
    if not isinstance(lse, torch.Tensor):
        raise TypeError(f"lse is {type(lse).__name__}; expected a torch.Tensor. Pass one or None.")
    matches = lse.shape == out.shape[:2] and lse.is_contiguous() and lse.device == out.device
    if not matches or lse.dtype != torch.float32:
        raise refusal(
            f"lse is {lse.dtype} {tuple(lse.shape)} with stride {lse.stride()} on {lse.device}",
            f"contiguous torch.float32 {tuple(out.shape[:2])} on {out.device}",
            "Pass such a tensor, or return_lse=True to have it allocated",
        )
    check_written("lse", lse, zip((*names[: len(inputs)], "out"), (*inputs, out), strict=True))


def check_written(name: str, t: torch.Tensor, others: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise unless `t` can be written while the named `others` are read or written."""
    check_no_gradient(name, t)
    check_no_self_overlap(name, t)
    for other_name, other in others:
        check_no_overlap(name, t, other_name, other)


def check_no_self_overlap(name: str, t: torch.Tensor) -> None:
    """Raise if elements of a tensor that is written share memory, as those of `expand` do."""
    reach = 1
    for stride, n in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1):
        if stride < reach and t.numel() > 0:
            raise refusal(
                f"{name} has shape {tuple(t.shape)} with stride {t.stride()}",
                "a tensor whose elements lie apart",
                "Allocate it without expand()",
            )
        reach = stride * n


def check_no_overlap(name: str, t: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raise if a tensor that is written may share memory with one that is read meanwhile."""
    if _may_overlap(t, other):
        raise refusal(
            f"{name} shares memory with {other_name}",
            "memory of its own",
            f"Allocate {name}, or leave it out",
        )


def _may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may share a byte; views of one packed buffer are told apart."""
    if not a.numel() or not b.numel():
        return False
    ahead = b.data_ptr() - a.data_ptr()
    if ahead >= _bytes(a.shape, a) or -ahead >= _bytes(b.shape, b):
        return False
    row = a.stride(0) * a.element_size()
    if row <= 0 or row != b.stride(0) * b.element_size():
        return True
    column = ahead % row
    return column < _bytes(a.shape[1:], a) or column + _bytes(b.shape[1:], b) > row


def _bytes(shape: Sequence[int], t: torch.Tensor) -> int:
    """Bytes from the first to past the last element of the trailing dimensions of `t`."""
    strides = t.stride()[t.dim() - len(shape) :]
    last: int = sum(map(mul, shape, strides)) - sum(strides)  # element
    return (last + 1) * t.element_size()
