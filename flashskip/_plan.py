"""What `plan()` decides: where to run, which kernel, and what a launch will pass."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from flashskip._checks import check_vector
from flashskip._jit.kernel import Kernel
from flashskip._options import DTYPE_NAMES, PlanOptions, refusal
from flashskip.errors import UnsupportedDevice, UnsupportedVariant
from flashskip.geometry import Geometry
from flashskip.variant import Variant, alternatives, fault

# The argument behind a field of Variant, for messages.
_ARGUMENTS = {
    "q_dtype": "q_data_type",
    "kv_dtype": "kv_data_type",
    "o_dtype": "o_data_type",
    "kv_path": "the KV layout",
    "window": "window_left",
    "soft_cap": "logits_soft_cap",
    "skip": "skip_criterion",
    "stats": "collect_stats",
    "bound": "collect_bound",
}

# How a tensor compares with the one that was checked before: the same, the same at another
# address (with the alignment that kernels need), or one to check.
SAME, MOVED, NEW = range(3)


@dataclass
class Plan:
    """What `plan()` decided and `run()` launches."""

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
    params_address: int = 0
    reach: dict[str, int] = field(default_factory=dict)  # rows, pages that CPU indices point at
    bound_to: dict[str, tuple[object, ...]] = field(default_factory=dict)  # what params hold
    lse_written: tuple[int, str] | None = None  # address and base in params

    def compare(self, name: str, t: torch.Tensor) -> int:
        """Say how a tensor differs from what the launch record holds under this name.

        Until it is remembered again, the record counts as holding none: so a tensor that is
        refused, or a record half rewritten, never passes for checked.
        """
        known, now = self.bound_to.get(name), _signature(t)
        if known == now:
            return SAME
        self.bound_to.pop(name, None)
        moved = known is not None and known[1:] == now[1:] and t.data_ptr() % 16 == 0
        return MOVED if moved else NEW

    def remember(self, name: str, t: torch.Tensor) -> None:
        """Note that the launch record holds this tensor, which passed all checks."""
        if name not in self.bound_to:
            self.bound_to[name] = _signature(t)

    def forget(self, name: str) -> None:
        """Note that the launch record may hold anything under this name."""
        self.bound_to.pop(name, None)


def _signature(t: torch.Tensor) -> tuple[object, ...]:
    """Return what a launch record depends on of a tensor, its address first."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.device


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
        # In decode the causal limit is that of several new tokens among themselves.
        multi_token = variant.op == "decode" and name == "causal"
        argument = "q_len_per_req > 1" if multi_token else _ARGUMENTS.get(name, name)
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


def check_live_tensors(plan: Plan) -> None:
    """Check the option tensors, which kernels read by address."""
    options, device = plan.options, plan.device
    vectors = (
        ("skip_softmax_threshold", options.skip_softmax_threshold, plan.batch_size),
        (
            "skip_softmax_threshold_scale_factor",
            options.skip_softmax_threshold_scale_factor,
            plan.batch_size,
        ),
        ("sinks", options.sinks, plan.num_qo_heads),
    )
    for name, t, length in vectors:
        if t is not None and (name == "sinks" or not isinstance(t, (int, float))):
            check_vector(name, t, length, dtype=torch.float32, device=device)
    if options.threshold_kv_len is not None:
        check_vector("threshold_kv_len", options.threshold_kv_len, plan.batch_size, device=device)


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
