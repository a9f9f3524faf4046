"""The CPU path of the wrappers: a plan carried out by `flashskip.reference` in float32."""

from __future__ import annotations

import torch

from flashskip import reference
from flashskip._plan import Plan


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
        dtype=torch.float32,
        skip_map=False,
    )
