"""Every tensor that a kernel reads or writes lies between fences: poisoned, then harmless.

What is written outside of a tensor breaks a fence; what is read outside of one and matters changes
a bit between the two runs. (Reads that do not matter are seen by `test_sanitize_gpu.py`.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fences import HARMLESS, POISON, Fences
from sanitize_target import (
    DECODE,
    PREFILL,
    Call,
    decode_call,
    decode_kernel,
    prefill_call,
    prefill_kernel,
)
from torch import Tensor


def on_a_gpu_and_once_on_the_cpu(examples: tuple[Any, ...], one: int) -> pytest.MarkDecorator:
    """Parametrize by the number of an example and the device; `one` is the CPU's."""
    numbers = range(len(examples))
    on_gpu = [pytest.param(number, "cuda", marks=pytest.mark.gpu) for number in numbers]
    return pytest.mark.parametrize(("number", "device"), [(one, "cpu"), *on_gpu])


def every_source(call: Call, device: str) -> Iterator[Call]:
    """The same with a number, a live threshold, and a live factor and lengths.

    On the CPU, which is slow, the last alone.
    """
    value = call.options.get("skip_softmax_threshold")
    if value is None:
        yield call
        return
    rest = {n: x for n, x in call.options.items() if n != "skip_softmax_threshold"}
    batch_size = len(next(iter(call.indices.values()))) - 1
    live = torch.full((batch_size,), value, device=device)
    lengths = torch.arange(batch_size, dtype=torch.int32, device=device) * 90
    factor = {"skip_softmax_threshold_scale_factor": 200 * live, "threshold_kv_len": lengths}
    sources = [call.options, {**rest, "skip_softmax_threshold": live}, {**rest, **factor}]
    for options in sources if device == "cuda" else sources[-1:]:
        yield replace(call, options=options)


def fenced(call: Call, fences: Fences) -> Call:
    """The same call with all of its tensors between fences."""

    def put(tensors: dict[str, Any]) -> dict[str, Any]:
        given = {n: x for n, x in tensors.items() if isinstance(x, Tensor)}
        return {**tensors, **{n: fences.put(n, t) for n, t in given.items()}}

    inputs = put({f"input {i}": t for i, t in enumerate(call.inputs)})
    return replace(
        call, indices=put(call.indices), options=put(call.options), scales=put(call.scales),
        inputs=tuple(inputs.values()),
    )  # fmt: skip


def run_between_fences(call: Call, fill: int, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Plan and run with all tensors between fences; returns all that was written."""
    fences, device = Fences(fill), call.inputs[0].device
    call = fenced(call, fences)
    out = fences.empty("out", call.out_shape, call.inputs[0].dtype, device)
    lse = fences.empty("lse", call.out_shape[:2], torch.float32, device)
    on_gpu = device.type == "cuda"
    wrapper = call.plan(None if on_gpu else torch.empty(0))
    with monkeypatch.context() as patch:
        if on_gpu:
            space = fences.empty("workspace", (wrapper.workspace_bytes,), torch.uint8, device)
            patch.setattr(torch, "zeros", fences.allocator("a buffer of the wrapper", 0))
            patch.setattr(torch, "empty", fences.allocator("an output of the wrapper", None))
            wrapper = call.plan(space)
        answer = call.run(wrapper, out=out, lse=lse, return_lse=True)
    written = [t.clone() for t in answer]
    counters = {"stats": call.options.get("collect_stats")}
    counters["gaps"] = call.options.get("skip_criterion") == "measure"
    for name in (name for name, asked in counters.items() if asked):
        assert not on_gpu or fences.hold(getattr(wrapper, name)), f"{name} has no fence"
        written.append(getattr(wrapper, name).clone())
    assert not on_gpu or all(map(fences.hold, answer))
    assert fences.broken() == []
    return written


def assert_fences_do_not_matter(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned, harmless = (run_between_fences(call, f, monkeypatch) for f in (POISON, HARMLESS))
    for a, b in zip(poisoned, harmless, strict=True):
        assert torch.equal(a, b)
        assert not a.isnan().any()


@pytest.mark.variants(lambda number: [prefill_kernel(number)])
@on_a_gpu_and_once_on_the_cpu(PREFILL, 4)
def test_prefill(number: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in every_source(prefill_call(number, device), device):
        assert_fences_do_not_matter(call, monkeypatch)


@pytest.mark.variants(lambda number: [decode_kernel(number)])
@on_a_gpu_and_once_on_the_cpu(DECODE, 4)
def test_decode(number: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in every_source(decode_call(number, device), device):
        assert_fences_do_not_matter(call, monkeypatch)


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
