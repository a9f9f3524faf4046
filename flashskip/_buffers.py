"""Device memory of a wrapper. Its addresses outlive plans, because captured graphs hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from flashskip._options import refusal

Needs = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of each buffer


class Buffers:
    """Named buffers that only grow, and after a capture (`captured`) not even that."""

    def __init__(self) -> None:
        self.captured = False
        self.storage: dict[str, torch.Tensor] = {}

    def reserve(
        self, needs: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Return views of these buffers, all or none: a refusal changes nothing.

        New memory is 0; what was reserved before keeps its contents.
        """
        small = {name: need for name, need in needs.items() if self._lacks(name, *need, device)}
        if self.captured and small:
            name, (shape, _) = next(iter(small.items()))
            held = self.storage.get(name)
            raise refusal(
                f"the plan needs {math.prod(shape)} elements for {name} after a run was captured "
                f"in a graph",
                f"at most {0 if held is None else held.numel()}, as the graph holds the old buffer",
                "Make the plan that needs most first (batch, head dim), or use a new wrapper",
            )
        if small:
            with torch.inference_mode(False):  # or no code outside of it could reset a buffer
                self.storage |= {
                    name: torch.zeros(max(math.prod(shape), 1), dtype=dtype, device=device)
                    for name, (shape, dtype) in small.items()
                }
        return {
            name: self.storage[name][: math.prod(shape)].view(shape)
            for name, (shape, _) in needs.items()
        }

    def _lacks(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> bool:
        held = self.storage.get(name)
        return (
            held is None
            or held.numel() < math.prod(shape)
            or (held.dtype, held.device) != (dtype, device)
        )
