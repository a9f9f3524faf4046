"""plan() and run() again: the launch record holds what a new wrapper's would, and nothing older.

The code that fills records runs here on CPU tensors, with a launch that keeps a copy of the record
and tensor maps that spell out what they were made from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flashskip
from flashskip import _kernels, _maps
from flashskip._plan import Plan
from flashskip._wrapper import BatchWrapper

BF16, FP16 = torch.bfloat16, torch.float16
PHASES = ("prefill", "decode")
BUFFERS = ("merge_counter", "partial", "work_counter", "stats")  # differ between wrappers


class Recording(BatchWrapper):
    """A wrapper that launches nothing."""

    fills = 0
    launched: dict[str, Any]

    def _load(self, plan: Plan) -> None:
        plan.kernel, plan.grid = object(), 132  # type: ignore[assignment]
        plan.params, plan.params_pointer = _kernels.new_record(plan.variant)

    def _fill(self, plan: Plan) -> None:
        self.fills += 1
        super()._fill(plan)

    def _launch(self, plan: Plan) -> None:
        names = plan.params.dtype.names
        self.launched = {n: plan.params[n].tolist() for n in names if n not in BUFFERS}
        self.launched["symbol"] = plan.variant.symbol


class Prefill(Recording, flashskip.BatchPrefillWrapper):
    pass


class Decode(Recording, flashskip.BatchDecodeWrapper):
    pass


@pytest.fixture(autouse=True)
def spelled_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    def tensor_map(*arguments: object) -> np.ndarray[Any, Any]:
        digest = hashlib.sha256(repr(arguments).encode()).digest()
        return np.frombuffer(digest * 4, np.uint8)

    monkeypatch.setattr(_maps, "tensor_map", tensor_map)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Call:
    """The arguments of plan() and run(), which a test changes by name."""

    def __init__(self, phase: str, **changes: Any) -> None:
        self.plan: dict[str, Any] = {
            "num_qo_heads": 4,
            "num_kv_heads": 2,
            "q_data_type": BF16,
            "skip_softmax_threshold": 0.25,
        }
        q, cache = torch.zeros(2, 4, 64, dtype=BF16), torch.zeros(9, 2, 16, 2, 64, dtype=BF16)
        self.run: dict[str, Any] = {"q": q, "out": torch.zeros_like(q)}
        if phase == "prefill":
            self.plan |= {"qo_indptr": ints(0, 1, 2), "kv_indptr": ints(0, 5, 9), "head_dim_qk": 64}
            self.run |= {"k": cache[:, 0, 0], "v": cache[:, 1, 0]}
        else:
            self.plan |= {"indptr": ints(0, 1, 3), "indices": ints(4, 2, 0), "head_dim": 64}
            self.plan |= {"last_page_len": ints(7, 1), "page_size": 16}
            self.run |= {"paged_kv_cache": cache}
        for name, value in changes.items():
            (self.run if name in (*self.run, "lse", "lse_base") else self.plan)[name] = value

    def of(self, wrapper: Any) -> dict[str, Any]:
        """Plan and run; return what was launched."""
        wrapper.plan(**self.plan)
        wrapper.run(**self.run)
        return wrapper.launched


def new(phase: str) -> Any:
    return Prefill(torch.empty(1 << 22)) if phase == "prefill" else Decode(torch.empty(1 << 20))


def fresh(phase: str, call: Call) -> dict[str, Any]:
    return call.of(new(phase))


# ---- what needs no new plan ----------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
def test_equal_arguments_fill_one_record_once(phase: str) -> None:
    wrapper, base = new(phase), Call(phase)
    expected = base.of(wrapper)
    plan = wrapper._planned()
    equal = Call(phase)
    equal.run = base.run
    equal.plan |= {"skip_softmax_threshold": float("0.25"), "num_qo_heads": int("4")}
    for call in (base, equal, base):
        launched = call.of(wrapper)
        assert launched == fresh(phase, call)
    assert launched == expected
    assert wrapper._planned() is plan
    assert wrapper.fills == 1


def test_another_rule_of_seeds_is_another_plan() -> None:
    """The study's switch is no argument of plan(), and equal arguments do not hide its change."""
    wrapper, call = new("prefill"), Call("prefill")
    for seeded in (True, False, False):
        wrapper._seeded = seeded
        launched = call.of(wrapper)
        assert wrapper.geometry.seed_short_queries is seeded
        assert launched["short_qo_len"] == (1024 if seeded else 0)
    assert wrapper.fills == 2


def test_longer_page_tables_are_bound_without_a_new_plan() -> None:
    wrapper = new("decode")
    for ids in (ints(4, 2, 0), ints(4, 2, 0, 7, 7, 7), ints(1, 2, 3)):
        call = Call("decode", indices=ids, indptr=ints(0, 2, 3))
        launched = call.of(wrapper)
        assert launched == fresh("decode", call)
        assert launched["num_indices"] == len(ids)
    assert wrapper.fills == 1


@pytest.mark.parametrize("phase", PHASES)
def test_counters_are_zero_after_each_plan(phase: str) -> None:
    wrapper, call = new(phase), Call(phase, collect_stats=True)
    for _ in range(3):
        call.of(wrapper)
        assert not wrapper.stats.any()
        wrapper.stats.fill_(5)
    assert wrapper.fills == 1


# ---- what changes the record ---------------------------------------------------------------------

BOTH: list[dict[str, Any]] = [
    {"skip_softmax_threshold": None},
    {"skip_softmax_threshold": 0.5},
    {"skip_softmax_threshold": 0.0},
    {"skip_softmax_threshold": 1},
    {"skip_softmax_threshold": torch.zeros(2)},
    {"skip_softmax_threshold": None, "skip_softmax_threshold_scale_factor": 0.25},
    {"skip_softmax_threshold": None, "skip_softmax_threshold_scale_factor": torch.zeros(2)},
    {
        "skip_softmax_threshold": None,
        "skip_softmax_threshold_scale_factor": 3.0,
        "threshold_kv_len": ints(8, 9),
        "length_exponent": 0.5,
        "overflow": "clamp",
    },
    {"sinks": torch.zeros(4)},
    {"sm_scale": 0.5},
    {"window_left": 3},
    {"logits_soft_cap": 2.0},
    {"o_data_type": FP16, "out": torch.zeros(2, 4, 64, dtype=FP16)},
    {"collect_stats": True},
    {"num_qo_heads": 2, "q": torch.zeros(2, 2, 64).to(BF16), "out": torch.ones(2, 2, 64).to(BF16)},
    {"q": torch.ones(2, 8, 64, dtype=BF16)[:, ::2]},
    {"out": torch.ones(2, 4, 64, dtype=BF16)},
    {"lse": torch.zeros(2, 4), "lse_base": "e"},
    {"lse": torch.zeros(2, 4)},
]
PREFILL: list[dict[str, Any]] = [
    {"causal": True},
    {"order": "ascending"},
    {"vote_kv": 128},
    {"qo_indptr": ints(0, 2, 2)},
    {"kv_indptr": ints(0, 1, 9)},
    {"qo_indptr": ints(0, 2), "kv_indptr": ints(0, 9)},
    {"k": torch.ones(9, 2, 64, dtype=BF16)},
    {"v": torch.ones(9, 4, 64, dtype=BF16)[:, ::2]},
    {"k": torch.ones(30, 2, 64, dtype=BF16), "v": torch.ones(30, 2, 64, dtype=BF16)},
]
_PAIR = tuple(torch.ones(9, 16, 2, 64, dtype=BF16) for _ in range(2))
DECODE: list[dict[str, Any]] = [
    {"vote_kv": 64},
    {"indptr": ints(0, 2, 3)},
    {"last_page_len": ints(1, 1)},
    {"page_size": 5, "paged_kv_cache": torch.zeros(9, 2, 5, 2, 64, dtype=BF16),
     "last_page_len": ints(5, 1)},
    {"q_len_per_req": 2, "q": torch.ones(4, 4, 64).to(BF16), "out": torch.zeros(4, 4, 64).to(BF16)},
    {"indptr": ints(0, 3), "last_page_len": ints(4),
     "q": torch.ones(1, 4, 64).to(BF16), "out": torch.zeros(1, 4, 64).to(BF16)},
    {"paged_kv_cache": _PAIR},
    {"paged_kv_cache": _PAIR[::-1]},
    {"paged_kv_cache": torch.ones(40, 2, 16, 2, 64, dtype=BF16)},
]  # fmt: skip
CHANGES = [("prefill", c) for c in BOTH + PREFILL] + [("decode", c) for c in BOTH + DECODE]


@pytest.mark.parametrize(("phase", "changed"), CHANGES, ids=lambda x: str(x)[:40])
def test_nothing_of_an_earlier_plan_or_run_is_launched(phase: str, changed: dict[str, Any]) -> None:
    wrapper, base, other = new(phase), Call(phase), Call(phase, **changed)
    first = base.of(wrapper)
    assert other.of(wrapper) == fresh(phase, other) != first
    assert base.of(wrapper) == first


def test_a_tensor_option_is_replaced_by_an_equal_one() -> None:
    for name, n in (("sinks", 4), ("skip_softmax_threshold", 2)):
        wrapper = new("decode")
        given = [torch.zeros(n), torch.zeros(n)]
        fields = []
        for t in (*given, given[0]):
            launched = Call("decode", **{name: t}).of(wrapper)
            fields.append(launched["sinks" if name == "sinks" else "threshold"])
        assert fields == [given[0].data_ptr(), given[1].data_ptr(), given[0].data_ptr()]


# ---- what is refused -----------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"num_qo_heads": 4.0}, TypeError),
    ({"num_kv_heads": True}, TypeError),
    ({"collect_stats": 0}, TypeError),
    ({"window_left": -1.0}, ValueError),
    ({"skip_softmax_threshold": "0.25"}, TypeError),
    ({"skip_softmax_threshold": torch.zeros(3)}, ValueError),
    ({"sinks": torch.zeros(4, dtype=BF16)}, ValueError),
    ({"sinks": 0.0}, TypeError),
    ({"q_data_type": None}, TypeError),
]
BAD_VECTORS: list[tuple[Any, type[Exception]]] = [
    (torch.zeros(3, dtype=torch.int64), ValueError),
    (torch.zeros(3), ValueError),
    (torch.zeros(3, 1, dtype=torch.int32), ValueError),
    (torch.zeros(6, dtype=torch.int32)[::2], ValueError),
    (torch.zeros(3, dtype=torch.int32, device="meta"), ValueError),
    ([0, 1, 2], TypeError),
    (None, TypeError),
]
NAMES = {"prefill": ("qo_indptr", "kv_indptr"), "decode": ("indptr", "indices", "last_page_len")}
REFUSED = [(phase, c, e) for phase in PHASES for c, e in WRONG] + [
    (phase, {name: bad}, error)
    for phase in PHASES
    for name in NAMES[phase]
    for bad, error in BAD_VECTORS
]


@pytest.mark.parametrize(("phase", "changed", "error"), REFUSED, ids=lambda x: str(x)[:40])
def test_what_a_first_plan_refuses_a_second_refuses_too(
    phase: str, changed: dict[str, Any], error: type[Exception]
) -> None:
    base, bad = Call(phase, sm_scale=1.0), Call(phase, sm_scale=1.0, **changed)
    with pytest.raises(error) as expected:
        new(phase).plan(**bad.plan)
    wrapper = new(phase)
    first = base.of(wrapper)
    with pytest.raises(error) as found:
        wrapper.plan(**bad.plan)
    assert str(found.value) == str(expected.value)
    wrapper.run(**base.run)  # the earlier plan, as it was
    assert wrapper.launched == first
    assert base.of(wrapper) == first


@pytest.mark.parametrize("name", ["sinks", "skip_softmax_threshold"])
@pytest.mark.parametrize(
    "change", [lambda t: t.resize_(7), lambda t: t.set_(torch.zeros(9)[1:])], ids=["size", "memory"]
)
def test_a_tensor_option_that_was_resized_is_checked_again(
    name: str, change: Callable[[Tensor], Tensor]
) -> None:
    t = torch.zeros(4 if name == "sinks" else 2)
    wrapper, call = new("decode"), Call("decode", **{name: t})
    call.of(wrapper)
    with torch.no_grad():
        change(t)
    with pytest.raises(ValueError, match=f"{name} has [78] entries"):
        call.of(wrapper)


def test_a_workspace_that_was_shrunk_is_noticed() -> None:
    space = torch.empty(1 << 20)
    wrapper, call = Decode(space), Call("decode")
    call.of(wrapper)
    space.resize_(8)
    with pytest.raises(ValueError, match="float_workspace_buffer has 32 bytes"):
        call.of(wrapper)


@pytest.mark.parametrize("phase", PHASES)
def test_half_a_plan_is_never_launched(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper, call = new(phase), Call(phase)
    call.of(wrapper)

    def fail(**_: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(wrapper, "_set", fail)
        with pytest.raises(RuntimeError, match="broken"):
            wrapper.plan(**{**call.plan, "sm_scale": 0.5})
    with pytest.raises(RuntimeError, match="has no plan"):
        wrapper.run(**call.run)
    assert call.of(wrapper) == fresh(phase, call)


@pytest.mark.parametrize("phase", PHASES)
def test_a_run_that_is_refused_leaves_nothing_checked(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper, call = new(phase), Call(phase)
    expected = call.of(wrapper)
    q = call.run["q"]
    lse = torch.zeros(2, 4)
    for bad in ({"q": q.half()}, {"q": q[:, :2]}, {"out": q}, {"lse": lse.double()}):
        for _ in range(2):
            with pytest.raises(ValueError, match="expected"):
                wrapper.run(**{**call.run, **bad})
        wrapper.run(**call.run)
        assert wrapper.launched == expected

    def broken(*_: object) -> dict[str, object]:
        raise RuntimeError("no map")

    moved = {**call.run, "q": q.clone()}
    if phase == "decode":
        moved["paged_kv_cache"] = call.run["paged_kv_cache"].clone()
    with monkeypatch.context() as patch:
        patch.setattr(_maps, f"{phase}_maps", broken)
        for inputs in (moved, call.run):  # what the record holds is unknown, so it is filled anew
            with pytest.raises(RuntimeError, match="no map"):
                wrapper.run(**inputs)
    wrapper.run(**call.run)
    assert wrapper.launched == expected


def test_out_is_compared_with_inputs_that_moved() -> None:
    wrapper, call = new("decode"), Call("decode")
    call.of(wrapper)
    with pytest.raises(ValueError, match="out shares memory with q"):
        wrapper.run(**{**call.run, "q": call.run["out"]})


def test_outputs_are_checked_against_the_rows_of_each_run() -> None:
    wrapper, call = new("prefill"), Call("prefill", lse=torch.zeros(2, 4))
    expected = call.of(wrapper)
    q, out, lse = (
        torch.zeros(3, *t.shape[1:], dtype=t.dtype)
        for t in (call.run["q"], call.run["out"], call.run["lse"])
    )
    for _ in range(2):
        with pytest.raises(ValueError, match=r"out has shape .2, 4, 64.; expected .3, 4, 64."):
            wrapper.run(**{**call.run, "q": q})
        with pytest.raises(ValueError, match=r"lse is .*2, 4.* expected .*3, 4."):
            wrapper.run(**{**call.run, "q": q, "out": out})
    wrapper.run(**{**call.run, "q": q, "out": out, "lse": lse})
    wrapper.run(**call.run)
    assert wrapper.launched == expected


# ---- buffers -------------------------------------------------------------------------------------


def test_a_plan_refused_after_a_capture_overwrites_nothing() -> None:
    wrapper = new("decode")
    device = torch.device("cpu")
    shape = {"indptr": (3,), "indices": (3,), "last_page_len": (2,)}
    needs = {name: (s, torch.int32) for name, s in shape.items()}
    held = wrapper._buffers.reserve(needs, device)
    for t in held.values():
        t.fill_(7)
    wrapper._buffers.captured = True
    assert (
        wrapper._buffers.reserve(needs, device)["indices"].data_ptr() == held["indices"].data_ptr()
    )
    needs["indices"] = ((4,), torch.int32)
    message = "needs 4 elements for indices after a run was captured in a graph; expected at most 3"
    with pytest.raises(ValueError, match=message):
        wrapper._buffers.reserve(needs, device)
    assert all((t == 7).all() for t in held.values())
