"""`run()` as torch.compile sees it: a custom op that knows its wrapper by an integer."""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch

from flashskip._scales import Scales


class Attends(Protocol):
    """What the op calls."""

    def _attend(
        self,
        inputs: list[torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor | None,
        bound: torch.Tensor | None,
        lse_base: str,
        scales: Scales,
    ) -> None: ...


_handles = itertools.count()
_wrappers: weakref.WeakValueDictionary[int, Attends] = weakref.WeakValueDictionary()


def register(wrapper: Attends) -> int:
    """Return the integer by which the op finds this wrapper for as long as it lives."""
    handle = next(_handles)
    _wrappers[handle] = wrapper
    return handle


@torch.library.custom_op(
    "flashskip::run",
    mutates_args=("out", "lse", "bound"),
    schema=(
        "(int handle, Tensor[] inputs, Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? bound, "
        "str lse_base, Tensor? k_scale=None, Tensor? v_scale=None, float k_scale_value=1.0, "
        "float v_scale_value=1.0) -> ()"
    ),
)
def run(
    handle: int,
    inputs: list[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor | None,
    bound: torch.Tensor | None,
    lse_base: str,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_scale_value: float = 1.0,
    v_scale_value: float = 1.0,
) -> None:
    """Attend; eager calls do not come this way, since an op call costs 15 us."""
    wrapper = _wrappers.get(handle)
    if wrapper is None:
        raise RuntimeError(
            "the wrapper of this compiled or exported call is gone; expected one that lives as "
            "long as the call is used. Keep a reference to it, and compile or export again."
        )
    scales = Scales(k_scale, v_scale, k_scale_value, v_scale_value)
    wrapper._attend(inputs, out, lse, bound, lse_base, scales)


run.register_fake(lambda *arguments: None)  # outputs are allocated by the caller
