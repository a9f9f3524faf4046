"""Kernels whose warps are held up here and there: who is late must not change a bit.

A barrier that is looked at by the wrong parity passes as long as all warps keep step.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator
from typing import Any

import paged
import prefill_gpu
import pytest
import test_prefill_paged_gpu
import torch
from helpers import make_ragged
from paged import make_paged, to_pages

from flashskip import _env, _kernels
from flashskip._jit.build import build
from flashskip._jit.compile import Program, compile_cubin
from flashskip._jit.kernel import load
from flashskip._jit.render import Source
from flashskip._tiles import PrefillTile, tile_for
from flashskip.variant import Variant

LAMBDA = paged.LAMBDA
STATS: dict[str, Any] = {"skip_softmax_threshold": LAMBDA, "collect_stats": True}

# Which warps are late, in turn. In prefill only in every second CTA, of those that share what they
# load: a consumer of four; of the producers the one that schedules and the first that loads.
WARPS = tuple(f"threadIdx.x / 32 % 4 == {i}" for i in (0, 1))
CONSUMERS = tuple(f"{warp} && blockIdx.x % 2 == {i}" for i, warp in enumerate(WARPS))
PRODUCERS = tuple(f"threadIdx.x / 32 % 4 < 2 && blockIdx.x % 2 == {i}" for i in (0, 1))

# What a warp is late for, by the code that it is held up before.
DECODE = {
    "filling a stage of K": "mbarrier_wait(at(shared.k_released[ring.stage]), ring.parity ^ 1);",
    "filling a stage of V": "const KeptTile& kept = shared.kept[ring.stage];\n    const int tile",
    "announcing a segment": "const int stage = ring.stage;\n  mbarrier_wait(at(shared.q_released",
    "giving K back": "if (lane < count) mbarrier_arrive(at(shared.k_released",
    "asking for V": "KeptTile& kept = shared.kept[to.stage];",
    "handing P on": "fence_proxy_async_shared();  // P before the wgmma that reads it",
    "giving V back": "if (threadIdx.x % 32 == 0) mbarrier_arrive(at(shared.v_released[ring.",
}
PRODUCING = {
    "claiming an item": "load_q(p, shared, work, item % 2);",
    "filling a stage": "loader.template load<COLUMNS, FIRST_COLUMN>(",
}
PAIRED = {  # where CTAs are launched in pairs
    "telling what an item is of": "const bool agree = pair.agree(work, item);",
    "announcing a stage": "const uint32_t barrier = shared_address(&ready[stage]);",
    "waiting for the other's stage": "mbarrier_wait(barrier, parities >> stage & 1);",
}
CONSUMING = {
    "multiplying": "wait_for_k(shared, k);\n      if (sees(unit",
    "voting": "if (threadIdx.x % 32 == 0) st_shared_volatile_u8(voter.own",
    "giving V back": "release(shared.v_ring.released[v.stage]);\n    }",
}
OVERLAPPING = {  # where a tile's P.V is issued behind the next one's Q.K
    "taking its turn": "wait_for_turn(unit.index);\n  multiply_qk",
    "passing the turn": "pass_turn(unit.index);\n  take_scores",
    "giving V back": "if constexpr (PV_BEFORE) end_pv(unit, shared, v);",
}

# Options of the kernels; rings of V: of three stages twice, of six.
DECODES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "wide": (4, 256, 64, {}),
    "wide skipping": (4, 256, 64, STATS),
    "many rows": (64, 128, 16, STATS),
    "128": (4, 128, 16, {}),
    "128 skipping": (4, 128, 16, STATS),
    "rows of pages": (4, 128, 3, STATS),
}
PREFILLS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "wide": (256, 0, {"causal": True, **STATS}),
    "128": (128, 0, {"causal": True, **STATS}),
    "pages": (128, 16, {"causal": True, **STATS}),
    "rows of pages": (128, 3, {"causal": True, **STATS}),
    "blocks of rows in pairs": (128, 0, STATS),
    "blocks of rows in pairs on pages": (128, 16, STATS),
    "in turns": (64, 0, {"causal": True}),
    "in turns on pages": (64, 16, {"window_left": 300}),
}
# Queries, keys and heads. Where long caches of few queries are divided over their keys, no CTAs
# share tiles; in the second batch none are, and each CTA has several items.
BATCHES: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...] = (
    ((700, 1, 300, 64, 16, 500, 0, 130), (700, 40, 900, 3000, 9000, 5000, 77, 130), 4),
    ((700, 1, 300, 64, 1500, 500, 0, 130) * 2, (700, 40, 900, 3000, 1500, 2500, 77, 130) * 2, 16),
)


def late(program: Program, before: str, who: str) -> Program:
    """Let warps sleep before `before`, which stands in one place of all sources."""
    texts = [program.source.text, *(text for _, text in program.source.headers)]
    assert sum(text.count(before) for text in texts) == 1, before
    sleeping = f"if ({who}) __nanosleep(3000);\n{before}"
    text, *headers = (text.replace(before, sleeping) for text in texts)
    names = [name for name, _ in program.source.headers]
    source = Source(text, tuple(zip(names, headers, strict=True)))
    return dataclasses.replace(program, source=source)


def places(v: Variant) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """What warps of a kernel are late for, the code that they are held up before, and which."""
    if v.op == "decode":
        by_warps = {WARPS: DECODE}
    else:
        tile = tile_for(v)
        assert isinstance(tile, PrefillTile)
        paired = PAIRED if tile.pairs(v) else {}
        consuming = OVERLAPPING if tile.overlaps else CONSUMING
        by_warps = {CONSUMERS: consuming, PRODUCERS: PRODUCING | paired}
    for warps, found in by_warps.items():
        for place, before in found.items():
            yield place, before, warps


def decode_variant(case: str) -> Variant:
    group_size, head_dim, page_size, options = DECODES[case]
    return paged.variant(group_size, head_dim, page_size, **options)


def prefill_variant(case: str) -> Variant:
    head_dim, page_size, options = PREFILLS[case]
    return prefill_gpu.variant(head_dim, page_size=page_size, **options)


def programs() -> Iterator[Program]:
    """All of them."""
    for v in itertools.chain(map(decode_variant, DECODES), map(prefill_variant, PREFILLS)):
        for _, before, warps in places(v):
            for who in warps:
                yield late(_kernels.program_for(v), before, who)


@pytest.fixture(scope="module")
def built() -> None:
    """Compile them side by side."""
    directory = _env.cache_dir()
    if directory is not None:
        build(list(programs()), directory, jobs=os.cpu_count() or 1)


def run_late(wrapper: Any, run: Any, before: str, who: str) -> Any:
    """Run with the plan's kernel held up."""
    plan = wrapper._planned()
    usual = plan.kernel
    plan.kernel = load(late(_kernels.program_for(plan.variant), before, who), _env.kernel_cache())
    plan.kernel.prepare(plan.device.index)
    try:
        return run()
    finally:
        plan.kernel = usual


def assert_unmoved(wrapper: Any, run: Any) -> None:
    """Outputs, LSE and counters are those of the kernel that nobody holds up."""
    counts = wrapper._planned().options.collect_stats

    def answer(*held_up: str) -> tuple[torch.Tensor, ...]:
        if counts:
            wrapper.reset_stats()
        tensors = run_late(wrapper, run, *held_up) if held_up else run()
        return (*tensors, *([wrapper.stats.clone()] if counts else []))

    expected = answer()
    if counts:
        assert expected[-1][..., 0].any()
    for place, before, warps in places(wrapper._planned().variant):
        for who in warps:
            assert all(map(torch.equal, answer(before, who), expected)), (place, who)


@pytest.mark.gpu
@pytest.mark.variants(lambda case: [decode_variant(case)])
@pytest.mark.parametrize("case", DECODES)
@pytest.mark.usefixtures("built")
def test_decode(case: str) -> None:
    group_size, head_dim, page_size, options = DECODES[case]
    lengths = (4096, 0, 1, 64, 700, 130, 2048, 65) * 8
    batch = make_paged(lengths, 2 * group_size, 2, head_dim, page_size)
    wrapper = paged.plan(batch, **options)
    assert_unmoved(wrapper, lambda: paged.run(wrapper, batch))


@pytest.mark.gpu
@pytest.mark.variants(lambda case: [prefill_variant(case)])
@pytest.mark.parametrize("case", PREFILLS)
@pytest.mark.parametrize("batch", BATCHES, ids=["divided", "whole"])
@pytest.mark.usefixtures("built")
def test_prefill(case: str, batch: tuple[tuple[int, ...], tuple[int, ...], int]) -> None:
    head_dim, page_size, options = PREFILLS[case]
    *lengths, heads = batch
    ragged = make_ragged(*lengths, heads, 2, head_dim, hot=0.3)
    if page_size:
        pages = to_pages(ragged, page_size)
        wrapper = test_prefill_paged_gpu.plan_pages(ragged, pages, **options)
        run = lambda: test_prefill_paged_gpu.run_pages(wrapper, ragged, pages)  # noqa: E731
    else:
        wrapper = prefill_gpu.plan(ragged, **options)
        run = lambda: prefill_gpu.run(wrapper, ragged)  # noqa: E731
    assert_unmoved(wrapper, run)


def test_each_kernel_is_held_up_in_one_place_and_compiles() -> None:
    """On any machine: two of them are compiled, for each the text must stand where it is said."""
    every = list(programs())
    assert len({program.content for program in every}) == len(every)
    for program in (every[0], every[-1]):
        assert compile_cubin(program).registers > 0
