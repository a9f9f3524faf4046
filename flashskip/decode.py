"""Decode attention over a paged KV cache."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashskip import _cpu, _maps, reference
from flashskip._buffers import Needs
from flashskip._checks import (
    check_count,
    check_head_dim,
    check_heads,
    check_indptr_contents,
    check_pages_contents,
    check_reach,
    check_tensor,
)
from flashskip._operation_options import decode_options
from flashskip._options import PlanOptions, refusal, takes_plan_options
from flashskip._paged import (
    PagedKV,
    cache_record,
    cache_tensors,
    check_cache,
    check_page_table,
    kv_lengths,
    split_cache,
)
from flashskip._plan import NEW, SAME, Plan, dtype_name, target_device, warn_of_overflow
from flashskip._scales import given_scales
from flashskip._wrapper import BatchWrapper
from flashskip.geometry import Geometry
from flashskip.variant import Variant, most_rows, unit_rows


class BatchDecodeWrapper(BatchWrapper):
    """Attention of one new token per request on a paged cache; V of a skipped tile is never loaded.

    Plan once per batch shape, then run once per layer and step. Lengths and page ids live on the
    GPU: new ones written in place are honoured by the next run or graph replay. CPU tensors run
    the reference implementation.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor, optional
        Scratch memory of at least `workspace_bytes`; allocated if None. Its device is where the
        plan will run.
    kv_layout : {"NHD", "HND"}
        ``[pages, (2,) page_size, num_kv_heads, head_dim]``, or with the middle two swapped.

    Examples
    --------
    >>> import torch, flashskip
    >>> cache = torch.randn(12, 2, 16, 2, 64, dtype=torch.bfloat16)  # 12 pages of 16 tokens
    >>> q = torch.randn(2, 8, 64, dtype=torch.bfloat16)
    >>> indptr = torch.tensor([0, 4, 12], dtype=torch.int32)
    >>> indices = torch.arange(12, dtype=torch.int32)
    >>> last_page_len = torch.tensor([16, 3], dtype=torch.int32)
    >>> wrapper = flashskip.BatchDecodeWrapper(torch.empty(0))  # a CPU workspace: run on the CPU
    >>> wrapper.plan(indptr, indices, last_page_len, 8, 2, 64, 16, q_data_type=q.dtype,
    ...              skip_softmax_threshold=0.01)
    >>> wrapper.run(q, cache).shape
    torch.Size([2, 8, 64])
    """

    _input_names = ("q", "paged_kv_cache", "paged_kv_cache[1]")

    @takes_plan_options
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_len_per_req: int = 1,
        **options: Any,
    ) -> None:
        """Prepare runs: check, choose and load the kernel.

        Never reads a GPU tensor and never waits for the GPU.

        Parameters
        ----------
        indptr, indices, last_page_len : torch.Tensor
            The page table: int32 ``[batch_size + 1]``, ``[num_indices]``, ``[batch_size]``. CUDA
            tensors are used in place; CPU tensors are copied once for a plan that runs on a GPU.
            `indices` may be longer than ``indptr[-1]``: room to grow.
        num_qo_heads, num_kv_heads : int
            Query heads, any multiple of the KV heads.
        head_dim : int
            Channels of q, k, v and the output.
        page_size : int
            Tokens of a page, at least 1.
        q_len_per_req : int
            New tokens of each request, 1 to 8.
        **options
            See `flashskip.PlanOptions`; `causal` and `order` have no effect in decode and are
            refused.

        Raises
        ------
        ValueError, TypeError
            An argument is wrong, or has no effect in this combination.
        UnsupportedVariant
            No kernel has this combination; the message lists alternatives.
        """
        tensors = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size, q_len_per_req)
        arguments = (*shape, *options, *options.values())
        if self._replan(arguments, tensors):
            return
        checked = decode_options(options)
        group_size = check_heads(num_qo_heads, num_kv_heads)
        check_head_dim("head_dim", head_dim)
        check_count("page_size", page_size)
        check_count("q_len_per_req", q_len_per_req)
        if q_len_per_req > 8:
            raise refusal(
                f"q_len_per_req is {q_len_per_req}",
                "1 to 8",
                "Use prefill",
            )
        reach = check_page_table(indptr, indices, last_page_len, page_size)
        device = target_device(self._workspace, tensors)
        self._page_size, self._q_len_per_req = page_size, q_len_per_req
        variant = self._variant(checked, head_dim, group_size)
        several_units = group_size * q_len_per_req > most_rows(variant.kv_dtype, head_dim)
        plan = Plan(
            arguments=arguments,
            options=checked,
            variant=variant,
            geometry=Geometry.decode(
                group_size,
                window_left=checked.window_left,
                rows_per_vote=most_rows(variant.kv_dtype, head_dim) if several_units else 64,
            ),
            device=device,
            batch_size=indptr.shape[0] - 1,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            indices=tensors,
            page_size=page_size,
            q_len_per_req=q_len_per_req,
            reach=reach,
        )
        self._adopt(plan, stats_heads=num_kv_heads)
        if indptr.device.type == "cpu":
            warn_of_overflow(checked, kv_lengths(indptr, last_page_len, page_size))

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedKV,
        *,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Attend. Never compiles, never waits for the GPU, can be captured in a CUDA graph.

        Parameters
        ----------
        q : torch.Tensor
            ``[batch_size * q_len_per_req, num_qo_heads, head_dim]``.
        paged_kv_cache : torch.Tensor or tuple of torch.Tensor
            One 5-D tensor ``[pages, 2, ...]`` or a pair (k, v) of 4-D tensors ``[pages, ...]`` in
            the wrapper's layout. Pages may lie at any stride that is a multiple of 16 bytes.
        k_scale, v_scale : float or torch.Tensor, optional
            Of an FP8 cache, default 1: attention is that of ``k_scale * K`` and ``v_scale * V``. A
            tensor is fp32 ``[1]`` or ``[num_kv_heads]`` on the plan's device and read by the
            kernel.
        out : torch.Tensor, optional
            ``[batch_size * q_len_per_req, num_qo_heads, head_dim]``.
        lse : torch.Tensor, optional
            fp32 ``[batch_size * q_len_per_req, num_qo_heads]``, contiguous; filled when given.
        return_lse : bool
            Return (output, lse) instead of the output.
        lse_base : {"log2", "e"}
            Base of the logarithm.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            The output, then the LSE with `return_lse`, then the bound with `collect_bound`. A
            request without keys is 0 with LSE -inf.

        Raises
        ------
        RuntimeError
            There is no plan.
        ValueError, TypeError
            A tensor does not match the plan, or requires a gradient.
        """
        scales = given_scales(k_scale, v_scale, self._planned().options.kv_dtype)
        cache = cache_tensors(paged_kv_cache)
        return self._run([q, *cache], out, lse, return_lse, lse_base, scales)

    def _variant(self, options: PlanOptions, head_dim: int, group_size: int) -> Variant:
        kv_dtype = dtype_name(options.kv_dtype)
        return Variant(
            op="decode",
            q_dtype=dtype_name(options.q_data_type),
            kv_dtype=kv_dtype,
            o_dtype=dtype_name(options.o_dtype),
            head_dim_qk=head_dim,
            head_dim_vo=head_dim,
            kv_path="paged_tma" if _maps.tma_pages(self._page_size) else "paged_gather",
            rows=unit_rows(group_size * self._q_len_per_req, kv_dtype, head_dim),
            causal=self._q_len_per_req > 1,
            window=options.window_left >= 0,
            soft_cap=bool(options.logits_soft_cap),
            sinks=options.sinks is not None,
            skip=options.criterion,
            order=None,
            vote_kv=(options.vote_kv or 64) if options.decides else None,
            stats=options.collect_stats,
            bound=options.collect_bound,
        )

    def _needs(self, plan: Plan) -> Needs:
        return super()._needs(plan) | {"merge_counter": ((plan.grid,), torch.int32)}

    def _fill(self, plan: Plan) -> None:
        super()._fill(plan)
        group_size = plan.num_qo_heads // plan.num_kv_heads
        strands = math.gcd(plan.num_kv_heads, plan.grid)
        self._set(
            strands=strands,
            strand_heads=plan.num_kv_heads // strands,
            merge_counter=plan.buffers["merge_counter"].data_ptr(),
            group_size=group_size,
            group_reciprocal=((2**32 - 1) // group_size + 1) % 2**32,
            page_size=plan.page_size,
            page_reciprocal=(2**32 - 1) // plan.page_size,
            q_len_per_req=plan.q_len_per_req,
        )

    def _set_indices(self, indices: Mapping[str, torch.Tensor]) -> None:
        self._set(num_indices=indices["indices"].shape[0])
        super()._set_indices(indices)

    def _cache_views(
        self, cache: Sequence[torch.Tensor], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the cache as ``[pages, page_size, num_kv_heads, head_dim]`` views, checked."""
        plan, v = self._planned(), self._planned().variant
        dims = (v.head_dim_qk, v.head_dim_vo)
        sizes = (plan.page_size, plan.num_kv_heads, dims)
        check_cache(cache, self._kv_layout, *sizes, plan.options.kv_dtype, device)
        return split_cache(cache, self._kv_layout)

    def _check_q(self, q: torch.Tensor, device: torch.device) -> None:
        plan = self._planned()
        rows = plan.batch_size * plan.q_len_per_req
        shape = (rows, plan.num_qo_heads, plan.variant.head_dim_qk)
        check_tensor("q", q, shape, plan.options.q_data_type, device)

    def _bind(self, inputs: Sequence[torch.Tensor], changes: Sequence[int]) -> None:
        q, *cache = inputs
        if changes[0] == NEW:
            self._check_q(q, self._planned().device)
        if changes[0] != SAME:
            self._set(q=q.data_ptr(), q_stride_token=q.stride(0), q_stride_head=q.stride(1))
        if max(changes[1:]) != SAME:
            self._bind_cache(cache)

    def _bind_cache(self, cache: Sequence[torch.Tensor]) -> None:
        plan = self._planned()
        k, v = self._cache_views(cache, plan.device)
        check_reach("paged_kv_cache", k, "indices", plan.reach)
        self._set(num_pages=k.shape[0])
        if k.shape[0] == 0:  # legal: there is nothing to read, but maps and pointers need a page
            page = {"empty_page": ((1, *k.shape[1:]), k.dtype)}
            k = v = self._buffers.reserve(page, plan.device)["empty_page"]
        self._set(**cache_record(k, v))
        if plan.variant.kv_path == "paged_tma":
            self._set(**_maps.decode_maps(plan.variant, k, v))

    def _as_ragged(
        self, inputs: Sequence[torch.Tensor], indices: Sequence[torch.Tensor]
    ) -> _cpu.Ragged:
        plan = self._planned()
        indptr, page_ids, last_page_len = indices
        q = inputs[0]
        self._check_q(q, q.device)
        k_pages, v_pages = self._cache_views(inputs[1:], q.device)
        check_indptr_contents("indptr", indptr)  # what was written into them since plan()
        num_pages = k_pages.shape[0]
        check_pages_contents(indptr, page_ids, last_page_len, plan.page_size, num_pages, "")
        k, v, kv_indptr = reference.gather_pages(
            (k_pages, v_pages), indptr, page_ids, last_page_len, "NHD"
        )
        qo_indptr = torch.arange(len(indptr), dtype=torch.int32, device="cpu") * plan.q_len_per_req
        return q, k, v, qo_indptr, kv_indptr
