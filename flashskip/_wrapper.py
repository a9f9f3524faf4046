"""What the two wrappers share: the plan's state, buffers with kept addresses, the launch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch

from flashskip import _cpu, _kernels, _op
from flashskip._buffers import Buffers, Needs
from flashskip._checks import check_device, check_inputs, check_tensor
from flashskip._options import check_choice, refusal
from flashskip._outputs import LSE_SCALES, check_lse, check_lse_base, check_written
from flashskip._plan import (
    Plan,
    changes,
    check_option_tensors,
    counters,
    multiprocessors,
    require_kernel,
    signature,
    threshold_fields,
    workspace_fields,
    workspace_needs,
)
from flashskip._scales import UNSCALED, Scales, check_scales, dequantised, scale_fields
from flashskip.geometry import Geometry
from flashskip.variant import Variant


class BatchWrapper:
    """Base of the wrappers: see `BatchPrefillWrapper` and `BatchDecodeWrapper`."""

    _input_names: tuple[str, ...]  # of the tensors that `_run` is given, for messages

    def __init__(
        self, float_workspace_buffer: torch.Tensor | None = None, kv_layout: str = "NHD"
    ) -> None:
        check_choice("kv_layout", kv_layout, ("NHD", "HND"))
        if float_workspace_buffer is not None and not isinstance(
            float_workspace_buffer, torch.Tensor
        ):
            raise TypeError(
                f"float_workspace_buffer is {type(float_workspace_buffer).__name__}; expected a "
                "torch.Tensor or None. None lets the wrapper allocate what it needs."
            )
        self._workspace = float_workspace_buffer
        self._kv_layout = kv_layout
        self._plan: Plan | None = None
        self._buffers = Buffers()
        self._handle = _op.register(self)

    def __reduce_ex__(self, protocol: object) -> str:
        raise TypeError(
            f"{type(self).__name__} is copied or pickled, but holds addresses of this process's "
            "memory; expected a wrapper of one's own. Make a new one and plan it."
        )

    # -- what a caller may look at

    @property
    def geometry(self) -> Geometry:
        """Rows, heads and keys per vote, order and seeds; `.of(qo_len, kv_len)` of a request."""
        return self._planned().geometry

    @property
    def variant(self) -> Variant:
        """The compiled kernel that the plan chose."""
        return self._planned().variant

    @property
    def workspace_bytes(self) -> int:
        """Bytes of `float_workspace_buffer` that the plan needs; independent of lengths."""
        plan = self._planned()
        return _kernels.workspace_bytes(plan.variant, plan.grid)

    @property
    def stats(self) -> torch.Tensor:
        """Skipped and visited decisions since `reset_stats()`: int64 ``[batch_size, heads, 2]``.

        Heads are query heads in prefill and KV heads in decode.

        Raises
        ------
        ValueError
            If the plan was made without `collect_stats`.
        """
        if not self._planned().options.collect_stats:
            raise refusal(
                "stats is read on a plan without counters",
                "collect_stats=True",
                "Plan again with it",
            )
        return self._planned().buffers["stats"]

    def reset_stats(self) -> None:
        """Set what the plan counts, `stats` or `gaps`, to zero in stream order; else raise."""
        (self.gaps if self._planned().options.criterion == "measure" else self.stats).zero_()

    @property
    def gaps(self) -> torch.Tensor:
        """Decisions by the threshold above which they skip: int64 ``[batch_size, heads, 256]``.

        Since `plan` or `reset_stats()`, in bins of 1/8 of log2 from -32 to 0; heads as in `stats`.
        The first bin also holds all below, the last one what no threshold skips. Raises ValueError
        unless the plan was made with ``skip_criterion="measure"``.
        """
        criterion = self._planned().options.skip_criterion
        if criterion != "measure":
            raise refusal(
                f"gaps is read on a plan with skip_criterion={criterion!r}",
                "skip_criterion='measure'",
                "Plan again with it",
            )
        return self._planned().buffers["gaps"]

    # -- plan

    def _planned(self) -> Plan:
        if self._plan is None:
            raise RuntimeError(
                f"{type(self).__name__} has no plan; expected plan() before this. Call plan() once."
            )
        return self._plan

    def _replan(self, arguments: Sequence[object], indices: dict[str, torch.Tensor]) -> bool:
        """Give the plan other index tensors, if nothing else differs; whether that was enough.

        A serving loop plans every step with equal arguments. Then what was decided and checked
        still holds, and so does the launch record but for addresses and the number of page ids.
        Anything that differs, wrong arguments included, is left to a new plan.
        """
        plan = self._plan
        if plan is None or plan.kernel is None or not plan.is_made_from(arguments):
            return False
        if not all(map(torch.is_tensor, indices.values())):
            return False
        now = [signature(t) for t in indices.values()]
        if plan.live_held != [signature(t) for t in plan.live]:
            return False
        if now != plan.indices_held:
            if len(now) != len(plan.indices_held):  # copies are in the record: CPU tensors
                return False
            for name, a, b in zip(indices, now, plan.indices_held, strict=True):
                # A vector of stride 1 may have another length where the batch size is not its own.
                if a[1:] != b[1:] and (name != "indices" or a[2:] != b[2:]):
                    return False
            self._set_indices(indices)
            plan.indices_held = now
        plan.indices = indices
        if plan.counts:
            self.reset_stats()
        return True

    def _adopt(self, plan: Plan, stats_heads: int) -> None:
        """Load the kernel and fill the launch record; a plan that is refused is not adopted."""
        options = plan.options
        plan.live = check_option_tensors(plan)
        if self._workspace is not None:
            plan.live.append(self._workspace)
        self._load(plan)
        needs = {} if plan.kernel is None else self._needs(plan)
        plan.counts = counters(options)
        for name, size in plan.counts.items():
            needs[name] = ((plan.batch_size, stats_heads, size), torch.int64)
        plan.buffers = self._buffers.reserve(needs, plan.device)
        self._plan = plan
        try:
            if plan.counts:
                self.reset_stats()
            if plan.kernel is not None:
                self._fill(plan)
        except BaseException:
            self._plan = None  # its buffers are in use already, but half a plan is never launched
            raise

    def _load(self, plan: Plan) -> None:
        """Load the kernel of a plan that runs on a GPU."""
        if plan.device.type == "cpu":
            return
        require_kernel(plan.variant, plan.device)
        plan.kernel = _kernels.kernel_for(plan.variant)
        plan.kernel.prepare(plan.device.index)
        plan.grid = _kernels.grid_for(plan.variant, multiprocessors(plan.device.index))
        plan.params, plan.params_pointer = _kernels.new_record(plan.variant)

    def _needs(self, plan: Plan) -> Needs:
        """Name the buffers that a launch needs, counters of decisions aside."""
        moved = {n: t for n, t in plan.indices.items() if t.device != plan.device}
        needs: Needs = {name: (tuple(t.shape), t.dtype) for name, t in moved.items()}
        return needs | workspace_needs(plan, self._workspace)

    def _fill(self, plan: Plan) -> None:
        """Write into the launch record what does not change between runs."""
        options = plan.options
        self._set(
            **threshold_fields(options),
            **workspace_fields(plan, self._workspace),
            batch_size=plan.batch_size,
            num_qo_heads=plan.num_qo_heads,
            num_kv_heads=plan.num_kv_heads,
            window_left=options.window_left,
            sm_scale_log2=options.scale(plan.variant.head_dim_qk) * math.log2(math.e),
            soft_cap=(options.logits_soft_cap or 0.0) / options.scale(plan.variant.head_dim_qk),
            sinks=0 if options.sinks is None else options.sinks.data_ptr(),
            **{name: plan.buffers[name].data_ptr() for name in plan.counts},
        )
        plan.live_held = [signature(t) for t in plan.live]
        placed = {n: self._on_device(n, t, plan) for n, t in plan.indices.items()}
        self._set_indices(placed)
        if all(placed[n] is t for n, t in plan.indices.items()):
            plan.indices_held = [signature(t) for t in placed.values()]

    def _set_indices(self, indices: Mapping[str, torch.Tensor]) -> None:
        """Write index tensors that are on the device into the launch record."""
        self._set(**{name: t.data_ptr() for name, t in indices.items()})

    def _set(self, **values: object) -> None:
        """Write fields of the launch record by name."""
        params = self._planned().params
        for name, value in values.items():
            params[name] = value

    def _on_device(self, name: str, t: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Return an index tensor on the device: itself, or a copy at an address that is kept."""
        if t.device == plan.device:
            return t
        # A copy from pinned memory would still read the caller's tensor after plan() has returned.
        source = t.clone() if t.is_pinned() else t
        return plan.buffers[name].copy_(source, non_blocking=True)

    # -- run

    def _run(
        self,
        inputs: list[torch.Tensor],
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        lse_base: str,
        scales: Scales = UNSCALED,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Allocate what was not passed and attend; under torch.compile through a custom op."""
        plan = self._planned()
        check_inputs(self._input_names, inputs, plan.options.sinks)
        if return_lse is not True and return_lse is not False:
            raise TypeError(f"return_lse is {return_lse!r}; expected True or False. Pass a bool.")
        check_lse_base(lse_base, lse is not None or return_lse)
        q, ours = inputs[0], []
        rows = (q.shape[0], plan.num_qo_heads)
        if out is None:
            shape = (*rows, plan.variant.head_dim_vo)
            out = torch.empty(shape, dtype=plan.options.o_dtype, device=q.device)
            ours.append("out")
        if lse is None and return_lse:
            lse = torch.empty(rows, dtype=torch.float32, device=q.device)
            ours.append("lse")
        bound = None
        if plan.options.collect_bound:
            bound = torch.empty(rows, dtype=torch.float32, device=q.device)
        # Tensor subclasses include those that stand for a tensor while something traces.
        if torch.compiler.is_compiling() or type(q) is not torch.Tensor or q.is_meta:
            torch.ops.flashskip.run(self._handle, inputs, out, lse, bound, lse_base, *scales)
        else:
            self._attend(inputs, out, lse, bound, lse_base, scales, ours)
        if not return_lse and bound is None:
            return out
        extra = [t for t in (lse if return_lse else None, bound) if t is not None]
        return (out, *extra)

    def _attend(
        self,
        inputs: Sequence[torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor | None,
        bound: torch.Tensor | None,
        lse_base: str,
        scales: Scales = UNSCALED,
        ours: Collection[str] = (),
    ) -> None:
        """Check the tensors and compute, where the plan runs.

        Neither outputs that are `ours` are checked, nor what was in the run before: the usual call
        only compares.
        """
        plan = self._planned()
        if plan.kernel is None:
            check_device(inputs[0], plan.device)
            ragged = self._as_ragged(inputs, list(plan.indices.values()))
            self._check_out(out, inputs)
            check_lse(lse, out, self._input_names, inputs)
            if plan.variant.kv_dtype == "e4m3":
                check_scales(scales, plan.num_kv_heads, plan.device)
                ragged = dequantised(ragged, scales)
            _cpu.attend_into(plan, ragged, out, lse, bound, LSE_SCALES[lse_base])
            return
        now = [signature(t) for t in inputs]
        if now != plan.inputs_held:
            check_device(inputs[0], plan.device)
            held, plan.inputs_held = plan.inputs_held, []
            plan.out_held = plan.lse_held = None  # they were checked against the inputs before
            self._bind(inputs, changes(held, now))
            plan.inputs_held = now
        out_now = signature(out)
        if out_now != plan.out_held:
            plan.out_held = plan.lse_held = None
            if "out" not in ours:
                self._check_out(out, inputs)
            self._set(o=out_now[0], o_stride_token=out_now[2][0], o_stride_head=out_now[2][1])
            plan.out_held = out_now
        lse_now = (lse_base, None if lse is None else signature(lse))
        if lse_now != plan.lse_held:
            plan.lse_held = None
            if "lse" not in ours:
                check_lse(lse, out, self._input_names, inputs)
            self._set(lse=0 if lse is None else lse.data_ptr(), lse_scale=LSE_SCALES[lse_base])
            plan.lse_held = lse_now
        if bound is not None:
            self._set(bound=bound.data_ptr())
        if plan.variant.kv_dtype == "e4m3":
            check_scales(scales, plan.num_kv_heads, plan.device)
            self._set(**scale_fields(scales))
        self._launch(plan)

    def _check_out(self, out: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
        plan = self._planned()
        shape = (inputs[0].shape[0], plan.num_qo_heads, plan.variant.head_dim_vo)
        check_tensor("out", out, shape, plan.options.o_dtype, plan.device)
        check_written("out", out, zip(self._input_names, inputs, strict=False))

    def _launch(self, plan: Plan) -> None:
        assert plan.kernel is not None
        device, buffers = plan.device.index, self._buffers
        buffers.captured = buffers.captured or torch.cuda.is_current_stream_capturing()
        stream = torch._C._cuda_getCurrentRawStream(device)
        if torch._C._cuda_getDevice() == device:  # torch.cuda.current_device() without its checks
            plan.kernel.launch(plan.grid, plan.params_pointer, stream)
        else:
            with torch.cuda.device(device):
                plan.kernel.launch(plan.grid, plan.params_pointer, stream)

    def _bind(self, inputs: Sequence[torch.Tensor], changes: Sequence[int]) -> None:
        """Check inputs that are new and write what changed into the launch record."""
        raise NotImplementedError

    def _as_ragged(
        self, inputs: Sequence[torch.Tensor], indices: Sequence[torch.Tensor]
    ) -> _cpu.Ragged:
        """Check CPU inputs and return q, k, v, qo_indptr, kv_indptr."""
        raise NotImplementedError
