"""What `plan()` decides: where to run, which kernel, and what a launch will pass."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import is_
from typing import Any

import torch

from flashskip import _kernels, reference
from flashskip._buffers import Needs
from flashskip._checks import BATCH_SIZE, check_vector, check_workspace
from flashskip._jit.kernel import Kernel
from flashskip._options import DTYPE_NAMES, LIVE, PlanOptions, refusal
from flashskip.errors import UnsupportedDevice, UnsupportedVariant
from flashskip.geometry import Geometry
from flashskip.variant import Variant, alternatives, fault

# The argument behind a field of Variant, for messages.
_ARGUMENTS = {
    "q_dtype": "q_data_type",
    "kv_dtype": "kv_data_type",
    "o_dtype": "o_data_type",
    "kv_path": "the KV layout",
    "rows": "num_qo_heads / num_kv_heads * q_len_per_req",
    "window": "window_left",
    "soft_cap": "logits_soft_cap",
    "skip": "skip_criterion",
    "stats": "collect_stats",
    "bound": "collect_bound",
}
# The same in decode, where the causal limit is that of several new tokens among themselves.
_DECODE_ARGUMENTS = {
    "causal": "q_len_per_req > 1",
    "head_dim_qk": "head_dim",
    "head_dim_vo": "head_dim",
}

OPTION_TENSORS = {  # options that may be tensors, and their element types
    "skip_softmax_threshold": torch.float32,
    "skip_softmax_threshold_scale_factor": torch.float32,
    "threshold_kv_len": torch.int32,
    "sinks": torch.float32,
}

# How a tensor compares with the one that was checked before: the same, the same at another
# address (with the alignment that kernels need), or one to check.
SAME, MOVED, NEW = range(3)

# All of a tensor that a launch record depends on, its address first.
Signature = tuple[int, torch.Size, tuple[int, ...], torch.dtype, torch.device]


def signature(t: torch.Tensor) -> Signature:
    """Return what must be equal for a tensor to pass as checked and written already."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.device


def changes(known: Sequence[Signature], now: Sequence[Signature]) -> list[int]:
    """Say how each tensor differs from the one that the launch record holds in its place."""
    if len(known) != len(now):
        return [NEW] * len(now)
    return [_change(a, b) for a, b in zip(known, now, strict=True)]


def _change(known: Signature, now: Signature) -> int:
    if now == known:
        return SAME
    return MOVED if now[1:] == known[1:] and now[0] % 16 == 0 else NEW


@dataclass
class Plan:
    """What `plan()` decided and `run()` launches."""

    arguments: Sequence[object]  # all that it was made from, besides index tensors
    options: PlanOptions
    variant: Variant
    geometry: Geometry
    device: torch.device
    batch_size: int
    num_qo_heads: int
    num_kv_heads: int
    indices: dict[str, torch.Tensor]  # as given: the CPU path reads them live
    page_size: int = 0  # decode only, as the next
    q_len_per_req: int = 1
    kernel: Kernel | None = None  # None on a machine without a GPU
    grid: int = 0
    params: Any = None  # one record of the variant's parameter table
    params_pointer: Any = None  # to it, for launches
    live: list[torch.Tensor] = field(default_factory=list)  # of options, and the workspace
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # the wrapper's, as it needs
    counts: dict[str, int] = field(default_factory=dict)  # buffers that are counters
    reach: dict[str, int] = field(default_factory=dict)  # rows, pages that CPU indices point at

    # What `params` holds. A tensor is compared with it and checked only where it differs. While
    # `params` is being written, the part in question holds none: so a tensor that was refused, or a
    # record half written, never passes for checked.
    live_held: list[Signature] = field(default_factory=list)  # `live`
    indices_held: list[Signature] = field(default_factory=list)  # those in place on the device
    inputs_held: list[Signature] = field(default_factory=list)
    out_held: Signature | None = None
    lse_held: tuple[str, Signature | None] | None = None  # base, LSE

    def is_made_from(self, arguments: Sequence[object]) -> bool:
        """Whether a plan of these arguments would be this one: equal in type and value.

        Tensors must be the same objects, which this plan keeps alive; what may have changed about
        one is in its signature.
        """
        if len(self.arguments) != len(arguments):
            return False
        if all(map(is_, self.arguments, arguments)):  # the usual case, and cheap
            return True
        return all(
            a is b or (type(a) is type(b) and not isinstance(a, torch.Tensor) and a == b)
            for a, b in zip(self.arguments, arguments, strict=True)
        )


def require_kernel(variant: Variant, device: torch.device) -> None:
    """Raise unless a kernel for this Variant exists and this GPU can run it.

    Raises
    ------
    UnsupportedDevice
        The GPU is not of compute capability 9.0.
    UnsupportedVariant
        Names the argument, what was found and what is supported.
    """
    capability = _capability(device.index)
    if capability != (9, 0):
        raise UnsupportedDevice(
            f"{torch.cuda.get_device_name(device)} has compute capability "
            f"{capability[0]}.{capability[1]}; "
            "expected 9.0 (H100, H200). CPU tensors run the reference on any machine."
        )
    name = fault(variant)
    if name is not None:
        arguments = _ARGUMENTS | (_DECODE_ARGUMENTS if variant.op == "decode" else {})
        argument = arguments.get(name, name)
        choices = ", ".join(map(str, alternatives(variant, name)))
        raise UnsupportedVariant(
            f"{argument} asks for {name}={getattr(variant, name)} in {variant.op}, which no "
            f"kernel for {variant.arch} has; supported: {choices}. CPU tensors run the reference."
        )


@cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def multiprocessors(device: int) -> int:
    """Return the SMs of a GPU: the CTAs of a launch."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def check_option_tensors(plan: Plan) -> list[torch.Tensor]:
    """Return the options that kernels read by address; raise unless they can."""
    found = []
    for name, dtype in OPTION_TENSORS.items():
        t = getattr(plan.options, name)
        if t is None or (name in LIVE and isinstance(t, (int, float))):
            continue
        length, of = plan.batch_size, BATCH_SIZE
        if name == "sinks":
            length, of = plan.num_qo_heads, "num_qo_heads"
        check_vector(name, t, length, dtype=dtype, device=plan.device, length_is=of)
        found.append(t)
    return found


def threshold_fields(options: PlanOptions) -> dict[str, object]:
    """Return the fields of a launch record that say how much may be skipped."""
    threshold, lengths = options.threshold, options.threshold_kv_len
    live = isinstance(threshold, torch.Tensor)
    return {
        "threshold": threshold.data_ptr() if live else 0,  # type: ignore[union-attr]
        "threshold_value": 0.0 if live or threshold is None else threshold,
        "threshold_kv_len": 0 if lengths is None else lengths.data_ptr(),
        "length_exponent": options.length_exponent,
        "threshold_is_factor": options.threshold_is_factor,
        "overflow_is_dense": options.overflow == "dense",
        "allowance": reference.allowance(options.skip_budget or 0.0),
    }


def workspace_needs(plan: Plan, workspace: torch.Tensor | None) -> Needs:
    """Name the buffer of partial results, where a plan has some and the caller passed no memory.

    Raises ValueError if what was passed is too small.
    """
    size = _kernels.workspace_bytes(plan.variant, plan.grid)
    if workspace is not None:
        check_workspace(workspace, size)
    return {"partial": ((size,), torch.uint8)} if size and workspace is None else {}


def workspace_fields(plan: Plan, workspace: torch.Tensor | None) -> dict[str, object]:
    """Return the field of a launch record that says where partial results go."""
    partial = plan.buffers.get("partial", workspace)
    return {"partial": 0 if partial is None else partial.data_ptr()}


def warn_of_overflow(options: PlanOptions, kv_len: torch.Tensor) -> None:
    """Say once that a factor leaves short requests dense; `kv_len` is on the CPU."""
    factor, lengths = options.skip_softmax_threshold_scale_factor, options.threshold_kv_len
    if lengths is None:
        lengths = kv_len
    if not isinstance(factor, (int, float)) or options.overflow != "dense":
        return
    if lengths.device.type == "cpu":
        divisors = lengths.clamp(min=1).double() ** options.length_exponent
        short = kv_len[(divisors <= factor) & (kv_len > 0)]
        if short.numel():
            _warn_of_overflow(factor, int(short[0]))


_warned: set[str] = set()


def _warn_of_overflow(factor: float, kv_len: int) -> None:
    if "overflow" not in _warned:
        _warned.add("overflow")
        logging.getLogger("flashskip").warning(
            "skip_softmax_threshold_scale_factor %g gives a threshold of 1 or more for a request "
            "of %d keys: such requests run dense (overflow='dense'). Not said again.",
            factor,
            kv_len,
        )


def counters(options: PlanOptions) -> dict[str, int]:
    """Name what a plan counts on the device, and the number of counters of a request's head."""
    if options.criterion == "measure":
        return {"gaps": reference.GAP_BINS}
    return {"stats": 2} if options.collect_stats else {}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of an element type in a Variant."""
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def target_device(
    workspace: torch.Tensor | None, index_tensors: dict[str, torch.Tensor]
) -> torch.device:
    """Where a plan runs: with the workspace or CUDA index tensors, or on the current GPU."""
    devices = {name: t.device for name, t in index_tensors.items()}
    if workspace is not None:
        devices["float_workspace_buffer"] = workspace.device
    for name, d in devices.items():
        if d.type not in ("cpu", "cuda"):
            raise refusal(f"{name} is on {d}", "a CPU or CUDA tensor", "Move it to one of these")
    cuda = {name: d for name, d in devices.items() if d.type == "cuda"}
    if len(set(cuda.values())) > 1:
        raise ValueError(
            f"index tensors and workspace are on several GPUs: {cuda}; expected one. Move them "
            f"together."
        )
    if cuda:
        if workspace is not None and workspace.device.type == "cpu":
            raise refusal(
                f"float_workspace_buffer is on cpu and {next(iter(cuda))} on a GPU",
                "one device",
                "Move the workspace to the GPU",
            )
        return next(iter(cuda.values()))
    if workspace is not None or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
