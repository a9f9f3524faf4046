"""An attention layer of a transformers model: its wrappers, and tensors in their layouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from flashskip._kernels import MOST_WORKSPACE_BYTES
from flashskip.decode import BatchDecodeWrapper
from flashskip.integrations._masks import AttentionMask
from flashskip.prefill import BatchPrefillWrapper

Options = dict[str, Any]


class Phase(ABC):
    """A wrapper of one layer, what it was planned for, and its counts."""

    wrapper: BatchPrefillWrapper | BatchDecodeWrapper

    def __init__(self, device: torch.device, workspace: Tensor) -> None:
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)  # skipped, visited
        self._planned_for: object = None  # all that the plan depends on; None: plan again

    def count(self) -> None:
        """Add the last run's decisions to `counts`, without waiting for the GPU."""
        self.counts += self.wrapper.stats.sum(dim=(0, 1))
        self.wrapper.reset_stats()

    @abstractmethod
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, options: Options
    ) -> Tensor:
        """Return ``[batch_size, qo_len, num_qo_heads, head_dim]``."""


class Prefill(Phase):
    """Several queries per request: ragged rows, views where the batch allows it."""

    wrapper: BatchPrefillWrapper

    def __init__(self, device: torch.device, workspace: Tensor) -> None:
        super().__init__(device, workspace)
        self.wrapper = BatchPrefillWrapper(workspace)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, options: Options
    ) -> Tensor:
        if mask.valid is None:
            return self._attend_unpadded(query, key, value, mask, options)
        queries, keys = mask.packed_queries, mask.packed_keys
        self._planned_for = None
        self._plan(queries.indptr, keys.indptr, query, key, value, mask, options)
        rows, slots = (queries.request, slice(None), queries.position), keys.position
        k, v = (x[keys.request, :, slots] for x in (key, value))
        shape = (query.shape[0] * query.shape[2], query.shape[1], value.shape[3])
        packed = query.new_zeros(shape)  # rows of padding are not written, and read as 0
        self.wrapper.run(query[rows], k, v, out=packed)
        out = torch.empty_like(packed)
        out[queries.order] = packed
        return out.view(query.shape[0], query.shape[2], *shape[1:])

    def _attend_unpadded(
        self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, options: Options
    ) -> Tensor:
        kv_len = int(mask.kv_len)
        batch_size, _, qo_len, _ = query.shape
        planned_for = (query.shape, key.shape[1], kv_len, mask.window_left, _hashable(options))
        if self._planned_for != planned_for:
            self._planned_for = None
            starts = torch.arange(batch_size + 1, dtype=torch.int32, device=query.device)
            self._plan(starts * qo_len, starts * kv_len, query, key, value, mask, options)
            self._planned_for = planned_for
        out = self.wrapper.run(_rows(query), _rows(key[:, :, :kv_len]), _rows(value[:, :, :kv_len]))
        assert isinstance(out, Tensor)
        return out.view(batch_size, qo_len, *out.shape[1:])

    def _plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: AttentionMask,
        options: Options,
    ) -> None:
        self.wrapper.plan(
            qo_indptr,
            kv_indptr,
            query.shape[1],
            key.shape[1],
            query.shape[3],
            value.shape[3],
            causal=mask.causal,
            window_left=mask.effective_window(),
            **options,
        )


class Decode(Phase):
    """One query per request. A contiguous cache is a page per request, a padded one per token."""

    wrapper: BatchDecodeWrapper

    def __init__(self, device: torch.device, workspace: Tensor) -> None:
        super().__init__(device, workspace)
        self.wrapper = BatchDecodeWrapper(workspace, kv_layout="HND")
        self._lengths = torch.empty(0, dtype=torch.int32, device=device)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, options: Options
    ) -> Tensor:
        pages = (key, value)
        if mask.valid is None:
            self._plan_page_per_request(query, key, mask, options)
        else:
            pages, pages_per_request = _token_pages(key, value)
            self._plan_page_per_token(query, key, pages_per_request, mask, options)
        out = self.wrapper.run(query[:, :, 0], pages)
        assert isinstance(out, Tensor)
        return out[:, None]

    def _plan_page_per_request(
        self, query: Tensor, key: Tensor, mask: AttentionMask, options: Options
    ) -> None:
        """Plan where shapes changed; lengths are written into the plan's own tensor."""
        batch_size, page_size = key.shape[0], key.shape[2]
        window_left = mask.effective_window()
        planned_for = (query.shape, key.shape, window_left, _hashable(options))
        if self._planned_for != planned_for:
            self._planned_for = None
            starts = torch.arange(batch_size + 1, dtype=torch.int32, device=query.device)
            self._lengths = starts.new_empty(batch_size).fill_(page_size)
            indices = (starts, starts[:-1], self._lengths)
            self._plan(*indices, query, key, page_size, window_left, options)
            self._planned_for = planned_for
        if isinstance(mask.kv_len, Tensor):
            self._lengths.copy_(mask.kv_len)
        else:
            self._lengths.fill_(mask.kv_len)

    def _plan_page_per_token(
        self,
        query: Tensor,
        key: Tensor,
        pages_per_request: int,
        mask: AttentionMask,
        options: Options,
    ) -> None:
        """Plan with one page for each token that is no padding; the window is already cut."""
        keys = mask.packed_keys
        indices = keys.request * pages_per_request + keys.position
        ones = keys.indptr.new_ones(query.shape[0])
        self._planned_for = None
        self._plan(keys.indptr, indices.to(torch.int32), ones, query, key, 1, -1, options)

    def _plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        query: Tensor,
        key: Tensor,
        page_size: int,
        window_left: int,
        options: Options,
    ) -> None:
        self.wrapper.plan(
            indptr,
            indices,
            last_page_len,
            query.shape[1],
            key.shape[1],
            query.shape[3],
            page_size,
            window_left=window_left,
            **options,
        )


def new_workspace(device: torch.device) -> Tensor:
    """Make scratch memory for all wrappers of a stream; on the CPU they need none."""
    size = 0 if device.type == "cpu" else MOST_WORKSPACE_BYTES
    return torch.empty(size, dtype=torch.uint8, device=device)


def _hashable(options: Options) -> object:
    """Give what a plan is recognised by; with sinks nothing, as their values may change.

    Live thresholds are the plan's own, so the tensor's identity is enough.
    """
    if options["sinks"] is not None:
        return object()
    return tuple((k, id(v) if isinstance(v, Tensor) else v) for k, v in options.items())


def _rows(x: Tensor) -> Tensor:
    """View ``[batch, heads, length, dim]`` as ragged rows; a copy for several requests."""
    return x.transpose(1, 2).flatten(0, 1)


def _token_pages(key: Tensor, value: Tensor) -> tuple[tuple[Tensor, Tensor], int]:
    """View a cache ``[batch, heads, length, dim]`` as one-token pages ``[pages, heads, 1, dim]``.

    A page begins at every multiple of a token's stride: page ``request * pages_per_request +
    position`` is that token, and pages in between, which overlap other heads, are never named.
    """
    steps = [(x.stride(0) % x.stride(2), x.stride(0) // x.stride(2)) for x in (key, value)]
    if steps[0] != steps[1] or steps[0][0] != 0:
        key, value = key.contiguous(), value.contiguous()
    pages_per_request = key.stride(0) // key.stride(2)
    batch_size, heads, length, _ = key.shape
    pages = (batch_size - 1) * pages_per_request + length

    def view(x: Tensor) -> Tensor:
        token = x.stride(2)
        return x.as_strided((pages, heads, 1, x.shape[3]), (token, x.stride(1), token, 1))

    return (view(key), view(value)), pages_per_request
