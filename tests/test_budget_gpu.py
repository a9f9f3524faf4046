"""The budget criterion in the prefill kernel: the reference's decisions, and never too much."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import prefill_gpu
import pytest
import torch
from adversarial import PATTERNS, make_adversarial, omitted_share
from helpers import Ragged, make_ragged, seen, show_tiles
from prefill_gpu import BF16, DEVICE, FP16, LONG, MIX
from test_bound_gpu import sure_rows

from flashskip import reference
from flashskip.geometry import ORDERS
from flashskip.variant import Variant

pytestmark = pytest.mark.gpu


def spending(budget: float, **options: Any) -> dict[str, Any]:
    return {"skip_criterion": "budget", "skip_budget": budget, **options}


def kernel(head_dim: int = 128, dtype: torch.dtype = BF16, **options: Any) -> list[Variant]:
    return [prefill_gpu.variant(head_dim, dtype, **spending(0.1, **options))]


def exact_result(wrapper: Any, batch: Any, budget: float) -> reference.Result:
    options = wrapper._planned().options
    return reference.attention(
        batch.q, batch.k, batch.v, qo_indptr=batch.qo_indptr, kv_indptr=batch.kv_indptr,
        geometry=wrapper.geometry, logits_soft_cap=options.logits_soft_cap, sinks=options.sinks,
        budget=budget,
    )  # fmt: skip


CASES: dict[str, tuple[Any, ...]] = {
    "causal": (LONG, (5, 1), 128, BF16, 0.05, {"causal": True}),
    "coarse": (LONG, (3, 1), 128, BF16, 0.2, {"causal": True, "vote_kv": 128, "order": ORDERS[1]}),
    "ascending": (LONG, (3, 1), 128, FP16, 0.01, {"order": ORDERS[2]}),
    "in pairs": (LONG, (4, 1), 128, BF16, 0.1, {}),
    "all": (MIX, (4, 2), 64, BF16, 0.1,
            {"window_left": 200, "logits_soft_cap": 10.0, "sinks": torch.empty(0)}),
    "wide": (LONG, (2, 1), 256, BF16, 0.05, {"causal": True}),
}  # fmt: skip
COLLECT = {"collect_stats": True, "collect_bound": True}


def prepare(case: str) -> tuple[Ragged, dict[str, Any], float]:
    """Return the batch, the options and the budget of a case."""
    lengths, heads, head_dim, dtype, budget, given = CASES[case]
    options = dict(given)
    if "sinks" in options:
        options["sinks"] = torch.tensor([-3.0, 2.0, 0.0, 5.0], device=DEVICE)
    batch = make_ragged(*lengths, *heads, head_dim, dtype, hot=0.3, gain=8.0, device=DEVICE)
    return batch, options, budget


@pytest.mark.variants(lambda case: kernel(*CASES[case][2:4], **CASES[case][5], **COLLECT))
@pytest.mark.parametrize("case", CASES)
def test_decisions_are_the_references(case: str) -> None:
    batch, options, budget = prepare(case)
    wrapper = prefill_gpu.plan(batch, **spending(budget, **options, **COLLECT))
    out, lse, bound = wrapper.run(batch.q, batch.k, batch.v, return_lse=True)
    exact = exact_result(wrapper, batch, budget)
    sure = sure_rows(exact)
    assert sure.double().mean() > 0.8
    torch.testing.assert_close(lse[sure].double(), exact.lse[sure], rtol=0, atol=1e-4)
    torch.testing.assert_close(bound[sure].double(), exact.bound[sure], rtol=1e-3, atol=1e-30)
    torch.testing.assert_close(out[sure].double(), exact.out[sure], rtol=2**-6, atol=2**-8)
    assert (bound <= budget).all()
    assert torch.equal(wrapper.stats[..., 1], exact.counts[..., 1])
    assert exact.skip_map is not None
    slack = torch.stack(
        [
            m.count((m.margin.abs() <= prefill_gpu.ROUNDING_BAND).any(2, keepdim=True) & m.visited)
            for m in exact.skip_map
        ]
    )
    assert ((wrapper.stats - exact.counts)[..., 0].abs() <= slack).all()
    assert wrapper.stats[..., 0].sum() > 0.02 * wrapper.stats[..., 1].sum()
    again = wrapper.run(batch.q, batch.k, batch.v, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip((out, lse, bound), again, strict=True))


@pytest.mark.variants(lambda case: kernel(*CASES[case][2:4], **CASES[case][5], **COLLECT))
@pytest.mark.parametrize("times", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("case", CASES)
def test_the_exact_mass_is_within_the_budget(case: str, times: float) -> None:
    """Of every row of every request, by what was truly kept: V shows it."""
    batch, options, budget = prepare(case)
    budget *= times
    show_tiles(batch, options.get("vote_kv", 64))
    wrapper = prefill_gpu.plan(batch, **spending(budget, **options, **COLLECT))
    out, _ = prefill_gpu.run(wrapper, batch)
    dense = prefill_gpu.oracle(wrapper, batch, None)
    assert dense.skip_map is not None
    most = 0.0
    for (qo, kv), m, stats in zip(batch.spans(), dense.skip_map, wrapper.stats, strict=True):
        if not m.visited.any():
            continue
        kept = seen(out[qo], m)
        assert torch.equal(m.count(m.visited & ~kept), stats[:, 0])
        request = replace(batch, q=batch.q[qo], k=batch.k[kv])
        omitted = omitted_share(request, m, kept, options.get("logits_soft_cap"))
        assert (omitted <= budget).all()
        most = max(most, omitted.max().item())
    assert times < 1 or most > 0


@pytest.mark.variants(lambda: kernel(causal=True) + kernel(causal=True, order=ORDERS[2]))
@pytest.mark.parametrize("budget", [1.0, 0.1, 1e-3])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_row_omits_more_than_its_budget(pattern: str, budget: float) -> None:
    batch = make_adversarial(pattern, (700, 5000), (2, 1), 128, device=DEVICE)
    tile = torch.arange(5000, device=DEVICE) // 64  # V shows which tiles were kept
    batch.v[:] = torch.nn.functional.one_hot(tile, 128)[:, None].to(BF16)
    for order in (ORDERS[0], ORDERS[2]):
        wrapper = prefill_gpu.plan(batch, **spending(budget, causal=True, order=order))
        out, _ = prefill_gpu.run(wrapper, batch)
        dense = prefill_gpu.oracle(wrapper, batch, None)
        assert dense.skip_map is not None
        rows = torch.nn.functional.pad(out.transpose(0, 1)[..., :79], (0, 0, 0, 4))
        kept = (rows.unflatten(1, (11, 64)) > 0).any(2)
        omitted = omitted_share(batch, dense.skip_map[0], kept)
        assert (omitted <= budget).all()
        assert budget < 0.1 or (omitted > 0).any()


@pytest.mark.variants(lambda: kernel(causal=True, collect_stats=True))
def test_a_row_of_nan_is_computed_and_others_keep_their_budget() -> None:
    batch = make_ragged((200, 77), (900, 500), 2, 1, 128, hot=0.3, gain=8.0, device=DEVICE)
    wrapper = prefill_gpu.plan(batch, **spending(0.1, causal=True, collect_stats=True))
    before = prefill_gpu.run(wrapper, batch)
    batch.q[3, 1] = torch.nan
    out, lse = prefill_gpu.run(wrapper, batch)
    assert out[3, 1].isnan().all()
    assert torch.equal(out[200:], before[0][200:])
    assert torch.equal(out[:, 0], before[0][:, 0])
    assert not out[4:].isnan().any()
    assert not lse[4:].isnan().any()
