"""Variant -> Tile: how much one CTA holds at a time, with the reason for each number."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashskip.variant import Variant

WARPGROUP = 128  # threads
UNIT_ROWS = 64  # query rows of a prefill warpgroup: they vote together
MAX_SHARED_BYTES = 232_448  # dynamic shared memory of one CTA on sm_90
CHUNK = 64  # columns of a swizzled row in shared memory


@dataclass(frozen=True)
class Wgmma:
    """One matrix instruction m64 n`n` k16 that a template needs, as a C++ function `name`."""

    name: str
    n: int
    a_in_registers: bool = False
    transpose_a: bool = False
    transpose_b: bool = False

    @property
    def registers(self) -> range:
        """Accumulator registers of a thread, the first operands."""
        return range(self.n // 2)

    @property
    def a_operand(self) -> str:
        """A as the instruction names it: four registers, or one descriptor."""
        first = self.n // 2
        if not self.a_in_registers:
            return f"%{first}"
        return "{" + ", ".join(f"%{first + i}" for i in range(4)) + "}"

    @property
    def b_operand(self) -> int:
        """Operand number of B's descriptor."""
        return self.n // 2 + (4 if self.a_in_registers else 1)

    @property
    def scale_operand(self) -> int:
        """Operand number of the flag that keeps what D holds."""
        return self.b_operand + 1

    @property
    def transposes(self) -> str:
        """Transpose immediates; a register A has none."""
        b = f", {int(self.transpose_b)}"
        return b if self.a_in_registers else f", {int(self.transpose_a)}" + b


@dataclass(frozen=True)
class PrefillTile:
    """Rows and keys of a prefill CTA: consumer warpgroups of 64 rows, and loading warps."""

    consumer_warpgroups: int
    tile_kv: int
    k_stages: int
    v_stages: int
    producer_warps: int
    producer_registers: int
    consumer_registers: int
    unit_rows: int = UNIT_ROWS
    pv_head_keys: int = 64  # their P.V runs under the exponentials of the tile's other keys
    pieces_per_cta: int = 2  # of short requests cut over their keys, at most
    k_parts: int = 1  # of the columns of a tile of K, a stage each
    overlaps: bool = False  # a tile's P.V is issued behind the next one's Q.K, in turns

    @property
    def tile_q(self) -> int:
        """Query rows of a CTA: the row block that shares K and V."""
        return self.unit_rows * self.consumer_warpgroups

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return WARPGROUP * self.consumer_warpgroups + 32 * self.producer_warps

    @staticmethod
    def pairs(v: Variant) -> bool:
        """Whether CTAs are launched in pairs, which share tiles that the copy engine loads.

        Two blocks of rows, if they see the same keys, or else two heads of a group.
        """
        return v.kv_path != "paged_gather" and not v.window

    def votes(self, v: Variant) -> int:
        """Decisions of a warpgroup per load tile; a dense kernel counts as one."""
        return self.tile_kv // (v.vote_kv or self.tile_kv)

    def wgmma(self, v: Variant) -> tuple[Wgmma, ...]:
        """Return the matrix instructions of this tile."""
        return (
            Wgmma("wgmma_qk", self.tile_kv),
            Wgmma("wgmma_pv", v.head_dim_vo, a_in_registers=True, transpose_b=True),
        )

    @staticmethod
    def unit_state_bytes(v: Variant) -> int:
        """Return what a unit leaves of a piece of its keys; the template asserts the number."""
        per_thread = v.head_dim_vo // 2 + 4 + 1  # o; m and l of two rows; the omitted mass
        return 128 * per_thread * 4

    def shared_bytes(self, v: Variant) -> int:
        """Return the dynamic shared memory of a CTA; the template asserts the same number."""
        qk, vo = _round_up(v.head_dim_qk, CHUNK), _round_up(v.head_dim_vo, CHUNK)
        q = self.tile_q * qk * 2
        kv = self.tile_kv * 2 * (self.k_stages * qk // self.k_parts + self.v_stages * vo)
        work = 2 * 208 + 12 + 16
        pair = 48 + 8 * (self.k_stages + self.v_stages) if self.pairs(v) else 0
        seeds = 4 * self.tile_q if v.skip in ("threshold", "measure") else 0
        is_last = 4 * self.consumer_warpgroups if v.skip != "budget" else 0
        ballots = 16 * self.consumer_warpgroups
        barriers = 1 + 2 * (2 + self.consumer_warpgroups + self.k_stages + self.v_stages)
        rest = _round_up(pair + work + seeds + is_last + ballots, 8) + 8 * barriers
        return q + kv + _round_up(rest, 16)


@dataclass(frozen=True)
class DecodeTile:
    """Keys of a decode CTA: one warpgroup loads, one scores and votes, one accumulates."""

    k_stages: int
    v_stages: int
    tiles_per_group: int
    q_stages: int = 2  # segments whose queries are loaded ahead
    loader_registers: int = 96  # 504 together; scores of 2 x 64 keys and their maxima need most
    scorer_registers: int = 224
    weigher_registers: int = 184
    tile_kv: int = 64

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 3 * WARPGROUP

    def wgmma(self, v: Variant) -> tuple[Wgmma, ...]:
        """Return the matrix instructions of this tile: keys (then channels) are the 64 rows."""
        assert v.rows is not None
        fp8 = v.kv_dtype == "e4m3"
        return (
            Wgmma("wgmma_qk", v.rows, a_in_registers=fp8),
            Wgmma("wgmma_pv", v.rows, a_in_registers=fp8, transpose_a=not fp8, transpose_b=True),
        )

    @staticmethod
    def kv_bytes(v: Variant, head_dim: int) -> int:
        """Return the shared memory of a tile of K or V, whose rows are padded."""
        row = head_dim * (1 if v.kv_dtype == "e4m3" else 2)
        return DecodeTile.tile_kv * _round_up(row, decode_box_bytes(row))

    def shared_bytes(self, v: Variant) -> int:
        """Return the dynamic shared memory of a CTA; the template asserts the same number."""
        assert v.rows is not None
        page_ids = self.tile_kv if v.kv_path == "paged_gather" else 8
        k_tile, v_tile = (self.kv_bytes(v, dim) for dim in (v.head_dim_qk, v.head_dim_vo))
        row_values = 4 * v.rows * (3 if v.bound else 2)
        k_stage = k_tile + 16 + 4 * page_ids  # barriers
        segment = 48
        v_stage = v_tile + self.tile_kv * v.rows * 2 + row_values + 24 + 16 + 4 * page_ids + segment
        q_row = _round_up(v.head_dim_qk, 64) * 2 + (4 if v.kv_dtype == "e4m3" else 0)
        q = self.q_stages * (v.rows * q_row + 16 + 4 + segment) + 4
        exchange = v.rows * 32 * self.tiles_per_group
        schedule = 8 * self.threads // 32 + 5 * 8 + 4 * 4
        used = self.k_stages * k_stage + self.v_stages * v_stage + q + exchange + schedule + 4
        used += 4 * v.rows if v.bound else 0  # what is omitted so far
        used += 4  # so that barriers begin at a multiple of 8
        return 1024 + _round_up(used, 1024)  # alignment of the first tile, and of the struct's size


def decode_box_bytes(row_bytes: int) -> int:
    """Return the width of a chunk of a tile with such rows, as csrc/kv_tile.cuh has it."""
    return 64 if row_bytes % 128 == 64 else 128


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def _decode_tile(v: Variant) -> DecodeTile:
    assert v.rows is not None
    # 96 KiB of K always under way cover latency times bandwidth of an SM; V gets as much where P
    # and Q of many rows leave it. An SM holds one CTA: two with half the stages were no faster.
    tile_bytes = DecodeTile.kv_bytes(v, v.head_dim_qk)
    k_stages = v_stages = 96 * 1024 // tile_bytes
    # Scores of more than two tiles do not fit the registers of many rows. A tile of 8 KiB arrives
    # in half the time, and judging four at once is 4 % faster; with 16 KiB it is slower.
    group = 4 if tile_bytes <= 8192 and v.rows <= 16 else 2
    q_stages = 4 if v.rows <= 16 else 2
    registers = (96, 224, 184)
    if v.head_dim_vo == 256 and v.rows > 24:
        # The output of 256 channels takes two registers a row, and decisions take some.
        registers = (88, 200, 216) if v.skip == "dense" else (96, 208, 200)
    elif v.bound and v.head_dim_vo < 256:
        # All that is told of a tile is wanted at once; a smaller output leaves more for it.
        registers = (112, 240, 152) if v.head_dim_vo == 64 else (104, 240, 160)
    elif v.kv_path == "paged_gather" or v.kv_dtype == "e4m3":
        registers = (104, 224, 176)  # rows to gather, or queries that pass through registers
    tile = DecodeTile(k_stages, v_stages, group, q_stages, *registers)
    while tile.shared_bytes(v) > MAX_SHARED_BYTES:
        tile = replace(tile, v_stages=tile.v_stages - 1)
    return tile


# Three warpgroups of 64 rows share each K and V tile: fewest bytes and instructions per FLOP. The
# registers of a CTA limit them to 160 each, enough for an output of 128 columns and 128 scores.
_THREE = PrefillTile(
    3, 128, k_stages=2, v_stages=2, producer_warps=4, producer_registers=32, consumer_registers=160
)
_PREFILL_TILES = {
    (64, 64): _THREE,
    (96, 96): _THREE,  # stored as 128 columns: the upper half of the second chunk is never read
    (128, 128): _THREE,
    # Q of 192 rows and 192 columns leaves no room for two stages of K and V.
    (192, 128): PrefillTile(
        2,
        128,
        k_stages=2,
        v_stages=2,
        producer_warps=4,
        producer_registers=40,
        consumer_registers=232,
    ),
    # An output of 256 columns takes 128 registers. Shared memory holds one load tile of 128 keys:
    # 16 % faster than two of 64, whose Q.K is bound by reading shared memory.
    (256, 256): PrefillTile(
        2,
        128,
        k_stages=1,
        v_stages=1,
        producer_warps=4,
        producer_registers=40,
        consumer_registers=232,
    ),
}


def prefill_tile(head_dim_qk: int, head_dim_vo: int) -> PrefillTile:
    """Return the tile of a prefill; of other head dims that of 128, for the CPU's decisions."""
    return _PREFILL_TILES.get((head_dim_qk, head_dim_vo), _THREE)


def tile_for(v: Variant) -> PrefillTile | DecodeTile:
    """Return the tile of `v`."""
    if v.op == "prefill":
        tile = prefill_tile(v.head_dim_qk, v.head_dim_vo)
        if tile.k_stages == 1 and v.skip in ("threshold", "budget"):
            # Where tiles are skipped, a lone stage of K is waited for. In halves three fit.
            return replace(tile, k_parts=2, k_stages=3)
        if v.head_dim_vo == 64 and v.skip == "dense" and not v.soft_cap:
            # Products take as long as exponentials. A kernel that skips has fewer to overlap, and
            # loses by it; a soft cap leaves too few registers. V is needed for longer: two stages
            # would be waited for.
            return replace(tile, overlaps=True, k_stages=3, v_stages=3)
        return tile
    return _decode_tile(v)
