"""What the two wrappers share: the plan's state, buffers with kept addresses, the launch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flashskip import _cpu, _kernels, _op
from flashskip._checks import check_forward_only, check_tensor, check_vector
from flashskip._options import check_choice, refuse
from flashskip._plan import Plan, require_kernel
from flashskip.errors import UnsupportedVariant
from flashskip.geometry import Geometry
from flashskip.variant import Variant

LSE_SCALES = {"log2": 1.0, "e": math.log(2.0)}


class BatchWrapper:
    """Base of the wrappers: see `BatchPrefillWrapper` and `BatchDecodeWrapper`."""

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
        refuse(
            not self._planned().options.collect_stats,
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
        refuse(
            self._planned().options.skip_criterion != "measure",
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
        """Load the kernel and fill what does not change between runs."""
        options = plan.options
        self._check_live_tensors(plan)
        if options.collect_stats:
            self._keep("stats", (plan.batch_size, stats_heads, 2), torch.int64, plan.device)
        self._plan = plan
        if plan.device.type == "cpu":
            if options.skip_criterion != "threshold":
                raise UnsupportedVariant(
                    f"skip_criterion is {options.skip_criterion!r} on the CPU; supported: "
                    f"'threshold'. "
                    "Pass a threshold or a scale factor."
                )
            return
        require_kernel(plan.variant, plan.device)
        plan.kernel = _kernels.kernel_for(plan.variant)
        plan.kernel.prepare(plan.device.index)
        plan.grid = torch.cuda.get_device_properties(plan.device).multi_processor_count
        plan.params = _kernels.params_for(plan.variant).new()
        plan.params_address = plan.params.ctypes.data
        self._fill_threshold(plan)
        self._set(
            batch_size=plan.batch_size,
            num_qo_heads=plan.num_qo_heads,
            num_kv_heads=plan.num_kv_heads,
            sm_scale_log2=options.scale(plan.variant.head_dim_qk) * math.log2(math.e),
            stats=self._buffers["stats"].data_ptr() if options.collect_stats else 0,
        )

    def _check_live_tensors(self, plan: Plan) -> None:
        """Check the option tensors, which kernels read by address."""
        options, device = plan.options, plan.device
        threshold_name = "skip_softmax_threshold" + (
            "_scale_factor" if options.threshold_is_factor else ""
        )
        if isinstance(options.threshold, torch.Tensor):
            check_vector(
                threshold_name,
                options.threshold,
                plan.batch_size,
                dtype=torch.float32,
                device=device,
            )
        if options.threshold_kv_len is not None:
            check_vector(
                "threshold_kv_len", options.threshold_kv_len, plan.batch_size, device=device
            )
        if options.sinks is not None:
            check_vector(
                "sinks", options.sinks, plan.num_qo_heads, dtype=torch.float32, device=device
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
        """Return a zeroed buffer whose address outlives plans, for graphs that hold it."""
        elements = math.prod(shape)
        storage = self._buffers.get(f"{name}.storage")
        if storage is None or storage.numel() < elements or storage.device != device:
            refuse(
                self._captured,
                f"the plan needs {elements} elements for {name} after a run was captured in a "
                f"graph",
                f"at most {0 if storage is None else storage.numel()}, as the graph holds the "
                f"old buffer",
                "Make the first plan with the largest batch, or use a new wrapper",
            )
            storage = torch.zeros(max(elements, 1), dtype=dtype, device=device)
            self._buffers[f"{name}.storage"] = storage
        else:
            storage.zero_()
        self._buffers[name] = storage[:elements].view(shape)
        return self._buffers[name]

    def _on_device(self, name: str, t: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return an index tensor on the device: itself, or a copy at an address that is kept."""
        if t.device == device:
            return t
        buffer = self._keep(name, tuple(t.shape), t.dtype, device)
        buffer.copy_(t, non_blocking=True)
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
        plan, q = self._planned(), inputs[0]
        shape = (q.shape[0], plan.num_qo_heads, plan.variant.head_dim_vo)
        if out is None:
            out = torch.empty(shape, dtype=plan.options.o_dtype, device=q.device)
        if lse is None and return_lse:
            lse = torch.empty(shape[:2], dtype=torch.float32, device=q.device)
        bound = None
        if plan.options.collect_bound:
            bound = torch.empty(shape[:2], dtype=torch.float32, device=q.device)
        if torch.compiler.is_compiling():
            torch.ops.flashskip.run(self._handle, inputs, out, lse, bound, lse_base)
        else:
            self._attend(inputs, out, lse, bound, lse_base)
        extra = [t for t in (lse if return_lse else None, bound) if t is not None]
        return (out, *extra) if extra else out

    def _attend(
        self,
        inputs: Sequence[torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor | None,
        bound: torch.Tensor | None,
        lse_base: str,
    ) -> None:
        """Check the tensors and compute, on the device where q is."""
        plan = self._planned()
        check_choice("lse_base", lse_base, tuple(LSE_SCALES))
        check_forward_only(**dict(zip(("q", "k", "v"), inputs, strict=False)))
        shape = (inputs[0].shape[0], plan.num_qo_heads, plan.variant.head_dim_vo)
        if inputs[0].device.type == "cpu":
            check_tensor("out", out, shape, plan.options.o_dtype, inputs[0].device)
            self._check_lse(lse, shape, inputs[0].device)
            self._attend_on_cpu(inputs, out, lse, bound, LSE_SCALES[lse_base])
            return
        if self._is_new("out", out):
            check_tensor("out", out, shape, plan.options.o_dtype, plan.device)
            self._set(o=out.data_ptr(), o_stride_token=out.stride(0), o_stride_head=out.stride(1))
        self._check_lse(lse, shape, plan.device)
        self._set(lse=0 if lse is None else lse.data_ptr(), lse_scale=LSE_SCALES[lse_base])
        self._bind(inputs)
        self._launch()

    def _check_lse(
        self, lse: torch.Tensor | None, shape: tuple[int, ...], device: torch.device
    ) -> None:
        if lse is None:
            return
        matches = lse.shape == shape[:2] and lse.is_contiguous() and lse.device == device
        refuse(
            not matches or lse.dtype != torch.float32,
            f"lse is {lse.dtype} {tuple(lse.shape)} with stride {lse.stride()} on {lse.device}",
            f"contiguous torch.float32 {shape[:2]} on {device}",
            "Pass such a tensor, or return_lse=True to have it allocated",
        )

    def _is_new(self, name: str, t: torch.Tensor) -> bool:
        """Whether the launch record does not yet hold this very tensor; remembers it."""
        bound_to = self._planned().bound_to
        signature = (t.data_ptr(), t.shape, t.stride(), t.dtype)
        if bound_to.get(name) == signature:
            return False
        bound_to[name] = signature
        return True

    def _launch(self) -> None:
        plan = self._planned()
        device = plan.device.index
        stream = torch._C._cuda_getCurrentRawStream(device)
        self._captured = self._captured or torch.cuda.is_current_stream_capturing()
        assert plan.kernel is not None
        if torch.cuda.current_device() == device:
            plan.kernel.launch(plan.grid, plan.params_address, stream)
        else:
            with torch.cuda.device(device):
                plan.kernel.launch(plan.grid, plan.params_address, stream)

    def _bind(self, inputs: Sequence[torch.Tensor]) -> None:
        """Check the inputs and write them into the launch record, where they are new."""
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
        ragged = self._as_ragged(inputs, self._cpu_indices())
        result = _cpu.attend(self._planned(), *ragged)
        rows = int(ragged[3][-1])
        out[:rows] = result.out[:rows].to(out.dtype)
        if lse is not None:
            lse[:rows] = result.lse[:rows] * lse_scale
        if bound is not None:
            bound[:rows] = result.bound[:rows]
        if self._planned().options.collect_stats:
            self._buffers["stats"] += result.counts

    def _as_ragged(
        self, inputs: Sequence[torch.Tensor], indices: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Check CPU inputs and return q, k, v, qo_indptr, kv_indptr."""
        raise NotImplementedError

    def _cpu_indices(self) -> list[torch.Tensor]:
        """Return the plan's index tensors, read live."""
        indices = list(self._planned().indices.values())
        refuse(
            any(t.device.type != "cpu" for t in indices),
            "q is on cpu and the plan's index tensors on a GPU",
            "all on one device",
            "Move the inputs to the GPU",
        )
        return indices
