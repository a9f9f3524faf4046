"""Where a request's final threshold comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def final_thresholds(
    kv_lens: Sequence[int] | Tensor,
    *,
    threshold: float | Tensor | None = None,
    scale_factor: float | Tensor | None = None,
    length_exponent: float = 1.0,
    threshold_kv_len: Sequence[int] | Tensor | None = None,
    overflow: str = "dense",
) -> list[float | None]:
    """Work out each request's final threshold, from a threshold or from a scale factor.

    Host values (floats) are checked; device values (tensors) are read as a kernel reads them, which
    cannot raise: NaN and negative as 0, a threshold above 1 as 1.

    Parameters
    ----------
    kv_lens : sequence or Tensor of int
        ``[batch_size]``: keys of each request.
    threshold : float or Tensor, optional
        The final threshold, or float32 ``[batch_size]`` of them.
    scale_factor : float or Tensor, optional
        ``F`` of ``F / length ** length_exponent``, or float32 ``[batch_size]`` of them.
    length_exponent : float
        Exponent of the length.
    threshold_kv_len : sequence or Tensor of int, optional
        ``[batch_size]``: the lengths to divide by instead of `kv_lens`.
    overflow : str
        What a factor that gives a threshold of 1 or more means: ``"dense"`` or ``"clamp"`` (to 1).

    Returns
    -------
    list of float or None
        ``[batch_size]``; None: the request is dense.

    Raises
    ------
    ValueError
        Both sources at once, a host value out of range, or an option that has no effect.
    """
    batch_size = len(kv_lens)
    if overflow not in ("dense", "clamp"):
        raise ValueError(f"overflow is {overflow!r}; it must be 'dense' or 'clamp'")
    if threshold is not None and scale_factor is not None:
        raise ValueError(
            "skip_softmax_threshold and skip_softmax_threshold_scale_factor are both given; "
            "give one of them"
        )
    if scale_factor is None and (threshold_kv_len is not None or length_exponent != 1.0):
        raise ValueError(
            "threshold_kv_len and length_exponent only have an effect with "
            "skip_softmax_threshold_scale_factor; leave them out or give it"
        )
    if threshold is not None:
        values = _per_request(threshold, batch_size, "skip_softmax_threshold", limit=1.0)
        return [min(value, 1.0) for value in values]
    if scale_factor is None:
        return [None] * batch_size
    factors = _per_request(scale_factor, batch_size, "skip_softmax_threshold_scale_factor")
    lengths = kv_lens if threshold_kv_len is None else threshold_kv_len
    finals = [
        float32(factor / max(int(length), 1) ** length_exponent)
        for factor, length in zip(factors, lengths, strict=True)
    ]
    beyond = None if overflow == "dense" else 1.0
    return [beyond if value >= 1 else value for value in finals]


def log2_thresholds(
    thresholds: Sequence[float | None] | Tensor | None, batch_size: int
) -> list[float | None]:
    """Check final thresholds and take their logarithm; None stays None."""
    if thresholds is None:
        return [None] * batch_size
    values = thresholds.tolist() if isinstance(thresholds, Tensor) else thresholds
    if len(values) != batch_size:
        raise ValueError(
            f"thresholds has {len(values)} entries; give one per request, {batch_size}"
        )
    for value in values:
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"thresholds holds {value}; each must be None or in [0, 1]")
    singles = [None if value is None else float32(value) for value in values]
    return [None if x is None else math.log2(x) if x > 0 else -math.inf for x in singles]


def float32(value: float) -> float:
    """Round a threshold to what a kernel holds."""
    return float(torch.tensor(value, dtype=torch.float32))


def _per_request(
    given: float | Tensor, batch_size: int, name: str, limit: float = math.inf
) -> list[float]:
    """Spread a checked host value over the batch, or read a tensor as a kernel does."""
    if isinstance(given, Tensor):
        if given.shape != (batch_size,):
            raise ValueError(
                f"{name} has shape {tuple(given.shape)}; give a float or one value per request, "
                f"({batch_size},)"
            )
        return [value if value > 0 else 0.0 for value in given.float().tolist()]
    if not 0 <= given <= limit or math.isinf(given):
        wanted = "in [0, 1]" if limit == 1 else "finite and not negative"
        raise ValueError(f"{name} is {given}; it must be {wanted}")
    return [float32(given)] * batch_size
