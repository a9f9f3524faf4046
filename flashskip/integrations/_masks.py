"""What a transformers attention mask lets the queries see, in the terms of the wrappers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from flashskip.errors import UnsupportedVariant

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class AttentionMask:
    """What the queries of one forward pass see; every layer of the same kind shares it.

    Attributes
    ----------
    batch_size, qo_len : int
        Requests, and query positions of each, padding included.
    kv_len : int or Tensor
        Leading keys of each request that the mask is about; a 0-d integer tensor where only the
        device knows it (static caches).
    causal : bool
        A query does not see the keys behind its own position.
    window_left : int
        Nor those more than this many positions before it; -1 is unlimited.
    valid : Tensor or None
        bool ``[batch_size, kv_len]``, False where a key is padding. None: there is no padding.
    """

    ndim: ClassVar[int] = 0  # transformers looks at it where a mask was made before the forward

    batch_size: int
    qo_len: int
    kv_len: int | Tensor
    causal: bool = True
    window_left: int = -1
    valid: Tensor | None = None

    def effective_window(self) -> int:
        """`window_left`, or -1 where no row has that many keys before it."""
        unlimited = self.window_left >= 0 and self.window_left >= int(self.kv_len) - 1
        return -1 if unlimited else self.window_left

    @cached_property
    def packed_queries(self) -> Packing:
        """Where the queries are that see a key: with a causal mask those that are no padding."""
        assert self.valid is not None
        if not self.causal:
            return Packing.of(self.valid.new_ones(self.batch_size, self.qo_len))
        return Packing.of(self.valid[:, -self.qo_len :])

    @cached_property
    def packed_keys(self) -> Packing:
        """Where the keys are that some query may see."""
        assert self.valid is not None
        if self.qo_len > 1 or self.effective_window() < 0:
            return Packing.of(self.valid)
        # One query: the window is a range of positions, which dropping padding would stretch.
        reach = torch.zeros_like(self.valid)
        reach[:, -self.window_left - 1 :] = True
        return Packing.of(self.valid & reach)


@dataclass(frozen=True)
class Packing:
    """Real tokens of a padded batch, in the order of a ragged batch; made without a device sync.

    Attributes
    ----------
    indptr : Tensor
        int32 ``[batch_size + 1]``: where the tokens of each request begin in `order`.
    order : Tensor
        int64 ``[batch_size * length]``: flat positions of the real tokens, then of the padding.
    length : int
        Positions per request in the padded batch.
    """

    indptr: Tensor
    order: Tensor
    length: int

    @classmethod
    def of(cls, valid: Tensor) -> Packing:
        """Pack where `valid`, bool ``[batch_size, length]``, is True."""
        indptr = torch.zeros(valid.shape[0] + 1, dtype=torch.int32, device=valid.device)
        torch.cumsum(valid.sum(dim=1), dim=0, out=indptr[1:])
        order = torch.argsort(~valid.flatten(), stable=True)
        return cls(indptr=indptr, order=order, length=valid.shape[1])

    @property
    def request(self) -> Tensor:
        """The request of each entry of `order`."""
        return self.order // self.length

    @property
    def position(self) -> Tensor:
        """The position of each entry of `order` inside its request."""
        return self.order % self.length


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | AttentionMask | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **hints: object,
) -> AttentionMask:
    """Describe a mask for the attention layers, or refuse it.

    The signature is that of transformers' mask functions; what `hints` carries (dtype, device,
    whether a mask may be left out) does not change which keys a query sees.

    Parameters
    ----------
    batch_size, q_length, kv_length : int
        Sizes of the mask.
    q_offset, kv_offset : int
        Positions of the first query and of the first key.
    mask_function : callable
        ``(batch, head, query position, key position) -> bool``.
    attention_mask : Tensor or AttentionMask, optional
        bool ``[batch_size, positions]``: False for padding. What this function has made already, as
        `generate()` does for static caches, is returned.
    local_size : int, optional
        Width of a sliding window.
    use_vmap : bool
        The mask function is the caller's own.

    Returns
    -------
    AttentionMask
        The same visibility, in the terms of the wrappers.

    Raises
    ------
    UnsupportedVariant
        If the mask is neither causal, nor a causal sliding window, nor bidirectional.
    """
    if isinstance(attention_mask, AttentionMask):
        return attention_mask
    if use_vmap:
        raise _refusal("a custom mask function (or_mask_function, and_mask_function)")
    causal, window_left = _limits(
        mask_function, local_size, batch_size, q_length, int(kv_length), q_offset, kv_offset
    )
    kv_len: int | Tensor = q_offset + q_length - kv_offset if causal else kv_length
    valid = _padding(attention_mask, kv_len, kv_offset)
    mask = AttentionMask(batch_size, q_length, kv_len, causal, window_left, valid)
    if valid is not None and q_length > 1 and mask.effective_window() >= 0 and _has_holes(valid):
        raise _refusal("a sliding window over a mask with padding between tokens")
    return mask


def _limits(
    mask_function: MaskFunction | None,
    local_size: int | None,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
) -> tuple[bool, int]:
    """Name the mask function's (causal, window_left)."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if mask_function is bidirectional_mask_function:
        return False, -1
    if mask_function is causal_mask_function or mask_function is None:
        return True, -1
    window_left = local_size - 1 if local_size is not None else -1
    first = int(q_offset)
    positions = torch.arange(first, first + q_length)
    if not _is_causal_window(
        mask_function, positions, kv_offset, kv_offset + kv_length, window_left, batch_size
    ):
        raise _refusal(
            "a mask that is neither causal nor a causal sliding window (packed, chunked, blockwise)"
        )
    return True, window_left


def _is_causal_window(
    mask_function: MaskFunction,
    queries: Tensor,
    kv_first: int,
    kv_end: int,
    window_left: int,
    batch_size: int,
) -> bool:
    """Whether a mask built by transformers is a causal window: if the window's edges are right.

    The masks that transformers builds itself (packed sequences, chunks, blocks, windows) are unions
    and intersections of ranges around the query; one that sees both ends of the expected range and
    not the keys next to them is the expected range.
    """
    lowest = queries - window_left if window_left >= 0 else torch.zeros_like(queries)
    lowest = lowest.clamp(min=kv_first)
    edges = [(lowest, True), (queries, True), (lowest - 1, False), (queries + 1, False)]
    batch = torch.arange(batch_size)[:, None]
    for keys, expected in edges:
        exists = (keys >= kv_first) & (keys < kv_end)
        keys = keys.clamp(kv_first, kv_end - 1)[None, :]
        seen = mask_function(batch, torch.zeros_like(batch), queries[None, :], keys).cpu()
        if bool(((seen != expected) & exists).any()):
            return False
    return True


def _padding(attention_mask: Tensor | None, kv_len: int | Tensor, kv_offset: int) -> Tensor | None:
    """Cut the 2-D mask to the keys in question; None where it hides none of them."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise _refusal(f"an attention mask of {attention_mask.dim()} dimensions")
    valid = attention_mask[:, kv_offset : kv_offset + int(kv_len)]
    missing = int(kv_len) - valid.shape[1]
    if missing > 0:
        valid = torch.nn.functional.pad(valid, (0, missing))
    return None if bool(valid.all()) else valid


def _has_holes(valid: Tensor) -> bool:
    """Whether padding lies between tokens of some request."""
    starts = valid[:, 1:] & ~valid[:, :-1]
    return bool((starts.sum(dim=1) + valid[:, 0] > 1).any())


def _refusal(found: str) -> UnsupportedVariant:
    """Say what the mask is, and which masks there are kernels for."""
    return UnsupportedVariant(
        f"attention_mask is {found}; flashskip supports causal, causal sliding-window and "
        "bidirectional attention with a 2-D padding mask. Load the model with "
        "attn_implementation='sdpa' for other masks."
    )
