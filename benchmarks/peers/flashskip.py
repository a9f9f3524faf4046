"""flashskip itself: the dense kernel, and the skip kernel at the data's threshold.

On a paged prefill also the dense kernel on the same K and V without pages, as what paging costs; in
some cases the skip kernel with votes of 128 keys, as what votes of 64 cost.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch

import flashskip
from benchmarks.cases import Case, DecodeCase, PrefillCase
from benchmarks.contestant import NOT_ASKED, Contestant, Prepared, Unsupported
from benchmarks.data import THRESHOLD, Data, DecodeData, PrefillData, make_data
from benchmarks.groups import PREFILL_VOTES
from flashskip.variant import supported

# Seconds of the first plan() of each kernel: with an empty cache that is render, compile and load.
first_plan_seconds: dict[flashskip.Variant, float] = {}


def prepare(case: Case, data: Data, **options: object) -> Prepared:
    """Plan a wrapper; `options` go to plan()."""
    return planned(case, data, **options)[1]


def planned(
    case: Case, data: Data, **options: object
) -> tuple[flashskip.BatchPrefillWrapper | flashskip.BatchDecodeWrapper, Prepared]:
    """Plan a wrapper and return it too, for what looks into its plan."""
    wrapper, plan, run = _wrapper(case, data, options)
    started = time.perf_counter()
    try:
        plan()
    except flashskip.UnsupportedVariant as error:
        raise Unsupported(str(error)) from error
    first_plan_seconds.setdefault(wrapper.variant, time.perf_counter() - started)
    skips = options.get("skip_softmax_threshold") is not None
    count = partial(_skipped_share, case, data, options) if skips else None
    return wrapper, Prepared(run, plan=plan, skipped_share=count)


def prepare_unpaged(case: Case, data: Data) -> Prepared:
    """Plan the dense kernel on ragged K and V where the case has pages."""
    if not isinstance(case, PrefillCase) or not case.page_size:
        raise Unsupported(NOT_ASKED)
    prepared = prepare(replace(case, page_size=0), data)
    prepared.paged = False
    return prepared


def prepare_votes_of_128(case: Case, data: Data) -> Prepared:
    """Plan the skip kernel with wide votes, in a few cases."""
    if case not in PREFILL_VOTES:
        raise Unsupported(NOT_ASKED)
    return prepare(case, data, **_SKIP_BY_128)


def _wrapper(case: Case, data: Data, options: dict[str, object]) -> tuple:
    """Return a wrapper, its plan() and its run() on the data, with an output that is kept."""
    options = {"q_data_type": data.q.dtype, **options}
    workspace = torch.empty(0) if data.q.device.type == "cpu" else None
    if isinstance(case, PrefillCase):
        assert isinstance(data, PrefillData)
        wrapper = flashskip.BatchPrefillWrapper(workspace)
        plan, inputs = _prefill_plan(wrapper, case, data, options)
        head_dim_vo = case.head_dim_vo
    else:
        assert isinstance(case, DecodeCase)
        assert isinstance(data, DecodeData)
        wrapper = flashskip.BatchDecodeWrapper(workspace)
        indices = (data.indptr, data.indices, data.last_page_len)
        shape = (case.num_qo_heads, case.num_kv_heads, case.head_dim, case.page_size)
        if case.kv_dtype:
            options["kv_data_type"] = data.k.dtype
        plan = partial(wrapper.plan, *indices, *shape, **options)
        inputs, head_dim_vo = (data.q, (data.k, data.v)), case.head_dim
    out = data.q.new_full((*data.q.shape[:2], head_dim_vo), float("nan"))
    return wrapper, plan, partial(wrapper.run, *inputs, out=out)


def _prefill_plan(
    wrapper: flashskip.BatchPrefillWrapper,
    case: PrefillCase,
    data: PrefillData,
    options: dict[str, object],
) -> tuple:
    """Return plan() or plan_paged() with its arguments, and what run() is given."""
    options["causal"] = case.causal
    heads = (case.num_qo_heads, case.num_kv_heads)
    if case.page_size and data.pages is not None:
        pages = data.pages
        table = (data.qo_indptr, pages.indptr, pages.indices, pages.last_page_len)
        shape = (*heads, case.head_dim_qk, case.page_size)
        options["head_dim_vo"] = case.head_dim_vo
        plan = partial(wrapper.plan_paged, *table, *shape, **options)
        return plan, (data.q, (pages.k, pages.v))
    shape = (*heads, case.head_dim_qk, case.head_dim_vo)
    plan = partial(wrapper.plan, data.qo_indptr, data.kv_indptr, *shape, **options)
    return plan, (data.q, data.k, data.v)


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


def variants(cases: Iterable[Case]) -> list[flashskip.Variant]:
    """Return the supported kernels that the contestants launch on these cases, found on the CPU."""
    found: dict[flashskip.Variant, None] = {}
    for case in cases:
        skips = (_SKIP, _SKIP_BY_128) if case in PREFILL_VOTES else (_SKIP,)
        for options in ({}, *skips, *({**skip, "collect_stats": True} for skip in skips)):
            try:
                variant = variant_of(case, **options)
            except (flashskip.UnsupportedVariant, ValueError):  # the run will say so
                continue
            if supported(variant):
                found[variant] = None
    return list(found)


def variant_of(case: Case, **options: object) -> flashskip.Variant:
    """Return the kernel that a plan of this case launches, found on the CPU."""
    small = _shortest(case)
    data = make_data(small, 0.0, torch.device("cpu"))
    wrapper, plan, _ = _wrapper(small, data, options)
    plan()
    return wrapper.variant


def _shortest(case: Case) -> Case:
    """Return the case with one request of one token: no kernel depends on lengths."""
    if isinstance(case, PrefillCase):
        return replace(case, qo_lens=(1,), kv_lens=(1,))
    return replace(case, batch_size=1, kv_len=1)


_SKIP = {"skip_softmax_threshold": THRESHOLD}
_SKIP_BY_128 = {**_SKIP, "vote_kv": 128}
CONTESTANTS = (
    Contestant("flashskip dense", prepare, ours=True),
    Contestant("flashskip skip", partial(prepare, **_SKIP), skips=True, ours=True),
    Contestant("flashskip ragged", prepare_unpaged, ours=True),
    Contestant("flashskip skip by 128", prepare_votes_of_128, skips=True, ours=True),
)
