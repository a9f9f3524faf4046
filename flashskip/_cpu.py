"""The CPU path of the wrappers: a plan carried out by `flashskip.reference` in float32."""

from __future__ import annotations

import torch

from flashskip import reference
from flashskip._plan import Plan

Ragged = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k, v, qo_indptr, kv_indptr."""


def attend_into(
    plan: Plan,
    ragged: Ragged,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    bound: torch.Tensor | None,
    lse_scale: float,
) -> None:
    """Write what a kernel would; rows past the last request are not written."""
    result = attend(plan, *ragged)
    rows = int(ragged[3][-1])
    out[:rows] = result.out[:rows].to(out.dtype)
    if lse is not None:
        lse[:rows] = result.lse[:rows] * lse_scale
    if bound is not None:
        bound[:rows] = result.bound[:rows]
    if plan.options.collect_stats:
        plan.buffers["stats"] += result.counts
    if result.skip_map:
        plan.buffers["gaps"] += torch.stack([reference.histogram(m) for m in result.skip_map])


def attend(
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
) -> reference.Result:
    """Attend with the plan's options; live tensors are read now, as a kernel would."""
    options = plan.options
    thresholds = None
    if options.threshold is not None:
        name = "scale_factor" if options.threshold_is_factor else "threshold"
        thresholds = reference.final_thresholds(
            (kv_indptr[1:] - kv_indptr[:-1]).tolist(),
            length_exponent=options.length_exponent,
            threshold_kv_len=options.threshold_kv_len,
            overflow=options.overflow,
            **{name: options.threshold},
        )
    return reference.attention(
        q,
        k,
        v,
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        geometry=plan.geometry,
        sm_scale=options.scale(plan.variant.head_dim_qk),
        logits_soft_cap=options.logits_soft_cap,
        sinks=options.sinks,
        thresholds=thresholds,
        budget=options.skip_budget,
        dtype=torch.float32,
        skip_map=options.criterion == "measure",
    )
