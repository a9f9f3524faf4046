"""The oracle's decisions: cases worked out by hand, and a literal loop over tiles."""

import dataclasses
import math
import random

import pytest
import torch
from plain_attention import INF, LOG2_E, one_request, plain, plain_scores, random_qkv
from plain_attention import one_thread as one_thread  # a fixture
from torch import Tensor

from flashskip.geometry import Geometry, RequestGeometry
from flashskip.reference import KEPT, NOT_VISITED, SKIPPED, Result


def of_scores(scores: list[list[float]], geometry: Geometry, threshold: float | None) -> Result:
    """One head whose score of row i and key j is ``scores[i][j]``, and whose values are one-hot."""
    s = torch.tensor(scores, dtype=torch.float64)
    rows, keys = s.shape
    q = torch.eye(rows, dtype=torch.float64)[:, None]
    v = torch.eye(keys, dtype=torch.float64)[:, None]
    return one_request(q, s.T[:, None], v, geometry, sm_scale=1.0, thresholds=[threshold])


def tiny(**rules: object) -> Geometry:
    """Votes of 2 rows and 1 key, loads of 1 key, all rows in one block, not causal, ascending."""
    given = {
        "heads_per_vote": 1,
        "rows_per_vote": 2,
        "keys_per_vote": 1,
        "keys_per_load": 1,
        "rows_per_block": 4,
        "order": "ascending",
        "judged_against": "running_max",
        "causal": False,
        "window_left": -1,
    }
    return Geometry(**(given | rules))


def states(result: Result, request: int = 0, sequence: int = 0) -> list[list[int]]:
    return result.skip_map[request].state[sequence].tolist()


def test_tile_is_skipped_below_the_threshold_and_not_at_it() -> None:
    # One row; the second key is log2(1/4) below the first, the third a little more.
    quarter = -2 / LOG2_E
    scores = [[0.0, quarter, quarter - 1e-9]]
    assert states(of_scores(scores, tiny(), 0.25)) == [[KEPT, KEPT, SKIPPED]]


def test_margin_is_the_distance_in_log2_units() -> None:
    skip_map = of_scores([[0.0, -3 / LOG2_E, -1 / LOG2_E]], tiny(), 0.25).skip_map[0]
    torch.testing.assert_close(skip_map.margin[0, 0, 1:], torch.tensor([-1.0, 1.0]).double())
    assert skip_map.margin[0, 0, 0] == INF
    assert skip_map.log2_threshold == -2.0


@pytest.mark.parametrize("threshold", [None, 0.0])
def test_gaps_are_known_where_nothing_can_be_skipped(threshold: float | None) -> None:
    scores = [[0.0, -3 / LOG2_E, -1 / LOG2_E]]
    skip_map = of_scores(scores, tiny(window_left=1), threshold).skip_map[0]
    # Only the last two keys are in the window; the second is judged against nothing yet.
    expected = torch.tensor([-INF, INF, 2.0], dtype=torch.float64)
    torch.testing.assert_close(skip_map.gap[0, 0], expected)
    assert skip_map.visited[0, 0].tolist() == [False, True, True]
    assert (skip_map.margin == INF).all()


def test_every_row_of_the_unit_must_agree() -> None:
    scores = [[0.0, -9.0, -9.0], [0.0, -9.0, -1.0], [0.0, -1.0, -9.0]]
    # Rows 0 and 1 are a unit, row 2 is one alone.
    assert states(of_scores(scores, tiny(), 0.1)) == [
        [KEPT, SKIPPED, KEPT],
        [KEPT, KEPT, SKIPPED],
    ]


def test_maximum_is_the_rows_own() -> None:
    # Row 1 has only small scores. They are judged against its own maximum, not against row 0's.
    scores = [[0.0, -9.0], [-20.0, -20.0]]
    assert states(of_scores(scores, tiny(), 0.1)) == [[KEPT, KEPT]]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("ascending", [KEPT, KEPT, KEPT, SKIPPED]),
        ("descending", [SKIPPED, SKIPPED, KEPT, KEPT]),
        # No diagonal without causal: tile 0, then 3, 2, 1.
        ("diagonal_sink_descending", [KEPT, SKIPPED, KEPT, KEPT]),
    ],
)
def test_order_decides(order: str, expected: list[int]) -> None:
    scores = [[-8.0, -6.0, 0.0, -4.0]]
    assert states(of_scores(scores, tiny(order=order), 0.1)) == [expected]


def test_diagonal_then_sink_then_descending() -> None:
    # Rows see 4 and 5 keys. Tile 4 is the diagonal part; then 0, 3, 2, 1.
    scores = [[-3.0, -6.0, -5.0, -7.0, 9.0], [-3.0, -6.0, -5.0, -7.0, -9.0]]
    geometry = tiny(causal=True, order="diagonal_sink_descending")
    # Row 0 does not see tile 4 and has no maximum when tile 0 comes; that tile rules the rest out.
    expected = [KEPT, SKIPPED, SKIPPED, SKIPPED, KEPT]
    assert states(of_scores(scores, geometry, 0.5)) == [expected]


def test_both_halves_of_a_load_tile_are_judged_against_what_was_known_before_it() -> None:
    scores = [[-5.0, -3.0, 0.0, -2.5, -9.0, -1.0]]
    halves = tiny(keys_per_load=2)
    # Against -inf: 0, 1. Against -3: 2, 3 (0.5 above it, although far below its own half's 0).
    assert states(of_scores(scores, halves, 0.1)) == [[KEPT] * 4 + [SKIPPED, KEPT]]
    assert states(of_scores(scores, tiny(), 0.1)) == [[KEPT] * 3 + [SKIPPED, SKIPPED, KEPT]]


def test_votes_of_several_keys_take_the_maximum() -> None:
    scores = [[0.0, -9.0, -9.0, -1.0, -9.0, -9.0]]
    wide = tiny(keys_per_vote=2, keys_per_load=2)
    assert states(of_scores(scores, wide, 0.1)) == [[KEPT, KEPT, SKIPPED]]


def test_seed_is_tile_0_and_the_tile_of_the_last_visible_key() -> None:
    scores = [[-2.0, -4.0, -1.0, 3.0, -4.0, 0.0]]
    seeded = tiny(judged_against="seed")
    # The seed is 0. Key 3 is above it and never helps to judge the others.
    expected = [KEPT, SKIPPED, KEPT, KEPT, SKIPPED, KEPT]
    assert states(of_scores(scores, seeded, 0.1)) == [expected]
    # Also the seed tiles are judged: at e^-1 the first falls, and the third stays at it.
    expected = [SKIPPED, SKIPPED, KEPT, KEPT, SKIPPED, KEPT]
    assert states(of_scores(scores, seeded, math.exp(-1) * (1 - 1e-6))) == [expected]


def test_seed_follows_each_rows_own_limit() -> None:
    # Rows see 3 and 4 keys: their last visible tiles differ.
    scores = [[-9.0, -3.0, 0.0, 50.0], [-9.0, -3.0, -8.0, 0.0]]
    seeded = tiny(judged_against="seed", causal=True)
    # Each row's maximum is in its seed, so tiles 0 and 1 fall; 2 and 3 hold a maximum.
    assert states(of_scores(scores, seeded, 0.1)) == [[SKIPPED, SKIPPED, KEPT, KEPT]]


def test_seed_is_limited_by_the_window() -> None:
    # The one row sees keys 2, 3 and 4; key 0 with its large score is out of sight.
    scores = [[50.0, 50.0, -3.0, -9.0, 0.0]]
    seeded = tiny(judged_against="seed", causal=True, window_left=2)
    expected = [NOT_VISITED, NOT_VISITED, KEPT, SKIPPED, KEPT]
    assert states(of_scores(scores, seeded, 0.01)) == [expected]


def test_packed_heads_vote_together() -> None:
    # Two heads on one KV head, one token. Head 1 keeps tile 1 for both.
    q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    k = torch.tensor([[[0.0, 0.0]], [[-9.0, -1.0]], [[-9.0, -9.0]], [[0.0, 0.0]]])
    v = torch.eye(4)[:, None]
    packed = tiny(heads_per_vote=2, judged_against="seed", causal=True)
    result = one_request(q, k, v, packed, sm_scale=1.0, thresholds=[0.1])
    assert states(result) == [[KEPT, KEPT, SKIPPED, KEPT]]
    assert result.counts.tolist() == [[[1, 4]]]
    alone = dataclasses.replace(packed, heads_per_vote=1)
    result = one_request(q, k, v, alone, sm_scale=1.0, thresholds=[0.1])
    assert states(result, sequence=0) == [[KEPT, SKIPPED, SKIPPED, KEPT]]
    assert states(result, sequence=1) == [[KEPT, KEPT, SKIPPED, KEPT]]
    assert result.counts.tolist() == [[[2, 4], [1, 4]]]


def test_row_without_a_key_in_the_tile_lets_it_go_and_unseen_tiles_are_not_counted() -> None:
    # Rows 0, 1 see no key at all, row 2 sees one, row 3 two.
    scores = [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [-9.0, 0.0]]
    geometry = tiny(causal=True, order="descending")
    result = of_scores(scores, geometry, 0.1)
    # Tile 1 comes first; row 2 does not see it. Tile 0 is the first that row 2 sees: computed.
    assert states(result) == [[NOT_VISITED, NOT_VISITED], [KEPT, KEPT]]
    assert result.counts.tolist() == [[[0, 2]]]
    result = of_scores([*scores[:2], [-9.0, 0.0], [-9.0, 0.0]], tiny(order="descending"), 0.1)
    assert result.counts.tolist() == [[[1, 4]]]


def test_masked_row_with_no_maximum_yet_does_not_force_computation() -> None:
    # Window of one key: row 0 sees key 0, row 1 sees key 1 only; nobody forces anything else.
    scores = [[0.0, 0.0], [0.0, 0.0]]
    geometry = tiny(causal=True, window_left=0, keys_per_load=1)
    assert states(of_scores(scores, geometry, 1.0)) == [[KEPT, KEPT]]


def test_output_lse_and_bound_of_a_skip() -> None:
    scores = [[0.0, -4.0, -5.0, -1.0]]
    geometry = tiny(keys_per_vote=2, keys_per_load=2, order="descending")
    # Tile 1 (keys 2, 3) first: M = -1. Tile 0 (0, -4) is above it: kept.
    assert states(of_scores(scores, geometry, 0.5)) == [[KEPT, KEPT]]
    result = of_scores(scores, dataclasses.replace(geometry, order="ascending"), 0.5)
    assert states(result) == [[KEPT, SKIPPED]]
    mass = 1 + math.exp(-4)
    expected = torch.tensor([[[1 / mass, math.exp(-4) / mass, 0, 0]]], dtype=torch.float64)
    torch.testing.assert_close(result.out, expected)
    assert result.lse.item() == pytest.approx(math.log2(mass), rel=1e-12)
    omitted = 2 * math.exp(-1)
    bound = omitted / (mass + omitted) * (1 + 2**-10)
    assert result.bound.item() == pytest.approx(bound, rel=1e-12)


def test_bound_counts_visible_keys_and_sinks() -> None:
    # The window hides key 0 from the row, so the skipped tile 0 holds one key.
    q, v = torch.ones(1, 1, 1), torch.ones(4, 1, 1)
    k = torch.tensor([7.0, -2.0, 0.0, 0.0])[:, None, None]
    geometry = tiny(keys_per_vote=2, keys_per_load=2, order="descending", window_left=2)
    sinks = torch.tensor([1.0])
    result = one_request(q, k, v, geometry, sm_scale=1.0, thresholds=[0.5], sinks=sinks)
    assert states(result) == [[SKIPPED, KEPT]]
    omitted = math.exp(-2)
    bound = omitted / (2 + math.e + omitted) * (1 + 2**-10)
    assert result.bound.item() == pytest.approx(bound, rel=1e-7)
    assert result.lse.item() == pytest.approx(math.log2(2 + math.e), rel=1e-7)


def test_sinks_are_no_part_of_the_test() -> None:
    scores = [[0.0, -1.0, -9.0]]
    without = of_scores(scores, tiny(), 0.1)
    q, v = torch.ones(1, 1, 1), torch.ones(3, 1, 1)
    k = torch.tensor(scores[0])[:, None, None]
    result = one_request(
        q, k, v, tiny(), sm_scale=1.0, thresholds=[0.1], sinks=torch.tensor([40.0])
    )
    assert states(result) == states(without) == [[KEPT, KEPT, SKIPPED]]


def test_zero_keeps_a_visible_tile_of_minus_infinity() -> None:
    scores = [[0.0, -INF], [0.0, -INF]]
    q, v = torch.ones(2, 1, 1), torch.ones(2, 1, 1)
    k = torch.tensor(scores[0])[:, None, None]
    result = one_request(q, k, v, tiny(), sm_scale=1.0, thresholds=[0.0])
    assert states(result) == [[KEPT, KEPT]]
    result = one_request(q, k, v, tiny(), sm_scale=1.0, thresholds=[1e-30])
    assert states(result) == [[KEPT, SKIPPED]]


def test_row_that_sees_only_minus_infinity_forces_computation() -> None:
    q, v = torch.ones(2, 1, 1), torch.ones(2, 1, 1)
    k = torch.full((2, 1, 1), -INF)
    result = one_request(q, k, v, tiny(), sm_scale=1.0, thresholds=[1.0])
    assert states(result) == [[KEPT, KEPT]]
    assert not result.out.any()
    assert (result.lse == -INF).all()


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_nan_and_inf_in_valid_inputs_are_computed_and_reach_the_output(bad: float) -> None:
    q, v = torch.ones(1, 1, 1), torch.ones(3, 1, 1)
    k = torch.tensor([0.0, bad, 0.0])[:, None, None]
    result = one_request(q, k, v, tiny(), sm_scale=1.0, thresholds=[1.0])
    assert result.skip_map[0].kept[0, 0, 1]
    assert result.out.isnan().all()


def literal(
    s: Tensor, geometry: RequestGeometry, threshold: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Section 1 of the contract word by word for one sequence of rows and its scores [rows, keys].

    Returns the states, the kept keys and the gaps; the maximum is that of the *computed* tiles.
    """
    rows, keys = s.shape
    per_vote, per_load = geometry.keys_per_vote, geometry.keys_per_load
    state = torch.zeros(geometry.num_units, geometry.num_tiles, dtype=torch.int8)
    gaps = torch.full(state.shape, -INF, dtype=torch.float64)
    kept = torch.zeros(rows, keys, dtype=torch.bool)

    def seed(row: int) -> float:
        seen = [j for j in range(keys) if s[row, j] > -INF]
        tiles = {0, seen[-1] // per_vote} if seen else set()
        return max((s[row, j].item() for j in seen if j // per_vote in tiles), default=-INF)

    for block in range(0, rows, geometry.rows_per_block):
        block_rows = range(block, min(block + geometry.rows_per_block, rows))
        seen = s[block : block_rows.stop] > -INF
        loads = [
            t for t in range(-(-keys // per_load)) if seen[:, t * per_load :][:, :per_load].any()
        ]
        if geometry.order != "ascending":
            loads.reverse()
        if geometry.order == "diagonal_sink_descending":
            first_limit = block // geometry.heads_per_vote + geometry.kv_len - geometry.qo_len
            cut = [
                t
                for t in loads
                if geometry.causal and min((t + 1) * per_load, keys) - 1 > first_limit
            ]
            sink = [t for t in loads if t == 0 and t not in cut]
            loads = cut + sink + [t for t in loads if t not in cut + sink]
        maximum = {row: -INF for row in block_rows}
        if geometry.judged_against == "seed":
            maximum = {row: seed(row) for row in block_rows}
        for load in loads:
            before = dict(maximum)
            for start in range(load * per_load, min((load + 1) * per_load, keys), per_vote):
                for unit in range(block, block_rows.stop, geometry.rows_per_vote):
                    voters = range(unit, min(unit + geometry.rows_per_vote, block_rows.stop))
                    votes = []
                    for row in voters:
                        t = s[row, start : start + per_vote].max().item()
                        if t > -INF:
                            votes.append((t - before[row]) * LOG2_E)
                    if not votes:
                        continue
                    where = unit // geometry.rows_per_vote, start // per_vote
                    gaps[where] = max(votes)
                    if max(votes) < math.log2(threshold):
                        state[where] = SKIPPED
                        continue
                    state[where] = KEPT
                    kept[unit : voters.stop, start : start + per_vote] = True
                    for row in voters:
                        if geometry.judged_against == "running_max":
                            t = s[row, start : start + per_vote].max().item()
                            maximum[row] = max(maximum[row], t)
    return state, kept, gaps


def random_geometry(rng: random.Random, group: int) -> Geometry:
    seeded, packs = rng.random() < 0.4, rng.random() < 0.5
    keys_per_vote = rng.choice([4, 8])
    rows_per_vote = rng.choice([1, 4, 6])
    return Geometry(
        heads_per_vote=group if seeded or rng.random() < 0.2 else 1,
        rows_per_vote=rows_per_vote,
        keys_per_vote=keys_per_vote,
        keys_per_load=keys_per_vote * rng.choice([1, 2]),
        rows_per_block=rows_per_vote * rng.choice([1, 3]),
        order=rng.choice(["diagonal_sink_descending", "descending", "ascending"]),
        judged_against="seed" if seeded else "running_max",
        causal=rng.random() < 0.8,
        window_left=rng.choice([-1, -1, 0, 5, 30]),
        group_size=group if packs else None,
        seed_short_queries=rng.random() < 0.7,
    )


@pytest.mark.parametrize("seed", range(90))
def test_decisions_output_and_bound_follow_the_literal_loop(seed: int) -> None:
    rng = random.Random(seed)
    num_kv_heads, group = rng.choice([(1, 1), (2, 1), (1, 3), (2, 2)])
    heads = num_kv_heads * group
    qo_len, kv_len = rng.choice(
        [(1, 40), (4, 33), (9, 50), (33, 33), (20, 11), (17, 64), (64, 64), (2, 0)]
    )
    geometry = random_geometry(rng, group)
    request = geometry.of(qo_len, kv_len)
    threshold = rng.choice([1.0, 0.5, 0.1, 1e-3])
    q, k, v = random_qkv(seed, qo_len, kv_len, (heads, num_kv_heads))
    soft_cap = rng.choice([None, 4.0])
    result = one_request(
        q, k, v, geometry, sm_scale=0.2, thresholds=[threshold], logits_soft_cap=soft_cap
    )
    s = plain_scores(q, k, 0.2, request, soft_cap)
    skip_map = result.skip_map[0]
    packed, counted = request.heads_per_vote, geometry.heads_per_vote
    for sequence in range(heads // packed):
        of_sequence = slice(sequence * packed, (sequence + 1) * packed)
        rows = s[of_sequence].transpose(0, 1).reshape(qo_len * packed, kv_len)
        state, kept, gaps = literal(rows, request, threshold)
        assert torch.equal(skip_map.state[sequence], state)
        torch.testing.assert_close(skip_map.gap[sequence], gaps, rtol=0, atol=1e-10)
        units = torch.arange(len(rows)).split(request.rows_per_vote)
        for head in range(0, packed, counted):
            own = [bool((unit % packed // counted == head // counted).any()) for unit in units]
            counts = [(state[own] == SKIPPED).sum(), (state[own] != NOT_VISITED).sum()]
            counter = (sequence * packed + head) // counted
            assert result.counts[0, counter].tolist() == counts

        values = v[:, sequence * packed // group]
        out, lse = plain(rows.masked_fill(~kept, -INF), values)
        blind = (rows == -INF).all(-1)
        out = out.masked_fill(blind[:, None], 0).view(qo_len, packed, -1)
        torch.testing.assert_close(result.out[:, of_sequence], out, rtol=1e-11, atol=1e-11)
        lse = lse.view(qo_len, packed)
        torch.testing.assert_close(result.lse[:, of_sequence], lse, rtol=1e-11, atol=1e-11)
        # The bound is at least the share that was omitted, and 0 where nothing was.
        share = 1 - torch.exp2(lse - torch.logsumexp(rows, -1).view(qo_len, packed) * LOG2_E)
        share = share.nan_to_num(0)
        assert (result.bound[:, of_sequence] >= share - 1e-14).all()
        omits = ((rows > -INF) & ~kept).any(-1).view(qo_len, packed)
        assert torch.equal(result.bound[:, of_sequence] > 0, omits)


def test_the_random_cases_skip_something() -> None:
    q, k, v = random_qkv(0, 200, 200)
    skipped, visited = (
        one_request(q, k, v, Geometry.prefill(causal=True, keys_per_vote=64), thresholds=[0.1])
        .counts.sum((0, 1))
        .tolist()
    )
    assert 0 < skipped < visited
