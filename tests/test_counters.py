"""Reading Nsight Compute's output, and the table made of it."""

import json

import pytest

from benchmarks import counters
from benchmarks.counters import TARGETS, Target, parse, table
from benchmarks.groups import CASES
from benchmarks.result_file import save

STALLS = {"wait": "1.5", "long_scoreboard": "6", "barrier": "0.5", "selected": "1", "gmma": "0"}
COLUMNS = {
    "ID": ("", "0"),
    "Kernel Name": ("", "flashskip_decode"),
    counters._TIME: ("ns", "80,896"),
    counters._BYTES: ("byte/s", "3,679,762,658,227.85"),
    **{metric: ("%", "76.5") for metric in counters._PERCENT.values()},
    **{counters._STALL + n + counters._PER_ISSUE: ("inst", v) for n, v in STALLS.items()},
}


def output(launches: int) -> str:
    """What ncu and the program under it print."""
    rows = [list(COLUMNS), [unit for unit, _ in COLUMNS.values()]]
    rows += [[value for _, value in COLUMNS.values()]] * launches
    quoted = [",".join(f'"{cell}"' for cell in row) for row in rows]
    return "\n".join(["==PROF== Connected", *quoted, "==PROF== Disconnected"])


def test_counters_of_each_launch():
    one, two = parse(output(2))
    assert one == two
    assert (one["kernel"], one["us"], one["dram"]) == ("flashskip_decode", 80.896, 76.5)
    assert one["dram_gbps"] == pytest.approx(3679.76, abs=0.01)
    assert list(one["warps"].items())[:2] == [("long_scoreboard", 66.7), ("wait", 16.7)]


def test_no_launch():
    assert parse("==ERROR== no kernel\n") == []


def test_targets_are_cases_that_are_measured():
    assert {target.case for target in TARGETS} <= CASES.keys()
    assert [Target.parse(str(target)) for target in TARGETS] == list(TARGETS)


def test_a_run_replaces_its_targets(monkeypatch, tmp_path):
    path = tmp_path / "counters.json"
    old = [{"target": str(t), "us": 0.0} for t in TARGETS[:2]]
    save(path, {"counters": old})
    monkeypatch.setattr(counters, "read", lambda targets: parse(output(len(targets))))
    monkeypatch.setattr(counters.machine, "describe", lambda *_: {"commit": "c"})
    counters.run(path, [TARGETS[1], TARGETS[2]], "c")
    results = json.loads(path.read_text())
    found = {entry["target"]: entry["us"] for entry in results["counters"]}
    assert found == {str(TARGETS[0]): 0.0, str(TARGETS[1]): 80.896, str(TARGETS[2]): 80.896}
    assert f"| {TARGETS[2]} | 80.9 | 3680 (76 %)" in table(results, str(TARGETS[2]))


def test_fewer_launches_than_targets_are_an_error(monkeypatch):
    class Done:
        stdout, stderr, returncode = output(1), "what ncu says", 0

    monkeypatch.setattr(counters.subprocess, "run", lambda *_, **__: Done())
    with pytest.raises(RuntimeError, match="1 launches were read, not 2"):
        counters.read(TARGETS[:2])
