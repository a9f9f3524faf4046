"""What takes part in a measurement: a name, and a function that prepares a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from benchmarks.cases import Case
from benchmarks.data import Data

NOT_ASKED = "not one of this contestant's cases"  # a reason that no table needs to repeat
FP8_ROUNDING = 0.1  # of a row's norm, where q and P are rounded to e4m3: 4 to 6e-2


class Unsupported(Exception):
    """A contestant cannot run here, or not this case; the message is printed in its place."""


@dataclass
class Prepared:
    """One contestant on one case's data, ready to run."""

    run: Callable[[], Tensor]  # enqueues one attention, returns its output
    to_rows: Callable[[Tensor], Tensor] = lambda out: (
        out
    )  # the output as [rows, heads, head_dim_vo]
    plan: Callable[[], object] | None = None  # what a serving loop repeats when shapes change
    skipped_share: Callable[[], float] | None = None  # of visited tiles, counted in an untimed run
    # Where the case has a page table: read through it. False in a prefill: ragged K and V instead;
    # in a decode: pages in their order of storage, the ceiling of those that look them up.
    paged: bool = True
    rounding: float | None = None  # relative error that its arithmetic brings, if not the inputs'
    note: str = ""


@dataclass(frozen=True)
class Contestant:
    """A way to compute attention.

    `available` returns why it cannot run on this machine, or an empty text. `prepare` raises
    `Unsupported` where it lacks the case. `ours` is what peers are compared with.
    """

    name: str
    prepare: Callable[[Case, Data], Prepared]
    available: Callable[[], str] = lambda: ""
    skips: bool = False
    ours: bool = False
