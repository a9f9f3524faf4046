"""The budget criterion on the CPU: no row ever omits more than it may, and much is skipped."""

import dataclasses

import pytest
import torch
from adversarial import PATTERNS, make_adversarial, omitted_share
from helpers import make_ragged

import flashskip
from flashskip import reference
from flashskip.geometry import ORDERS, Geometry

BF16 = torch.bfloat16


def both(batch, geometry, budget, dtype=torch.float64, sinks=None):
    """The reference with the budget and without."""
    inputs = (batch.q, batch.k, batch.v)
    rest = {"qo_indptr": batch.qo_indptr, "kv_indptr": batch.kv_indptr, "geometry": geometry}
    rest |= {"dtype": dtype, "sinks": sinks}
    return reference.attention(*inputs, **rest, budget=budget), reference.attention(*inputs, **rest)


@pytest.mark.parametrize("budget", [1.0, 0.1, 1e-3])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_row_omits_more_than_its_budget(pattern, budget):
    batch = make_adversarial(pattern, (200, 1500), (2, 1), 64, device="cpu")
    for order, keys_per_vote, dtype in (
        (ORDERS[0], 64, torch.float64),
        (ORDERS[1], 128, torch.float32),
        (ORDERS[2], 64, torch.float32),
    ):
        geometry = Geometry.prefill(causal=True, order=order, keys_per_vote=keys_per_vote)
        result, dense = both(batch, geometry, budget, dtype)
        (skips,), (everything,) = result.skip_map, dense.skip_map
        omitted = omitted_share(batch, everything, ~skips.skipped)
        assert (omitted <= budget).all()
        assert (result.bound <= budget).all()
        assert (result.bound + 1e-12 >= omitted.T).all()
        assert skips.skipped.any() == (omitted > 0).any()


@pytest.mark.parametrize("pattern", ["one loud tile", "heavy tails", "sawtooth"])
def test_a_budget_is_spent_where_there_is_something_to_save(pattern):
    batch = make_adversarial(pattern, (256, 4096), (2, 1), 64, device="cpu")
    geometry = Geometry.prefill(causal=True)
    shares = []
    for budget in (1e-3, 0.05, 0.4):
        result, _ = both(batch, geometry, budget)
        skipped, visited = result.counts.sum((0, 1)).tolist()
        shares.append(skipped / visited)
    assert shares == sorted(shares)
    assert shares[-1] > 0.1


def test_decisions_by_hand():
    # Four tiles of one row: scores in log2 units are 0, 0, -1, and then one key of -9.
    scale = reference.LOG2_E**-1
    k = torch.zeros(256, 1, 8, dtype=torch.float64)
    k[:, 0, 0] = torch.tensor([0.0, 0.0, -1.0, -9.0]).repeat_interleave(64) * scale
    q = torch.zeros(1, 1, 8, dtype=torch.float64)
    q[0, 0, 0] = 1
    geometry = Geometry.prefill(order="ascending", keys_per_load=64)
    rest = {"qo_indptr": [0, 1], "kv_indptr": [0, 256], "geometry": geometry, "sm_scale": 1.0}

    def skipped(budget):
        result = reference.attention(q, k, k, **rest, budget=budget)
        return result.skip_map[0].skipped[0, 0].tolist(), result

    # Kept: 64, 128, 160. The last tile holds 64 / 512 = 1/8 of a key: 1/1280 of what is kept.
    assert skipped(1 / 1281)[0] == [False, False, False, False]
    assert skipped(1 / 1278)[0] == [False, False, False, True]
    # A quarter of 128 is what the third holds; then 32 + 1/8 of 128 would be too much.
    assert skipped(0.2499)[0] == [False, False, False, True]
    assert skipped(0.2503)[0] == [False, False, True, False]
    gap = skipped(0.1)[1].skip_map[0].gap[0, 0]
    assert gap[0] == torch.inf
    assert gap[1:].tolist() == pytest.approx([0.0, -2.0, torch.tensor(1 / 1280).log2().item()])
    # Two tiles of a load are asked as if both held as much.
    rest["geometry"] = dataclasses.replace(geometry, keys_per_load=128)
    assert skipped(0.4999)[0] == [False, False, False, True]
    assert skipped(0.5006)[0] == [False, False, True, True]


def test_the_wrapper_takes_the_references_decisions():
    batch = make_ragged((300, 0, 500), (300, 7, 900), 4, 2, 64, hot=0.3, gain=6.0, device="cpu")
    wrapper = flashskip.BatchPrefillWrapper(torch.empty(0))
    wrapper.plan(
        batch.qo_indptr, batch.kv_indptr, 4, 2, 64, q_data_type=BF16, causal=True,
        skip_criterion="budget", skip_budget=0.05, collect_stats=True, collect_bound=True,
        order="descending", vote_kv=128,
    )  # fmt: skip
    out, bound = wrapper.run(batch.q, batch.k, batch.v)
    oracle, _ = both(batch, wrapper.geometry, 0.05, torch.float32)
    assert torch.equal(wrapper.stats, oracle.counts)
    assert wrapper.stats[..., 0].sum() > 0
    torch.testing.assert_close(out.double(), oracle.out.double(), rtol=2**-8, atol=1e-5)
    assert torch.equal(bound, oracle.bound)
    assert bound.max() <= 0.05


def test_sinks_are_no_part_of_the_test_and_lower_the_bound():
    batch = make_adversarial("heavy tails", (128, 1024), (2, 1), 64, device="cpu")
    geometry = Geometry.prefill(causal=True)
    plain, _ = both(batch, geometry, 0.1)
    sunk, _ = both(batch, geometry, 0.1, sinks=torch.tensor([0.0, 5.0]))
    assert torch.equal(plain.counts, sunk.counts)
    assert (sunk.bound <= plain.bound).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": 0.0}, "budget is 0.0"),
        ({"budget": 1.5}, "budget is 1.5"),
        ({"budget": 0.5, "thresholds": [0.1]}, r"thresholds is \[0.1\]"),
    ],
)
def test_the_reference_refuses_budgets_out_of_range(arguments, message):
    x = torch.zeros(1, 1, 8)
    with pytest.raises(ValueError, match=message):
        reference.attention(
            x, x, x, qo_indptr=[0, 1], kv_indptr=[0, 1], geometry=Geometry.prefill(), **arguments
        )


def test_decode_refuses_a_budget():
    wrapper = flashskip.BatchDecodeWrapper(torch.empty(0))
    table = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [0], [5])]
    with pytest.raises(flashskip.UnsupportedVariant, match="skip_criterion is 'budget' in decode"):
        wrapper.plan(
            *table, 2, 1, 64, 16, q_data_type=BF16, skip_criterion="budget", skip_budget=0.1
        )
