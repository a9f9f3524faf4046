"""Prefill attention over ragged batches and paged caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashskip import _cpu, _kernels, _maps, reference
from flashskip._buffers import Needs
from flashskip._checks import (
    check_count,
    check_head_dim,
    check_heads,
    check_indptr,
    check_indptr_contents,
    check_pages_contents,
    check_reach,
    check_tensor,
)
from flashskip._operation_options import prefill_options
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
from flashskip._plan import NEW, Plan, dtype_name, target_device, warn_of_overflow
from flashskip._tiles import prefill_tile
from flashskip._wrapper import BatchWrapper
from flashskip.geometry import SHORT_QO_LEN
from flashskip.variant import Variant


class BatchPrefillWrapper(BatchWrapper):
    """Attention of many queries on ragged or paged keys, skipping tiles of negligible weight.

    Plan once per batch shape, then run once per layer and step. Work is divided on the GPU from the
    index tensors, so lengths written into them in place are honoured by the next run or graph
    replay. CPU tensors run the reference implementation.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor, optional
        Scratch memory of at least `workspace_bytes`, which wrappers that run on one stream may
        share; allocated if None. Its device is where the plan will run.
    kv_layout : {"NHD", "HND"}
        Layout of a paged cache: ``[pages, (2,) page_size, num_kv_heads, head_dim]``, or with the
        middle two swapped. Ragged K and V are always ``[tokens, heads, dim]``: "NHD".

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

    _seeded = True  # False: short queries too are judged against a running maximum, for a study

    @property
    def _input_names(self) -> tuple[str, ...]:  # type: ignore[override]
        paged = ("q", "paged_kv_cache", "paged_kv_cache[1]")
        return paged if self._planned().page_size else ("q", "k", "v")

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
        arguments = (*shape, self._seeded, *options, *options.values())
        if self._replan(arguments, indices):
            return
        if self._kv_layout != "NHD":
            raise refusal(
                f"kv_layout is {self._kv_layout!r} in a plan of ragged K and V, where it has no "
                "effect",
                "'NHD': ragged K and V are [tokens, heads, dim]",
                "Make the wrapper with kv_layout='NHD', or use plan_paged()",
            )
        batch_size = check_indptr("qo_indptr", qo_indptr)
        check_indptr("kv_indptr", kv_indptr, batch_size)
        reach = {n: int(t[-1]) for n, t in indices.items() if t.device.type == "cpu"}
        checked = prefill_options(options)
        self._prepare(arguments, checked, indices, reach, shape)
        if kv_indptr.device.type == "cpu":
            warn_of_overflow(checked, kv_indptr.diff())

    @takes_plan_options
    def plan_paged(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        head_dim_vo: int | None = None,
        **options: Any,
    ) -> None:
        """Prepare runs on a paged cache: check, choose and load the kernel.

        Never reads a GPU tensor and never waits for the GPU.

        Parameters
        ----------
        qo_indptr : torch.Tensor
            int32 ``[batch_size + 1]``: where each request's queries start.
        paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len : torch.Tensor
            The page table: int32 ``[batch_size + 1]``, ``[num_indices]``, ``[batch_size]``, with
            the keys of the queries themselves. CUDA tensors are used in place; CPU tensors are
            copied once for a plan that runs on a GPU. The ids may be more than
            ``paged_kv_indptr[-1]``: room to grow.
        num_qo_heads, num_kv_heads : int
            Query heads, any multiple of the KV heads.
        head_dim_qk : int
            Channels of q and k.
        page_size : int
            Tokens of a page, at least 1.
        head_dim_vo : int, optional
            Channels of v and the output; default: those of q and k.
        **options
            See `flashskip.PlanOptions`.

        Raises
        ------
        ValueError, TypeError
            An argument is wrong, or has no effect in this combination.
        UnsupportedVariant
            No kernel has this combination; the message lists alternatives.
        """
        table = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        indices = {"qo_indptr": qo_indptr}
        indices |= dict(zip(("indptr", "indices", "last_page_len"), table, strict=True))
        shape = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size)
        arguments = (*shape, self._seeded, *options, *options.values())
        if self._replan(arguments, indices):
            return
        check_count("page_size", page_size)
        batch_size = check_indptr("qo_indptr", qo_indptr)
        reach = check_page_table(*table, page_size, batch_size, "paged_kv_")
        if qo_indptr.device.type == "cpu":
            reach["qo_indptr"] = int(qo_indptr[-1])
        checked = prefill_options(options)
        self._prepare(arguments, checked, indices, reach, shape)
        if paged_kv_indptr.device.type == "cpu":
            kv_len = kv_lengths(paged_kv_indptr, paged_kv_last_page_len, page_size)
            warn_of_overflow(checked, kv_len)

    def _prepare(
        self,
        arguments: Sequence[object],
        options: PlanOptions,
        indices: dict[str, torch.Tensor],
        reach: dict[str, int],
        shape: Sequence[Any],
    ) -> None:
        """Adopt a plan of checked index tensors; `shape`: heads, head dims[, page size]."""
        num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size = (*shape, 0)[:5]
        check_heads(num_qo_heads, num_kv_heads)
        check_head_dim("head_dim_qk", head_dim_qk)
        head_dim_vo = head_dim_qk if head_dim_vo is None else head_dim_vo
        check_head_dim("head_dim_vo", head_dim_vo)
        device = target_device(self._workspace, indices)
        variant = self._variant(options, head_dim_qk, head_dim_vo, page_size)
        plan = Plan(
            arguments=arguments,
            options=options,
            variant=variant,
            geometry=_kernels.geometry_for(
                variant, num_qo_heads // num_kv_heads, options.window_left, self._seeded
            ),
            device=device,
            batch_size=indices["qo_indptr"].shape[0] - 1,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            indices=indices,
            page_size=page_size,
            reach=reach,
        )
        self._adopt(plan, stats_heads=num_qo_heads)

    def run(
        self,
        q: torch.Tensor,
        k: PagedKV | None = None,
        v: torch.Tensor | None = None,
        *,
        paged_kv_cache: PagedKV | None = None,
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
            After `plan`: ``[nnz_kv, num_kv_heads, head_dim_qk]`` and
            ``[nnz_kv, num_kv_heads, head_dim_vo]``.
        paged_kv_cache : torch.Tensor or tuple of torch.Tensor
            After `plan_paged`, and in the place of k: one 5-D tensor ``[pages, 2, ...]`` or a pair
            (k, v) of 4-D tensors ``[pages, ...]`` in the wrapper's layout. Pages may lie at any
            stride that is a multiple of 16 bytes.
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
        kv = _kv_inputs(k, v, paged_kv_cache, paged=self._planned().page_size > 0)
        return self._run([q, *kv], out, lse, return_lse, lse_base)

    def _variant(
        self, options: PlanOptions, head_dim_qk: int, head_dim_vo: int, page_size: int = 0
    ) -> Variant:
        decides = options.decides
        tile_kv = prefill_tile(head_dim_qk, head_dim_vo).tile_kv
        paged = "paged_tma" if _maps.tma_pages(page_size, tile_kv) else "paged_gather"
        return Variant(
            op="prefill",
            q_dtype=dtype_name(options.q_data_type),
            kv_dtype=dtype_name(options.kv_dtype),
            o_dtype=dtype_name(options.o_dtype),
            head_dim_qk=head_dim_qk,
            head_dim_vo=head_dim_vo,
            kv_path=paged if page_size else "ragged",
            rows=None,
            causal=options.causal,
            window=options.window_left >= 0,
            soft_cap=bool(options.logits_soft_cap),
            sinks=options.sinks is not None,
            skip=options.criterion,
            order=options.order if decides else None,
            vote_kv=(options.vote_kv or _kernels.DEFAULT_VOTE_KV) if decides else None,
            stats=options.collect_stats,
            bound=options.collect_bound,
        )

    def _needs(self, plan: Plan) -> Needs:
        needs = super()._needs(plan) | {"work_counter": ((2,), torch.int32)}
        units = _kernels.merged_units(plan.variant, plan.grid)
        return needs | {"merge_counter": ((units,), torch.int32)} if units else needs

    def _fill(self, plan: Plan) -> None:
        super()._fill(plan)
        counter = plan.buffers.get("merge_counter")
        self._set(
            work_counter=plan.buffers["work_counter"].data_ptr(),
            merge_counter=0 if counter is None else counter.data_ptr(),
            group_size=plan.num_qo_heads // plan.num_kv_heads,
            short_qo_len=SHORT_QO_LEN if plan.geometry.seed_short_queries else 0,
            page_size=plan.page_size,
            page_reciprocal=(2**32 - 1) // max(plan.page_size, 1),
        )

    def _set_indices(self, indices: Mapping[str, torch.Tensor]) -> None:
        if "indices" in indices:
            self._set(num_indices=indices["indices"].shape[0])
        super()._set_indices(indices)

    def _check_inputs(self, inputs: Sequence[torch.Tensor], device: torch.device) -> None:
        plan, v = self._planned(), self._planned().variant
        q, *kv = inputs
        heads, dtype = plan.num_kv_heads, plan.options.kv_dtype
        q_shape = (None, plan.num_qo_heads, v.head_dim_qk)
        check_tensor("q", q, q_shape, plan.options.q_data_type, device)
        check_reach("q", q, "qo_indptr", plan.reach)
        if plan.page_size:
            dims = (v.head_dim_qk, v.head_dim_vo)
            check_cache(kv, self._kv_layout, plan.page_size, heads, dims, dtype, device)
            check_reach("paged_kv_cache", kv[0], "indices", plan.reach)
            return
        check_tensor("k", kv[0], (None, heads, v.head_dim_qk), dtype, device)
        check_tensor("v", kv[1], (kv[0].shape[0], heads, v.head_dim_vo), dtype, device)
        check_reach("k", kv[0], "kv_indptr", plan.reach)

    def _bind(self, inputs: Sequence[torch.Tensor], changes: Sequence[int]) -> None:
        plan = self._planned()
        if NEW in changes:
            self._check_inputs(inputs, plan.device)
        q, *kv = inputs
        k, v = self._bind_cache(kv) if plan.page_size else kv
        self._set(q=q.data_ptr(), q_stride_token=q.stride(0), q_stride_head=q.stride(1))
        self._set(nnz_qo=q.shape[0], nnz_kv=k.shape[0], **_maps.prefill_maps(plan.variant, q, k, v))

    def _bind_cache(self, cache: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Write where a cache lies into the launch record and return what maps are made of."""
        k, v = split_cache(cache, self._kv_layout)
        self._set(num_pages=k.shape[0])
        if k.shape[0] == 0:  # legal: there is nothing to read, but maps and pointers need a page
            needs = {n: ((1, *t.shape[1:]), t.dtype) for n, t in (("no_k", k), ("no_v", v))}
            pages = self._buffers.reserve(needs, self._planned().device)
            k, v = pages["no_k"], pages["no_v"]
        self._set(**cache_record(k, v))
        return k, v

    def _as_ragged(
        self, inputs: Sequence[torch.Tensor], indices: Sequence[torch.Tensor]
    ) -> _cpu.Ragged:
        plan = self._planned()
        q, *kv = inputs
        qo_indptr, kv_indptr, *pages = indices  # checked: they may have changed since plan()
        check_indptr_contents("qo_indptr", qo_indptr)
        plan.reach["qo_indptr"] = int(qo_indptr[-1])
        check_indptr_contents("paged_kv_indptr" if plan.page_size else "kv_indptr", kv_indptr)
        if not plan.page_size:
            plan.reach["kv_indptr"] = int(kv_indptr[-1])
            self._check_inputs(inputs, q.device)
            return q, kv[0], kv[1], qo_indptr, kv_indptr
        self._check_inputs(inputs, q.device)
        cache = split_cache(kv, self._kv_layout)
        check_pages_contents(kv_indptr, pages[0], pages[1], plan.page_size, cache[0].shape[0])
        k, v, gathered_indptr = reference.gather_pages(cache, kv_indptr, pages[0], pages[1])
        return q, k, v, qo_indptr, gathered_indptr


def _kv_inputs(
    k: PagedKV | None, v: torch.Tensor | None, paged_kv_cache: PagedKV | None, *, paged: bool
) -> tuple[torch.Tensor, ...]:
    """Return the tensors of K and V among the arguments of `run`, which depend on the plan."""
    if paged:
        given = [name for name, t in (("k", k), ("v", v)) if t is not None]
        if v is not None or (k is not None) == (paged_kv_cache is not None):
            raise TypeError(
                f"run() after plan_paged() got {' and '.join(given) or 'no cache'}"
                f"{' beside paged_kv_cache' if paged_kv_cache is not None else ''}; expected "
                "run(q, paged_kv_cache). Pass one 5-D tensor or a pair (k, v)."
            )
        return cache_tensors(k if paged_kv_cache is None else paged_kv_cache)
    if paged_kv_cache is not None or k is None or v is None:
        found = "paged_kv_cache" if paged_kv_cache is not None else "no k and v"
        raise TypeError(
            f"run() after plan() got {found}; expected run(q, k, v). Pass both, or plan with "
            "plan_paged()."
        )
    return k, v  # type: ignore[return-value]
