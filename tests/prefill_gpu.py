"""Plan, run and compare with the oracle: what the GPU tests of the prefill kernel share."""

from __future__ import annotations

from typing import Any

import torch
from helpers import (
    HeadDim,
    Ragged,
    assert_within_budget,
    eager_attention,
    head_dims,
    kept_keys,
    poisoned,
)

import flashskip
from flashskip import reference
from flashskip._options import PlanOptions
from flashskip.variant import Variant

DEVICE = "cuda"
BF16, FP16 = torch.bfloat16, torch.float16

# Queries and keys of requests: none, one, more queries than keys, partial tiles, whole blocks.
MIX = ((130, 0, 5, 300, 64, 700, 1, 192), (130, 77, 900, 300, 0, 500, 333, 1152))
LONG = ((2000, 1, 300, 700), (2000, 500, 300, 900))

# Scores are fp32 sums of exact products: their error is far below this, in log2 units. A decision
# whose margin is smaller may fall either way.
ROUNDING_BAND = 1e-3


# Channels of q and k, and of v and the output where they differ.
HEAD_DIMS = (64, 96, 128, (192, 128), 256)


def variant(
    head_dim: HeadDim = 128, dtype: torch.dtype = BF16, page_size: int = 0, **options: Any
) -> Variant:
    """Return the kernel that a plan with these options launches; `page_size` 0: a ragged one."""
    wrapper = flashskip.BatchPrefillWrapper(torch.empty(0))
    checked = PlanOptions(q_data_type=dtype, **options)
    return wrapper._variant(checked, *head_dims(head_dim), page_size)


def plan(batch: Ragged, **options: Any) -> flashskip.BatchPrefillWrapper:
    """Plan for `batch` on the test's device."""
    wrapper = flashskip.BatchPrefillWrapper()
    shape = (batch.q.shape[1], batch.k.shape[1], batch.q.shape[2], batch.v.shape[2])
    options = {"q_data_type": batch.q.dtype, **options}
    wrapper.plan(batch.qo_indptr, batch.kv_indptr, *shape, **options)
    return wrapper


def run(
    wrapper: flashskip.BatchPrefillWrapper, batch: Ragged, lse_base: str = "log2"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run into poisoned outputs."""
    out = poisoned(batch.out_shape, batch.q.dtype, DEVICE)
    lse = poisoned(batch.q.shape[:2], torch.float32, DEVICE)
    wrapper.run(batch.q, batch.k, batch.v, out=out, lse=lse, lse_base=lse_base)
    return out, lse


def attend(batch: Ragged, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Plan and run once."""
    return run(plan(batch, **options), batch)


def oracle(
    wrapper: flashskip.BatchPrefillWrapper, batch: Ragged, thresholds: list[float | None] | None
) -> reference.Result:
    """The reference in float64, with the plan's geometry and options."""
    options = wrapper._planned().options
    return reference.attention(
        batch.q,
        batch.k,
        batch.v,
        qo_indptr=batch.qo_indptr,
        kv_indptr=batch.kv_indptr,
        geometry=wrapper.geometry,
        logits_soft_cap=options.logits_soft_cap,
        sinks=options.sinks,
        thresholds=thresholds,
    )


def assert_matches(
    batch: Ragged,
    out: torch.Tensor,
    lse: torch.Tensor,
    exact: reference.Result,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Outputs within the budget of each request, LSE to 1e-4, all rows written."""
    assert exact.skip_map is not None
    sm_scale = batch.q.shape[-1] ** -0.5
    for (qo, kv), skip_map in zip(batch.spans(), exact.skip_map, strict=True):
        if qo.stop > qo.start:
            kept = kept_keys(skip_map)
            tensors = (batch.q[qo], batch.k[kv], batch.v[kv])
            eager = eager_attention(*tensors, kept, sm_scale, soft_cap, sinks)
            assert_within_budget(out[qo], exact.out[qo], eager)
            sees_nothing = ~kept.any(-1).mT
            assert (out[qo][sees_nothing] == 0).all()
    torch.testing.assert_close(lse.double(), exact.lse, rtol=0, atol=1e-4)


def assert_counts(wrapper: flashskip.BatchPrefillWrapper, exact: reference.Result) -> None:
    """Counters equal the oracle's, but for decisions within the rounding band."""
    assert exact.skip_map is not None
    stats = wrapper.stats.cpu()
    counts = exact.counts.cpu()
    torch.testing.assert_close(stats[..., 1], counts[..., 1], rtol=0, atol=0)
    close = [m.count(m.margin.abs() < ROUNDING_BAND).cpu() for m in exact.skip_map]
    assert ((stats - counts)[..., 0].abs() <= torch.stack(close)).all()


def check(batch: Ragged, threshold: float | None = None, **options: Any) -> None:
    """Attend and compare with the oracle: outputs, LSE, and the counters where there are some."""
    skips = (
        {} if threshold is None else {"collect_stats": True, "skip_softmax_threshold": threshold}
    )
    wrapper = plan(batch, **options, **skips)
    out, lse = run(wrapper, batch)
    thresholds = None if threshold is None else [threshold] * (len(batch.qo_indptr) - 1)
    exact = oracle(wrapper, batch, thresholds)
    capped_and_sunk = (options.get("logits_soft_cap"), options.get("sinks"))
    assert_matches(batch, out, lse, exact, *capped_and_sunk)
    if threshold is not None:
        assert_counts(wrapper, exact)
