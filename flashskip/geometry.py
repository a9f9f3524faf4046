"""Which rows and keys decide together, what they are judged against, and in which order.

A skip decision is taken by a *unit* of rows for a *tile* of keys.  This module says, in plain
integers, how the rows and keys of one request are cut into units and tiles, which tiles a block of
rows visits and in which order, and where a row's seed comes from.  Kernels are built to it,
``flashskip.reference`` reproduces their skip maps from it, and calibrated coefficients are stored
with it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

ORDERS = ("diagonal_sink_descending", "descending", "ascending")
JUDGED_AGAINST = ("running_max", "seed")

# A prefill with at most this many queries on a cache at least this many times longer is judged
# against the seed, where the geometry says `seed_short_queries`.
SHORT_QO_LEN = 1024
LONG_KV_RATIO = 8

# With fewer queries than this, the heads of a prefill's group share units of rows.
PACKED_BELOW = 64


@dataclass(frozen=True, kw_only=True)
class _Rules:
    """What decides the skip map besides the lengths."""

    heads_per_vote: int
    rows_per_vote: int
    keys_per_vote: int
    keys_per_load: int
    rows_per_block: int
    order: str
    judged_against: str
    causal: bool
    window_left: int

    def __post_init__(self) -> None:
        for name in ("heads_per_vote", "rows_per_vote", "keys_per_vote"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        _check_multiple("keys_per_load", self.keys_per_load, "keys_per_vote", self.keys_per_vote)
        _check_multiple("rows_per_block", self.rows_per_block, "rows_per_vote", self.rows_per_vote)
        _check_choice("order", self.order, ORDERS)
        _check_choice("judged_against", self.judged_against, JUDGED_AGAINST)
        if self.window_left < -1:
            raise ValueError(
                f"window_left is {self.window_left}; it must be -1 (unlimited) or a number of keys"
            )


@dataclass(frozen=True, kw_only=True)
class Geometry(_Rules):
    """The skip geometry of a plan: everything that decides a skip map except the lengths.

    Rows are token-major: row ``token * heads_per_vote + head`` of the sequence of rows that a vote
    is cut from.  In prefill each query head is a sequence of its own, unless there are few queries;
    in decode the query heads of one KV head share one.

    A dense plan has the geometry of the plan that would skip, and takes no decision.

    Attributes
    ----------
    heads_per_vote : int
        Query heads whose rows vote together, and that share a counter: 1 in prefill, the GQA group
        in decode.
    rows_per_vote : int
        Consecutive rows that take one decision together.
    keys_per_vote : int
        Keys of one decision (a *tile*).
    keys_per_load : int
        Keys of a *load tile*; the running maximum is the one from before the load tile.
    rows_per_block : int
        Rows that share K: they visit the same load tiles in the same order.
    order : str
        ``"diagonal_sink_descending"``, ``"descending"`` or ``"ascending"``.
    judged_against : str
        ``"running_max"``: a row's maximum over the load tiles visited before; ``"seed"``: its
        maximum over tile 0 and over the tile of its own last visible key.
    causal : bool
        Row of token ``i`` sees no key beyond ``i + kv_len - qo_len``.
    window_left : int
        Nor a key before ``i + kv_len - qo_len - window_left``; -1 is unlimited.
    group_size : int, optional
        Query heads whose rows vote together in a request of fewer than 64 queries, instead of
        `heads_per_vote`: a multiple of it, the GQA group in prefill.  A decision is counted for
        each of them that has a row in the unit.  None: `heads_per_vote` whatever the length.
    seed_short_queries : bool
        Judge a request of at most 1024 queries and at least 8 times as many keys against the seed,
        in which order ever it is visited and however the kernel divides its keys.  True in every
        prefill plan but those of the budget criterion, which judges against nothing.

    Examples
    --------
    >>> from flashskip.geometry import Geometry
    >>> geometry = Geometry.prefill(group_size=4, causal=True)
    >>> geometry.of(512, 131072).judged_against  # a chunk of a long prompt
    'seed'
    >>> geometry.of(8192, 8192).judged_against
    'running_max'
    >>> [geometry.of(n, 32768).heads_per_vote for n in (16, 63, 64)]
    [4, 4, 1]
    """

    group_size: int | None = None
    seed_short_queries: bool = False

    def __post_init__(self) -> None:  # noqa: D105
        super().__post_init__()
        if self.group_size is not None:
            _check_multiple("group_size", self.group_size, "heads_per_vote", self.heads_per_vote)

    @classmethod
    def prefill(
        cls,
        group_size: int = 1,
        *,
        rows_per_block: int = 192,
        keys_per_load: int = 128,
        keys_per_vote: int = 64,
        order: str = "diagonal_sink_descending",
        causal: bool = False,
        window_left: int = -1,
        seed_short_queries: bool = True,
    ) -> Geometry:
        """Geometry of a prefill kernel: 64 rows of one query head, against the running maximum.

        Requests of few queries differ: see `group_size` and `seed_short_queries`.
        """
        return cls(
            heads_per_vote=1,
            rows_per_vote=64,
            keys_per_vote=keys_per_vote,
            keys_per_load=keys_per_load,
            rows_per_block=rows_per_block,
            order=order,
            judged_against="running_max",
            causal=causal,
            window_left=window_left,
            group_size=group_size,
            seed_short_queries=seed_short_queries,
        )

    @classmethod
    def decode(cls, group_size: int, *, window_left: int = -1, rows_per_vote: int = 64) -> Geometry:
        """Geometry of a decode kernel: the rows of one KV head, 64 keys, against the seed.

        The visiting order is without effect on decisions that are judged against the seed.
        """
        return cls(
            heads_per_vote=group_size,
            rows_per_vote=rows_per_vote,
            keys_per_vote=64,
            keys_per_load=64,
            rows_per_block=rows_per_vote,
            order="ascending",
            judged_against="seed",
            causal=True,
            window_left=window_left,
        )

    def of(self, qo_len: int, kv_len: int) -> RequestGeometry:
        """Apply to one request of `qo_len` queries and `kv_len` keys.

        Raises
        ------
        ValueError
            If a length is negative.
        """
        rules = {f.name: getattr(self, f.name) for f in dataclasses.fields(_Rules)}
        if self.group_size is not None and qo_len < PACKED_BELOW:
            rules["heads_per_vote"] = self.group_size
        if (
            self.seed_short_queries
            and 0 < qo_len <= SHORT_QO_LEN
            and kv_len >= LONG_KV_RATIO * qo_len
        ):
            rules["judged_against"] = "seed"
        counted = self.heads_per_vote
        return RequestGeometry(qo_len=qo_len, kv_len=kv_len, heads_per_counter=counted, **rules)


@dataclass(frozen=True, kw_only=True)
class RequestGeometry(_Rules):
    """The skip geometry of one request; attributes as in :class:`Geometry`, and its own.

    Rows, units, tiles and load tiles are counted from the start of the request.

    Attributes
    ----------
    qo_len, kv_len : int
        Queries and keys of the request.
    heads_per_counter : int
        Query heads that share a counter of decisions: those of a vote, or fewer.
    """

    qo_len: int
    kv_len: int
    heads_per_counter: int

    def __post_init__(self) -> None:  # noqa: D105
        super().__post_init__()
        for name in ("qo_len", "kv_len"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        _check_multiple(
            "heads_per_vote", self.heads_per_vote, "heads_per_counter", self.heads_per_counter
        )

    @property
    def num_rows(self) -> int:
        """Rows of one sequence."""
        return self.qo_len * self.heads_per_vote

    @property
    def num_units(self) -> int:
        """Units of rows that vote, in one sequence."""
        return _ceil_div(self.num_rows, self.rows_per_vote)

    @property
    def num_tiles(self) -> int:
        """Tiles of keys, visited or not."""
        return _ceil_div(self.kv_len, self.keys_per_vote)

    def blocks(self) -> list[range]:
        """Rows of each row block."""
        return _cut(range(self.num_rows), self.rows_per_block)

    def units(self, block: range) -> list[range]:
        """Rows of each unit of `block`."""
        return _cut(block, self.rows_per_vote)

    def counters(self, unit: range) -> list[int]:
        """Counters of a sequence in which a decision of `unit` counts: of each head with a row."""
        return sorted({row % self.heads_per_vote // self.heads_per_counter for row in unit})

    def visible(self, row: int) -> range:
        """Keys that `row` sees: a range, empty where it sees none."""
        last = row // self.heads_per_vote + self.kv_len - self.qo_len
        first = last - self.window_left if self.window_left >= 0 else 0
        end = last + 1 if self.causal else self.kv_len
        return range(max(first, 0), max(min(end, self.kv_len), first, 0))

    def load_tiles(self, block: range) -> list[int]:
        """Load tiles that hold a key visible to a row of `block`, in visiting order."""
        # Neighbouring rows see overlapping or adjacent ranges, so together they see one range.
        first, end = self.visible(block[0]).start, self.visible(block[-1]).stop
        if end <= first:
            return []
        tiles = range(first // self.keys_per_load, _ceil_div(end, self.keys_per_load))
        if self.order == "ascending":
            return list(tiles)
        descending = list(reversed(tiles))
        if self.order == "descending":
            return descending
        diagonal = [tile for tile in descending if self._is_cut(tile, block[0])]
        rest = descending[len(diagonal) :]
        sink = rest[-1:] if rest and rest[-1] == 0 else []
        return diagonal + sink + rest[: len(rest) - len(sink)]

    def votes(self, load_tile: int) -> range:
        """Tiles of `load_tile`, each decided on its own."""
        per_load = self.keys_per_load // self.keys_per_vote
        return range(load_tile * per_load, min((load_tile + 1) * per_load, self.num_tiles))

    def is_visited(self, unit: range, tile: int) -> bool:
        """Whether a row of `unit` sees a key of `tile`: then it is decided on, and counted."""
        keys = range(tile * self.keys_per_vote, (tile + 1) * self.keys_per_vote)
        return any(
            visible.start < keys.stop and keys.start < visible.stop
            for visible in map(self.visible, unit)
            if visible
        )

    def seed_tiles(self, row: int) -> tuple[int, ...]:
        """Tiles that the seed of `row` is the maximum of: up to two, each of which it sees."""
        visible = self.visible(row)
        if not visible:
            return ()
        last = visible[-1] // self.keys_per_vote
        return (0, last) if last > 0 and visible[0] < self.keys_per_vote else (last,)

    def _is_cut(self, load_tile: int, first_row: int) -> bool:
        """Whether the causal limit of a block's first row hides a key of `load_tile`."""
        limit = first_row // self.heads_per_vote + self.kv_len - self.qo_len + 1
        return self.causal and limit < min((load_tile + 1) * self.keys_per_load, self.kv_len)


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _cut(rows: range, size: int) -> list[range]:
    """`rows` in consecutive pieces of at most `size`."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def _check_multiple(name: str, value: int, unit_name: str, unit: int) -> None:
    if value < unit or value % unit:
        raise ValueError(f"{name} is {value}; it must be a multiple of {unit_name} ({unit})")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
