"""Both GPUs of a machine: tensors on the one that is not current, work split over both, threads.

`pytest -m two_gpus` selects these, and a whole run of them writes a receipt of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import poison
from reported import (
    BF16,
    Answer,
    Request,
    assert_close,
    assert_right,
    decode,
    decode_variant,
    normal,
    paged,
    prefill,
    prefill_paged,
    prefill_variants,
)
from torch import Tensor

import flashskip
from flashskip import _env, _kernels, merge_state
from flashskip._jit.cache import KernelCache

pytestmark = pytest.mark.two_gpus

HEADS = (32, 8)
SKIPS: dict[str, Any] = {"skip_softmax_threshold": 0.9, "collect_stats": True}
CAUSAL: dict[str, Any] = {"causal": True}
DENSE = [*prefill_variants(), *prefill_variants(**CAUSAL), decode_variant()]
SKIPPING = [*prefill_variants(**CAUSAL, **SKIPS), decode_variant(**SKIPS)]
GPUS = ("cuda:0", "cuda:1")
EACH = pytest.mark.parametrize("attend", [prefill, prefill_paged, decode])


def options_of(attend: Callable[..., Any], **options: Any) -> dict[str, Any]:
    return {**options, **({} if attend is decode else CAUSAL)}


def requests_of(attend: Callable[..., Any], seed: int = 18) -> list[Request]:
    qo_lens = [1] * 3 if attend is decode else [1, 70, 300]
    return normal(seed, qo_lens, [1, 100, 5000], HEADS)


@pytest.fixture(autouse=True)
def _current_device_stays() -> Any:
    """Whatever a call does, the current device is the same afterwards."""
    torch.cuda.set_device(0)
    yield
    assert torch.cuda.current_device() == 0


# ---- C01: tensors on another GPU than the current one --------------------------------------------


@pytest.mark.variants([*DENSE, *SKIPPING])
@EACH
@pytest.mark.parametrize("more", [{}, SKIPS], ids=["dense", "skipping"])
def test_reported_C01_tensors_on_another_gpu(attend: Callable[..., Any], more: Any) -> None:
    requests, options = requests_of(attend), options_of(attend, **more)
    torch.cuda.synchronize(0)
    before = torch.cuda.memory_allocated(0)
    first: Answer = attend(requests, "cuda:1", **options)
    assert torch.cuda.memory_allocated(0) == before
    assert all(t.device.index == 1 for t in first.wrapper._buffers.storage.values())
    if more:
        assert first.wrapper.stats.device.index == 1
        assert first.wrapper.stats[..., 0].any()
    answers = [attend(requests, GPUS[i % 2], **options) for i in range(20)]
    assert torch.cuda.current_device() == 0
    for answer in answers:
        assert answer.same_as(first)
        if more:
            assert torch.equal(answer.wrapper.stats.cpu(), first.wrapper.stats.cpu())
    if not more:
        for i, request in enumerate(requests):
            assert_right(request, first.out[i], first.lse[i], causal=True)


@EACH
def test_reported_C01_two_threads_and_a_cold_cache(
    attend: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, "flashskip")
    cold = KernelCache(tmp_path)
    monkeypatch.setattr(_env, "kernel_cache", lambda: cold)
    _kernels.kernel_for.cache_clear()
    requests, options = requests_of(attend), options_of(attend)
    barrier, answers, errors = threading.Barrier(2, timeout=60), [], []

    def work(device: str) -> None:  # a thread's current device is 0, whatever it computes on
        try:
            barrier.wait()
            answers.extend(attend(requests, device, **options) for _ in range(10))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(device,)) for device in GPUS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _kernels.kernel_for.cache_clear()
    assert not errors
    assert len(answers) == 20
    assert all(answer.same_as(answers[0]) for answer in answers)
    for i, request in enumerate(requests):
        assert_right(request, answers[0].out[i], answers[0].lse[i], causal=True)
    assert sum("compiling" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.variants(DENSE)
def test_reported_C01_the_current_gpu_decides_only_for_cpu_indices() -> None:
    requests = normal(18, [1] * 3, [1, 100, 5000], HEADS)
    cache = paged(requests, "cpu")
    wrapper = flashskip.BatchDecodeWrapper()
    with torch.cuda.device(1):
        wrapper.plan(*cache.table, *HEADS, 128, 16, q_data_type=BF16)
    q = torch.cat([r[0] for r in requests]).to("cuda:1")
    out = wrapper.run(q, cache.pages.to("cuda:1"))
    assert out.device == torch.device("cuda", 1)
    for i, request in enumerate(requests):
        assert_right(request, out[i : i + 1].cpu())


# ---- P04: what lies on the wrong GPU is refused --------------------------------------------------


@pytest.mark.variants(DENSE)
def test_reported_P04_metadata_on_another_gpu_is_refused() -> None:
    requests = normal(18, [1] * 3, [1, 100, 500], HEADS)
    here, there = (paged(requests, device) for device in GPUS)
    shape = (*HEADS, 128, 16)
    for i in range(3):
        table = [*here.table[:i], there.table[i], *here.table[i + 1 :]]
        with pytest.raises(ValueError, match=r"is on cuda:\d; expected cuda:\d"):
            flashskip.BatchDecodeWrapper().plan(*table, *shape, q_data_type=BF16)
    space = torch.empty(1 << 28, dtype=torch.uint8, device="cuda:1")
    with pytest.raises(ValueError, match=r"several GPUs: .*float_workspace_buffer.*expected one"):
        flashskip.BatchDecodeWrapper(space).plan(*here.table, *shape, q_data_type=BF16)
    live = torch.zeros(3, device="cuda:1")
    wrapper = flashskip.BatchDecodeWrapper()
    with pytest.raises(ValueError, match=r"skip_softmax_threshold is on cuda:1; expected cuda:0"):
        wrapper.plan(*here.table, *shape, q_data_type=BF16, skip_softmax_threshold=live)
    wrapper.plan(*here.table, *shape, q_data_type=BF16)
    q = torch.cat([r[0] for r in requests])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"q is on cuda:1; expected cuda:0"):
            wrapper.run(q.to("cuda:1"), here.pages)
        with pytest.raises(ValueError, match=r"paged_kv_cache is on cuda:1; expected cuda:0"):
            wrapper.run(q.to("cuda:0"), there.pages)
        with pytest.raises(ValueError, match=r"lse is .* on cuda:1; expected .* on cuda:0"):
            wrapper.run(q.to("cuda:0"), here.pages, lse=torch.empty(3, 32, device="cuda:1"))
    out = wrapper.run(q.to("cuda:0"), here.pages)
    for i, request in enumerate(requests):
        assert_right(request, out[i : i + 1].cpu())


# ---- one problem over both -----------------------------------------------------------------------


@pytest.mark.variants([*DENSE, *SKIPPING])
@EACH
@pytest.mark.parametrize("more", [{}, SKIPS], ids=["dense", "skipping"])
def test_tensor_parallel_heads(attend: Callable[..., Any], more: Any) -> None:
    """Half of the heads on each GPU: the same decisions, and the same results, as all on one."""
    requests, options = requests_of(attend), options_of(attend, **more)
    whole: Answer = attend(requests, "cuda:0", **options)
    halves: list[Answer] = []
    for half, device in enumerate(GPUS):
        heads = [slice(half * n // 2, (half + 1) * n // 2) for n in HEADS]
        mine = [(q[:, heads[0]], k[:, heads[1]], v[:, heads[1]]) for q, k, v in requests]
        halves.append(attend(mine, device, **options))
    for i in range(len(requests)):
        assert_close(torch.cat([half.out[i] for half in halves], 1), whole.out[i])
        lse = torch.cat([half.lse[i] for half in halves], 1)
        torch.testing.assert_close(lse, whole.lse[i], rtol=1e-5, atol=1e-4)
    if more:
        stats = torch.cat([half.wrapper.stats.cpu() for half in halves], 1)
        assert torch.equal(stats, whole.wrapper.stats.cpu())
        assert stats[..., 0].any()


@pytest.mark.variants(DENSE)
@EACH
@pytest.mark.parametrize("sinks", [False, True])
def test_context_parallel_halves_merge_to_the_whole(
    attend: Callable[..., Any], sinks: bool
) -> None:
    """Keys split over both GPUs, each with its own attention; one of them counts the sinks."""
    requests = normal(18, [1, 1], [4096, 300], HEADS)
    sink = {"sinks": torch.linspace(-3, 3, HEADS[0])} if sinks else {}
    whole = on(attend, requests, "cuda:0", sink)
    states = []
    for half, device in enumerate(GPUS):
        keys = [slice(half * len(k) // 2, (half + 1) * len(k) // 2) for _, k, _ in requests]
        mine = [(q, k[rows], v[rows]) for (q, k, v), rows in zip(requests, keys, strict=True)]
        answer = on(attend, mine, device, sink if half == 0 else {})
        states.append((answer.out, answer.lse))
    for i in range(len(requests)):
        (v_a, s_a), (v_b, s_b) = (
            (out[i].to("cuda:1"), lse[i].to("cuda:1") * 1.4426950408889634) for out, lse in states
        )
        out, lse = merge_state(v_a, s_a, v_b, s_b)
        assert_close(out.cpu(), whole.out[i])
        natural = lse.cpu() * 0.6931471805599453
        torch.testing.assert_close(natural, whole.lse[i], rtol=1e-5, atol=1e-3)


def on(attend: Callable[..., Any], requests: list[Request], device: str, sinks: Any) -> Answer:
    """Attend without a causal limit, the sinks on the device."""
    return attend(requests, device, **{n: t.to(device) for n, t in sinks.items()})  # type: ignore[no-any-return]


def test_states_on_two_gpus_are_not_merged_in_silence() -> None:
    v, s = torch.zeros(1, 2, 64, dtype=BF16), torch.zeros(1, 2)
    with pytest.raises(ValueError, match="v_a is on cuda:0 and v_b on cuda:1; move them together"):
        merge_state(v.to("cuda:0"), s.to("cuda:0"), v.to("cuda:1"), s.to("cuda:1"))


# ---- graphs and streams of the other GPU ---------------------------------------------------------


@pytest.mark.variants(SKIPPING)
@EACH
def test_a_graph_of_the_other_gpu_is_replayed_from_here(attend: Callable[..., Any]) -> None:
    requests, options = requests_of(attend), options_of(attend, **SKIPS)
    expected: Answer = attend(requests, "cuda:1", **options)
    wrapper, inputs = expected.wrapper, tensors_of(attend, requests, "cuda:1")
    out = torch.empty_like(inputs[0])
    with torch.cuda.device(1):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            wrapper.run(*inputs, out=out)
    for _ in range(3):
        poison(out)
        torch.cuda.synchronize(1)
        graph.replay()
        torch.cuda.synchronize(1)
        assert torch.equal(out.cpu(), torch.cat(expected.out))


@pytest.mark.variants(SKIPPING)
@EACH
def test_a_stream_of_the_other_gpu(attend: Callable[..., Any]) -> None:
    requests, options = requests_of(attend), options_of(attend, **SKIPS)
    expected: Answer = attend(requests, "cuda:1", **options)
    inputs = tensors_of(attend, requests, "cuda:1")
    torch.cuda.synchronize(1)
    stream = torch.cuda.Stream(device=1)
    with torch.cuda.stream(stream):  # which makes GPU 1 the current one inside
        out = expected.wrapper.run(*inputs)
        copy = out.clone()
    stream.synchronize()
    assert torch.equal(copy.cpu(), torch.cat(expected.out))


def tensors_of(
    attend: Callable[..., Any], requests: list[Request], device: str
) -> tuple[Tensor, ...]:
    """What `run` takes for these requests; the pages are those that `decode` lays out."""
    q, k, v = (torch.cat(parts).to(device) for parts in zip(*requests, strict=True))
    return (q, k, v) if attend is prefill else (q, paged(requests, device).pages)
