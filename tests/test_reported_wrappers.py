"""Cases from public bug reports: planning (P), torch.compile (I05), and their neighbours."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from helpers import indptr
from reported import (
    BF16,
    Request,
    decode_variant,
    normal,
    on_both,
    paged,
    prefill_variants,
    workspace,
)
from torch import Tensor

import flashskip

ON_CPU = torch.empty(0)
PHASES = ("prefill", "paged prefill", "decode")
KERNELS = [*prefill_variants(causal=True), decode_variant()]


def ints(*values: int, **options: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, **options)


class Call:
    """A wrapper, its plan's arguments and a run's inputs, each of which a test may change."""

    def __init__(self, phase: str, device: str = "cpu", dtype: torch.dtype = BF16) -> None:
        self.requests: list[Request] = normal(0, [1, 1], [40, 17], dtype=dtype)
        self.options: dict[str, Any] = {"q_data_type": dtype}
        q, k, v = (torch.cat(parts).to(device) for parts in zip(*self.requests, strict=True))
        self.wrapper: Any
        if phase == "prefill":
            self.wrapper = flashskip.BatchPrefillWrapper(workspace(device))
            self.indices = [indptr([1, 1], device), indptr([40, 17], device)]
            self.names = ["qo_indptr", "kv_indptr"]
            self.shape = [8, 2, 128]
            self.inputs = [q, k, v]
            self.options["causal"] = True
        elif phase == "paged prefill":
            cache = paged(self.requests, device, fill=0.0)
            self.wrapper = flashskip.BatchPrefillWrapper(workspace(device))
            self.indices = [indptr([1, 1], device), *cache.table]
            names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
            self.names = ["qo_indptr", *names]
            self.shape = [8, 2, 128, 16]
            self.inputs = [q, cache.pages]
            self.options["causal"] = True
        else:
            cache = paged(self.requests, device, fill=0.0)
            self.wrapper = flashskip.BatchDecodeWrapper(workspace(device))
            self.indices = list(cache.table)
            self.names = ["indptr", "indices", "last_page_len"]
            self.shape = [8, 2, 128, 16]
            self.inputs = [q, cache.pages]

    def plan(self, **options: Any) -> None:
        plan = self.wrapper.plan_paged if len(self.indices) == 4 else self.wrapper.plan
        plan(*self.indices, *self.shape, **{**self.options, **options})

    def run(self, *inputs: Any, **outputs: Any) -> Any:
        return self.wrapper.run(*(inputs or self.inputs), **outputs)


@pytest.fixture(params=PHASES)
def call(request: pytest.FixtureRequest) -> Call:
    made = Call(request.param)
    made.plan()
    return made


# ---- P04: dtypes of indices, plan against run ----------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.float32])
def test_reported_P04_indices_of_another_width_are_refused(phase: str, dtype: torch.dtype) -> None:
    call = Call(phase)
    for i, name in enumerate(call.names):
        call.indices[i] = call.indices[i].to(dtype)
        with pytest.raises(ValueError, match=f"{name} has dtype {dtype}; expected torch.int32"):
            call.plan()
        call.indices[i] = call.indices[i].to(torch.int32)
    right = call.indices
    call.indices = [t.to(dtype) for t in right]
    with pytest.raises(ValueError, match=f"{call.names[0]} has dtype {dtype}"):
        call.plan()
    call.indices = right
    call.plan()
    call.run()


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.variants(KERNELS)]),
    ],
)
@pytest.mark.parametrize("phase", PHASES)
def test_reported_P04_what_differs_from_the_plan_is_refused_each_time(
    device: str, phase: str
) -> None:
    call = Call(phase, device)
    with pytest.raises(RuntimeError, match="has no plan"):
        call.run()
    call.plan()
    expected = call.run()
    q, *kv = call.inputs
    wrong = [
        ([q.half(), *kv], "q has dtype torch.float16; expected torch.bfloat16"),
        ([q.repeat(1, 2, 1), *kv], r"q has shape .2, 16, 128.; expected .* 8, 128."),
        ([q[..., :64], *kv], r"q has shape .2, 8, 64.; expected .* 8, 128."),
        ([q, *(t.float() for t in kv)], "has dtype torch.float32; expected torch.bfloat16"),
        ([q, *(t[..., :64] for t in kv)], r"has shape .*64.; expected .*128."),
        (
            [q.to("meta") if device == "cpu" else q.cpu(), *kv],
            "q is on" if device == "cuda" else None,
        ),
        ([q, *(t.to("meta") for t in kv)], "is on meta"),
    ]
    for inputs, message in wrong:
        if message is None:
            continue
        for _ in range(2):  # a second time: what was refused is not remembered as checked
            with pytest.raises(ValueError, match=message):
                call.run(*inputs)
    assert torch.equal(call.run(), expected)


@pytest.mark.gpu
@pytest.mark.variants(KERNELS)
@pytest.mark.parametrize("phase", PHASES)
def test_reported_P04_another_device_is_named(phase: str) -> None:
    on_gpu, on_cpu = Call(phase, "cuda"), Call(phase, "cpu")
    on_gpu.plan()
    on_cpu.plan()
    for _ in range(2):
        with pytest.raises(ValueError, match="q is on cpu; expected cuda:0, where the plan runs"):
            on_gpu.run(*on_cpu.inputs)
        with pytest.raises(ValueError, match="q is on cuda:0; expected cpu, where the plan runs"):
            on_cpu.run(*on_gpu.inputs)
        with pytest.raises(ValueError, match="is on cpu; expected cuda:0"):
            on_gpu.run(on_gpu.inputs[0], *on_cpu.inputs[1:])
    on_gpu.run()


def test_reported_P04_indices_that_decrease_or_reach_past_the_tensors() -> None:
    call = Call("prefill")
    for bad in (ints(0, 2, 1), ints(1, 2, 2), ints(0, -1, 2)):
        with pytest.raises(ValueError, match=r"qo_indptr\["):
            call.wrapper.plan(bad, call.indices[1], *call.shape, **call.options)
    call.plan()
    q, k, v = call.inputs
    with pytest.raises(
        ValueError, match="q has 1 in dimension 0; expected at least 2, as far as qo_indptr"
    ):
        call.run(q[:1], k, v)
    with pytest.raises(ValueError, match="k has 56 in dimension 0; expected at least 57"):
        call.run(q, k[:56], v[:56])
    call.indices[0][1] = 7  # live: written after plan()
    with pytest.raises(ValueError, match=r"qo_indptr\[2\] is 2 after 7"):
        call.run()


def test_reported_P04_a_live_page_table_is_checked_on_the_cpu() -> None:
    call = Call("decode")
    call.plan()
    call.indices[0][1] = 9  # written after plan()
    with pytest.raises(ValueError, match=r"indptr\[2\] is 5 after 9; expected offsets that never"):
        call.run()
    call.indices[0][1] = 3
    call.indices[1][4] = 99
    with pytest.raises(ValueError, match=r"indices\[4\] is 99; expected 0 to 7, the pages of the"):
        call.run()


# ---- a plan that fails ---------------------------------------------------------------------------


def test_reported_P04_a_refused_plan_leaves_the_earlier_one(call: Call) -> None:
    expected = call.run()
    live = "skip_softmax_threshold"
    for options in ({live: -1.0}, {live: torch.zeros(9)}, {"sinks": torch.zeros(3)}, {"causal": 1}):
        with pytest.raises((ValueError, TypeError)):
            call.plan(**options)
    if len(call.shape) == 4:  # another page size is refused too, and changes nothing
        call.shape[3] = 32
        with pytest.raises(ValueError, match="skip_softmax_threshold has 9 entries; expected 2"):
            call.plan(skip_softmax_threshold=torch.zeros(9))
    assert torch.equal(call.run(), expected)


def test_reported_P04_a_plan_without_room_leaves_the_earlier_one(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Tensor:
        raise ValueError("no room")

    expected = call.run()
    with monkeypatch.context() as patch:
        patch.setattr(call.wrapper._buffers, "reserve", fail)
        with pytest.raises(ValueError, match="no room"):
            call.plan(skip_softmax_threshold=0.0, collect_stats=True)
    assert torch.equal(call.run(), expected)
    call.plan()
    call.run()


# ---- P01: wrappers planned again, and buffers ----------------------------------------------------


@on_both(
    *prefill_variants(causal=True),
    *prefill_variants(causal=True, skip_softmax_threshold=0.1, collect_stats=True),
    decode_variant(),
    decode_variant(skip_softmax_threshold=0.1, collect_stats=True),
)
@pytest.mark.parametrize("phase", PHASES)
def test_reported_P01_nothing_stays_of_an_earlier_plan(device: str, phase: str) -> None:
    call = Call(phase, device)
    call.plan()
    dense = call.run(return_lse=True)
    skipping = {"skip_softmax_threshold": 0.3, "collect_stats": True}
    call.plan(**skipping)
    skipped, stats = call.run(return_lse=True), call.wrapper.stats.clone()
    call.plan()
    assert all(torch.equal(a, b) for a, b in zip(call.run(return_lse=True), dense, strict=True))
    with pytest.raises(ValueError, match="stats is read on a plan without counters"):
        _ = call.wrapper.stats
    call.plan(**skipping)
    assert not call.wrapper.stats.any()
    assert all(torch.equal(a, b) for a, b in zip(call.run(return_lse=True), skipped, strict=True))
    assert torch.equal(call.wrapper.stats, stats)
    larger = Call(phase, device)  # then a larger batch, whose counters need a new buffer
    larger.indices = [
        t if n.endswith("indices") else torch.cat([t, t[-1:]])
        for n, t in zip(call.names, call.indices, strict=True)
    ]
    if phase == "decode":
        larger.inputs[0] = torch.cat([call.inputs[0], call.inputs[0][:1]])
    larger.wrapper = call.wrapper
    larger.plan(**skipping)
    out, lse = larger.run(return_lse=True)
    assert torch.equal(out[:2], skipped[0])
    assert torch.equal(call.wrapper.stats[:2], stats)
    assert not call.wrapper.stats[2].any()
    if phase == "decode":
        assert (lse[2] == -math.inf).all()


def test_reported_P01_plans_made_in_inference_mode_serve_outside_of_it(call: Call) -> None:
    with torch.inference_mode():
        call.wrapper = type(call.wrapper)(ON_CPU)
        call.plan(skip_softmax_threshold=0.5, collect_stats=True)
        call.run()
    call.wrapper.reset_stats()
    call.run()
    assert call.wrapper.stats[..., 1].any()


def test_reported_P01_a_wrapper_is_not_copied(call: Call) -> None:
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="is copied or pickled, but holds addresses"):
            duplicate(call.wrapper)
    call.run()


# ---- outputs -------------------------------------------------------------------------------------


def test_outputs_that_overlap_are_refused(call: Call) -> None:
    q = call.inputs[0]
    with pytest.raises(ValueError, match=r"out has shape .* with stride .0,.*lie apart"):
        call.run(out=q.new_empty(1, 8, 128).expand(2, -1, -1))
    for out in (q, torch.as_strided(q, q.shape, q.stride(), 0)):
        with pytest.raises(ValueError, match="out shares memory with q"):
            call.run(out=out)
    buffer = q.new_empty(3, 8, 128)
    buffer[:2] = q
    with pytest.raises(ValueError, match="out shares memory with q"):
        call.run(buffer[:2], *call.inputs[1:], out=buffer[1:])
    packed = torch.cat([q, q], 1)
    call.run(packed[:, :8], *call.inputs[1:], out=packed[:, 8:])  # interleaved, and disjoint
    assert torch.equal(packed[:, 8:], call.run())


def test_outputs_may_be_views_and_lse_is_filled_when_given(call: Call) -> None:
    q = call.inputs[0]
    expected, expected_lse = call.run(return_lse=True)
    wide = torch.full((2, 8, 192), math.nan, dtype=BF16)
    lse = torch.full((2, 8), math.nan)
    out = call.run(out=wide[..., 32:160], lse=lse)
    assert isinstance(out, Tensor)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert wide[..., :32].isnan().all()
    assert wide[..., 160:].isnan().all()
    for bad in (lse.double(), lse[:1], lse.T.contiguous().T, lse.to("meta")):
        with pytest.raises(ValueError, match="lse is"):
            call.run(lse=bad)
    with pytest.raises(TypeError, match="lse is float"):
        call.run(lse=1.0)
    with pytest.raises(ValueError, match="out has dtype"):
        call.run(out=torch.empty_like(q, dtype=torch.float32))


# ---- what is no tensor, no bool, no number -------------------------------------------------------


def test_inputs_that_are_no_tensors_are_named(call: Call) -> None:
    q, *kv = call.inputs
    with pytest.raises(TypeError, match="return_lse is tensor"):
        call.run(return_lse=torch.empty(0))
    for bad in (None, [1.0], torch.tensor(1.0)):
        with pytest.raises(TypeError, match="q is"):
            call.run(bad, *kv)
    with pytest.raises(TypeError, match=r"paged_kv_cache is int|got no k and v"):
        call.run(q, 3 if len(kv) == 1 else None, *kv[1:])


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"causal": "no"}, TypeError, "causal"),
        ({"skip_softmax_threshold": 0.1, "collect_stats": 1}, TypeError, "collect_stats"),
        ({"skip_softmax_threshold": 0.1, "collect_bound": None}, TypeError, "collect_bound"),
        ({"window_left": True}, ValueError, "window_left"),
        ({"sm_scale": torch.tensor(math.nan)}, TypeError, "sm_scale"),
        ({"logits_soft_cap": torch.tensor(1.0)}, TypeError, "logits_soft_cap"),
        ({"q_data_type": torch.int32}, ValueError, "q_data_type"),
        ({"sinks": [0.0] * 8}, TypeError, "sinks"),
        ({"sinks": 0.0}, TypeError, "sinks"),
        ({"skip_softmax_threshold": 0.1, "vote_kv": torch.empty(0)}, ValueError, "vote_kv"),
        ({"skip_softmax_threshold": 0.1, "vote_kv": 64.0}, ValueError, "vote_kv"),
        ({"sinks": torch.zeros(8, dtype=BF16)}, ValueError, "sinks"),
    ],
)
def test_options_of_a_wrong_kind_are_named(
    phase: str, options: dict[str, Any], error: type[Exception], name: str
) -> None:
    with pytest.raises((error, ValueError), match=name):
        Call(phase).plan(**options)


# ---- gradients -----------------------------------------------------------------------------------


def test_gradients_are_refused_also_for_sinks_and_under_compile(call: Call) -> None:
    q, *kv = call.inputs
    needs = q.clone().requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(call.wrapper.run, backend="eager", fullgraph=True)
    with pytest.raises(ValueError, match="q requires a gradient"):
        call.run(needs, *kv)
    with pytest.raises(Exception, match="q requires a gradient"):  # dynamo wraps what is raised
        compiled(needs, *kv)
    with torch.no_grad():
        assert torch.equal(compiled(needs, *kv), call.run(needs, *kv))
    call.plan(sinks=torch.nn.Parameter(torch.zeros(8)))
    with pytest.raises(ValueError, match="sinks requires a gradient"):
        call.run()
    with torch.no_grad():
        call.run()


# ---- I05: torch.compile --------------------------------------------------------------------------


@on_both(*KERNELS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_reported_I05_one_graph_equal_to_eager(device: str, phase: str, backend: str) -> None:
    call = Call(phase, device)
    call.plan()

    def f(q: Tensor, *kv: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = call.wrapper.run(q * 2, *kv, return_lse=True)
        return out + 1, lse

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend=backend)
    for _ in range(2):
        found, expected = compiled(*call.inputs), f(*call.inputs)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        call.inputs[0].neg_()


def test_reported_I05_lengths_and_thresholds_do_not_recompile() -> None:
    call = Call("prefill")
    live = torch.zeros(2)
    call.plan(skip_softmax_threshold=live, collect_stats=True)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(call.wrapper.run, fullgraph=True, backend=counter, dynamic=True)
    q, k, v = call.inputs
    for rows in range(2, 12):
        more = torch.cat([q, q.new_zeros(rows - 2, 8, 128)])
        assert torch.equal(compiled(more, k, v)[:2], call.run(more, k, v)[:2])
        live.fill_(rows / 12)
    assert counter.frame_count <= 2
    call.plan(skip_softmax_threshold=torch.ones(2), collect_stats=True)
    assert torch.equal(compiled(q, k, v), call.run(q, k, v))
    assert counter.frame_count <= 2


def test_reported_I05_fake_and_meta_tensors(call: Call) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = call.run(return_lse=True)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in call.inputs]
        fake = call.run(*fakes, return_lse=True)
    meta = call.run(*(t.to("meta") for t in call.inputs), return_lse=True)
    for a, b, c in zip(real, fake, meta, strict=True):
        assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)
        assert (a.shape, a.dtype, a.stride()) == (c.shape, c.dtype, c.stride())


def test_reported_I05_the_op_is_what_it_declares(call: Call) -> None:
    out = torch.empty(2, 8, 128, dtype=BF16)
    lse = torch.empty(2, 8)
    arguments = (call.wrapper._handle, call.inputs, out, lse, None, "e")
    torch.library.opcheck(torch.ops.flashskip.run.default, arguments)


def test_reported_I05_export(call: Call) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, *kv: Tensor) -> Tensor:
            return call.wrapper.run(q * 2, *kv)

    exported = torch.export.export(Attention(), tuple(call.inputs)).module()
    expected = call.run(call.inputs[0] * 2, *call.inputs[1:])
    assert torch.equal(exported(*call.inputs), expected)
    call.wrapper = None
    with pytest.raises(RuntimeError, match="the wrapper of this compiled or exported call is gone"):
        exported(*call.inputs)


# ---- appending to a cache ------------------------------------------------------------------------


def append(changed: dict[str, Any]) -> Tensor:
    given: dict[str, Any] = {
        "k": torch.ones(2, 2, 64),
        "v": torch.ones(2, 2, 64),
        "paged_kv_cache": torch.zeros(3, 2, 4, 2, 64),
        "paged_kv_indptr": ints(0, 1, 2),
        "paged_kv_indices": ints(2, 0),
        "paged_kv_last_page_len": ints(4, 1),
        **changed,
    }
    flashskip.append_paged_kv_cache(**given)
    return given["paged_kv_cache"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"paged_kv_indices": ints(-1, 0)}, r"indices\[0\] is -1; expected 0 to 2"),
        ({"paged_kv_indices": ints(3, 0)}, r"indices\[0\] is 3; expected 0 to 2"),
        (
            {"paged_kv_last_page_len": ints(5, 1)},
            r"last_page_len\[0\] is 5; expected 1 to page_size",
        ),
        ({"paged_kv_indptr": ints(0, 1, 3)}, "indptr ends at 3; expected at most"),
        ({"v": torch.ones(2, 2, 32)}, "v is torch.float32 .2, 2, 32. on cpu; expected"),
        ({"v": torch.ones(2, 2, 64, dtype=BF16)}, "v is torch.bfloat16 .2, 2, 64. on cpu"),
        ({"paged_kv_indptr": ints(0), "paged_kv_last_page_len": ints()}, "for 0 requests"),
    ],
    ids=range(7),
)
def test_a_refused_append_writes_nothing(changed: dict[str, Any], message: str) -> None:
    cache = torch.zeros(3, 2, 4, 2, 64)
    with pytest.raises(ValueError, match=message):
        append({**changed, "paged_kv_cache": cache})
    assert not cache.any()
    assert int(append({}).sum()) == 2 * 2 * 2 * 64


def test_check_indices_names_what_is_no_tensor() -> None:
    with pytest.raises(TypeError, match="qo_indptr is list"):
        flashskip.check_indices(qo_indptr=[0, 1])  # type: ignore[arg-type]
    table = {"paged_kv_indptr": ints(0, 1), "paged_kv_indices": ints(0)}
    with pytest.raises(ValueError, match=r"paged_kv_last_page_len has dtype torch.int64"):
        flashskip.check_indices(**table, paged_kv_last_page_len=torch.tensor([1]), page_size=4)
    with pytest.raises(ValueError, match=r"page_size is 0"):
        flashskip.check_indices(**table, paged_kv_last_page_len=ints(1), page_size=0)
