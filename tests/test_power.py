"""The study of the power limit: its table on any machine, its samples by a tool that is faked."""

from __future__ import annotations

import json

import pytest

from benchmarks import power
from benchmarks.groups import CASES


def test_targets_are_cases() -> None:
    assert {target.case for target in power.TARGETS} <= CASES.keys()


def test_cycles_are_time_times_clock() -> None:
    entry = {"target": "x", "ms": 2.0, "mhz": 1500.0, "watts": 690.4, "power_capped": 0.5}
    (row,) = power.table({"power": [entry]}).splitlines()[2:]
    assert row == "| x | 2.000 | 1500 | 690 | 50% | 3.00 |"


def test_samples_hold_what_the_tool_says() -> None:
    lines = ["1500, 690.1, Active", "1600, 680.0, Not Active", "1550, 700.0, Active", "15"]
    seen = power.summary(lines, [2.0, 1.0, 4.0])
    assert seen == {
        "ms": 2.0,
        "mhz": 1550.0,
        "watts": 690.1,
        "power_capped": pytest.approx(2 / 3),
        "samples": 3,
    }


def test_a_turn_without_a_sample_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="in 2 launches, no whole line"):
        power.summary(["1500, 69"], [2.0, 1.0])


def test_the_page_holds_the_table() -> None:
    assert power.table(json.loads(power.RESULTS.read_text())) in power.PAGE.read_text()
