"""Tensors with fences: memory around them that nobody may write, and that must not matter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BAND = 8192  # bytes on either side; more than a kernel reads ahead of a row or a page

# Bytes of a fence. As a number they are NaN or -1; or small and finite, or a large index.
POISON, HARMLESS = 0xFF, 0x3C


class Fences:
    """Makes tensors that lie between two bands of one byte value."""

    def __init__(self, fill: int) -> None:
        self.fill = fill
        self._made: list[tuple[str, Tensor, int]] = []  # name, whole memory, bytes inside

    def empty(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: Any = "cuda"
    ) -> Tensor:
        """Return a tensor between fences, itself full of the same bytes."""
        inside = math.prod(shape) * dtype.itemsize
        whole = torch.ops.aten.full.default(
            [inside + 2 * BAND], self.fill, dtype=torch.uint8, device=torch.device(device)
        )
        self._made.append((name, whole, inside))
        return whole[BAND : BAND + inside].view(dtype).view(shape)

    def put(self, name: str, t: Tensor) -> Tensor:
        """Return a copy of `t` between fences."""
        return self.empty(name, tuple(t.shape), t.dtype, t.device).copy_(t)

    def hold(self, t: Tensor) -> bool:
        """Whether a tensor lies between fences."""
        return any(
            whole.data_ptr() + BAND <= t.data_ptr() <= whole.data_ptr() + BAND + inside
            for _, whole, inside in self._made
        )

    def broken(self) -> list[str]:
        """Names of the tensors around which something was written."""
        return [
            name
            for name, whole, inside in self._made
            if (whole[:BAND] != self.fill).any() or (whole[BAND + inside :] != self.fill).any()
        ]

    def allocator(self, name: str, value: int | None) -> Callable[..., Tensor]:
        """Stand in for `torch.zeros` or `torch.empty`: what a wrapper allocates has fences too."""

        def allocate(*size: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
            shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
            dtype = dtype or torch.get_default_dtype()
            t = self.empty(name, tuple(shape), dtype, device or "cpu")
            return t if value is None else t.fill_(value)

        return allocate
