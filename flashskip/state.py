"""Merging attention states: outputs over disjoint sets of keys, with their LSE in base 2.

A state that has seen no key has output 0 and LSE ``-inf``; merging it changes nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two attention states of the same queries over disjoint keys.

    Parameters
    ----------
    v_a, v_b : Tensor
        Outputs ``[nnz_qo, num_heads, head_dim]``, floating.
    s_a, s_b : Tensor
        float32 LSE ``[nnz_qo, num_heads]``, base 2; ``-inf`` for an empty state.

    Returns
    -------
    v, s : Tensor
        Output and LSE of the union, in the dtypes of `v_a` and float32.  Where one state is empty
        the other is returned exactly; where both are, 0 and ``-inf``.

    Raises
    ------
    ValueError, TypeError
        Shapes, dtypes or devices that do not fit together, or something that is no tensor.
    """
    for name, t in (("v_a", v_a), ("s_a", s_a), ("v_b", v_b), ("s_b", s_b)):
        _check_tensor(name, t)
    if v_a.shape != v_b.shape or v_a.dtype != v_b.dtype:
        raise ValueError(
            f"v_a is {v_a.dtype} {tuple(v_a.shape)} and v_b is {v_b.dtype} {tuple(v_b.shape)}; "
            "merge outputs of the same shape and dtype"
        )
    _check(v_a, s_a, "v_a", "s_a", 3)
    _check(v_b, s_b, "v_b", "s_b", 3)
    if v_a.device != v_b.device:
        raise ValueError(f"v_a is on {v_a.device} and v_b on {v_b.device}; move them together")
    return _merge(torch.stack([v_a, v_b], 1), torch.stack([s_a, s_b], 1))


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merge several attention states of the same queries over disjoint keys.

    Parameters
    ----------
    v : Tensor
        Outputs ``[nnz_qo, num_states, num_heads, head_dim]``, floating.
    s : Tensor
        float32 LSE ``[nnz_qo, num_states, num_heads]``, base 2; ``-inf`` for an empty state.

    Returns
    -------
    v, s : Tensor
        Output ``[nnz_qo, num_heads, head_dim]`` in the dtype of `v` and float32 LSE
        ``[nnz_qo, num_heads]`` of the union.  A single state that is not empty is returned exactly;
        where all are empty, 0 and ``-inf``.

    Raises
    ------
    ValueError, TypeError
        Shapes, dtypes or devices that do not fit together, no state at all, or no tensor.
    """
    _check_tensor("v", v)
    _check_tensor("s", s)
    _check(v, s, "v", "s", 4)
    if v.shape[1] == 0:
        raise ValueError(f"v has shape {tuple(v.shape)}; give at least one state to merge")
    return _merge(v, s)


def _merge(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Weigh each state by its share of the softmax mass, in float32."""
    highest = s.amax(1, keepdim=True)
    weight = torch.exp2(s - highest.masked_fill(highest == -math.inf, 0))
    mass = weight.sum(1)
    # An empty state's output does not count, whatever it holds.
    weighted = torch.where(weight[..., None] == 0, 0, weight[..., None] * v.float())
    merged = torch.where(mass[..., None] == 0, 0, weighted.sum(1) / mass[..., None])
    return merged.to(v.dtype), highest[:, 0] + torch.log2(mass)


def _check_tensor(name: str, t: object) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} is {type(t).__name__}; expected a torch.Tensor. Convert it first.")


def _check(v: Tensor, s: Tensor, v_name: str, s_name: str, rank: int) -> None:
    """Check one output and its LSE."""
    if v.ndim != rank or not v.is_floating_point():
        states = "num_states, " if rank == 4 else ""
        raise ValueError(
            f"{v_name} is {v.dtype} {tuple(v.shape)}; it must be floating, "
            f"[nnz_qo, {states}num_heads, head_dim]"
        )
    if s.shape != v.shape[:-1] or s.dtype != torch.float32:
        raise ValueError(
            f"{s_name} is {s.dtype} {tuple(s.shape)}; it must be torch.float32 "
            f"{tuple(v.shape[:-1])}, the base-2 LSE of {v_name}"
        )
    if s.device != v.device:
        raise ValueError(
            f"{v_name} is on {v.device} and {s_name} on {s.device}; move them together"
        )
