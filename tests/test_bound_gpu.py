"""The certified bound of the kernels: equal to the reference's, never below what is omitted."""

from __future__ import annotations

from typing import Any

import paged
import prefill_gpu
import pytest
import torch
from helpers import by_row, make_ragged, poisoned
from paged import make_paged
from prefill_gpu import BF16, DEVICE, FP16, LONG, MIX, ROUNDING_BAND

from flashskip import reference
from flashskip.geometry import ORDERS
from flashskip.variant import Variant

pytestmark = pytest.mark.gpu

BOUND = {"collect_bound": True, "collect_stats": True}


def sure_rows(exact: reference.Result) -> torch.Tensor:
    """Bool ``[nnz_qo, num_qo_heads]``: rows of units whose decisions rounding cannot change."""
    assert exact.skip_map is not None
    rows = [by_row((m.margin.abs() > ROUNDING_BAND).all(2), m.geometry).mT for m in exact.skip_map]
    return torch.cat(rows)


def assert_bound(
    bound: torch.Tensor, exact: reference.Result, dense: reference.Result, least: float = 0.9
) -> None:
    """Compare with the reference's bound, and with the share that is missing from the softmax."""
    omitted = (1 - torch.exp2(exact.lse - dense.lse)).nan_to_num(0)  # -inf: a row without keys
    sure = sure_rows(exact)
    assert sure.double().mean() > least
    assert (bound[sure] > 0).double().mean() > 0.02
    torch.testing.assert_close(bound[sure].double(), exact.bound[sure], rtol=5e-4, atol=1e-30)
    assert (omitted <= bound + 1e-14)[sure].all()  # the rounding of `omitted`


PREFILL: dict[str, tuple[Any, ...]] = {
    # Lengths, heads, head dim, element type, lambda, options.
    "causal": (LONG, (5, 1), 128, BF16, 0.02, {"causal": True}),
    "coarse": (LONG, (3, 1), 128, BF16, 0.3, {"causal": True, "vote_kv": 128, "order": ORDERS[1]}),
    "ascending": (LONG, (3, 1), 128, FP16, 1.0, {"order": ORDERS[2]}),
    "all": (MIX, (4, 2), 64, BF16, 0.02,
            {"window_left": 200, "logits_soft_cap": 10.0, "sinks": [-3.0, 2.0, 0.0, 5.0]}),
    "wide": (LONG, (2, 1), 256, BF16, 0.02, {"causal": True}),
}  # fmt: skip


def prefill_variants(case: str) -> list[Variant]:
    *_, head_dim, dtype, threshold, given = PREFILL[case]
    options = {**given, "sinks": torch.empty(0)} if "sinks" in given else dict(given)
    options["skip_softmax_threshold"] = threshold
    return [prefill_gpu.variant(head_dim, dtype, **options, **o) for o in (BOUND, {})]


@pytest.mark.variants(lambda case: prefill_variants(case))
@pytest.mark.parametrize("case", PREFILL)
def test_prefill(case: str) -> None:
    lengths, heads, head_dim, dtype, threshold, given = PREFILL[case]
    options = dict(given)
    if "sinks" in options:
        options["sinks"] = torch.tensor(options["sinks"], device=DEVICE)
    gain = 8.0 * max(head_dim / 128, 1) ** 0.25  # hot scores are gain² / sqrt(head_dim) higher
    batch = make_ragged(*lengths, *heads, head_dim, dtype, hot=0.3, gain=gain, device=DEVICE)
    options["skip_softmax_threshold"] = threshold
    wrapper = prefill_gpu.plan(batch, **options, **BOUND)
    out, lse, bound = wrapper.run(batch.q, batch.k, batch.v, return_lse=True)
    plain = prefill_gpu.attend(batch, **options)
    assert torch.equal(out, plain[0])
    assert torch.equal(lse, plain[1])
    requests = len(lengths[0])
    exact, dense = (prefill_gpu.oracle(wrapper, batch, [x] * requests) for x in (threshold, None))
    assert_bound(bound, exact, dense)
    prefill_gpu.assert_counts(wrapper, exact)


DECODE: dict[str, dict[str, Any]] = {
    "split": {"heads": (8, 2), "kv_lens": (0, 1, 64, 1000, 0, 70_000, 129)},
    "two row units": {"heads": (71, 1), "kv_lens": (700, 5000, 1)},
    "eight KV heads": {"heads": (32, 8), "kv_lens": (700, 0, 5000, 1)},
    "gathered": {"heads": (6, 2), "kv_lens": (700, 9000, 64), "page_size": 3, "head_dim": 64},
    "several tokens": {"heads": (8, 2), "kv_lens": (5, 64, 65, 129, 9000, 66), "q_len": 4},
    "window": {"heads": (4, 2), "kv_lens": (1, 300, 9000), "window_left": 500,
               "sinks": [-3.0, 2.0, 0.0, 5.0], "logits_soft_cap": 20.0},
    "wide": {"heads": (8, 2), "kv_lens": (300, 9000), "head_dim": 256},
    "fp8": {"heads": (8, 2), "kv_lens": (300, 30_000), "kv_dtype": paged.FP8},
}  # fmt: skip
PLAN = ("window_left", "sinks", "logits_soft_cap")


def decode_variants(case: str) -> list[Variant]:
    case_ = dict(DECODE[case])
    heads, options = case_.pop("heads"), {n: case_.pop(n) for n in PLAN if n in case_}
    case_.pop("kv_lens")
    if "sinks" in options:
        options["sinks"] = torch.empty(0)
    options["skip_softmax_threshold"] = 0.02
    if "kv_dtype" in case_:
        case_["kv_data_type"] = case_.pop("kv_dtype")
    group, head_dim = heads[0] // heads[1], case_.pop("head_dim", 128)
    return [paged.variant(group, head_dim, **case_, **options, **o) for o in (BOUND, {})]


@pytest.mark.variants(lambda case: decode_variants(case))
@pytest.mark.parametrize("case", DECODE)
def test_decode(case: str) -> None:
    kwargs = dict(DECODE[case])
    options = {n: kwargs.pop(n) for n in PLAN if n in kwargs}
    gain = 7.5 * max(kwargs.get("head_dim", 128) / 128, 1) ** 0.25
    batch = make_paged(kwargs.pop("kv_lens"), *kwargs.pop("heads"), gain=gain, **kwargs)
    if "sinks" in options:
        options["sinks"] = torch.tensor(options["sinks"], device=batch.q.device)
    options["skip_softmax_threshold"] = 0.02
    wrapper = paged.plan(batch, **options, **BOUND)
    out, lse, bound = wrapper.run(batch.q, batch.cache, return_lse=True, **batch.scales)
    plain = paged.run(paged.plan(batch, **options), batch)
    assert torch.equal(out, plain[0])
    assert torch.equal(lse, plain[1])
    exact, dense = (paged.oracle(wrapper, batch, x) for x in (0.02, None))
    assert_bound(bound, exact, dense, least=0.5)
    again = wrapper.run(batch.q, batch.cache, **batch.scales)[1]
    assert torch.equal(again, bound)


@pytest.mark.variants(
    [prefill_gpu.variant(causal=True, skip_softmax_threshold=0.1, collect_bound=True)]
)
def test_nothing_skipped_omits_nothing_and_other_rows_are_not_written() -> None:
    batch = make_ragged((70, 0, 5), (300, 9, 0), 3, 1, 128, device=DEVICE)
    padded = torch.cat([batch.q, poisoned((9, 3, 128), BF16, DEVICE)])
    wrapper = prefill_gpu.plan(batch, causal=True, skip_softmax_threshold=0.0, collect_bound=True)
    _, bound = wrapper.run(padded, batch.k, batch.v)
    assert bound.shape == (84, 3)
    assert (bound[:75] == 0).all()
