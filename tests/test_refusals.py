"""Wrong arguments, found by trying: named, with what was found, what is expected, what to do."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import paged
import prefill_gpu
import pytest
import torch
from reported import BF16
from test_reported_wrappers import PHASES, Call

import flashskip
from flashskip import _plan
from flashskip.variant import Variant

DECODE = paged.variant()
BUDGET = prefill_gpu.variant(page_size=1, skip_criterion="budget", skip_budget=0.1)
PARTS = re.compile(r".+; expected .+\. [A-Z].+\.$", re.DOTALL)  # found; expected. Advice.


def assert_refused(error: pytest.ExceptionInfo[BaseException]) -> None:
    """A message has all of its parts."""
    assert PARTS.fullmatch(str(error.value)), str(error.value)


@pytest.fixture(params=PHASES)
def call(request: pytest.FixtureRequest) -> Call:
    made = Call(request.param)
    made.plan()
    return made


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sm_scale": 10**400}, "sm_scale is 1000"),  # an int that no float holds
        ({"sm_scale": 1e-300}, "sm_scale is 1e-300"),  # 0 in the precision of a kernel
        ({"sm_scale": 1e39}, r"sm_scale is 1e\+39"),
        ({"logits_soft_cap": 1e39}, r"logits_soft_cap is 1e\+39"),
        ({"logits_soft_cap": 1e-46}, "logits_soft_cap is 1e-46"),
        ({"window_left": 2**31}, "window_left is 2147483648"),
        ({"window_left": 2**70}, "window_left is 1180591620717411303424"),
        ({"skip_softmax_threshold_scale_factor": 1e39}, "scale_factor is 1e"),
        ({"skip_softmax_threshold_scale_factor": 1.0, "length_exponent": 1e39}, "length_exponent"),
        ({"sinks": torch.zeros(7)}, "sinks has 7 entries; expected 8"),
        (
            {"skip_softmax_threshold": torch.zeros(2).requires_grad_()},
            "skip_softmax_threshold requires a gradient",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_numbers_that_no_kernel_can_hold(phase: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        Call(phase).plan(**options)
    assert_refused(error)
    assert "batch size" not in str(error.value)


def test_an_lse_that_shares_memory(call: Call) -> None:
    """With the output, or with an input."""
    q = call.inputs[0]
    space = torch.empty(q.numel(), dtype=torch.float32)
    out, lse = space.view(BF16)[: q.numel()].view_as(q), space[:16].view(2, 8)
    with pytest.raises(ValueError, match="lse shares memory with out") as error:
        call.run(out=out, lse=lse)
    assert_refused(error)
    q = out.copy_(q)
    with pytest.raises(ValueError, match="lse shares memory with q"):
        call.run(q, *call.inputs[1:], lse=lse)
    call.run(out=out, lse=space[-16:].view(2, 8))


def test_outputs_that_require_a_gradient(call: Call) -> None:
    q = call.inputs[0]
    for given in ({"out": torch.empty_like(q)}, {"lse": torch.empty(2, 8)}):
        ((name, t),) = given.items()
        with pytest.raises(ValueError, match=f"{name} requires a gradient") as error:
            call.run(**{name: t.requires_grad_()})
        assert_refused(error)
        with torch.no_grad():
            call.run(**given)


@pytest.mark.parametrize("phase", PHASES)
def test_counts_that_32_bits_do_not_hold(phase: str) -> None:
    for place, huge in enumerate((2**31, 2**40)):
        call = Call(phase)
        call.shape[place] = huge
        name = ("num_qo_heads", "num_kv_heads")[place]
        with pytest.raises(ValueError, match=f"{name} is {huge}; expected at most 2147483647") as e:
            call.plan()
        assert_refused(e)


@pytest.mark.parametrize("phase", [p for p in PHASES if p != "prefill"])
def test_a_page_size_that_32_bits_do_not_hold(phase: str) -> None:
    call = Call(phase)
    call.shape[-1] = 2**33
    with pytest.raises(ValueError, match="page_size is 8589934592; expected at most 2147483647"):
        call.plan()


@pytest.mark.parametrize("phase", PHASES)
def test_advice_that_leads_to_no_other_error(phase: str) -> None:
    """A criterion that is given already is no reason to add a threshold."""
    with pytest.raises(ValueError, match="collect_stats is given without a skip test") as error:
        Call(phase).plan(skip_criterion="measure", collect_stats=True)
    assert_refused(error)
    assert str(error.value).endswith("Drop collect_stats.")
    Call(phase).plan(skip_criterion="measure")


def test_bases_that_are_none(call: Call) -> None:
    for bad in (["e"], {"e": 1}, 2, None, torch.tensor(2.0)):
        with pytest.raises(ValueError, match="lse_base is") as error:
            call.run(return_lse=True, lse_base=bad)
        assert_refused(error)


def test_tensors_that_are_not_strided(call: Call) -> None:
    q, *rest = call.inputs
    with pytest.raises(ValueError, match=r"q has the layout torch\.sparse_coo") as error:
        call.run(q.to_sparse(), *rest)
    assert_refused(error)


def test_decode_names_its_own_arguments() -> None:
    """They have no prefix there."""
    for number, (bad, name) in enumerate(
        [([0, 3, 9], "indptr"), ([-1, 0, 0, 0, 0], "indices"), ([99, 1], "last_page_len")]
    ):
        call = Call("decode")
        call.indices[number] = torch.tensor(bad, dtype=torch.int32)
        with pytest.raises(ValueError, match=rf"^{name}\b") as error:
            call.plan()
        assert_refused(error)


@pytest.mark.parametrize(
    ("v", "message"),
    [
        (dataclasses.replace(DECODE, head_dim_qk=192, head_dim_vo=192), "head_dim asks for "),
        (dataclasses.replace(DECODE, causal=True, rows=7), "num_qo_heads / num_kv_heads \\* q_len"),
        (
            dataclasses.replace(BUDGET, order="ascending"),
            "order asks for order=ascending in prefill",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_kernels_that_do_not_exist(
    v: Variant, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_plan, "_capability", lambda device: (9, 0))
    with pytest.raises(flashskip.UnsupportedVariant, match=message) as error:
        _plan.require_kernel(v, torch.device("cuda", 0))
    assert re.search(r"; supported: \w.*\. [A-Z].+\.$", str(error.value)), str(error.value)


@pytest.mark.parametrize("name", ["sm_scale", "logits_soft_cap"])
def test_extreme_but_legal_numbers_give_numbers(call: Call, name: str) -> None:
    for value in (1e-15, 1e15):
        call.plan(**{name: value})
        out, lse = call.run(return_lse=True)
        assert out.isfinite().all()
        assert not lse.isnan().any()
        assert (lse < math.inf).all()
