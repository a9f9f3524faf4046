"""What the two wrappers share: the plan's state, buffers with kept addresses, the launch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flashskip import _cpu, _kernels, _op
from flashskip._checks import check_inputs, check_tensor
from flashskip._options import check_choice, refusal
from flashskip._outputs import check_lse, check_no_overlap, check_no_self_overlap
from flashskip._plan import SAME, Plan, check_live_tensors, multiprocessors, require_kernel
from flashskip.errors import UnsupportedVariant
from flashskip.geometry import Geometry
from flashskip.variant import Variant

LSE_SCALES = {"log2": 1.0, "e": math.log(2.0)}


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
        self._buffers: dict[str, torch.Tensor] = {}
        self._captured = False
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
        return self._buffers["stats"]

    def reset_stats(self) -> None:
        """Set all counters to zero, in stream order."""
        self.stats.zero_()

    @property
    def gaps(self) -> torch.Tensor:
        """Histogram of the thresholds above which decisions are skipped, when measuring."""
        if self._planned().options.skip_criterion != "measure":
            raise refusal(
                f"gaps is read on a plan with "
                f"skip_criterion={self._planned().options.skip_criterion!r}",
                "skip_criterion='measure'",
                "Plan again with it",
            )
        return self._buffers["gaps"]

    # -- plan

    def _planned(self) -> Plan:
        if self._plan is None:
            raise RuntimeError(
                f"{type(self).__name__} has no plan; expected plan() before this. Call plan() once."
            )
        return self._plan

    def _adopt(self, plan: Plan, stats_heads: int) -> None:
        """Load the kernel and fill the launch record; a plan that is refused is not adopted."""
        options = plan.options
        check_live_tensors(plan)
        if plan.device.type == "cpu" and options.skip_criterion != "threshold":
            raise UnsupportedVariant(
                f"skip_criterion is {options.skip_criterion!r} on the CPU; supported: "
                f"'threshold'. "
                "Pass a threshold or a scale factor."
            )
        if plan.device.type == "cuda":
            require_kernel(plan.variant, plan.device)
            plan.kernel = _kernels.kernel_for(plan.variant)
            plan.kernel.prepare(plan.device.index)
            plan.grid = multiprocessors(plan.device.index)
            plan.params = _kernels.params_for(plan.variant).new()
            plan.params_address = plan.params.ctypes.data
        self._plan = plan
        try:
            if options.collect_stats:
                shape = (plan.batch_size, stats_heads, 2)
                self._keep("stats", shape, torch.int64, plan.device).zero_()
            if plan.kernel is not None:
                self._fill(plan)
        except BaseException:
            self._plan = None  # its buffers are in use already, but half a plan is never launched
            raise

    def _fill(self, plan: Plan) -> None:
        """Write into the launch record what does not change between runs."""
        options = plan.options
        self._fill_threshold(plan)
        self._set(
            batch_size=plan.batch_size,
            num_qo_heads=plan.num_qo_heads,
            num_kv_heads=plan.num_kv_heads,
            sm_scale_log2=options.scale(plan.variant.head_dim_qk) * math.log2(math.e),
            stats=self._buffers["stats"].data_ptr() if options.collect_stats else 0,
        )

    def _fill_threshold(self, plan: Plan) -> None:
        options, threshold = plan.options, plan.options.threshold
        live = isinstance(threshold, torch.Tensor)
        lengths = options.threshold_kv_len
        self._set(
            threshold=threshold.data_ptr() if live else 0,  # type: ignore[union-attr]
            threshold_value=0.0 if live or threshold is None else threshold,
            threshold_kv_len=0 if lengths is None else lengths.data_ptr(),
            length_exponent=options.length_exponent,
            threshold_is_factor=options.threshold_is_factor,
            overflow_is_dense=options.overflow == "dense",
        )

    def _set(self, **values: object) -> None:
        """Write fields of the launch record by name."""
        params = self._planned().params
        for name, value in values.items():
            params[name] = value

    def _keep(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a buffer whose address outlives plans, for graphs that hold it; 0 at first."""
        elements = math.prod(shape)
        storage = self._buffers.get(f"{name}.storage")
        kind = (dtype, device)
        if storage is None or storage.numel() < elements or (storage.dtype, storage.device) != kind:
            if self._captured:
                raise refusal(
                    f"the plan needs {elements} elements for {name} after a run was captured in a "
                    f"graph",
                    f"at most {0 if storage is None else storage.numel()}, as the graph holds the "
                    f"old buffer",
                    "Make the first plan with the largest batch, or use a new wrapper",
                )
            with torch.inference_mode(False):  # or no code outside of it could reset the buffer
                storage = torch.zeros(max(elements, 1), dtype=dtype, device=device)
            self._buffers[f"{name}.storage"] = storage
        self._buffers[name] = storage[:elements].view(shape)
        return self._buffers[name]

    def _on_device(self, name: str, t: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return an index tensor on the device: itself, or a copy at an address that is kept."""
        if t.device == device:
            return t
        buffer = self._keep(name, tuple(t.shape), t.dtype, device)
        # A copy from pinned memory would still read the caller's tensor after plan() has returned.
        buffer.copy_(t.clone() if t.is_pinned() else t, non_blocking=True)
        return buffer

    # -- run

    def _run(
        self,
        inputs: list[torch.Tensor],
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        lse_base: str,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Allocate what was not passed and attend; under torch.compile through a custom op."""
        plan = self._planned()
        check_inputs(self._input_names, inputs, plan.options.sinks)
        if return_lse is not True and return_lse is not False:
            raise TypeError(f"return_lse is {return_lse!r}; expected True or False. Pass a bool.")
        q = inputs[0]
        shape = (q.shape[0], plan.num_qo_heads, plan.variant.head_dim_vo)
        allocates = out is None
        if out is None:
            out = torch.empty(shape, dtype=plan.options.o_dtype, device=q.device)
        if lse is None and return_lse:
            lse = torch.empty(shape[:2], dtype=torch.float32, device=q.device)
        bound = None
        if plan.options.collect_bound:
            bound = torch.empty(shape[:2], dtype=torch.float32, device=q.device)
        # Tensor subclasses include those that stand for a tensor while something traces.
        if torch.compiler.is_compiling() or type(q) is not torch.Tensor or q.is_meta:
            torch.ops.flashskip.run(self._handle, inputs, out, lse, bound, lse_base)
        else:
            self._attend(inputs, out, lse, bound, lse_base, out_is_ours=allocates)
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
        *,
        out_is_ours: bool = False,
    ) -> None:
        """Check the tensors and compute, where the plan runs.

        What was checked in the run before is not checked again: the usual call only compares.
        """
        plan = self._planned()
        if lse_base not in LSE_SCALES:
            check_choice("lse_base", lse_base, tuple(LSE_SCALES))
        if inputs[0].device != plan.device:
            raise refusal(
                f"q is on {inputs[0].device}",
                f"{plan.device}, where the plan runs",
                "Move it, or make the wrapper with a workspace where q is and plan again",
            )
        if lse is not None:
            check_lse(lse, (inputs[0].shape[0], plan.num_qo_heads), plan.device)
        if plan.kernel is None:
            self._check_out(out, inputs)
            self._attend_on_cpu(inputs, out, lse, bound, LSE_SCALES[lse_base])
            return
        inputs_moved = self._bind(inputs)
        change = plan.compare("out", out)
        if not out_is_ours and (inputs_moved or change != SAME):
            plan.forget("out")
            self._check_out(out, inputs)
        if change != SAME:
            self._set(o=out.data_ptr(), o_stride_token=out.stride(0), o_stride_head=out.stride(1))
        plan.remember("out", out)
        lse_at = 0 if lse is None else lse.data_ptr()
        if plan.lse_written != (lse_at, lse_base):
            self._set(lse=lse_at, lse_scale=LSE_SCALES[lse_base])
            plan.lse_written = (lse_at, lse_base)
        self._launch()

    def _check_out(self, out: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
        plan = self._planned()
        shape = (inputs[0].shape[0], plan.num_qo_heads, plan.variant.head_dim_vo)
        check_tensor("out", out, shape, plan.options.o_dtype, plan.device)
        check_no_self_overlap("out", out)
        for name, t in zip(self._input_names, inputs, strict=False):
            check_no_overlap("out", out, name, t)

    def _launch(self) -> None:
        plan = self._planned()
        assert plan.kernel is not None
        device = plan.device.index
        self._captured = self._captured or torch.cuda.is_current_stream_capturing()
        stream = torch._C._cuda_getCurrentRawStream(device)
        if torch._C._cuda_getDevice() == device:  # torch.cuda.current_device() without its checks
            plan.kernel.launch(plan.grid, plan.params_address, stream)
        else:
            with torch.cuda.device(device):
                plan.kernel.launch(plan.grid, plan.params_address, stream)

    def _bind(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Check inputs that are new and write them into the launch record; whether any moved."""
        raise NotImplementedError

    def _attend_on_cpu(
        self,
        inputs: Sequence[torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor | None,
        bound: torch.Tensor | None,
        lse_scale: float,
    ) -> None:
        """Run the reference on CPU tensors; rows past the last request are not written."""
        plan = self._planned()
        ragged = self._as_ragged(inputs, list(plan.indices.values()))
        result = _cpu.attend(plan, *ragged)
        rows = int(ragged[3][-1])
        out[:rows] = result.out[:rows].to(out.dtype)
        if lse is not None:
            lse[:rows] = result.lse[:rows] * lse_scale
        if bound is not None:
            bound[:rows] = result.bound[:rows]
        if plan.options.collect_stats:
            self._buffers["stats"] += result.counts

    def _as_ragged(
        self, inputs: Sequence[torch.Tensor], indices: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Check CPU inputs and return q, k, v, qo_indptr, kv_indptr."""
        raise NotImplementedError
