"""flashskip itself: the dense kernel, and the skip kernel at the data's threshold."""

from __future__ import annotations

import time
from functools import partial

import torch

import flashskip
from benchmarks.cases import Case, DecodeCase, PrefillCase
from benchmarks.contestant import Contestant, Prepared, Unsupported
from benchmarks.data import THRESHOLD, Data, DecodeData, PrefillData

# Seconds of the first plan() of each kernel: with an empty cache that is render, compile and load.
first_plan_seconds: dict[flashskip.Variant, float] = {}


def prepare(case: Case, data: Data, **options: object) -> Prepared:
    """Plan a wrapper; `options` go to plan()."""
    wrapper, plan, run = _wrapper(case, data, options)
    started = time.perf_counter()
    try:
        plan()
    except flashskip.UnsupportedVariant as error:
        raise Unsupported(str(error)) from error
    first_plan_seconds.setdefault(wrapper.variant, time.perf_counter() - started)
    skips = options.get("skip_softmax_threshold") is not None
    count = partial(_skipped_share, case, data, options) if skips else None
    return Prepared(run, plan=plan, skipped_share=count)


def _wrapper(case: Case, data: Data, options: dict[str, object]) -> tuple:
    """Return a wrapper, its plan() and its run() on the data, with an output that is kept."""
    options = {"q_data_type": data.q.dtype, **options}
    workspace = torch.empty(0) if data.q.device.type == "cpu" else None
    if isinstance(case, PrefillCase):
        assert isinstance(data, PrefillData)
        wrapper = flashskip.BatchPrefillWrapper(workspace)
        indices = (data.qo_indptr, data.kv_indptr)
        shape = (case.num_qo_heads, case.num_kv_heads, case.head_dim_qk, case.head_dim_vo)
        options["causal"] = case.causal
        inputs, head_dim_vo = (data.q, data.k, data.v), case.head_dim_vo
    else:
        assert isinstance(case, DecodeCase)
        assert isinstance(data, DecodeData)
        wrapper = flashskip.BatchDecodeWrapper(workspace)
        indices = (data.indptr, data.indices, data.last_page_len)
        shape = (case.num_qo_heads, case.num_kv_heads, case.head_dim, case.page_size)
        inputs, head_dim_vo = (data.q, (data.k, data.v)), case.head_dim
    out = data.q.new_full((*data.q.shape[:2], head_dim_vo), float("nan"))
    plan = partial(wrapper.plan, *indices, *shape, **options)
    return wrapper, plan, partial(wrapper.run, *inputs, out=out)


def _skipped_share(case: Case, data: Data, options: dict[str, object]) -> float:
    """Count in a kernel of its own: the timed one carries no counters."""
    wrapper, plan, run = _wrapper(case, data, {**options, "collect_stats": True})
    started = time.perf_counter()
    plan()
    first_plan_seconds.setdefault(wrapper.variant, time.perf_counter() - started)
    wrapper.reset_stats()
    run()
    skipped, visited = wrapper.stats.sum((0, 1)).tolist()
    return skipped / max(visited, 1)


CONTESTANTS = (
    Contestant("flashskip dense", prepare, ours=True),
    Contestant(
        "flashskip skip",
        partial(prepare, skip_softmax_threshold=THRESHOLD),
        skips=True,
        ours=True,
    ),
)
