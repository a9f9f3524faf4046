"""A ragged batch, request by request."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flashskip.geometry import Geometry

from ._budget import allowance
from ._request import Request
from ._result import Result, SkipMap
from ._rows import spans
from ._thresholds import log2_thresholds


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    qo_indptr: Tensor | Sequence[int],
    kv_indptr: Tensor | Sequence[int],
    geometry: Geometry,
    sm_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: Tensor | None = None,
    thresholds: Sequence[float | None] | Tensor | None = None,
    budget: float | None = None,
    dtype: torch.dtype = torch.float64,
    skip_map: bool = True,
) -> Result:
    """Attention of a ragged batch, skipping tiles as the kernels do.

    Parameters
    ----------
    q : Tensor
        ``[nnz_qo, num_qo_heads, head_dim_qk]``, any floating dtype, on any device.
    k, v : Tensor
        ``[nnz_kv, num_kv_heads, head_dim_qk]`` and ``[nnz_kv, num_kv_heads, head_dim_vo]``; see
        :func:`gather_pages` for paged ones.
    qo_indptr, kv_indptr : Tensor or sequence of int
        ``[batch_size + 1]``: where each request's queries and keys start.  Spans are clamped to the
        tensors, a decreasing one is empty.
    geometry : Geometry
        Which rows and keys decide together, judged against what, in which order; causal limit and
        window.
    sm_scale : float, optional
        Factor of ``q k``; ``1 / sqrt(head_dim_qk)`` by default.
    logits_soft_cap : float, optional
        ``c * tanh(x / c)`` after the scale.  None or 0: off.
    sinks : Tensor, optional
        ``[num_qo_heads]``, natural-log units: a logit per head that joins the denominator.
    thresholds : sequence or Tensor, optional
        ``[batch_size]``: each request's final threshold in [0, 1], or None for a dense request.
        None: all dense.  See :func:`final_thresholds`.
    budget : float, optional
        In (0, 1]: skip by the budget criterion, so that the omitted share of the softmax mass stays
        at or below this in every row. Instead of `thresholds`.
    dtype : torch.dtype
        Of the computation and of the floating results.
    skip_map : bool
        Whether to return the decisions (and, for dense requests, to work out their gaps).

    Returns
    -------
    Result

    Raises
    ------
    ValueError
        Shapes that do not fit together, a threshold or budget out of range, or both given.
    """
    _check_shapes(q, k, v, geometry, sinks)
    if budget is not None and (thresholds is not None or not 0 < budget <= 1):
        raise ValueError(
            f"budget is {budget} and thresholds is {thresholds}; give a budget in (0, 1] alone"
        )
    batch_size = len(qo_indptr) - 1
    if len(kv_indptr) != len(qo_indptr):
        raise ValueError(
            f"kv_indptr has {len(kv_indptr)} entries and qo_indptr has {len(qo_indptr)}; "
            "give both batch_size + 1 entries"
        )
    log2_lambdas = log2_thresholds(thresholds, batch_size)
    rows, heads, head_dim_qk = q.shape
    out = q.new_zeros((rows, heads, v.shape[2]), dtype=dtype)
    lse = q.new_full((rows, heads), -math.inf, dtype=dtype)
    bound = q.new_zeros((rows, heads), dtype=dtype)
    counters = heads // geometry.heads_per_vote
    counts = torch.zeros((batch_size, counters, 2), dtype=torch.int64, device=q.device)
    maps: list[SkipMap] = []
    kv_spans = spans(kv_indptr, k.shape[0])
    for i, qo in enumerate(spans(qo_indptr, rows)):
        kv = kv_spans[i]
        request = Request(
            geometry.of(qo.stop - qo.start, kv.stop - kv.start),
            q=q[qo],
            k=k[kv],
            v=v[kv],
            sm_scale=1 / math.sqrt(head_dim_qk) if sm_scale is None else sm_scale,
            soft_cap=logits_soft_cap or None,
            log2_threshold=log2_lambdas[i] if budget is None else math.log2(allowance(budget)),
            spends_budget=budget is not None,
            dtype=dtype,
            wants_gaps=skip_map,
        )
        request.attend()
        out[qo], lse[qo], bound[qo] = request.finish(sinks)
        maps.append(request.skip_map())
        counts[i, :, 0] = maps[-1].count(maps[-1].skipped)
        counts[i, :, 1] = maps[-1].count(maps[-1].visited)
    return Result(out, lse, bound, counts, maps if skip_map else None)


def _check_shapes(
    q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, sinks: Tensor | None
) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 3:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; it must be [tokens, heads, head_dim]"
            )
    if k.shape[:2] != v.shape[:2] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q, k, v have shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; k and v "
            "must agree in tokens and heads, q and k in head_dim"
        )
    name = "heads_per_vote" if geometry.group_size is None else "group_size"
    heads_per_vote = getattr(geometry, name)
    group_size, remainder = divmod(q.shape[1], k.shape[1])
    if remainder or group_size % heads_per_vote:
        raise ValueError(
            f"q has {q.shape[1]} heads and k has {k.shape[1]}; their ratio must be a multiple of "
            f"{name}, which is {heads_per_vote}"
        )
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(
            f"sinks has shape {tuple(sinks.shape)}; it must be ({q.shape[1]},), one per query head"
        )
