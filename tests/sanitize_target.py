"""Launch a representative set of one operation's kernels on small shapes, for compute-sanitizer.

``python sanitize_target.py prefill`` or ``decode``. Kernels are compiled with line information,
which adds no instruction, so that a report names lines of `csrc`.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import sys
from dataclasses import dataclass
from typing import Any

import paged
import prefill_gpu
import torch
from helpers import HeadDim, make_ragged, poisoned
from paged import FP8, make_paged, to_pages
from torch import Tensor

import flashskip
from flashskip import _kernels
from flashskip._jit.compile import Program
from flashskip.variant import Variant

BF16, FP16 = torch.bfloat16, torch.float16
SKIPS = {"skip_softmax_threshold": 0.02}
COUNTS = {**SKIPS, "collect_stats": True}
CERTIFIES = {**COUNTS, "collect_bound": True}
MEASURES = {"skip_criterion": "measure"}
BUDGETS = {"skip_criterion": "budget", "skip_budget": 0.02, "collect_stats": True}
# Queries, keys, heads: first, also packed by group, judged against a seed, and cut over its keys
# and merged. CTAs share no tiles of these; of the others they do, and claim items in pairs.
ALONE = ((70, 0, 5, 130, 1, 200, 66), (70, 40, 300, 130, 0, 260, 4200), (3, 1))
PAIRED = ((200, 130) * 13, (200, 130) * 13, (4, 1))
STUCK = 120  # seconds after which a run, which takes 15 to 45, says where the host stands
PAGED_LENS = (0, 1, 63, 64, 65, 130, 700)

# Head dim, dtype, options of plan(), where there is a page_size also of to_pages(), and the batch.
PREFILL: tuple[tuple[HeadDim, torch.dtype, dict[str, Any]], ...] = (
    (128, BF16, {"causal": True}),
    (64, FP16, {}),
    (128, BF16, {"causal": True, **COUNTS}),
    (128, FP16, {"order": "descending", "vote_kv": 128, **SKIPS}),
    (64, BF16, {"causal": True, "order": "ascending", "window_left": 90, "logits_soft_cap": 9.0,
                "sinks": True, **COUNTS}),
    (96, BF16, {"causal": True, **COUNTS}),
    ((192, 128), BF16, {"causal": True}),
    (256, BF16, SKIPS),
    (128, BF16, {"page_size": 16, "causal": True, **COUNTS}),
    (128, BF16, {"page_size": 3, "layout": "HND", "form": "strided", "causal": True, **COUNTS}),
    ((192, 128), FP16, {"page_size": 64, "form": "pair"}),
    (64, BF16, {"page_size": 1}),
    (128, BF16, {"causal": True, **MEASURES}),
    (128, BF16, {"causal": True, **CERTIFIES}),
    (64, FP16, {"causal": True, **BUDGETS, "collect_bound": True}),
    (64, BF16, {"causal": True, "window_left": 90}),
    (64, BF16, {"batch": PAIRED}),
    (128, FP16, {"batch": PAIRED, "causal": True, **COUNTS}),
    (128, FP16, {"batch": PAIRED, "page_size": 16, "causal": True, **COUNTS}),
    (256, FP16, {"batch": PAIRED, "causal": True, **SKIPS}),
)  # fmt: skip

# Lengths, heads, arguments of make_paged(), options of plan().
DECODE: tuple[tuple[tuple[int, ...], tuple[int, int], dict[str, Any], dict[str, Any]], ...] = (
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
    ((6000, 3, 9000), (24, 2), {"head_dim": 128, "page_size": 16}, CERTIFIES),
    (PAGED_LENS, (8, 2), {"head_dim": 64, "page_size": 16}, MEASURES),
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """An example: all tensors that a kernel is given, and how to plan and run it."""

    wrapper: type
    method: str
    layout: str
    indices: dict[str, Tensor]
    shape: tuple[int, ...]
    options: dict[str, Any]  # of the plan; some are tensors
    inputs: tuple[Tensor, ...]  # q, k, v, or q and one or two tensors of a cache
    scales: dict[str, Tensor]
    out_shape: tuple[int, int, int]

    def plan(self, workspace: Tensor | None = None) -> Any:
        """Return a planned wrapper."""
        wrapper = self.wrapper(workspace, self.layout)
        getattr(wrapper, self.method)(*self.indices.values(), *self.shape, **self.options)
        return wrapper

    def run(self, wrapper: Any, **outputs: Any) -> Any:
        """Run it."""
        q, *kv = self.inputs
        if "indices" in self.indices:
            kv = [kv[0] if len(kv) == 1 else tuple(kv)]
        return wrapper.run(q, *kv, **self.scales, **outputs)


def prefill_call(number: int, device: str) -> Call:
    """An example of PREFILL."""
    head_dim, dtype, given = PREFILL[number]
    options = dict(given)
    qo_lens, kv_lens, heads = options.pop("batch", ALONE)
    batch = make_ragged(qo_lens, kv_lens, *heads, head_dim, dtype, device=device, hot=0.3, gain=8.0)
    options = {"q_data_type": dtype, **with_sinks(options, heads[0], device)}
    indices = {"qo_indptr": batch.qo_indptr, "kv_indptr": batch.kv_indptr}
    method, inputs, layout = "plan", (batch.q, batch.k, batch.v), "NHD"
    shape = (*heads, batch.q.shape[2], batch.v.shape[2])
    if "page_size" in options:
        form = {n: options.pop(n) for n in ("page_size", "layout", "form") if n in options}
        pages = to_pages(batch, **form)
        indices = {"qo_indptr": batch.qo_indptr, **_named(pages.table)}
        method, inputs, layout = "plan_paged", (batch.q, *_tensors(pages.cache)), pages.layout
        shape = (*shape[:3], pages.page_size)
        options["head_dim_vo"] = batch.v.shape[2]
    return Call(
        flashskip.BatchPrefillWrapper, method, layout, indices, shape, options, inputs, {},
        batch.out_shape,
    )  # fmt: skip


def decode_call(number: int, device: str) -> Call:
    """An example of DECODE."""
    kv_lens, heads, cache, options = DECODE[number]
    batch = make_paged(kv_lens, *heads, device=device, gain=7.5, **cache)
    options = {
        "q_data_type": batch.q.dtype, "kv_data_type": batch.k.dtype,
        "q_len_per_req": cache.get("q_len", 1), **with_sinks(options, heads[0], device),
    }  # fmt: skip
    scales = {}
    if batch.k.dtype == FP8:
        scales["k_scale"] = torch.linspace(0.5, 1.5, heads[1], device=device)
        scales["v_scale"] = torch.full((1,), 2.0, device=device)
    return Call(
        flashskip.BatchDecodeWrapper, "plan", batch.layout, _named(batch.table),
        (*heads, batch.q.shape[2], batch.k.shape[1]), options, (batch.q, *_tensors(batch.cache)),
        scales, tuple(batch.q.shape),
    )  # fmt: skip


def _named(table: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return dict(zip(("indptr", "indices", "last_page_len"), table, strict=True))


def _tensors(cache: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return (cache,) if isinstance(cache, Tensor) else cache


def with_sinks(options: dict[str, Any], heads: int, device: str) -> dict[str, Any]:
    """A copy of options, with a tensor where they ask for sinks."""
    sinks = {"sinks": torch.linspace(-3, 3, heads, device=device)} if "sinks" in options else {}
    return {**options, **sinks}


def prefill_kernel(number: int) -> Variant:
    """The kernel of an example of PREFILL."""
    head_dim, dtype, options = PREFILL[number]
    given = {n: x for n, x in options.items() if n not in ("layout", "form", "batch")}
    return prefill_gpu.variant(head_dim, dtype, **given)


def decode_kernel(number: int) -> Variant:
    """The kernel of an example of DECODE."""
    _, (num_qo_heads, num_kv_heads), cache, options = DECODE[number]
    shape = {n: cache[n] for n in ("head_dim", "page_size", "dtype", "q_len") if n in cache}
    kv_dtype = {"kv_data_type": cache["kv_dtype"]} if "kv_dtype" in cache else {}
    return paged.variant(num_qo_heads // num_kv_heads, **shape, **kv_dtype, **options)


# ---- the process that compute-sanitizer watches --------------------------------------------------


def with_line_info(program: Program) -> Program:
    """The same with one more option of the compiler."""
    return dataclasses.replace(program, options=(*program.options, "--generate-line-info"))


def programs() -> list[Program]:
    """All kernels with line information, to be built ahead."""
    kernels = [*map(prefill_kernel, range(len(PREFILL))), *map(decode_kernel, range(len(DECODE)))]
    return [with_line_info(_kernels.program_for(v)) for v in kernels]


def compile_with_line_info() -> None:
    """Compile every kernel of this process so."""
    plain = _kernels.program_for
    _kernels.program_for = lambda v: with_line_info(plain(v))


def launch(call: Call, device: str) -> Variant:
    """Run into poisoned outputs; returns the kernel.

    Its name is said first, and its end waited for, so that who finds this process at a standstill
    sees which launch does not end.
    """
    wrapper = call.plan(torch.empty(0) if device == "cpu" else None)
    print(f"launching {wrapper.variant.symbol}", flush=True)
    out = poisoned(call.out_shape, call.inputs[0].dtype, device)
    lse = poisoned(call.out_shape[:2], torch.float32, device)
    call.run(wrapper, out=out, lse=lse)
    assert not out.isnan().any()
    assert not lse.isnan().any()
    return wrapper.variant


def prefill(device: str = "cuda") -> list[Variant]:
    """Run all of PREFILL; returns the kernels."""
    return [launch(prefill_call(number, device), device) for number in range(len(PREFILL))]


def decode(device: str = "cuda") -> list[Variant]:
    """Run all of DECODE; returns the kernels."""
    return [launch(decode_call(number, device), device) for number in range(len(DECODE))]


if __name__ == "__main__":
    faulthandler.dump_traceback_later(STUCK)  # does it wait for the GPU, or stand elsewhere?
    compile_with_line_info()
    launched = {"prefill": prefill, "decode": decode}[sys.argv[1]]()
    print(f"launched {len(launched)} kernels")
