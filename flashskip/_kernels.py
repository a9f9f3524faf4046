"""From a Variant to a loaded kernel: the only module that sees both attention and the JIT."""

from __future__ import annotations

from ctypes import c_void_p
from functools import cache
from typing import Any

from flashskip import _env
from flashskip._jit.compile import Program
from flashskip._jit.kernel import Kernel, load
from flashskip._jit.params import ParamTable, pointer_to
from flashskip._jit.render import render
from flashskip._tiles import PrefillTile, tile_for
from flashskip.geometry import ORDERS, Geometry
from flashskip.variant import Variant

# Keys of one prefill decision where the caller does not choose.
DEFAULT_VOTE_KV = 64

# Where the final threshold of a request comes from (csrc/threshold.cuh reads these).
_THRESHOLD = [
    ("threshold", "const float*"),  # [batch_size] or null: then threshold_value for all
    ("threshold_kv_len", "const int32_t*"),  # [batch_size] or null: then the request's own length
    ("threshold_value", "float"),
    ("length_exponent", "float"),  # c of F / L^c
    ("threshold_is_factor", "int32_t"),  # the value is F, not lambda
    ("overflow_is_dense", "int32_t"),  # F / L^c >= 1: run dense, else lambda = 1
    ("allowance", "float"),  # budget: what a row may omit, over what it keeps
]

# What is told of the decisions.
_OBSERVED = [
    ("stats", "int64_t*"),  # [batch_size, heads, 2]: skipped, visited decisions
    ("gaps", "int64_t*"),  # [batch_size, heads, 256]: decisions by the lambda they would skip at
    ("bound", "float*"),  # [nnz_qo, num_qo_heads], contiguous: certified share that is omitted
]

PREFILL_PARAMS = ParamTable(
    "PrefillParams",
    [
        ("q_map", "TensorMap"),  # rows of 64 tokens of a head
        ("k_map", "TensorMap"),  # ragged, paged_tma
        ("v_map", "TensorMap"),
        ("q", "const void*"),  # [nnz_qo, num_qo_heads, head_dim_qk]
        ("o", "void*"),  # [nnz_qo, num_qo_heads, head_dim_vo]
        ("lse", "float*"),  # [nnz_qo, num_qo_heads], contiguous, or null
        ("qo_indptr", "const int32_t*"),  # [batch_size + 1]
        ("kv_indptr", "const int32_t*"),  # ragged: [batch_size + 1]
        ("k_cache", "const void*"),  # paged_gather
        ("v_cache", "const void*"),
        ("indptr", "const int32_t*"),  # paged: [batch_size + 1]
        ("indices", "const int32_t*"),  # [num_indices]
        ("last_page_len", "const int32_t*"),  # [batch_size]
        ("work_counter", "uint32_t*"),  # [2]: next work item, finished CTAs; both 0 between runs
        ("partial", "void*"),  # of pieces of short requests: [pieces, units of a CTA, UnitState]
        ("merge_counter", "uint32_t*"),  # [pieces, units of a CTA], 0 between runs
        ("q_stride_token", "int64_t"),  # elements
        ("q_stride_head", "int64_t"),
        ("o_stride_token", "int64_t"),
        ("o_stride_head", "int64_t"),
        ("k_stride_page", "int64_t"),  # of a paged cache, elements
        ("k_stride_token", "int64_t"),
        ("k_stride_head", "int64_t"),
        ("v_stride_page", "int64_t"),
        ("v_stride_token", "int64_t"),
        ("v_stride_head", "int64_t"),
        ("nnz_qo", "int32_t"),  # rows of q: no request reaches beyond
        ("nnz_kv", "int32_t"),  # rows of ragged k and v
        ("page_size", "int32_t"),
        ("page_reciprocal", "uint32_t"),  # (2**32 - 1) // page_size
        ("num_pages", "int32_t"),  # of the cache: a page id outside reads as zeros
        ("num_indices", "int32_t"),
        ("batch_size", "int32_t"),
        ("num_qo_heads", "int32_t"),
        ("num_kv_heads", "int32_t"),
        ("group_size", "int32_t"),  # num_qo_heads / num_kv_heads
        ("short_qo_len", "int32_t"),  # most tokens of a short request; 0: none is treated as such
        ("window_left", "int32_t"),
        ("soft_cap", "float"),  # logits_soft_cap / sm_scale: in units of q.k
        ("sinks", "const float*"),  # [num_qo_heads], natural-log units
        ("sm_scale_log2", "float"),  # sm_scale * log2(e)
        ("lse_scale", "float"),  # 1 for base 2, ln 2 for base e
        *_THRESHOLD,
        *_OBSERVED,
    ],
)

DECODE_PARAMS = ParamTable(
    "DecodeParams",
    [
        ("k_map", "TensorMap"),  # paged_tma
        ("v_map", "TensorMap"),
        ("q", "const void*"),  # [batch_size * q_len_per_req, num_qo_heads, head_dim]
        ("k_cache", "const void*"),  # paged_gather
        ("v_cache", "const void*"),
        ("o", "void*"),
        ("lse", "float*"),  # [tokens, num_qo_heads], contiguous, or null
        ("indptr", "const int32_t*"),  # [batch_size + 1]
        ("indices", "const int32_t*"),  # [num_indices]
        ("last_page_len", "const int32_t*"),  # [batch_size]
        ("partial", "float*"),  # two segments per CTA: [grid, 2, PartialState]
        ("merge_counter", "uint32_t*"),  # [grid], 0 between runs
        ("q_stride_token", "int64_t"),  # elements
        ("q_stride_head", "int64_t"),
        ("o_stride_token", "int64_t"),
        ("o_stride_head", "int64_t"),
        ("k_stride_page", "int64_t"),  # of the cache, elements
        ("k_stride_token", "int64_t"),
        ("k_stride_head", "int64_t"),
        ("v_stride_page", "int64_t"),
        ("v_stride_token", "int64_t"),
        ("v_stride_head", "int64_t"),
        ("batch_size", "int32_t"),
        ("num_qo_heads", "int32_t"),
        ("num_kv_heads", "int32_t"),
        (
            "strands",
            "int32_t",
        ),  # lists of work, of every `strands`-th KV head each; divides the grid
        ("strand_heads", "int32_t"),  # num_kv_heads / strands
        ("group_size", "int32_t"),  # query heads of a KV head
        ("group_reciprocal", "uint32_t"),  # (2**32 - 1) // group_size + 1, 0 for 1
        ("q_len_per_req", "int32_t"),
        ("page_size", "int32_t"),
        ("page_reciprocal", "uint32_t"),  # (2**32 - 1) // page_size
        ("num_pages", "int32_t"),  # of the cache: a page id outside reads as zeros
        ("num_indices", "int32_t"),
        ("window_left", "int32_t"),  # -1: unlimited
        ("soft_cap", "float"),  # logits_soft_cap / sm_scale: in units of q.k
        ("sinks", "const float*"),  # [num_qo_heads], natural-log units
        ("sm_scale_log2", "float"),
        ("lse_scale", "float"),
        (
            "k_scale",
            "const float*",
        ),  # of an FP8 cache: [1], [num_kv_heads], or null: then the value
        ("v_scale", "const float*"),
        ("k_scale_value", "float"),
        ("v_scale_value", "float"),
        ("k_scale_stride", "int32_t"),  # 1 where each KV head has its own, else 0
        ("v_scale_stride", "int32_t"),
        *_THRESHOLD,
        *_OBSERVED,
    ],
)


def params_for(v: Variant) -> ParamTable:
    """Return the table of what a launch of `v` passes."""
    return PREFILL_PARAMS if v.op == "prefill" else DECODE_PARAMS


def new_record(v: Variant) -> tuple[Any, c_void_p]:
    """Return what a launch of `v` passes, all 0, and the pointer by which it is passed."""
    record = params_for(v).new()
    return record, pointer_to(record)


@cache
def program_for(v: Variant) -> Program:
    """Render `v` into all that the compiler sees and a launch needs."""
    tile = tile_for(v)
    source = render(f"{v.op}_sm90.cu.jinja", v=v, t=tile, wgmma=tile.wgmma(v), params=params_for(v))
    return Program(
        symbol=v.symbol,
        arch=v.arch,
        source=source,
        block=tile.threads,
        shared_bytes=tile.shared_bytes(v),
        waits=v.op == "decode",
    )


@cache
def kernel_for(v: Variant) -> Kernel:
    """Return the loaded kernel of `v`: from memory, the disk cache, or the compiler."""
    kernel = load(program_for(v), _env.kernel_cache())
    _env.record_used(v.symbol)
    return kernel


def geometry_for(v: Variant, group_size: int, window_left: int, seeded: bool) -> Geometry:
    """Return which rows and keys of a prefill decide together in the kernel of `v`.

    Where a budget decides, or not `seeded`, there are no seeds and no request is split.
    """
    tile = tile_for(v)
    assert isinstance(tile, PrefillTile)
    return Geometry.prefill(
        group_size,
        rows_per_block=tile.tile_q,
        keys_per_load=tile.tile_kv,
        keys_per_vote=v.vote_kv or DEFAULT_VOTE_KV,
        order=v.order or ORDERS[0],
        causal=v.causal,
        window_left=window_left,
        seed_short_queries=seeded and v.skip != "budget",
    )


def grid_for(v: Variant, multiprocessors: int) -> int:
    """Return the CTAs of a launch: one for each multiprocessor, or as many as make pairs."""
    tile = tile_for(v)
    in_pairs = isinstance(tile, PrefillTile) and tile.pairs(v)
    return max(multiprocessors // 2, 1) * 2 if in_pairs else multiprocessors


def merged_units(v: Variant, grid: int) -> int:
    """Return how many states of units the pieces of a prefill leave at most; 0 if it has none."""
    tile = tile_for(v)
    assert isinstance(tile, PrefillTile)
    return 0 if v.skip == "budget" else tile.pieces_per_cta * grid * tile.consumer_warpgroups


# Of any launch on a GPU of at most 160 multiprocessors: prefill at head_dim 256 needs most.
MOST_WORKSPACE_BYTES = 48 << 20


def workspace_bytes(v: Variant, grid: int) -> int:
    """Return the scratch memory of a launch, which depends on the number of CTAs alone."""
    if v.op == "prefill":
        return merged_units(v, grid) * PrefillTile.unit_state_bytes(v)
    assert v.rows is not None
    values = v.head_dim_vo + (3 if v.bound else 2)
    return grid * 2 * v.rows * values * 4  # two cut segments per CTA, fp32
