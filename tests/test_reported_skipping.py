"""Cases from public bug reports about what is skipped, and what the counters say of it (K)."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from helpers import indptr
from reported import (
    BF16,
    Answer,
    Request,
    assert_close,
    assert_right,
    decode,
    decode_variant,
    dial,
    normal,
    on_both,
    paged,
    prefill,
    prefill_paged,
    prefill_variant,
    prefill_variants,
    scores,
    twin_peak,
    workspace,
)
from torch import Tensor

import flashskip
from flashskip import _plan, reference

COUNTED: dict[str, Any] = {"skip_softmax_threshold": 0.1, "collect_stats": True}
PREFILL, DECODE = prefill_variants(**COUNTED), decode_variant(2, **COUNTED)
# And how many equal query rows.
BOTH = {"prefill": (prefill, 128), "paged prefill": (prefill_paged, 128), "decode": (decode, 1)}
E = 1e-3  # of an LSE


def counts(answer: Answer) -> Tensor:
    """Skipped and visited decisions of each request, ``[requests, 2]``."""
    return answer.wrapper.stats.sum(1).cpu()


# ---- K01: each request's own length --------------------------------------------------------------


@on_both(*PREFILL, DECODE)
@pytest.mark.parametrize("phase", BOTH)
def test_reported_K01_a_factor_is_divided_by_each_requests_own_length(
    device: str, phase: str
) -> None:
    attend, qo_len = BOTH[phase]
    options = {"sm_scale": 1.0, "skip_softmax_threshold_scale_factor": 32.0, "collect_stats": True}
    a, b = twin_peak(1024, 4.0, qo_len), twin_peak(8192, 4.0, qo_len)
    alone = [attend([request], device, **options) for request in (a, b)]
    for order in ((0, 1), (1, 0)):
        answer = attend([(a, b)[i] for i in order], device, **options)
        for place, i in enumerate(order):
            out, lse = answer.out[place], answer.lse[place]
            if i == 0:
                assert (out[..., 4:12] == 0).all()
                assert_close(
                    out[..., :16],
                    torch.tensor([0.125] * 4 + [0.0] * 8 + [0.125] * 4).expand_as(out[..., :16]),
                )
                assert ((lse - 10.23832).abs() <= E).all()
            else:
                assert (out > 0).all()
                expected = torch.full((128,), 0.001796)
                expected[:4] = expected[-4:] = 0.09806
                torch.testing.assert_close(out.float(), expected.expand_as(out), rtol=0.02, atol=0)
                assert ((lse - 10.48106).abs() <= E).all()
            assert torch.equal(counts(answer)[place], counts(alone[i])[0])
            assert_close(out, alone[i].out[0])


# ---- K03: short contexts -------------------------------------------------------------------------


@on_both(*PREFILL, DECODE)
@pytest.mark.parametrize("qo_len", [1, 128])
@pytest.mark.parametrize("phase", BOTH)
def test_reported_K03_a_quotient_of_50_runs_dense(device: str, phase: str, qo_len: int) -> None:
    request = dial(
        torch.tensor([0, 3, 3.5, 3.75]).repeat_interleave(64), min(qo_len, BOTH[phase][1])
    )
    answer = BOTH[phase][0](
        [request],
        device,
        sm_scale=1.0,
        skip_softmax_threshold_scale_factor=12800.0,
        collect_stats=True,
    )
    masses = torch.tensor([0.01034, 0.20766, 0.34238, 0.43962]).expand_as(answer.out[0][..., :4])
    torch.testing.assert_close(answer.out[0][..., :4].float(), masses, rtol=0, atol=4e-3)
    assert ((answer.lse[0] - 8.7307).abs() <= E).all()
    assert counts(answer)[0, 0] == 0
    assert counts(answer)[0, 1] > 0


LENGTHS = (1, 17, 64, 100, 1000, 4999, 5000, 5001, 20000)


@on_both(*PREFILL, DECODE)
@pytest.mark.parametrize("phase", BOTH)
def test_reported_K03_dense_up_to_the_factor_and_bounded_beyond(device: str, phase: str) -> None:
    attend = BOTH[phase][0]
    qo_lens = [1 if phase == "decode" else 3] * len(LENGTHS)
    requests = normal(21, qo_lens, LENGTHS, (2, 1))
    answer = attend(
        requests, device, skip_softmax_threshold_scale_factor=5000.0, collect_stats=True
    )
    for i, (request, length) in enumerate(zip(requests, LENGTHS, strict=True)):
        if length <= 5000:
            assert counts(answer)[i, 0] == 0
            assert_right(request, answer.out[i], answer.lse[i])
        else:
            assert counts(answer)[i, 0] > 0 or length > 5001  # 0.25 is rarely reached by chance
            assert_must_keep(request, answer, i, 5000 / length)


def assert_must_keep(request: Request, answer: Answer, i: int, threshold: float) -> None:
    """The oracle keeps what it must by the final maximum, and the answer is the oracle's."""
    q, k, v = request
    oracle = reference.attention(
        q, k, v, qo_indptr=[0, len(q)], kv_indptr=[0, len(k)],
        geometry=answer.wrapper.geometry, thresholds=[threshold],
    )  # fmt: skip
    assert oracle.skip_map is not None
    skip_map = oracle.skip_map[0]
    s = scores(request)
    padded = torch.nn.functional.pad(s, (0, -len(k) % 64), value=-math.inf)
    t = padded.unflatten(-1, (-1, 64)).amax(-1)
    must = (torch.exp(t - s.amax(-1, keepdim=True)) >= threshold).any(1)  # [heads, tiles]
    must = must.view(skip_map.kept.shape[0], -1, must.shape[1]).any(
        1
    )  # a unit of rows keeps a tile
    assert (skip_map.kept.any(1) >= must).all()
    assert_close(answer.out[i], oracle.out)
    torch.testing.assert_close(
        answer.lse[i].double(), oracle.lse * math.log(2), rtol=1e-5, atol=1e-3
    )


@on_both(decode_variant(1, **COUNTED))
def test_reported_K03_a_mixed_batch_decides_per_request(device: str) -> None:
    (short,) = normal(21, [1], [100], (1, 1))
    requests = [short, twin_peak(102_400, 6.0, 1, heads=(1, 1), block=1024)]
    options = {"sm_scale": 1.0, "collect_stats": True}
    answer = decode(requests, device, skip_softmax_threshold_scale_factor=5000.0, **options)
    assert counts(answer).tolist() == [[0, 2], [1592, 1600]]
    assert_right(short, answer.out[0], answer.lse[0], sm_scale=1.0)


def test_reported_K03_one_warning_per_process(caplog: pytest.LogCaptureFixture) -> None:
    _plan._warned.clear()
    requests = normal(21, [1, 1], [100, 6000], (1, 1))
    for attend in (prefill, decode, prefill):
        attend(requests, "cpu", skip_softmax_threshold_scale_factor=5000.0)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "a request of 100 keys" in record.getMessage()
    _plan._warned.clear()
    prefill(requests, "cpu", skip_softmax_threshold_scale_factor=99.0)
    prefill(requests, "cpu", skip_softmax_threshold_scale_factor=5000.0, overflow="clamp")
    assert len(caplog.records) == 1


# ---- K06: none, zero, and what is no threshold ---------------------------------------------------


def plan(device: str, requests: list[Request], phase: str, **options: Any) -> Any:
    qo, kv = (indptr([len(r[i]) for r in requests], device) for i in (0, 1))
    cache, shape = paged(requests, device), (8, 2, 128, 16)
    if phase == "decode":
        wrapper: Any = flashskip.BatchDecodeWrapper(workspace(device))
        wrapper.plan(*cache.table, *shape, q_data_type=BF16, **options)
        return wrapper
    wrapper = flashskip.BatchPrefillWrapper(workspace(device))
    if phase == "prefill":
        wrapper.plan(qo, kv, *shape[:3], q_data_type=BF16, **options)
    else:
        wrapper.plan_paged(qo, *cache.table, *shape, q_data_type=BF16, **options)
    return wrapper


@on_both(*prefill_variants(), decode_variant(), *PREFILL, decode_variant(**COUNTED))
@pytest.mark.parametrize("phase", BOTH)
def test_reported_K06_zero_is_a_threshold_and_none_is_not(device: str, phase: str) -> None:
    attend = BOTH[phase][0]
    requests = normal(23, [1] * 3, [1, 100, 3000])
    dense = attend(requests, device)
    with pytest.raises(ValueError, match="stats is read on a plan without counters"):
        _ = dense.wrapper.stats
    for threshold in (0.0, torch.zeros(3, device=device), 1e-30):
        answer = attend(requests, device, skip_softmax_threshold=threshold, collect_stats=True)
        assert answer.wrapper.variant.skip == "threshold"
        assert (counts(answer)[:, 0] == 0).all()
        assert (counts(answer)[:, 1] > 0).all()
        for i, request in enumerate(requests):
            assert_right(request, answer.out[i], answer.lse[i])
            largest = dense.out[i].float().abs().clamp_min(2.0**-20)
            ulp = torch.exp2(torch.floor(torch.log2(largest)) - 7)
            assert ((answer.out[i].float() - dense.out[i].float()).abs() <= ulp).all()
            torch.testing.assert_close(answer.lse[i], dense.lse[i], rtol=0, atol=1e-5)


@pytest.mark.parametrize("phase", BOTH)
@pytest.mark.parametrize("name", ["skip_softmax_threshold", "skip_softmax_threshold_scale_factor"])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (-0.1, ValueError),
        (math.nan, ValueError),
        (math.inf, ValueError),
        ("abc", TypeError),
        (True, TypeError),
        (torch.zeros(2), ValueError),
        (torch.zeros(3, dtype=torch.float64), ValueError),
        (torch.zeros(3, dtype=BF16), ValueError),
        (torch.zeros(6)[::2], ValueError),
        (torch.tensor(0.1), ValueError),
        (torch.zeros(3, device="meta"), ValueError),
    ],
    ids=str,
)
def test_reported_K06_what_is_no_threshold_is_refused(
    phase: str, name: str, value: object, error: type[Exception]
) -> None:
    with pytest.raises(error, match=name):
        plan("cpu", normal(23, [1] * 3, [1, 2, 3]), phase, **{name: value})


@pytest.mark.gpu
@pytest.mark.parametrize("phase", BOTH)
def test_reported_K06_a_threshold_on_the_cpu_is_refused(phase: str) -> None:
    with pytest.raises(ValueError, match="skip_softmax_threshold is on cpu"):
        plan("cuda", normal(23, [1] * 3, [1, 2, 3]), phase, skip_softmax_threshold=torch.zeros(3))


@pytest.mark.parametrize("phase", BOTH)
def test_reported_K06_one_source_of_a_threshold(phase: str) -> None:
    requests = normal(23, [1] * 3, [1, 2, 3])
    with pytest.raises(ValueError, match="skip_softmax_threshold and skip_softmax_threshold_scale"):
        plan(
            "cpu",
            requests,
            phase,
            skip_softmax_threshold=0.0,
            skip_softmax_threshold_scale_factor=0.0,
        )
    with pytest.raises(TypeError, match="target_sparsity"):
        plan("cpu", requests, phase, skip_softmax_threshold=0.1, target_sparsity=0.5)
    with pytest.raises(ValueError, match="threshold"):
        flashskip.SkipSoftmaxConfig(threshold=0.1, threshold_scale_factor=3.0, target_sparsity=0.5)


@pytest.mark.parametrize("phase", BOTH)
def test_reported_K06_a_value_is_no_part_of_a_kernel(phase: str) -> None:
    requests = normal(23, [1] * 3, [1, 2, 3])
    kernels = {
        plan("cpu", requests, phase, skip_softmax_threshold=x).variant for x in (0.0, 0.1, 1)
    }
    assert len(kernels) == 1


# ---- K08: splits ---------------------------------------------------------------------------------


@on_both(decode_variant(4, **COUNTED))
def test_reported_K08_splits_change_no_decision(device: str) -> None:
    """Decode judges by a seed, so also the first tile of a split can be skipped: all middle is."""
    heads = (32, 8) if device == "cuda" else (4, 1)
    request = twin_peak(65536, 6.0, 1, heads=heads, block=512)
    cache = paged([request], device)
    batches = (1, 16) if device == "cuda" else (1, 2)
    repeats = 20 if device == "cuda" else 2
    for batch in batches:
        table = cache.indices.repeat(batch), cache.last_page_len.repeat(batch)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * 4096
        wrapper = flashskip.BatchDecodeWrapper(workspace(device))
        wrapper.plan(
            starts, *table, *heads, 128, 16,
            q_data_type=BF16, sm_scale=1.0,
            skip_softmax_threshold_scale_factor=512.0, collect_stats=True,
        )  # fmt: skip
        q = request[0].to(device).repeat(batch, 1, 1)
        runs = [wrapper.run(q, cache.pages, return_lse=True, lse_base="e") for _ in range(repeats)]
        assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))
        out, lse = (t[batch // 2].cpu() for t in runs[0])
        assert ((lse - 12.2383).abs() <= E).all()
        assert (out[:, 1:-1] == 0).all()
        assert (out[:, [0, -1]] == 0.5).all()
        expected = torch.tensor([1016, 1024], device=device) * repeats
        assert (wrapper.stats == expected).all()


# ---- K09: counters that tell the truth -----------------------------------------------------------


@on_both(prefill_variant(**COUNTED))
def test_reported_K09_counters_are_what_the_probe_shows(device: str) -> None:
    options = {"sm_scale": 1.0, "skip_softmax_threshold_scale_factor": 32.0, "collect_stats": True}
    a, b = (twin_peak(n, 4.0, 128, heads=(4, 2)) for n in (1024, 8192))
    alone = prefill([a], device, **options)
    assert counts(alone)[0].tolist() == [64, 2 * 4 * 16]
    kept = (alone.out[0][..., :16] > 0).unflatten(0, (2, 64)).any(1)  # [units, heads, tiles]
    assert int((~kept).sum()) == 64
    both = counts(prefill([a, b], device, **options))
    assert (both[:, 0] / both[:, 1]).tolist() == [0.5, 0.0]
    assert both.sum(0).tolist() == [64, 1152]


@on_both(
    prefill_variant(causal=True, **COUNTED), prefill_variant(causal=True, vote_kv=128, **COUNTED)
)
@pytest.mark.parametrize(("vote_kv", "tiles"), [(64, 136), (128, 72)])
def test_reported_K09_tiles_that_no_row_sees_are_not_counted(
    device: str, vote_kv: int, tiles: int
) -> None:
    (request,) = normal(0, [1024], [1024], (4, 2))
    answer = prefill(
        [(request[0] * 0, *request[1:])], device,
        causal=True, vote_kv=vote_kv, skip_softmax_threshold=0.5, collect_stats=True,
    )  # fmt: skip
    assert answer.wrapper.stats[0].tolist() == [[0, tiles]] * 4


@on_both(*PREFILL, DECODE)
@pytest.mark.parametrize("phase", BOTH)
def test_reported_K09_counters_add_up_until_reset(device: str, phase: str) -> None:
    requests = normal(9, [1, 1], [1000, 70])
    options = {"skip_softmax_threshold": 0.5, "collect_stats": True}
    once = counts(BOTH[phase][0](requests, device, **options))
    wrapper = plan(device, requests, phase, **options)
    q, k, v = (torch.cat(parts).to(device) for parts in zip(*requests, strict=True))
    inputs = (q, k, v) if phase == "prefill" else (q, paged(requests, device).pages)
    assert not wrapper.stats.any()
    for times in (1, 2):
        wrapper.run(*inputs)
        assert torch.equal(wrapper.stats.sum(1).cpu(), times * once)
    wrapper.reset_stats()
    assert not wrapper.stats.any()


@on_both(
    *prefill_variants(skip_softmax_threshold=0.1), decode_variant(2, skip_softmax_threshold=0.1)
)
@pytest.mark.parametrize("phase", BOTH)
def test_reported_K09_no_counters_rather_than_zeros(device: str, phase: str) -> None:
    requests = normal(9, [1], [512], (4, 2))
    answer = BOTH[phase][0](requests, device, skip_softmax_threshold=0.5)
    for read in (lambda: answer.wrapper.stats, answer.wrapper.reset_stats):
        with pytest.raises(ValueError, match="stats is read on a plan without counters"):
            read()


@on_both(*PREFILL, decode_variant(**COUNTED))
@pytest.mark.parametrize("phase", BOTH)
def test_reported_K09_a_factor_that_skips_nothing_shows(device: str, phase: str) -> None:
    requests = normal(9, [1], [512])
    answer = BOTH[phase][0](
        requests, device, skip_softmax_threshold_scale_factor=0.3, collect_stats=True
    )
    skipped, visited = counts(answer)[0].tolist()
    assert skipped == 0
    assert visited == 8 * (2 if phase == "decode" else 8)
