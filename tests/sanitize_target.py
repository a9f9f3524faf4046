"""Launch a representative set of one operation's kernels on small shapes, for compute-sanitizer.

``python sanitize_target.py prefill`` or ``decode``. Kernels are compiled with line information,
which adds no instruction, so that a report names lines of `csrc`.
"""

from __future__ import annotations

import dataclasses
import sys

import paged
import prefill_gpu
import torch
from helpers import make_ragged
from paged import FP8, make_paged

from flashskip import _kernels
from flashskip._jit.compile import Program
from flashskip.variant import Variant

BF16, FP16 = torch.bfloat16, torch.float16
SKIPS = {"skip_softmax_threshold": 0.02}
COUNTS = {**SKIPS, "collect_stats": True}
MEASURES = {"skip_criterion": "measure"}
QO_LENS, KV_LENS = (70, 0, 5, 130, 1, 200), (70, 40, 300, 130, 0, 260)
PAGED_LENS = (0, 1, 63, 64, 65, 130, 700)

# Head dim, dtype, options of plan().
PREFILL = (
    (128, BF16, {"causal": True}),
    (64, FP16, {}),
    (128, BF16, {"causal": True, **COUNTS}),
    (128, FP16, {"order": "descending", "vote_kv": 128, **SKIPS}),
    (64, BF16, {"causal": True, "order": "ascending", "window_left": 90, "logits_soft_cap": 9.0,
                "sinks": True, **COUNTS}),
    (128, BF16, {"causal": True, **MEASURES}),
)  # fmt: skip

# Lengths, heads, arguments of make_paged(), options of plan().
DECODE = (
    (PAGED_LENS, (8, 2), {"head_dim": 128, "page_size": 16}, {}),
    (PAGED_LENS, (8, 2), {"head_dim": 64, "page_size": 3, "dtype": FP16, "layout": "HND"}, {}),
    (PAGED_LENS, (8, 2), {"head_dim": 128, "page_size": 64, "form": "strided"}, COUNTS),
    (PAGED_LENS, (8, 2), {"head_dim": 64, "page_size": 5, "form": "pair"}, COUNTS),
    (PAGED_LENS, (8, 2), {"head_dim": 128, "page_size": 8, "q_len": 3},
     {"window_left": 100, "logits_soft_cap": 9.0, "sinks": True, **COUNTS}),
    (PAGED_LENS, (71, 1), {"head_dim": 64, "page_size": 16}, SKIPS),  # more than 64 rows
    (PAGED_LENS, (8, 2), {"head_dim": 96, "page_size": 3}, COUNTS),
    (PAGED_LENS, (8, 2), {"head_dim": 256, "page_size": 8}, SKIPS),
    (PAGED_LENS, (8, 2), {"head_dim": 128, "page_size": 16, "kv_dtype": FP8}, COUNTS),
    (PAGED_LENS, (8, 2), {"head_dim": 64, "page_size": 5, "kv_dtype": FP8}, {}),
    ((6000, 3, 9000), (24, 2), {"head_dim": 128, "page_size": 16}, COUNTS),  # cut and merged
    ((6000, 3, 9000), (24, 2), {"head_dim": 64, "page_size": 7}, {}),
    (PAGED_LENS, (8, 2), {"head_dim": 64, "page_size": 16}, MEASURES),
)  # fmt: skip


def compile_with_line_info() -> None:
    """Add one compiler option to every kernel of this process."""
    plain = _kernels.program_for

    def program_for(v: Variant) -> Program:
        program = plain(v)
        return dataclasses.replace(program, options=(*program.options, "--generate-line-info"))

    _kernels.program_for = program_for


def prefill_kernel(number: int) -> Variant:
    """The kernel of an example of PREFILL."""
    head_dim, dtype, options = PREFILL[number]
    return prefill_gpu.variant(head_dim, dtype, **options)


def decode_kernel(number: int) -> Variant:
    """The kernel of an example of DECODE."""
    _, (num_qo_heads, num_kv_heads), cache, options = DECODE[number]
    shape = {n: cache[n] for n in ("head_dim", "page_size", "dtype", "q_len") if n in cache}
    kv_dtype = {"kv_data_type": cache["kv_dtype"]} if "kv_dtype" in cache else {}
    return paged.variant(num_qo_heads // num_kv_heads, **shape, **kv_dtype, **options)


def with_sinks(options: dict, heads: int, device: str) -> dict:
    """Options with a tensor where they ask for sinks."""
    if "sinks" not in options:
        return options
    return {**options, "sinks": torch.linspace(-3, 3, heads, device=device)}


def prefill(device: str = "cuda") -> list[Variant]:
    """Run all of PREFILL; returns the kernels."""
    launched = []
    for head_dim, dtype, options in PREFILL:
        batch = make_ragged(
            QO_LENS, KV_LENS, 3, 1, head_dim, dtype, device=device, hot=0.3, gain=8.0
        )
        wrapper = prefill_gpu.plan(batch, **with_sinks(options, 3, device))
        out, lse = prefill_gpu.run(wrapper, batch)
        assert not out.isnan().any()
        assert not lse.isnan().any()
        launched.append(wrapper.variant)
    return launched


def decode(device: str = "cuda") -> list[Variant]:
    """Run all of DECODE; returns the kernels."""
    launched = []
    for kv_lens, heads, cache, options in DECODE:
        batch = make_paged(kv_lens, *heads, device=device, gain=7.5, **cache)
        wrapper = paged.plan(batch, **with_sinks(options, heads[0], device))
        out, lse = paged.run(wrapper, batch)
        assert not out.isnan().any()
        assert not lse.isnan().any()
        launched.append(wrapper.variant)
    return launched


if __name__ == "__main__":
    compile_with_line_info()
    launched = {"prefill": prefill, "decode": decode}[sys.argv[1]]()
    torch.cuda.synchronize()
    print(f"launched {len(launched)} kernels")
