"""Cases from public bug reports that need a GPU: sizes, streams, threads, devices, graphs."""

from __future__ import annotations

import itertools
import logging
import statistics
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import indptr, poison, poisoned
from reported import (
    BF16,
    Request,
    assert_right,
    decode,
    decode_variant,
    normal,
    paged,
    prefill,
    prefill_variant,
    twin_peak,
)
from torch import Tensor

import flashskip
from flashskip import _env, _kernels
from flashskip._jit.cache import KernelCache

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
HEADS = (32, 8)
DENSE, CAUSAL, DECODE = prefill_variant(), prefill_variant(causal=True), decode_variant()
PAGED_PREFILLS = [prefill_variant(page_size=size) for size in (16, 5)]
DECODE_STATS = decode_variant(skip_softmax_threshold=0.1, collect_stats=True)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def plan_decode(table: tuple[Tensor, ...], **options: Any) -> flashskip.BatchDecodeWrapper:
    wrapper = flashskip.BatchDecodeWrapper()
    wrapper.plan(*table, *HEADS, 128, 16, **{"q_data_type": BF16, **options})
    return wrapper


def assert_all_right(requests: list[Request], out: Tensor) -> None:
    for i, request in enumerate(requests):
        assert_right(request, out[i : i + 1].cpu())


# ---- S01: offsets beyond 31 bits -----------------------------------------------------------------


@pytest.mark.variants([DECODE, PAGED_PREFILLS[0]])
def test_reported_S01_a_pool_of_140001_pages() -> None:
    k, v = (torch.zeros(140_001, 16, 8, 128, dtype=BF16, device=DEVICE) for _ in range(2))
    pages = [0, 65536, 131071, 131072, 140000]
    for value, page in enumerate(pages, 1):
        v[page] = value
    table = ints(0, 1, 2, 3, 4, 5), ints(*pages), ints(16, 16, 16, 16, 16)
    prefiller = flashskip.BatchPrefillWrapper()
    prefiller.plan_paged(ints(0, 1, 2, 3, 4, 5), *table, *HEADS, 128, 16, q_data_type=BF16)
    expected = torch.arange(1, 6, device=DEVICE)[:, None, None].expand(5, 32, 128).to(BF16)
    for wrapper in (plan_decode(table), prefiller):
        out = wrapper.run(torch.ones(5, 32, 128, dtype=BF16, device=DEVICE), (k, v))
        assert torch.equal(out, expected)


@pytest.mark.variants([DECODE, *PAGED_PREFILLS])
@pytest.mark.parametrize("page_size", [16, 5])
def test_reported_S01_k_and_v_in_one_buffer(page_size: int) -> None:
    cache = torch.zeros(1_120_016 // page_size, 2, page_size, 8, 128, dtype=BF16, device=DEVICE)
    last = len(cache) - 1
    cache[last - 4000, 1], cache[last, 1] = 3, 7
    table = ints(0, 1, 2), ints(last - 4000, last), ints(page_size, page_size)
    q = torch.ones(2, 32, 128, dtype=BF16, device=DEVICE)
    decoder, prefiller = flashskip.BatchDecodeWrapper(), flashskip.BatchPrefillWrapper()
    decoder.plan(*table, *HEADS, 128, page_size, q_data_type=BF16)
    prefiller.plan_paged(ints(0, 1, 2), *table, *HEADS, 128, page_size, q_data_type=BF16)
    for wrapper in (decoder, prefiller):
        out = wrapper.run(q, cache)
        assert (out[0] == 3).all()
        assert (out[1] == 7).all()


@pytest.mark.variants([DENSE])
def test_reported_S01_queries_of_more_than_31_bits() -> None:
    requests, per_request = 1000, 600
    q = torch.zeros(requests * per_request, 32, 128, dtype=BF16, device=DEVICE)
    assert q.numel() > 2**31
    values = torch.arange(requests, device=DEVICE) % 100
    v = values[:, None, None].expand(-1, 8, 128).to(BF16).contiguous()
    starts = torch.arange(requests + 1, dtype=torch.int32, device=DEVICE)
    wrapper = flashskip.BatchPrefillWrapper()
    wrapper.plan(starts * per_request, starts, *HEADS, 128, q_data_type=BF16)
    out = wrapper.run(q, torch.zeros_like(v), v)
    assert isinstance(out, Tensor)
    assert (out[-per_request:] == 99).all()
    assert torch.equal(out[::per_request, 0, 0], values.to(BF16))


# ---- P01: two plans in quick succession ----------------------------------------------------------


@pytest.mark.variants([DECODE])
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_reported_P01_plans_do_not_wait_and_do_not_mix(pinned: bool, shared: bool) -> None:
    batches = [normal(15, [1] * 4, lens, HEADS) for lens in ([4096, 1, 1, 1], [7, 300, 2, 5000])]
    caches = [paged(requests, DEVICE) for requests in batches]
    queries = [torch.cat([r[0] for r in requests]).to(DEVICE) for requests in batches]
    needed = plan_decode(caches[0].table).workspace_bytes
    space = torch.empty(needed, dtype=torch.uint8, device=DEVICE) if shared else None
    first = flashskip.BatchDecodeWrapper(space)
    second = flashskip.BatchDecodeWrapper(space) if shared else first
    tables = [[t.cpu() for t in cache.table] for cache in caches]
    # Pinned before the GPU is busy, since pinning may wait for it.
    copies = [
        [[t.pin_memory() if pinned else t.clone() for t in table] for table in tables]
        for _ in range(200)
    ]
    outs: list[list[Tensor]] = [[], []]
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    for both in copies:
        for i, wrapper in enumerate((first, second)):
            wrapper.plan(*both[i], *HEADS, 128, 16, q_data_type=BF16)
            for t in both[i]:
                t.fill_(2**30)
            both[i].clear()
            outs[i].append(wrapper.run(queries[i], caches[i].pages))
    for i, requests in enumerate(batches):
        assert_all_right(requests, outs[i][0])
        assert all(torch.equal(out, outs[i][0]) for out in outs[i])


# ---- G01: replay with other lengths --------------------------------------------------------------


@pytest.mark.variants([DECODE, decode_variant(4, 64)])
def test_reported_G01_replays_follow_plans_made_after_the_capture() -> None:
    """Two wrappers of different heads in one graph; CPU index tensors, so that plans copy."""
    g = torch.Generator().manual_seed(16)
    longest, batch = 8192, 4
    pool = batch * longest // 16 + 9
    shapes = ((32, 8, 128), (8, 2, 64))
    caches = [torch.randn(pool, 2, 16, kv, d, generator=g).to(DEVICE, BF16) for _, kv, d in shapes]
    queries = [torch.randn(batch, heads, d, generator=g).to(DEVICE, BF16) for heads, _, d in shapes]
    wrappers = [flashskip.BatchDecodeWrapper() for _ in shapes]

    def plan(which: int, lens: list[int], room: int = 0) -> tuple[Tensor, ...]:
        counts = [-(-n // 16) for n in lens]
        ids = torch.randperm(pool, generator=g).int()[: max(sum(counts), room)]
        last = torch.tensor([(n - 1) % 16 + 1 for n in lens], dtype=torch.int32)
        heads, kv, d = shapes[which]
        table = (indptr(counts, "cpu"), ids, last)
        wrappers[which].plan(*table, heads, kv, d, 16, q_data_type=BF16)
        return table

    def assert_replayed(which: int, table: tuple[Tensor, ...], out: Tensor) -> None:
        on_gpu = [t.to(DEVICE) for t in table]
        k, v, starts = flashskip.reference.gather_pages(caches[which], *on_gpu)
        for i, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
            request = queries[which][i : i + 1], k[start:end], v[start:end]
            assert_right(request, out[i : i + 1])

    tables = [plan(i, [8192, 1, 1, 1], room=pool) for i in range(2)]
    outs = [wrappers[i].run(queries[i], caches[i]) for i in range(2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(2):
            wrappers[i].run(queries[i], caches[i], out=outs[i])
    for step in range(50):
        for which in (0, 1) if step % 2 else (0,):  # sometimes one is not planned again
            lens = torch.randint(1, longest + 1, (batch,), generator=g).tolist()
            tables[which] = plan(which, lens)
        for out in outs:
            poison(out)
        graph.replay()
        for which in range(2):
            assert_replayed(which, tables[which], outs[which])
    with pytest.raises(ValueError, match="after a run was captured"):
        wrappers[0].plan(
            indptr([pool // 4] * 4 + [50], "cpu"), torch.zeros(pool + 50, dtype=torch.int32),
            torch.full((5,), 16, dtype=torch.int32), *shapes[0], 16, q_data_type=BF16,
        )  # fmt: skip


# ---- C03: streams and threads --------------------------------------------------------------------


def decode_512() -> tuple[Any, ...]:
    """A wrapper planned for 512 requests of 1024 keys, and what it runs on."""
    batch, pages = 512, 64
    cache = torch.randn(batch * pages, 2, 16, 8, 128, dtype=BF16, device=DEVICE)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * pages
    ids = torch.randperm(batch * pages, device=DEVICE).int()
    full = torch.full((batch,), 16, dtype=torch.int32, device=DEVICE)
    q = torch.randn(batch, 32, 128, dtype=BF16, device=DEVICE)
    return plan_decode((starts, ids, full)), q, cache


def prefill_16() -> tuple[Any, ...]:
    """A wrapper planned for 16 requests of 300 queries and 700 keys, and what it runs on."""
    q = torch.randn(16 * 300, 32, 128, dtype=BF16, device=DEVICE)
    k, v = torch.randn(2, 16 * 700, 8, 128, dtype=BF16, device=DEVICE)
    wrapper = flashskip.BatchPrefillWrapper()
    lengths = indptr([300] * 16, DEVICE), indptr([700] * 16, DEVICE)
    wrapper.plan(*lengths, *HEADS, 128, q_data_type=BF16, causal=True)
    return wrapper, q, k, v


@pytest.mark.variants([DECODE, CAUSAL])
@pytest.mark.parametrize("make", [(decode_512,) * 2, (prefill_16,) * 2, (decode_512, prefill_16)])
def test_reported_C03_two_streams_share_nothing(make: tuple[Callable[[], Any], ...]) -> None:
    torch.manual_seed(0)
    calls = [one() for one in make]
    expected = [wrapper.run(*inputs) for wrapper, *inputs in calls]
    different = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(100):
        for i, ((wrapper, *inputs), stream) in enumerate(zip(calls, streams, strict=True)):
            with torch.cuda.stream(stream):
                out = wrapper.run(*inputs)
                different[i] += (out != expected[i]).any()
    torch.cuda.synchronize()
    assert different.tolist() == [0, 0]


@pytest.mark.parametrize("attend", [prefill, decode])
def test_reported_C03_eight_threads_compile_once(
    attend: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Each with its own wrapper and stream, 20 calls of each from a cold start."""
    caplog.set_level(logging.INFO, "flashskip")
    cold = KernelCache(tmp_path)
    monkeypatch.setattr(_env, "kernel_cache", lambda: cold)
    _kernels.kernel_for.cache_clear()
    requests = normal(3, [1, 1] if attend is decode else [5, 70], [100, 300], HEADS)
    options = {"causal": True} if attend is prefill else {}
    barrier, answers, errors = threading.Barrier(8, timeout=60), [], []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                barrier.wait()
                answers.extend(attend(requests, DEVICE, **options) for _ in range(20))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _kernels.kernel_for.cache_clear()
    assert not errors
    assert len(answers) == 160
    assert all(answer.same_as(answers[0]) for answer in answers)
    for i, request in enumerate(requests):
        assert_right(request, answers[0].out[i], answers[0].lse[i], causal=True)
    assert sum("compiling" in r.getMessage() for r in caplog.records) == 1


# ---- J07: what is cached is machine code ---------------------------------------------------------


@pytest.mark.variants([CAUSAL])
def test_reported_J07_a_cubin_of_this_architecture_is_loaded() -> None:
    kernel = _kernels.kernel_for(CAUSAL)
    assert kernel.cubin[:4] == b"\x7fELF"
    assert "sm_90a" in " ".join(_kernels.program_for(CAUSAL).flags)


# ---- K08: skipping costs no time -----------------------------------------------------------------


@pytest.mark.variants([DECODE, DECODE_STATS])
def test_reported_K08_skipping_decode_is_not_slower_than_dense() -> None:
    request = twin_peak(65536, 6.0, 1, heads=HEADS, block=512)
    cache, q = paged([request], DEVICE), request[0].to(DEVICE)
    out = poisoned(q.shape, BF16)
    skipping = {"skip_softmax_threshold_scale_factor": 512.0, "collect_stats": True}
    medians = []
    for options in ({}, skipping):
        wrapper = plan_decode(cache.table, sm_scale=1.0, **options)
        times = []
        for i in range(60):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            wrapper.run(q, cache.pages, out=out)
            end.record()
            end.synchronize()
            if i >= 10:
                times.append(start.elapsed_time(end))
        medians.append(statistics.median(times))
    assert medians[1] <= 1.05 * medians[0]
