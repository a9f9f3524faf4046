"""What is measured together: each group's workloads, the most important ones first."""

from __future__ import annotations

from benchmarks.cases import Case, chunk, decode, prefill

_DENSE = (0.0,)
_ENDS = (0.0, 0.75)  # of the sweep, where the whole curve would tell no more
_BOTH = (True, False)  # causal, full
_G8 = {"num_qo_heads": 64, "num_kv_heads": 8}
_ONE_KV_HEAD = {"num_qo_heads": 8, "num_kv_heads": 1}
# 16 requests of 1k to 32k tokens, and as many tokens in requests of one length.
_MIX = (
    *(32768, 1024, 16384, 2048, 8192, 4096, 1024, 24576),
    *(2048, 12288, 4096, 1024, 20480, 3072, 6144, 1536),
)
_UNIFORM = (sum(_MIX) // len(_MIX),) * len(_MIX)

# One of each kind, with every kernel's build timed.
FIRST: tuple[Case, ...] = (
    prefill(8192, True),
    prefill(32768, True),
    decode(64, 8192, 64),
    decode(128, 16384, 64, **_G8),
    prefill(8192, False),
    prefill(32768, False),
    decode(1, 131072, 64),
    decode(256, 1024, 64),
    decode(64, 8192, 16),
    decode(128, 16384, 16, **_G8, shares=_ENDS),
    decode(1, 131072, 16, shares=_ENDS),
    decode(256, 1024, 16, shares=_ENDS),
    prefill((4096,) * 4, True, shares=_ENDS),
    prefill((4096,) * 4, False, shares=_ENDS),
    prefill(8192, True, head_dim_qk=64, head_dim_vo=64, shares=_ENDS),
    decode(64, 8192, 64, head_dim=64, shares=_ENDS),
)

# The prefill kernels' own bars.
PREFILL_DENSE = (
    *(prefill(8192, causal, shares=_DENSE) for causal in _BOTH),
    *(prefill(32768, causal) for causal in _BOTH),
    *(prefill((4096,) * 4, causal, shares=_DENSE) for causal in _BOTH),
    *(prefill(131072, causal, **_ONE_KV_HEAD, shares=_DENSE) for causal in _BOTH),
)
PREFILL_SWEPT = (
    *PREFILL_DENSE[2:4],
    *(prefill(16384, causal) for causal in _BOTH),
    prefill(65536, True, **_ONE_KV_HEAD),
)
PREFILL_HEAD_DIMS = (
    *(prefill(8192, True, head_dim_qk=d, head_dim_vo=d, shares=_DENSE) for d in (64, 256)),
    prefill(8192, True, head_dim_qk=192, head_dim_vo=128, shares=_DENSE),
)
PREFILL_MIX, PREFILL_UNIFORM = (prefill(lens, True, shares=_DENSE) for lens in (_MIX, _UNIFORM))
PREFILL_PAGED = {p: prefill(8192, True, page_size=p, shares=_DENSE) for p in (16, 64, 1)}
# Where the vote is all that the skip kernel has more, and its share of the time is largest.
PREFILL_VOTES = (PREFILL_DENSE[1], PREFILL_SWEPT[3], PREFILL_PAGED[1])
PREFILL_CHUNK = chunk(512, 131072, shares=_ENDS)
# Rows of one head would fill a quarter of a unit; at 64 they fill one, and the keys are divided.
PREFILL_FEW_QUERIES = (chunk(16, 32768, 8, shares=_ENDS), chunk(64, 131072, shares=_ENDS))
PREFILL: tuple[Case, ...] = (
    *PREFILL_DENSE,
    *PREFILL_SWEPT[2:],
    *PREFILL_HEAD_DIMS,
    PREFILL_MIX,
    PREFILL_UNIFORM,
    *PREFILL_PAGED.values(),
    PREFILL_CHUNK,
    *PREFILL_FEW_QUERIES,
    prefill(8192, True, head_dim_qk=96, head_dim_vo=96, shares=_DENSE),
    prefill(32768, True, page_size=16, shares=_ENDS),
)

# The decode kernels' own bars.
DECODE_LARGE = {p: decode(128, 16384, p, **_G8) for p in (64, 16)}
DECODE_USUAL = {p: decode(64, 8192, p) for p in (64, 16)}
DECODE_ONE = {p: decode(1, 131072, p) for p in (64, 16)}
DECODE_SHORT = {p: decode(256, 1024, p, shares=_DENSE) for p in (64, 16)}
DECODE_DENSE = tuple(
    cases[p] for p in (64, 16) for cases in (DECODE_LARGE, DECODE_USUAL, DECODE_ONE, DECODE_SHORT)
)
DECODE_PAGE_1 = decode(64, 8192, 1, shares=_DENSE)
DECODE_BF16 = decode(64, 16384, 64, shares=_DENSE)
DECODE_FP8 = decode(64, 16384, 64, kv_dtype="float8_e4m3fn", shares=_ENDS)
DECODE_SHAPES = (
    *(decode(64, 8192, 64, head_dim=d, shares=_DENSE) for d in (64, 256)),
    *(decode(64, 8192, 64, num_qo_heads=8 * g, shares=_DENSE) for g in (1, 3, 8, 16)),
)
DECODE_GRAPHS = (
    decode(1, 1024, 64, shares=_DENSE, graph=True),
    decode(8, 2048, 64, shares=_DENSE, graph=True),
)
DECODE: tuple[Case, ...] = (
    *DECODE_DENSE,
    *DECODE_GRAPHS,
    DECODE_PAGE_1,
    DECODE_BF16,
    DECODE_FP8,
    *DECODE_SHAPES,
    decode(64, 8192, 64, head_dim=96, shares=_DENSE),
    decode(64, 8192, 64, uneven=True, shares=(0.0, 0.45)),
    decode(1, 131072, 64, uneven=True, shares=(0.0, 0.45)),
)

_SMALL = {"num_qo_heads": 4, "num_kv_heads": 2}
TINY: tuple[Case, ...] = (
    prefill(512, True, head_dim_qk=64, head_dim_vo=64, **_SMALL, shares=(0.0, 0.5)),
    prefill((200, 300), False, head_dim_qk=64, head_dim_vo=64, **_SMALL, shares=(0.0, 0.5)),
    decode(2, 512, 16, head_dim=64, **_SMALL, shares=(0.0, 0.5)),
)

GROUPS: dict[str, tuple[Case, ...]] = {
    "first": FIRST,
    "prefill": PREFILL,  # the prefill kernels' own bars, with peers
    "decode": DECODE,  # the decode kernels' own bars, with peers
    "tiny": TINY,  # proves that the harness works, on a CPU too; says nothing about speed
}

CASES: dict[str, Case] = {case.name: case for group in GROUPS.values() for case in group}

# Host time of plan() and run() is measured on these.
HOST_PREFILL, HOST_DECODE = prefill(1024, True), decode(256, 1024, 64)
HOST_CASES: dict[str, tuple[Case, ...]] = {
    "first": (HOST_PREFILL, HOST_DECODE),
    "prefill": (HOST_PREFILL,),
    "decode": (HOST_DECODE,),
    "tiny": (TINY[0], TINY[2]),
}
