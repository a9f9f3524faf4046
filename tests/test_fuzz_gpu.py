"""Random calls of the kernels: at least 500 examples over both wrappers, judged by the oracle.

Examples are the same each time. `FUZZ_SECONDS=600` tries more, `FUZZ_SEED=1000` others.
"""

from __future__ import annotations

import os
import time
from typing import Any

import fuzz_judge
import pytest
import torch
from fuzz_examples import NUMBERS, draw, variants
from fuzz_judge import check
from helpers import assert_within_budget

from flashskip.variant import Variant

EXAMPLES = 500  # of all kernels together, at the least
SECONDS = float(os.environ.get("FUZZ_SECONDS", "120"))  # of all kernels together
SLOWEST = 15.0  # seconds that one kernel's least examples may take
SEED = int(os.environ.get("FUZZ_SEED", "0"))


@pytest.mark.gpu_fuzz
@pytest.mark.variants(lambda number: [variants()[number]])
@pytest.mark.parametrize("number", NUMBERS)
def test_random_calls(number: int, receipt_notes: dict[str, Any]) -> None:
    """The kernel's share of the examples, then more of them until its share of the time is over."""
    v, start, share = variants()[number], time.monotonic(), SECONDS / len(NUMBERS)
    least = -(-EXAMPLES // len(NUMBERS))
    examples = decided = rows = 0
    while examples < least or time.monotonic() - start < share:
        assert time.monotonic() - start < max(share, SLOWEST), f"only {examples} examples in time"
        of_example = check(v, SEED + examples)
        examples, decided, rows = examples + 1, decided + of_example[0], rows + of_example[1]
    added = {"variants": 1, "examples": examples, "rows": rows, "rows_decided": decided}
    for name, count in added.items():
        receipt_notes[name] = receipt_notes.get(name, 0) + count
    receipt_notes["first_seed"] = SEED
    print(f"{examples} examples, {decided} of {rows} rows decided")
    assert decided > 0.9 * rows, "rounding may flip so many decisions that little was compared"


# ---- the fuzzer itself, on the CPU path ----------------------------------------------------------


@pytest.mark.parametrize("number", NUMBERS[::2])
def test_examples_on_the_cpu(number: int) -> None:
    check(variants()[number], 1, device="cpu", longest=70)


def test_an_output_below_fp16s_normal_numbers_is_held_to_their_spacing() -> None:
    """A sink may leave a row so little that fp16 rounds it by more than its weights' precision."""
    spacing = 2.0**-24
    exact = torch.tensor([[5.4 * spacing]], dtype=torch.float64)
    eager, rounded = exact.bfloat16(), exact.half().bfloat16()
    assert_within_budget(rounded, exact, eager, spacing)
    with pytest.raises(AssertionError, match="times the budget"):
        assert_within_budget(rounded, exact, eager)
    with pytest.raises(AssertionError, match="times the budget"):
        assert_within_budget((rounded + 2 * spacing).bfloat16(), exact, eager, spacing)


def test_kernels_are_few_and_of_both_operations() -> None:
    assert len(variants()) == len(set(variants())) == len(NUMBERS)
    assert {v.op for v in variants()} == {"prefill", "decode"}


@pytest.mark.parametrize("op", ["prefill", "decode"])
@pytest.mark.parametrize(
    "fault", ["output", "lse", "count", "bound", "gaps", "unwritten", "unsteady"]
)
def test_faults_are_found(op: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper that errs in one way fails, and the message says which example it was."""
    wanted = {"bound": lambda v: v.bound, "gaps": lambda v: v.skip == "measure"}
    is_wanted = wanted.get(fault, lambda v: v.stats)
    v = next(v for v in variants() if v.op == op and is_wanted(v))
    right, calls = fuzz_judge.run, []

    def wrong(x: Any, out: torch.Tensor) -> Any:
        answer = right(x, out)
        calls.append(x)
        if fault == "output":
            answer.out[0, 0, 0] += 0.5
        elif fault == "lse":
            answer.lse[0, 0] = answer.lse[0, 0].clamp(min=-9) + 0.01  # of a row without keys too
        elif fault == "count":
            answer.stats[..., 1] += 1
        elif fault == "bound":
            answer.bound[0, 0] += 0.01
        elif fault == "gaps":
            answer.gaps[0, 0, 7] += 1
        elif fault == "unwritten":
            answer.out[0, 0, 0] = torch.nan
        elif len(calls) == 2:
            answer.out[0, 0, 0] += 0.5
        return answer

    seed = _one_that_decides_the_first_row(v)
    monkeypatch.setattr(fuzz_judge, "run", wrong)
    with pytest.raises(AssertionError, match=f"example {seed} of {v.symbol}"):
        check(v, seed, device="cpu", longest=70)


def _one_that_decides_the_first_row(v: Variant) -> int:
    for seed in range(100):
        x = draw(v, seed, "cpu", 70)
        if len(x.alone) == 1 and x.rows:
            decided, rows = check(v, seed, device="cpu", longest=70)
            if decided == rows > 0:
                return seed
    raise LookupError(v.symbol)
