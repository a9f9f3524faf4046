"""Prefills of few queries: judged against a seed, and a group's heads packed into units of rows."""

import dataclasses
import itertools
import json
import math
import re
import warnings
from pathlib import Path

import pytest
import torch
from helpers import by_row, kept_keys, make_ragged
from plain_attention import INF, LOG2_E, one_request, plain_scores, random_qkv
from plain_attention import one_thread as one_thread  # a fixture
from test_reference_decisions import of_scores, states, tiny

import flashskip
from flashskip import _kernels, reference
from flashskip.geometry import LONG_KV_RATIO, ORDERS, PACKED_BELOW, Geometry
from flashskip.policy import Coefficients, SkipSoftmaxConfig
from flashskip.reference import KEPT, SKIPPED
from flashskip.variant import matrix

BF16 = torch.bfloat16
BUDGET = {"skip_criterion": "budget", "skip_budget": 0.1}

# ---- the rule of a request's own lengths ---------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "judged_against", "heads"),
    [
        ((1024, 8192), "seed", 1),
        ((1024, 8191), "running_max", 1),
        ((1025, 8200), "running_max", 1),
        ((1025, 2**20), "running_max", 1),
        ((64, 512), "seed", 1),
        ((64, 511), "running_max", 1),
        ((63, 504), "seed", 4),
        ((63, 503), "running_max", 4),
        ((1, 8), "seed", 4),
        ((1, 7), "running_max", 4),
        ((5, 0), "running_max", 4),
        ((0, 9), "running_max", 4),
    ],
)
def test_lengths_alone_say_what_judges_and_who_votes(lengths, judged_against, heads):
    request = Geometry.prefill(group_size=4, causal=True).of(*lengths)
    assert request.judged_against == judged_against
    assert request.heads_per_vote == heads
    assert request.heads_per_counter == 1


def test_either_rule_can_be_left_out():
    seedless = Geometry.prefill(4, seed_short_queries=False).of(5, 8000)
    assert (seedless.judged_against, seedless.heads_per_vote) == ("running_max", 4)
    unpacked = dataclasses.replace(Geometry.prefill(4), group_size=None).of(5, 8000)
    assert (unpacked.judged_against, unpacked.heads_per_vote) == ("seed", 1)
    decode = Geometry.decode(4).of(5, 8000)
    assert (decode.judged_against, decode.heads_per_vote) == ("seed", 4)
    assert decode.heads_per_counter == 4


@pytest.mark.parametrize(
    ("options", "seeds"),
    [
        ({}, True),
        ({"skip_softmax_threshold": 0.1}, True),
        ({"skip_criterion": "measure"}, True),
        (BUDGET, False),
    ],
)
def test_plans_know_their_group_and_all_but_a_budget_seed(options, seeds):
    starts = torch.tensor([0, 1], dtype=torch.int32)
    wrapper = flashskip.BatchPrefillWrapper(torch.empty(0))
    wrapper.plan(starts, starts, 6, 2, 64, q_data_type=BF16, causal=True, **options)
    geometry = wrapper.geometry
    assert geometry.group_size == 3
    assert geometry.seed_short_queries == seeds
    expected = Geometry.prefill(3, causal=True, seed_short_queries=seeds)
    assert geometry == dataclasses.replace(
        expected, rows_per_block=geometry.rows_per_block, keys_per_load=geometry.keys_per_load
    )


@pytest.mark.parametrize(
    ("name", "value"), [("PACKED_QO_LEN", PACKED_BELOW), ("LONG_KV_RATIO", LONG_KV_RATIO)]
)
def test_kernels_have_the_same_rule(name, value):
    text = (Path(__file__).parents[1] / "csrc" / "division.cuh").read_text()
    assert re.findall(rf"constexpr int {name} = (\d+);", text) == [str(value)]


def test_one_workspace_is_enough_for_every_kernel():
    needed = [_kernels.workspace_bytes(v, grid=160) for v in matrix()]
    assert max(needed) <= _kernels.MOST_WORKSPACE_BYTES < 2 * max(needed)


def test_impossible_groups_are_refused():
    with pytest.raises(ValueError, match="group_size is 0; it must be a multiple of heads_per"):
        Geometry.prefill(0)
    with pytest.raises(ValueError, match=r"group_size is 3; .* heads_per_vote \(2\)"):
        dataclasses.replace(Geometry.decode(2), group_size=3)
    q, k = torch.zeros(1, 6, 8), torch.zeros(1, 2, 8)
    with pytest.raises(ValueError, match="multiple of group_size, which is 2"):
        one_request(q, k, k, Geometry.prefill(2))


def test_rows_of_a_packed_block_are_the_groups_tokens():
    request = Geometry.prefill(7, causal=True).of(30, 300)
    assert request.num_rows == 210
    assert request.blocks() == [range(192), range(192, 210)]
    assert request.num_units == 4
    assert [request.visible(row).stop for row in (0, 6, 7, 209)] == [271, 271, 272, 300]
    # Row 192 is of token 27, which sees 298 keys: tile 2 (256 .. 299) is cut for it, tile 1 is not.
    assert request.load_tiles(range(192, 210)) == [2, 0, 1]


@pytest.mark.parametrize("group_size", [1, 3, 4, 7, 71])
def test_a_decision_counts_for_each_head_with_a_row(group_size):
    request = Geometry.prefill(group_size).of(60, 60)
    units = [unit for block in request.blocks() for unit in request.units(block)]
    for unit in units:
        assert request.counters(unit) == sorted({row % group_size for row in unit})
    counts = reference.SkipMap(
        request, torch.full((2, len(units), 1), KEPT), torch.zeros(2, len(units), 1), 0.0
    )
    of_head = [sum(h in request.counters(unit) for unit in units) for h in range(group_size)]
    assert counts.count(counts.kept).tolist() == 2 * of_head


def test_units_of_a_group_of_71_hold_parts_of_a_token():
    request = Geometry.prefill(71).of(2, 100)
    first, second, third = (range(0, 64), range(64, 128), range(128, 142))
    assert request.counters(first) == [*range(64)]
    assert request.counters(second) == [*range(57), *range(64, 71)]
    assert request.counters(third) == [*range(57, 71)]


# ---- seeds, worked out by hand -------------------------------------------------------------------


def test_a_tile_after_a_loud_one_is_skipped_by_the_maximum_and_kept_by_the_seed():
    scores = [[0.0, -1.0, 9.0, 1.0, 0.5, 0.0, -5.0, 0.0]]
    running = [KEPT, KEPT, KEPT] + [SKIPPED] * 5
    assert states(of_scores(scores, tiny(), 0.1)) == [running]
    # The seed is 0, of keys 0 and 7: only key 6 lies far below it.
    seeded = [KEPT] * 6 + [SKIPPED, KEPT]
    assert states(of_scores(scores, tiny(seed_short_queries=True), 0.1)) == [seeded]
    # 7 keys are not 8 times the row: the same scores without the last key.
    shorter = [scores[0][:7]]
    assert states(of_scores(shorter, tiny(seed_short_queries=True), 0.1)) == [running[:7]]


def test_tiles_before_a_loud_last_one_are_kept_by_the_maximum_and_skipped_by_the_seed():
    scores = [[-9.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, 0.0]]
    for order in ORDERS:
        seeded = tiny(seed_short_queries=True, order=order)
        assert states(of_scores(scores, seeded, 0.1)) == [[SKIPPED] * 6 + [SKIPPED, KEPT]]
    assert states(of_scores(scores, tiny(), 0.1)) == [[KEPT] * 8]
    # Tile 0 first, against nothing: also the order that knows most keeps what the seed skips.
    sink_first = tiny(order=ORDERS[0])
    assert states(of_scores(scores, sink_first, 0.1)) == [[KEPT] + [SKIPPED] * 6 + [KEPT]]


def test_each_row_has_its_own_seed_within_its_limits():
    # Rows see 15 and 16 keys: key 14 is the last of row 0, and key 15 of row 1.
    scores = torch.full((2, 16), -3.0)
    scores[0, 14], scores[1, 14], scores[1, 15] = 0.0, -9.0, -2.0
    scores[:, 7] = torch.tensor([-9.0, -9.0])
    geometry = tiny(seed_short_queries=True, causal=True)
    # Row 0's seed is 0 and would skip everything at -3; row 1's is -2 and keeps those.
    expected = [KEPT] * 7 + [SKIPPED] + [KEPT] * 8
    assert states(of_scores(scores.tolist(), geometry, 0.1)) == [expected]
    alone = dataclasses.replace(geometry, rows_per_vote=1)
    expected = [[SKIPPED] * 14 + [KEPT, 0], [KEPT] * 7 + [SKIPPED] + [KEPT] * 6 + [SKIPPED, KEPT]]
    assert states(of_scores(scores.tolist(), alone, 0.1)) == expected


def test_packed_heads_veto_for_each_other_and_each_is_counted():
    # One token of a group of 2: head 1 keeps key 1 for both, and both skip key 2.
    q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    k = torch.zeros(8, 1, 2)
    k[1, 0], k[2, 0] = torch.tensor([-9.0, -1.0]), torch.tensor([-9.0, -9.0])
    v = torch.eye(8)[:, None]
    packed = tiny(group_size=2, seed_short_queries=True)
    result = one_request(q, k, v, packed, sm_scale=1.0, thresholds=[0.1])
    assert states(result) == [[KEPT, KEPT, SKIPPED] + [KEPT] * 5]
    assert result.counts.tolist() == [[[1, 8], [1, 8]]]
    alone = tiny(seed_short_queries=True)
    result = one_request(q, k, v, alone, sm_scale=1.0, thresholds=[0.1])
    assert result.counts.tolist() == [[[2, 8], [1, 8]]]


def test_a_budget_has_no_seed_and_a_seed_has_no_order():
    q, k, v = random_qkv(5, 4, 200)
    seeds = tiny(group_size=2, seed_short_queries=True, keys_per_vote=4, keys_per_load=8)
    maps = []
    for seeded, order in itertools.product((True, False), ORDERS[1:]):
        geometry = dataclasses.replace(seeds, seed_short_queries=seeded, order=order)
        maps.append(one_request(q, k, v, geometry, budget=0.05).skip_map[0].state)
    descending, ascending, *seedless = maps
    assert torch.equal(descending, seedless[0])
    assert torch.equal(ascending, seedless[1])
    assert not torch.equal(descending, ascending)


# ---- against each row's own decisions ------------------------------------------------------------

SHAPES = [(5, 700), (63, 520), (20, 160), (60, 470), (33, 200), (64, 512), (90, 720)]


def row_gaps(q, k, request, soft_cap=None):
    """Each row's gap of each tile against the request's seed: ``[heads, tokens, tiles]``."""
    keys, per_tile = len(k), request.keys_per_vote
    s = plain_scores(q, k, 0.2, request, soft_cap)
    padded = torch.nn.functional.pad(s, (0, -keys % per_tile), value=-INF)
    t = padded.unflatten(-1, (-1, per_tile)).amax(-1)
    seen = s > -INF
    last = keys - 1 - seen.flip(-1).int().argmax(-1)
    m = torch.maximum(t[..., 0], t.gather(-1, (last // per_tile)[..., None])[..., 0])
    return ((t - m[..., None]) * LOG2_E).nan_to_num(neginf=-INF).masked_fill(t == -INF, -INF)


@pytest.mark.parametrize("window_left", [-1, 40])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group_size", [1, 3, 4, 7, 71])
def test_a_unit_decides_as_all_its_rows_would(group_size, causal, window_left):
    sinks = torch.linspace(-2, 3, group_size, dtype=torch.float64)
    skipped = 0
    for qo_len, kv_len in [(5, 200), (17, 140)]:
        q, k, v = random_qkv(group_size, qo_len, kv_len, (group_size, 1))
        geometry = Geometry.prefill(
            group_size, causal=causal, window_left=window_left,
            keys_per_vote=8, keys_per_load=16, rows_per_block=128,
        )  # fmt: skip
        request = geometry.of(qo_len, kv_len)
        gaps = row_gaps(q, k, request).transpose(0, 1).reshape(qo_len * group_size, -1)
        expected = torch.stack([unit.amax(0) for unit in gaps.split(64)])
        result = one_request(q, k, v, geometry, sm_scale=0.2, thresholds=[0.05], sinks=sinks)
        skip_map = result.skip_map[0]
        torch.testing.assert_close(skip_map.gap[0], expected, rtol=0, atol=1e-10)
        assert torch.equal(skip_map.visited[0], expected > -INF)
        assert torch.equal(skip_map.skipped, skip_map.visited & (skip_map.gap < math.log2(0.05)))
        skipped += skip_map.skipped.sum().item()

        units = torch.arange(qo_len * group_size).view(qo_len, group_size) // 64
        for head in range(group_size):
            own = units[:, head].unique()
            for count, decisions in enumerate((skip_map.skipped, skip_map.visited)):
                assert result.counts[0, head, count] == decisions[0, own].sum()

        kept = kept_keys(skip_map)
        s = plain_scores(q, k, 0.2, request).masked_fill(~kept, -INF)
        with_sink = torch.cat([s, sinks[:, None, None].expand(-1, qo_len, 1)], -1)
        torch.testing.assert_close(
            result.out.transpose(0, 1), with_sink.softmax(-1)[..., :-1] @ v[:, 0]
        )
        torch.testing.assert_close(result.lse.T, with_sink.logsumexp(-1) * LOG2_E)
    assert skipped > 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [False, True])
def test_a_seeded_map_depends_on_neither_blocks_nor_order(shape, causal):
    q, k, v = random_qkv(3, *shape, heads=(6, 2))
    states_of = {}
    for rows, keys, order in itertools.product((64, 192), (8, 32), ORDERS):
        geometry = Geometry.prefill(
            3, causal=causal, keys_per_vote=8, keys_per_load=keys, rows_per_block=rows, order=order
        )
        result = one_request(q, k, v, geometry, sm_scale=0.2, thresholds=[0.05])
        states_of[rows, keys, order] = result.skip_map[0].state
    distinct = {tuple(state.flatten().tolist()) for state in states_of.values()}
    seeded = shape[1] >= 8 * shape[0]
    assert (len(distinct) == 1) == seeded


def test_decisions_do_not_depend_on_the_batch():
    lengths = [(5, 700), (1, 500), (64, 600), (0, 50), (63, 400), (3, 0), (70, 70)]
    parts = [random_qkv(i, *shape, heads=(6, 2)) for i, shape in enumerate(lengths)]
    q, k, v = (torch.cat(x) for x in zip(*parts, strict=True))
    qo, kv = (torch.tensor([0, *n]).cumsum(0) for n in zip(*lengths, strict=True))
    geometry = Geometry.prefill(3, causal=True, keys_per_vote=16, keys_per_load=32)
    options = {"geometry": geometry, "sm_scale": 0.2}
    together = reference.attention(
        q, k, v, qo_indptr=qo, kv_indptr=kv, thresholds=[0.05] * len(lengths), **options
    )
    assert together.counts[:, :, 0].sum() > 0
    for i, part in enumerate(parts):
        alone = one_request(*part, thresholds=[0.05], **options)
        assert torch.equal(alone.skip_map[0].state, together.skip_map[i].state)
        assert torch.equal(alone.counts[0], together.counts[i])


# ---- the wrapper on the CPU ----------------------------------------------------------------------

MIX = ((5, 0, 64, 63, 1, 40, 130), (600, 30, 600, 504, 1, 300, 200))


def test_the_wrapper_counts_and_measures_by_query_head():
    batch = make_ragged(*MIX, 6, 2, 64, torch.float32, device="cpu", hot=0.3, gain=6.0)
    found = {}
    for name, options in {
        "measure": {"skip_criterion": "measure"},
        "skip": {"skip_softmax_threshold": 2.0**-4, "collect_stats": True},
    }.items():
        wrapper = flashskip.BatchPrefillWrapper(torch.empty(0))
        heads = (6, 2, 64)
        wrapper.plan(
            batch.qo_indptr, batch.kv_indptr, *heads,
            q_data_type=torch.float32, causal=True, **options,
        )  # fmt: skip
        wrapper.run(batch.q, batch.k, batch.v)
        found[name] = wrapper.gaps if name == "measure" else wrapper.stats
    assert found["skip"].shape == (7, 6, 2)
    assert torch.equal(found["measure"].sum(2), found["skip"][..., 1])
    below = found["measure"].cumsum(2)[..., 8 * (32 - 4) - 1]
    assert torch.equal(below, found["skip"][..., 0])
    assert (found["skip"][[0, 2, 3, 5], :, 0] > 0).all()
    # A unit of 64 rows holds every head of a group of 3, so that heads of a group agree.
    packed = found["skip"][[0, 3, 4, 5]].unflatten(1, (2, 3))
    assert torch.equal(packed, packed[:, :, :1].expand_as(packed))


def test_rows_of_a_packed_unit_keep_the_same_tiles():
    batch = make_ragged(
        (20,), (600,), 6, 2, 64, torch.float64, device="cpu", hot=0.3, gain=10.0, seed=1
    )
    result = one_request(batch.q, batch.k, batch.v, Geometry.prefill(3), thresholds=[0.05])
    skip_map = result.skip_map[0]
    kept = kept_keys(skip_map).unflatten(0, (2, 3))
    assert torch.equal(kept, kept[:, :1, :1].expand_as(kept))  # 60 rows: one unit
    assert 0 < kept.double().mean() < 1
    of_rows = by_row(skip_map.kept, skip_map.geometry)
    assert torch.equal(of_rows[:, 7], skip_map.kept[[0, 0, 0, 1, 1, 1], 0])


# ---- what policies store -------------------------------------------------------------------------


def test_coefficients_of_long_prompts_serve_plans_of_any_group():
    config = SkipSoftmaxConfig(
        target_sparsity=0.5,
        coefficients=Coefficients(a=100.0, b=5.0, measured_in=Geometry.prefill(causal=True)),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for geometry in (Geometry.prefill(8, causal=True), Geometry.prefill(8)):
            config.check("prefill", geometry)
            config.check("prefill", dataclasses.replace(geometry, seed_short_queries=False))


def test_coefficients_stored_without_these_fields_are_read():
    measured = Geometry.prefill(3, causal=True)
    config = SkipSoftmaxConfig(
        target_sparsity={"prefill": 0.5},
        coefficients={"prefill": Coefficients(a=3.0, b=4.0, measured_in=measured)},
    )
    checkpoint = config.to_checkpoint()
    assert SkipSoftmaxConfig.from_checkpoint(checkpoint) == config
    text = json.dumps(checkpoint)
    older = text.replace(', "group_size": 3, "seed_short_queries": true', "")
    assert len(older) < len(text)
    read = SkipSoftmaxConfig.from_checkpoint(json.loads(older))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read.check("prefill", measured)
    with pytest.warns(UserWarning, match="measured in"):
        read.check("prefill", Geometry.prefill(3, causal=True, keys_per_vote=128))
