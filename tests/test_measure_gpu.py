"""Kernels that measure: histograms of gaps against the reference; the output is the dense one."""

from __future__ import annotations

from typing import Any

import paged
import prefill_gpu
import pytest
import torch
from helpers import Ragged, make_ragged
from paged import make_paged
from prefill_gpu import BF16, DEVICE, FP16, LONG, MIX, ROUNDING_BAND

from flashskip import reference
from flashskip.calibration.measure import _Recorder
from flashskip.geometry import ORDERS
from flashskip.reference import GAP_BINS, SkipMap, histogram
from flashskip.reference._gaps import BINS_PER_UNIT, LOWEST
from flashskip.reference._rows import to_counters
from flashskip.variant import Variant

pytestmark = pytest.mark.gpu

MEASURE = {"skip_criterion": "measure"}
CASES: dict[str, tuple[Any, ...]] = {
    # Lengths, heads, head dim, element type, options.
    "sink": (LONG, (5, 1), 128, BF16, {"causal": True}),
    "coarse": (LONG, (3, 1), 128, BF16, {"causal": True, "vote_kv": 128, "order": ORDERS[1]}),
    "ascending": (LONG, (3, 1), 128, BF16, {"order": ORDERS[2]}),
    "fp16": (MIX, (4, 2), 64, FP16, {"causal": True}),
    "all": (MIX, (4, 2), 64, BF16,
            {"window_left": 200, "logits_soft_cap": 10.0, "sinks": [-3.0, 2.0, 0.0, 5.0]}),
    "wide": (LONG, (2, 1), 256, BF16, {"causal": True}),
}  # fmt: skip


def prefill_case(name: str) -> tuple[tuple[Any, ...], Any, int, torch.dtype, dict[str, Any]]:
    """Return a case with its sinks on the device."""
    *shape, given = CASES[name]
    options = dict(given)
    if "sinks" in options:
        options["sinks"] = torch.tensor(options["sinks"], device=DEVICE)
    return (*shape, options)


def prefill_variants(case: str) -> list[Variant]:
    *_, head_dim, dtype, given = CASES[case]
    options = {**given, "sinks": torch.empty(0)} if "sinks" in given else given
    dense = {k: v for k, v in options.items() if k not in ("order", "vote_kv")}
    return [
        prefill_gpu.variant(head_dim, dtype, **options, **MEASURE),
        prefill_gpu.variant(head_dim, dtype, **dense),
    ]


def near_edges(skip_map: SkipMap) -> torch.Tensor:
    """Gaps within the rounding band of each bin's lower edge: int64 ``[counters, 256]``."""
    place = (skip_map.gap - LOWEST) * BINS_PER_UNIT
    edge = place.round()
    close = (place - edge).abs() < ROUNDING_BAND * BINS_PER_UNIT
    close &= skip_map.visited & (edge >= 0) & (edge < GAP_BINS)
    bins = edge.clamp(0, GAP_BINS - 1).long()
    counts = bins.new_zeros((*bins.shape[:2], GAP_BINS))
    return to_counters(counts.scatter_add_(2, bins, close.long()), skip_map.geometry)


def assert_gaps(gaps: torch.Tensor, exact: reference.Result) -> None:
    """As many decisions below every edge as in the reference, but for those within rounding."""
    assert exact.skip_map is not None
    for found, skip_map in zip(gaps, exact.skip_map, strict=True):
        below = found.cumsum(1), histogram(skip_map).cumsum(1)
        assert torch.equal(below[0][:, -1], below[1][:, -1])
        difference = (below[0] - below[1])[:, :-1].abs()
        assert (difference <= near_edges(skip_map)[:, 1:]).all()


@pytest.mark.variants(lambda case: prefill_variants(case))
@pytest.mark.parametrize("case", CASES)
def test_prefill_gaps_are_the_oracles_and_the_output_is_dense(case: str) -> None:
    lengths, heads, head_dim, dtype, options = prefill_case(case)
    batch = make_ragged(*lengths, *heads, head_dim, dtype, hot=0.3, gain=8.0, device=DEVICE)
    wrapper = prefill_gpu.plan(batch, **options, **MEASURE)
    out, lse = prefill_gpu.run(wrapper, batch)
    exact = prefill_gpu.oracle(wrapper, batch, None)
    assert_gaps(wrapper.gaps, exact)
    assert torch.equal(wrapper.gaps.sum(2), exact.counts[..., 1])
    dense = {k: v for k, v in options.items() if k not in ("order", "vote_kv")}
    if case not in ("coarse", "ascending"):  # the order of the dense kernel
        expected = prefill_gpu.attend(batch, **dense)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
    once = wrapper.gaps.clone()
    prefill_gpu.run(wrapper, batch)
    assert torch.equal(wrapper.gaps, 2 * once)
    wrapper.reset_stats()
    assert not wrapper.gaps.any()


@pytest.mark.variants(
    lambda: [
        prefill_gpu.variant(causal=True, **MEASURE),
        prefill_gpu.variant(causal=True, skip_softmax_threshold=0.1, collect_stats=True),
    ]
)
def test_one_pass_tells_what_every_threshold_skips() -> None:
    batch = make_ragged(*LONG, 5, 1, 128, hot=0.3, gain=8.0, device=DEVICE)
    measuring = prefill_gpu.plan(batch, causal=True, **MEASURE)
    prefill_gpu.run(measuring, batch)
    below = measuring.gaps.cumsum(2)
    exact = prefill_gpu.oracle(measuring, batch, None)
    assert exact.skip_map is not None
    close = torch.stack([near_edges(m) for m in exact.skip_map])
    live = torch.zeros(4, device=DEVICE)
    options = {"causal": True, "collect_stats": True, "skip_softmax_threshold": live}
    skipping = prefill_gpu.plan(batch, **options)
    for bin in (1, 100, 180, 210, 230, 240, 250, 255):
        live.fill_(2.0 ** (LOWEST + bin / BINS_PER_UNIT))
        skipping.reset_stats()
        prefill_gpu.run(skipping, batch)
        difference = skipping.stats[..., 0] - below[..., bin - 1]
        assert (difference.abs() <= close[..., bin]).all()


DECODE = {
    "one row unit": {"heads": (8, 2), "kv_lens": (0, 1, 63, 64, 65, 1000, 0, 20_000, 129)},
    "two row units": {"heads": (71, 1), "kv_lens": (700, 5000, 1)},
    "eight KV heads": {"heads": (32, 8), "kv_lens": (700, 0, 5000, 1)},
    "gathered": {"heads": (6, 2), "kv_lens": (700, 9000, 64), "page_size": 3},
    "several tokens": {"heads": (8, 2), "kv_lens": (5, 64, 65, 129, 9000, 66), "q_len": 4},
    "window": {"heads": (4, 2), "kv_lens": (1, 300, 9000), "head_dim": 64, "window_left": 500},
    "wide": {"heads": (8, 2), "kv_lens": (300, 9000), "head_dim": 256},
    "fp8": {"heads": (8, 2), "kv_lens": (300, 9000), "kv_dtype": paged.FP8},
}


@pytest.mark.variants(lambda case: decode_variants(**DECODE[case]))
@pytest.mark.parametrize("case", DECODE)
def test_decode_gaps_are_the_oracles_and_the_output_is_dense(case: str) -> None:
    kwargs = dict(DECODE[case])
    options = {"window_left": kwargs.pop("window_left")} if "window_left" in kwargs else {}
    batch = make_paged(kwargs.pop("kv_lens"), *kwargs.pop("heads"), gain=7.5, **kwargs)
    wrapper = paged.plan(batch, **options, **MEASURE)
    out, lse = paged.run(wrapper, batch)
    assert_gaps(wrapper.gaps, paged.oracle(wrapper, batch))
    expected = paged.run(paged.plan(batch, **options), batch)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


def decode_variants(
    heads: tuple[int, int], head_dim: int = 128, kv_lens: object = None, **options: Any
) -> list[Variant]:
    group = heads[0] // heads[1]
    options = {"kv_data_type" if k == "kv_dtype" else k: x for k, x in options.items()}
    return [paged.variant(group, head_dim, **options, **o) for o in ({}, MEASURE)]


@pytest.mark.variants([paged.variant(**MEASURE), paged.variant()])
def test_decode_gaps_do_not_depend_on_the_batch_and_replay() -> None:
    lens = (20_000, 64, 3000, 0, 40_000, 7777)
    batch = make_paged(lens, 8, 2, gain=7.5)
    together = paged.plan(batch, **MEASURE)
    out, lse = paged.run(together, batch)
    expected = paged.run(paged.plan(batch), batch)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    once = together.gaps.clone()
    for i in (0, 2, 4):
        start, end = batch.indptr[i : i + 2].tolist()
        table = (batch.indptr[i : i + 2] - start, batch.indices[start:end].clone())
        alone = paged.Paged(
            batch.q[i : i + 1], batch.cache, batch.k, batch.v, batch.layout,
            *table, batch.last_page_len[i : i + 1].clone(),
        )  # fmt: skip
        wrapper = paged.plan(alone, **MEASURE)
        paged.run(wrapper, alone)
        assert torch.equal(wrapper.gaps[0], once[i])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        together.run(batch.q, batch.cache, out=out, lse=lse)
    together.reset_stats()
    for _ in range(3):
        graph.replay()
    assert torch.equal(together.gaps, 3 * once)


@pytest.mark.variants(
    [
        prefill_gpu.variant(64, causal=True, **MEASURE),
        paged.variant(3, 64, page_size=1000, **MEASURE),
    ]
)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_calibration_records_on_the_gpu_what_it_records_on_the_cpu(phase: str) -> None:
    """Decode: the last row, as a step of its own."""
    batch: Ragged = make_ragged((1000,), (1000,), 6, 2, 64, hot=0.3, gain=8.0, device=DEVICE)
    heads_first = [x.transpose(0, 1)[None] for x in (batch.q, batch.k, batch.v)]
    layer = torch.nn.Module()
    recorders = []
    for device in (DEVICE, "cpu"):
        recorder = _Recorder([phase], torch.tensor([999], device=device))
        recorder(layer, *(x.to(device) for x in heads_first), None)
        recorders.append(recorder)
    found, expected = (recorder.gaps(phase).cpu().cumsum(2) for recorder in recorders)
    assert recorders[0].geometries == recorders[1].geometries
    assert found[..., -1].min() > 0
    assert torch.equal(found[..., -1], expected[..., -1])
    q = batch.q.cpu()[-1:] if phase == "decode" else batch.q.cpu()
    exact = reference.attention(
        q, batch.k.cpu(), batch.v.cpu(), qo_indptr=[0, len(q)], kv_indptr=[0, 1000],
        geometry=recorders[0].geometries[phase],
    )  # fmt: skip
    assert exact.skip_map is not None
    close = near_edges(exact.skip_map[0])[:, 1:]
    assert ((found - expected)[0, :, :-1].abs() <= close).all()
