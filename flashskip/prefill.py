"""Prefill attention over ragged batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashskip import _cpu, _kernels, _maps
from flashskip._buffers import Needs
from flashskip._checks import (
    check_count,
    check_heads,
    check_indptr,
    check_indptr_contents,
    check_reach,
    check_tensor,
)
from flashskip._options import PlanOptions, takes_plan_options
from flashskip._plan import NEW, Plan, dtype_name, target_device, warn_of_overflow
from flashskip._wrapper import BatchWrapper
from flashskip.errors import UnsupportedVariant
from flashskip.variant import Variant


class BatchPrefillWrapper(BatchWrapper):
    """Attention of many queries on ragged keys, skipping tiles of negligible softmax weight.

    Plan once per batch shape, then run once per layer and step. Work is divided on the GPU from the
    index tensors, so lengths written into them in place are honoured by the next run or graph
    replay. CPU tensors run the reference implementation.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor, optional
        Scratch memory; allocated when needed if None. Its device is where the plan will run.
    kv_layout : {"NHD", "HND"}
        Layout of a paged cache; ragged K and V are always ``[tokens, heads, dim]``.

    Examples
    --------
    >>> import torch, flashskip
    >>> indptr = torch.tensor([0, 100, 300], dtype=torch.int32)
    >>> q = torch.randn(300, 8, 64, dtype=torch.bfloat16)
    >>> k, v = torch.randn(2, 300, 2, 64, dtype=torch.bfloat16)
    >>> wrapper = flashskip.BatchPrefillWrapper(torch.empty(0))  # a CPU workspace: run on the CPU
    >>> wrapper.plan(indptr, indptr, 8, 2, 64, q_data_type=q.dtype, causal=True)
    >>> wrapper.run(q, k, v).shape
    torch.Size([300, 8, 64])
    """

    _input_names = ("q", "k", "v")

    @takes_plan_options
    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        **options: Any,
    ) -> None:
        """Prepare runs on ragged K and V: check, choose and load the kernel.

        Never reads a GPU tensor and never waits for the GPU.

        Parameters
        ----------
        qo_indptr, kv_indptr : torch.Tensor
            int32 ``[batch_size + 1]``: where each request's queries and keys start. CUDA tensors
            are used in place; CPU tensors are copied once for a plan that runs on a GPU.
        num_qo_heads, num_kv_heads : int
            Query heads, any multiple of the KV heads.
        head_dim_qk, head_dim_vo : int
            Channels of q and k; of v and the output (default: the same).
        **options
            See `flashskip.PlanOptions`.

        Raises
        ------
        ValueError, TypeError
            An argument is wrong, or has no effect in this combination.
        UnsupportedVariant
            No kernel has this combination; the message lists alternatives.
        """
        indices = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr}
        shape = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)
        arguments = (*shape, *options, *options.values())
        if self._replan(arguments, indices):
            return
        checked = PlanOptions(**options)
        check_heads(num_qo_heads, num_kv_heads)
        check_count("head_dim_qk", head_dim_qk)
        head_dim_vo = head_dim_qk if head_dim_vo is None else head_dim_vo
        check_count("head_dim_vo", head_dim_vo)
        batch_size = check_indptr("qo_indptr", qo_indptr)
        check_indptr("kv_indptr", kv_indptr, batch_size)
        device = target_device(self._workspace, indices)
        variant = self._variant(checked, head_dim_qk, head_dim_vo)
        plan = Plan(
            arguments=arguments,
            options=checked,
            variant=variant,
            geometry=_kernels.geometry_for(variant, window_left=checked.window_left),
            device=device,
            batch_size=batch_size,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            indices=indices,
            reach={n: int(t[-1]) for n, t in indices.items() if t.device.type == "cpu"},
        )
        self._adopt(plan, stats_heads=num_qo_heads)
        if kv_indptr.device.type == "cpu" and checked.threshold_is_factor:
            warn_of_overflow(checked, kv_indptr.diff())

    def plan_paged(self, *args: object, **options: object) -> None:
        """Prepare runs on a paged cache: not available yet.

        Raises
        ------
        UnsupportedVariant
            Always.
        """
        raise UnsupportedVariant(
            "plan_paged asks for paged KV in prefill, which no kernel has yet; supported: plan() "
            "with ragged K and V. Gather the pages first (flashskip.reference.gather_pages)."
        )

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Attend. Never compiles, never waits for the GPU, can be captured in a CUDA graph.

        Parameters
        ----------
        q : torch.Tensor
            ``[nnz_qo, num_qo_heads, head_dim_qk]``. Rows past ``qo_indptr[-1]`` are not read.
        k, v : torch.Tensor
            ``[nnz_kv, num_kv_heads, head_dim_qk]`` and ``[nnz_kv, num_kv_heads, head_dim_vo]``.
        out : torch.Tensor, optional
            ``[nnz_qo, num_qo_heads, head_dim_vo]``; rows past ``qo_indptr[-1]`` are not written.
        lse : torch.Tensor, optional
            fp32 ``[nnz_qo, num_qo_heads]``, contiguous; filled when given.
        return_lse : bool
            Return (output, lse) instead of the output.
        lse_base : {"log2", "e"}
            Base of the logarithm.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            The output, then the LSE with `return_lse`, then the bound with `collect_bound`. A row
            that sees no key is 0 with LSE -inf.

        Raises
        ------
        RuntimeError
            There is no plan.
        ValueError, TypeError
            A tensor does not match the plan, or requires a gradient.
        """
        return self._run([q, k, v], out, lse, return_lse, lse_base)

    def _variant(self, options: PlanOptions, head_dim_qk: int, head_dim_vo: int) -> Variant:
        skips = options.skips
        return Variant(
            op="prefill",
            q_dtype=dtype_name(options.q_data_type),
            kv_dtype=dtype_name(options.kv_dtype),
            o_dtype=dtype_name(options.o_dtype),
            head_dim_qk=head_dim_qk,
            head_dim_vo=head_dim_vo,
            kv_path="ragged",
            rows=None,
            causal=options.causal,
            window=options.window_left >= 0,
            soft_cap=bool(options.logits_soft_cap),
            sinks=options.sinks is not None,
            skip=options.criterion,
            order=options.order if skips else None,
            vote_kv=(options.vote_kv or _kernels.DEFAULT_VOTE_KV) if skips else None,
            stats=options.collect_stats,
            bound=options.collect_bound,
        )

    def _needs(self, plan: Plan) -> Needs:
        return super()._needs(plan) | {"work_counter": ((2,), torch.int32)}

    def _fill(self, plan: Plan) -> None:
        super()._fill(plan)
        self._set(work_counter=plan.buffers["work_counter"].data_ptr())

    def _check_inputs(self, inputs: Sequence[torch.Tensor], device: torch.device) -> None:
        plan, v = self._planned(), self._planned().variant
        q, k, values = inputs
        options = plan.options
        check_tensor("q", q, (None, plan.num_qo_heads, v.head_dim_qk), options.q_data_type, device)
        check_tensor("k", k, (None, plan.num_kv_heads, v.head_dim_qk), options.kv_dtype, device)
        check_tensor(
            "v", values, (k.shape[0], plan.num_kv_heads, v.head_dim_vo), options.kv_dtype, device
        )
        check_reach("q", q, "qo_indptr", plan.reach)
        check_reach("k", k, "kv_indptr", plan.reach)

    def _bind(self, inputs: Sequence[torch.Tensor], changes: Sequence[int]) -> None:
        plan = self._planned()
        if NEW in changes:
            self._check_inputs(inputs, plan.device)
        q, k, v = inputs
        self._set(nnz_qo=q.shape[0], nnz_kv=k.shape[0], **_maps.prefill_maps(plan.variant, q, k, v))

    def _as_ragged(
        self, inputs: Sequence[torch.Tensor], indices: Sequence[torch.Tensor]
    ) -> _cpu.Ragged:
        for name, t in self._planned().indices.items():  # what was written into them since plan()
            check_indptr_contents(name, t)
            self._planned().reach[name] = int(t[-1])
        self._check_inputs(inputs, inputs[0].device)
        (q, k, v), (qo_indptr, kv_indptr) = inputs, indices
        return q, k, v, qo_indptr, kv_indptr
