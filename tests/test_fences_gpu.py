"""Every tensor that a kernel reads or writes lies between fences: poisoned, then harmless.

What is written outside of a tensor breaks a fence; what is read outside of one and matters changes
a bit between the two runs. (Reads that do not matter are seen by `test_sanitize_gpu.py`.)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fences import HARMLESS, POISON, Fences
from helpers import make_ragged
from paged import make_paged
from sanitize_target import (
    DECODE,
    KV_LENS,
    PREFILL,
    QO_LENS,
    decode_kernel,
    prefill_kernel,
    with_sinks,
)
from torch import Tensor

import flashskip


def on_a_gpu_and_once_on_the_cpu(examples: tuple[Any, ...], one: int) -> pytest.MarkDecorator:
    """Parametrize by the number of an example and the device; `one` is the CPU's."""
    numbers = range(len(examples))
    on_gpu = [pytest.param(number, "cuda", marks=pytest.mark.gpu) for number in numbers]
    return pytest.mark.parametrize(("number", "device"), [(one, "cpu"), *on_gpu])


def every_source(options: dict[str, Any], batch_size: int, device: str) -> list[dict[str, Any]]:
    """The same options with a number, a live threshold, and a live factor and lengths.

    On the CPU, which is slow, the last alone.
    """
    if "skip_softmax_threshold" not in options:
        return [options]
    rest = {n: x for n, x in options.items() if n != "skip_softmax_threshold"}
    value = options["skip_softmax_threshold"]
    lengths = torch.arange(batch_size, dtype=torch.int32, device=device) * 90
    live = torch.full((batch_size,), value, device=device)
    factor = {"skip_softmax_threshold_scale_factor": 200 * live, "threshold_kv_len": lengths}
    sources = [options, {**rest, "skip_softmax_threshold": live}, {**rest, **factor}]
    return sources if device == "cuda" else sources[-1:]


def run_between_fences(
    fill: int,
    wrapper_of: Any,
    indices: dict[str, Tensor],
    inputs: tuple[Tensor, ...],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> list[Tensor]:
    """Plan and run with all tensors between fences; returns all that was written."""
    fences, device, q = Fences(fill), inputs[0].device, inputs[0]
    options = {n: fences.put(n, x) if isinstance(x, Tensor) else x for n, x in options.items()}
    fenced_indices = [fences.put(n, t) for n, t in indices.items()]
    fenced = [fences.put(f"input {i}", t) for i, t in enumerate(inputs)]
    out = fences.empty("out", tuple(q.shape), q.dtype, device)
    lse = fences.empty("lse", tuple(q.shape[:2]), torch.float32, device)
    wrapper, plan = wrapper_of(None if device.type == "cuda" else torch.empty(0))
    plan(wrapper, fenced_indices, options)
    with monkeypatch.context() as patch:
        if device.type == "cuda":
            space = fences.empty("workspace", (wrapper.workspace_bytes,), torch.uint8, device)
            wrapper, plan = wrapper_of(space)
            patch.setattr(torch, "zeros", fences.allocator("a buffer of the wrapper", 0))
            patch.setattr(torch, "empty", fences.allocator("an output of the wrapper", None))
        plan(wrapper, fenced_indices, options)
        answer = wrapper.run(*fenced, out=out, lse=lse, return_lse=True)
    written = [t.clone() for t in answer]
    if options.get("collect_stats"):
        assert device.type == "cpu" or fences.hold(wrapper.stats)
        written.append(wrapper.stats.clone())
    assert device.type == "cpu" or all(map(fences.hold, answer))
    assert fences.broken() == []
    return written


def assert_fences_do_not_matter(*call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned, harmless = (run_between_fences(f, *call, monkeypatch) for f in (POISON, HARMLESS))
    for a, b in zip(poisoned, harmless, strict=True):
        assert torch.equal(a, b)
        assert not a.isnan().any()


@pytest.mark.variants(lambda number: [prefill_kernel(number)])
@on_a_gpu_and_once_on_the_cpu(PREFILL, 4)
def test_prefill(number: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head_dim, dtype, options = PREFILL[number]
    batch = make_ragged(QO_LENS, KV_LENS, 3, 1, head_dim, dtype, device=device, hot=0.3, gain=8.0)
    options = {"q_data_type": dtype, **with_sinks(options, 3, device)}

    def wrapper_of(space: Tensor | None) -> Any:
        return flashskip.BatchPrefillWrapper(space), lambda wrapper, indices, options: wrapper.plan(
            *indices, 3, 1, head_dim, **options
        )

    indices = {"qo_indptr": batch.qo_indptr, "kv_indptr": batch.kv_indptr}
    for each in every_source(options, len(QO_LENS), device):
        assert_fences_do_not_matter(
            wrapper_of, indices, (batch.q, batch.k, batch.v), each, monkeypatch=monkeypatch
        )


@pytest.mark.variants(lambda number: [decode_kernel(number)])
@on_a_gpu_and_once_on_the_cpu(DECODE, 4)
def test_decode(number: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kv_lens, heads, cache, options = DECODE[number]
    batch = make_paged(kv_lens, *heads, device=device, gain=7.5, **cache)
    shape = (*heads, batch.q.shape[2], batch.k.shape[1])
    options = {"q_data_type": batch.q.dtype, **with_sinks(options, heads[0], device)}

    def wrapper_of(space: Tensor | None) -> Any:
        wrapper = flashskip.BatchDecodeWrapper(space, batch.layout)
        return wrapper, lambda wrapper, indices, options: wrapper.plan(
            *indices, *shape, q_len_per_req=cache.get("q_len", 1), **options
        )

    indices = dict(zip(("indptr", "indices", "last_page_len"), batch.table, strict=True))
    both = batch.cache if isinstance(batch.cache, tuple) else batch.cache.unbind(1)

    def paired(space: Tensor | None) -> Any:
        wrapper, plan = wrapper_of(space)
        run = wrapper.run
        wrapper.run = lambda q, k, v, **outputs: run(q, (k, v), **outputs)
        return wrapper, plan

    for each in every_source(options, len(kv_lens), device):
        assert_fences_do_not_matter(
            paired, indices, (batch.q, *both), each, monkeypatch=monkeypatch
        )


def test_a_broken_fence_is_seen() -> None:
    fences = Fences(POISON)
    t = fences.put("t", torch.ones(5, 3))
    assert t.tolist() == [[1.0] * 3] * 5
    assert fences.hold(t)
    assert not fences.hold(torch.ones(3))
    assert fences.broken() == []
    torch.as_strided(t, (1,), (1,), t.storage_offset() + 15)[0] = 0
    assert fences.broken() == ["t"]
    assert Fences(HARMLESS).empty("f", (2,), torch.float32, "cpu").isfinite().all()
