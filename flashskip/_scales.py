"""k_scale and v_scale: what the numbers of an FP8 cache are multiplied by."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from flashskip._checks import check_vector
from flashskip._cpu import Ragged
from flashskip._options import FP8, check_no_gradient, refusal


class Scales(NamedTuple):
    """The scales of a run: of K and V a tensor that the kernel reads, or else a value."""

    k: torch.Tensor | None = None  # fp32 [1] or [num_kv_heads]
    v: torch.Tensor | None = None
    k_value: float = 1.0
    v_value: float = 1.0


UNSCALED = Scales()


def given_scales(
    k_scale: float | torch.Tensor | None,
    v_scale: float | torch.Tensor | None,
    kv_dtype: torch.dtype,
) -> Scales:
    """Sort what `run()` was given; tensors are looked at by `check_scales`."""
    if k_scale is None and v_scale is None:
        return UNSCALED
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            continue
        if kv_dtype != FP8:
            raise refusal(
                f"{name} is given with a {kv_dtype} cache, where it has no effect",
                f"{name} with a {FP8} cache only",
                f"Drop {name}",
            )
        if isinstance(scale, torch.Tensor):
            check_no_gradient(name, scale)
            continue
        if isinstance(scale, bool) or not isinstance(scale, (int, float)):
            raise TypeError(
                f"{name} is {scale!r}; expected a number or a float32 tensor. Pass one of these."
            )
        if not 0 < scale < math.inf:
            raise refusal(f"{name} is {scale}", "a finite number above 0", "Correct the value")
    # A tensor of one element is read where it is, whatever its dimensions.
    k, v = (
        (s if s.dim() else s.view(1)) if isinstance(s, torch.Tensor) else None
        for s in (k_scale, v_scale)
    )
    k_value, v_value = (
        float(s) if isinstance(s, (int, float)) else 1.0 for s in (k_scale, v_scale)
    )
    return Scales(k, v, k_value, v_value)


def check_scales(scales: Scales, num_kv_heads: int, device: torch.device) -> None:
    """Raise unless tensors hold one scale, or one of each KV head, where the plan runs."""
    for name, t in (("k_scale", scales.k), ("v_scale", scales.v)):
        if t is None:
            continue
        check_vector(name, t, None, dtype=torch.float32, device=device)
        if t.shape[0] not in (1, num_kv_heads):
            raise refusal(
                f"{name} has {t.shape[0]} entries",
                f"1, or {num_kv_heads}: one of each KV head",
                "Pass one of these",
            )


def scale_fields(scales: Scales) -> dict[str, object]:
    """Return the scales as fields of a launch record."""
    fields: dict[str, object] = {}
    for name, t, value in (("k", scales.k, scales.k_value), ("v", scales.v, scales.v_value)):
        fields[f"{name}_scale"] = 0 if t is None else t.data_ptr()
        fields[f"{name}_scale_value"] = value
        fields[f"{name}_scale_stride"] = 0 if t is None or t.shape[0] == 1 else 1
    return fields


def dequantised(ragged: Ragged, scales: Scales) -> Ragged:
    """Return the same with K and V as the float32 numbers that they stand for."""
    q, k, v, qo_indptr, kv_indptr = ragged
    k_scale = scales.k_value if scales.k is None else scales.k[:, None]
    v_scale = scales.v_value if scales.v is None else scales.v[:, None]
    return q, k.float() * k_scale, v.float() * v_scale, qo_indptr, kv_indptr
