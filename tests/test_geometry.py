"""The skip geometry, against cases worked out by hand and against its own definition."""

import random

import pytest

from flashskip.geometry import Geometry, RequestGeometry


def prefill(qo_len: int, kv_len: int, **rules: object) -> RequestGeometry:
    return Geometry.prefill(**rules).of(qo_len, kv_len)


def test_bottom_right_causal_visibility() -> None:
    geometry = prefill(3, 5, causal=True)
    assert [geometry.visible(row) for row in range(3)] == [range(3), range(4), range(5)]


def test_rows_before_the_first_key_see_nothing() -> None:
    geometry = prefill(5, 2, causal=True)
    assert [len(geometry.visible(row)) for row in range(5)] == [0, 0, 0, 1, 2]
    assert [geometry.seed_tiles(row) for row in range(5)] == [(), (), (), (0,), (0,)]


def test_window_holds_itself_and_so_many_keys_before() -> None:
    geometry = prefill(3, 10, causal=True, window_left=2)
    assert [geometry.visible(row) for row in range(3)] == [range(5, 8), range(6, 9), range(7, 10)]
    assert prefill(1, 10, causal=True, window_left=0).visible(0) == range(9, 10)


def test_window_without_causal_limits_only_the_left() -> None:
    assert prefill(3, 10, window_left=2).visible(0) == range(5, 10)


def test_rows_of_a_decode_group_are_token_major() -> None:
    geometry = Geometry.decode(3).of(2, 10)
    assert [geometry.visible(row).stop for row in range(6)] == [9, 9, 9, 10, 10, 10]


def test_blocks_and_units_cut_the_rows() -> None:
    geometry = prefill(400, 400, causal=True)
    assert geometry.blocks() == [range(192), range(192, 384), range(384, 400)]
    assert geometry.units(range(192, 384)) == [
        range(192, 256),
        range(256, 320),
        range(320, 384),
    ]
    assert geometry.num_units == 7
    assert geometry.num_tiles == 7
    assert geometry.units(range(384, 400)) == [range(384, 400)]


def test_decode_units_cut_a_token_in_the_middle() -> None:
    geometry = Geometry.decode(5).of(15, 1000)
    assert geometry.units(range(75)) == [range(64), range(64, 75)]


@pytest.mark.parametrize(
    ("order", "tiles"),
    [
        ("diagonal_sink_descending", [4, 3, 0, 2, 1]),
        ("descending", [4, 3, 2, 1, 0]),
        ("ascending", [0, 1, 2, 3, 4]),
    ],
)
def test_orders(order: str, tiles: list[int]) -> None:
    # The last 192 of 640 rows: the first of them sees 449 keys, so tiles 3 and 4 of 128 are cut.
    geometry = prefill(192, 640, causal=True, order=order)
    assert geometry.load_tiles(range(192)) == tiles


def test_diagonal_part_ends_at_the_first_row() -> None:
    # Row 0 sees 129 of 256 keys: tile 1 is cut, tile 0 is not.
    assert prefill(128, 256, causal=True).load_tiles(range(128)) == [1, 0]
    assert prefill(128, 512, causal=True).load_tiles(range(128)) == [3, 0, 2, 1]
    # Row 0 sees 384 of 512 keys: exactly tiles 0 .. 2, so that 3 is the whole diagonal part.
    assert prefill(129, 512, causal=True).load_tiles(range(129)) == [3, 0, 2, 1]
    assert prefill(130, 512, causal=True).load_tiles(range(130)) == [3, 2, 0, 1]


def test_without_causal_there_is_no_diagonal_part() -> None:
    assert prefill(192, 600).load_tiles(range(192)) == [0, 4, 3, 2, 1]


def test_one_query_sees_all_keys_and_has_no_diagonal_part() -> None:
    assert prefill(1, 600, causal=True).load_tiles(range(1)) == [0, 4, 3, 2, 1]


def test_diagonal_part_may_hold_tile_0() -> None:
    assert prefill(192, 192, causal=True).load_tiles(range(192)) == [1, 0]
    assert prefill(300, 200, causal=True).load_tiles(range(192)) == [0]


def test_window_without_tile_0_has_no_sink_part() -> None:
    geometry = prefill(192, 1024, causal=True, window_left=300)
    # Row 0 sees keys 532 .. 832, the last row up to 1023.
    assert geometry.load_tiles(range(192)) == [7, 6, 5, 4]
    assert prefill(192, 1024, causal=True, window_left=800).load_tiles(range(192))[2] == 0


def test_block_that_sees_nothing_visits_nothing() -> None:
    geometry = prefill(400, 100, causal=True)
    assert geometry.load_tiles(range(192)) == []
    assert prefill(5, 0).load_tiles(range(5)) == []
    assert prefill(0, 5).blocks() == []


def test_votes_of_a_load_tile_end_with_the_keys() -> None:
    geometry = prefill(1, 200, keys_per_vote=64)
    assert list(geometry.votes(0)) == [0, 1]
    assert list(geometry.votes(1)) == [2, 3]
    assert list(prefill(1, 190, keys_per_vote=64).votes(1)) == [2]
    assert list(prefill(1, 190, keys_per_vote=128).votes(1)) == [1]


def test_seed_tiles_follow_each_row() -> None:
    geometry = Geometry.decode(1).of(4, 131)
    # Rows see 128, 129, 130 and 131 keys.
    assert [geometry.seed_tiles(row) for row in range(4)] == [(0, 1), (0, 2), (0, 2), (0, 2)]
    assert Geometry.decode(1).of(1, 64).seed_tiles(0) == (0,)
    assert Geometry.decode(1, window_left=10).of(1, 1000).seed_tiles(0) == (15,)
    assert Geometry.decode(1, window_left=939).of(1, 1000).seed_tiles(0) == (0, 15)
    assert Geometry.decode(1, window_left=935).of(1, 1000).seed_tiles(0) == (15,)


def test_load_tiles_and_visits_agree_with_visibility() -> None:
    rng = random.Random(0)
    for _ in range(60):
        geometry = Geometry(
            heads_per_vote=rng.choice([1, 3]),
            rows_per_vote=4,
            keys_per_vote=4,
            keys_per_load=rng.choice([4, 8]),
            rows_per_block=rng.choice([4, 12]),
            order=rng.choice(["diagonal_sink_descending", "descending", "ascending"]),
            judged_against="running_max",
            causal=rng.random() < 0.7,
            window_left=rng.choice([-1, 0, 3, 9]),
        ).of(rng.randrange(20), rng.randrange(40))
        for block in geometry.blocks():
            seen = {key for row in block for key in geometry.visible(row)}
            tiles = geometry.load_tiles(block)
            assert len(tiles) == len(set(tiles))
            assert set(tiles) == {key // geometry.keys_per_load for key in seen}
            for unit in geometry.units(block):
                for tile in range(geometry.num_tiles):
                    keys = {key for row in unit for key in geometry.visible(row)}
                    expected = tile in {key // 4 for key in keys}
                    assert geometry.is_visited(unit, tile) == expected


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"keys_per_vote": 48}, "keys_per_load is 128; it must be a multiple of keys_per_vote"),
        ({"rows_per_block": 100}, "rows_per_block is 100; it must be a multiple of rows_per_vote"),
        ({"order": "random"}, "order is 'random'; it must be one of"),
        ({"window_left": -2}, "window_left is -2"),
        ({"keys_per_vote": 0}, "keys_per_vote is 0"),
    ],
)
def test_impossible_geometries_are_refused(rules: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Geometry.prefill(**rules)


def test_negative_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_len is -1"):
        Geometry.prefill().of(1, -1)
