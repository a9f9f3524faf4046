"""What the power limit makes of a kernel: time, clock and power of a launch in a long run.

``python -m benchmarks.power run --out FILE`` on a Hopper GPU runs each of `TARGETS` without a
pause for `_TURN_SECONDS`, in rounds of a random order, and asks ``nvidia-smi`` for the clock and
the power meanwhile. Time times clock is a number of cycles: where two kernels differ in time but
not in cycles, power is what holds the slower one. ``table`` writes a result file's table into the
page of the prefill kernel.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import ceilings, machine, pages
from benchmarks.counters import Target, prepare_target
from benchmarks.result_file import save

RESULTS = Path(__file__).parent / "results" / "power.json"
PAGE = Path(__file__).parent.parent / "docs" / "kernels" / "prefill_sm90.md"
MATRIX_PRODUCT = "matrix product"
_32K, _16K = "prefill-1x32768-full", "prefill-1x16384-full"
TARGETS = (
    *(Target(_32K, share, skips) for share, skips in ((0.0, False), (0.0, True), (0.75, True))),
    *(Target(_16K, share, skips) for share, skips in ((0.0, False), (0.0, True), (0.75, True))),
    *(Target("prefill-1x32768-causal", 0.0, skips) for skips in (False, True)),
)
_ROUNDS = 3
_TURN_SECONDS = 1.5
_SETTLING_SECONDS = 0.6  # of a turn, until clock and power are those of this kernel
_SAMPLE_MS = 25
_QUERY = "clocks.sm,power.draw.instant,clocks_event_reasons.sw_power_cap"


def run(path: Path, commit: str) -> None:
    """Measure all targets and a matrix product, and write a result file."""
    device = torch.device("cuda", 0)
    about = machine.describe(device, commit)
    calls = {str(target): prepare_target(target).run for target in TARGETS}
    calls[MATRIX_PRODUCT] = ceilings.matrix_product(device)
    for call in calls.values():
        call()
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name in random.sample(list(calls), len(calls)):
            turns[name].append(turn(calls[name], _SETTLING_SECONDS, _TURN_SECONDS))
    found = [{"target": name, **medians(of_target)} for name, of_target in turns.items()]
    save(path, {"machine": about, "power": found})


def turn(call: Callable[[], object], settling: float, seconds: float) -> dict[str, float]:
    """Run a call over and over for `seconds`; return the medians of what was seen after `settling`.

    By then clock and power should be those of this call.
    """
    _launch_for(settling, call)
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", "-i", "0"]
    with subprocess.Popen(
        [*command, "-lms", str(_SAMPLE_MS)], stdout=subprocess.PIPE, text=True
    ) as sampler:
        times = _launch_for(seconds - settling, call)
        sampler.terminate()
        lines = sampler.communicate()[0].splitlines()
    return summary(lines, times)


def summary(lines: Sequence[str], times: Sequence[float]) -> dict[str, float]:
    """Return the medians of launches' milliseconds and of what the tool said meanwhile."""
    samples = [line.split(", ") for line in lines[:-1]]  # the last line may be cut
    if not samples:
        raise RuntimeError(f"nvidia-smi said {list(lines)} in {len(times)} launches, no whole line")
    return {
        "ms": statistics.median(times),
        "mhz": statistics.median(float(clock) for clock, _, _ in samples),
        "watts": statistics.median(float(watts) for _, watts, _ in samples),
        "power_capped": statistics.mean(capped == "Active" for _, _, capped in samples),
        "samples": len(samples),
    }


def _launch_for(seconds: float, call: Callable[[], object]) -> list[float]:
    """Launch without a pause; return the milliseconds of each launch."""
    until = time.monotonic() + seconds
    events = [torch.cuda.Event(enable_timing=True)]
    events[0].record()
    while time.monotonic() < until:
        call()
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        if len(events) > 8:  # the queue stays short, so that a turn ends when it should
            events[-8].synchronize()
    events[-1].synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def medians(turns: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median over turns of each thing that was seen."""
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


def table(results: dict[str, Any]) -> str:
    """Return a Markdown table of a result."""
    header = ["launch", "ms", "clock, MHz", "power, W", "at the power limit", "million cycles"]
    rows = [
        [
            entry["target"],
            f"{entry['ms']:.3f}",
            f"{entry['mhz']:.0f}",
            f"{entry['watts']:.0f}",
            f"{entry['power_capped']:.0%}",
            f"{entry['ms'] * entry['mhz'] / 1e3:.2f}",
        ]
        for entry in results["power"]
    ]
    return pages.table(header, rows)


def main() -> None:
    """Measure, or write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.power", description=__doc__)
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="", help="of these sources, where there is no git")
    args = parser.parse_args()
    if args.command == "run":
        run(args.out, args.commit)
        return
    pages.fill(PAGE, {"power": table(json.loads(args.out.read_text()))})


if __name__ == "__main__":
    main()
