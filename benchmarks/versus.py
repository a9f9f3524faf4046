"""The kernels of two commits side by side: in one process, by one plan, on the same data.

``python -m benchmarks.versus render --sources DIR --out FILE`` writes down, on any machine, the
kernels of another checkout; ``run --other FILE`` on a Hopper GPU launches them by the present
checkout's plans, between its own kernels, and compares outputs, times and cycles; ``table`` prints
a result file. What does not show in the parameters' names and types, such as a new meaning of one,
is for whoever compares to know.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import machine, pages, power, programs
from benchmarks.counters import Target
from benchmarks.data import THRESHOLD, Data, PrefillData, make_data
from benchmarks.groups import CASES
from benchmarks.peers.flashskip import planned, variant_of
from benchmarks.result_file import save
from benchmarks.timing import Clock, interleave
from flashskip import _env
from flashskip._jit.build import build
from flashskip._jit.kernel import Kernel, load
from flashskip._kernels import program_for
from flashskip._plan import multiprocessors
from flashskip.variant import Variant

RESULTS = Path(__file__).parent / "results" / "versus.json"
PAGE = power.PAGE
_ROUNDS = 3
_TURN_SECONDS = 0.5
_SETTLING_SECONDS = 0.3  # of a turn, until clock and power are those of this kernel

Turns = dict[str, list[dict[str, float]]]  # of "present" and "other": what each turn saw


class Launch(NamedTuple):
    """A target, and whether every second of its query heads skips nothing."""

    target: Target
    lopsided: bool = False

    def __str__(self) -> str:
        return f"{self.target}{'-lopsided' if self.lopsided else ''}"

    def variant(self, **options: object) -> Variant:
        """Return the kernel that a plan of it chooses."""
        return variant_of(CASES[self.target.case], **self.options, **options)

    @property
    def options(self) -> dict[str, object]:
        """What plan() is given."""
        return {"skip_softmax_threshold": THRESHOLD} if self.target.skips else {}


def _launches(case: str, *shares: float, dense: bool = True) -> tuple[Launch, ...]:
    """Name the launches of a case: of the dense kernel, and of the skip kernel at shares."""
    first = (Launch(Target(case, 0.0, False)),) if dense else ()
    return (*first, *(Launch(Target(case, share, True)) for share in shares))


_8K, _16K, _4X = "prefill-1x8192-causal", "prefill-1x16384", "prefill-4x4096"
TARGETS = (
    *_launches(_8K),
    *_launches("prefill-1x32768-causal", 0.0, 0.75, 0.9),
    *_launches(f"{_16K}-causal", 0.9, dense=False),
    Launch(Target(f"{_16K}-causal", 0.9, True), lopsided=True),
    *_launches(f"{_16K}-full", 0.0, 0.5, 0.75, 0.9),
    Launch(Target(f"{_16K}-full", 0.9, True), lopsided=True),
    *_launches("prefill-1x8192-full"),
    *_launches(f"{_4X}-causal", 0.0),
    *_launches(f"{_4X}-full", 0.0),
    *_launches(f"{_8K}-d64", 0.0),
    *_launches(f"{_8K}-d256"),
    *_launches(f"{_8K}-d192/128"),
    *_launches(f"{_8K}-page16"),
    *_launches(f"{_8K}-page64"),
    *_launches("prefill-mix16-causal", 0.0, dense=False),
    *_launches("prefill-chunk-512-on-131072", 0.0, dense=False),
    *_launches("decode-64x8192-page16", 0.0, 0.9),
    *_launches("decode-1x131072-page64", 0.0, 0.9),
    *_launches("decode-1x131072-page16", 0.9, dense=False),
    *_launches("decode-256x1024-page16", 0.0),
    *_launches("decode-64x16384-page64-fp8"),
)


def render(sources: Path, launches: Sequence[Launch], commit: str) -> dict[str, Any]:
    """Return the kernels that another checkout has for launches, and its commit.

    Raises
    ------
    ValueError
        There is no git to tell the commit, and `commit` is empty.
    RuntimeError
        The checkout lacks one of the kernels, or all of them.
    """
    commit = commit or machine.commit_of(sources)
    if commit == "unknown":
        raise ValueError(f"the commit of {sources} is unknown, it has no git; pass --commit HASH")
    symbols = sorted({launch.variant().symbol for launch in launches})
    return {"commit": commit, "kernels": programs.of_checkout(sources, symbols)}


def check(launches: Sequence[Launch], other: dict[str, Any]) -> None:
    """Raise unless the present plans of all launches may launch the other checkout's kernels.

    Raises
    ------
    ValueError
        Names the launch, and what differs or is missing.
    """
    for launch in launches:
        symbol = launch.variant().symbol
        if symbol not in other["kernels"]:
            raise ValueError(
                f"{launch}: the other kernels have no {symbol}; render these targets anew"
            )
        kernel = other["kernels"][symbol]
        try:
            programs.program_of(kernel)
            reason = programs.misfit(kernel, programs.describe(symbol))
        except ValueError as error:
            reason = str(error)
        if reason:
            raise ValueError(f"{launch}: the other kernel cannot be launched: {reason}")


def run(path: Path, other: dict[str, Any], launches: Sequence[Launch], commit: str) -> None:
    """Compare all launches; the result file is complete after each."""
    device = torch.device("cuda", 0)
    if multiprocessors(0) != programs.MULTIPROCESSORS:
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} has {multiprocessors(0)} multiprocessors; the "
            f"other kernels' grids are for {programs.MULTIPROCESSORS}"
        )
    check(launches, other)
    _build(launches, other)
    results: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {**machine.describe(device, commit), "other": other["commit"]},
        "versus": [],
    }
    clock = Clock(device)
    for launch in launches:
        described = other["kernels"][launch.variant().symbol]
        kernel = load(programs.program_of(described), _env.kernel_cache())
        kernel.prepare(0)
        entry = compare(launch, kernel, described["grid"], clock)
        results["versus"].append(entry)
        save(path, results)
        print(" | ".join(_row(entry)), flush=True)
        torch.cuda.empty_cache()  # of this launch's data


def _build(launches: Sequence[Launch], other: dict[str, Any]) -> None:
    """Compile all kernels side by side: both checkouts' and those that count what is skipped."""
    variants = {launch.variant() for launch in launches}
    found = {v.symbol: programs.program_of(other["kernels"][v.symbol]) for v in variants}
    variants |= {launch.variant(collect_stats=True) for launch in launches if launch.target.skips}
    wanted = [*found.values(), *(program_for(v) for v in variants)]
    directory = _env.cache_dir()
    if directory is None:
        raise ValueError("there is no folder for compiled kernels; set FLASHSKIP_CACHE_DIR")
    once = {program.content: program for program in wanted}  # what did not change is built once
    outcome = build(list(once.values()), directory, jobs=os.cpu_count() or 1)
    if outcome.failed:
        raise RuntimeError(f"kernels do not compile: {', '.join(outcome.failed)}")


def compare(launch: Launch, other: Kernel | None, grid: int, clock: Clock) -> dict[str, Any]:
    """Run both kernels on a launch's data and time them; kernels are None on a CPU."""
    case = CASES[launch.target.case]
    data = make_data(case, launch.target.share, clock.device)
    if launch.lopsided:
        make_lopsided(data)
    wrapper, prepared = planned(case, data, **launch.options)
    plan, expected = wrapper._planned(), launch.variant()
    if plan.variant != expected:
        raise RuntimeError(f"{launch}: {plan.variant.symbol} was planned, not {expected.symbol}")

    def launching(kernel: Kernel | None, ctas: int) -> Callable[[], Tensor]:
        def call() -> Tensor:
            plan.kernel, plan.grid = kernel, ctas
            return prepared.run()

        return call

    calls = {"present": launching(plan.kernel, plan.grid), "other": launching(other, grid)}
    entry: dict[str, Any] = {"target": str(launch), **difference(*map(_answer, calls.values()))}
    if prepared.skipped_share is not None:
        entry["skipped"] = prepared.skipped_share()
    return entry | summary(_decode_turns(calls, clock) if case.op == "decode" else _turns(calls))


def make_lopsided(data: Data) -> None:
    """Let every second query head skip nothing, by taking from it what makes keys stand out.

    Rows of a head have one direction in common with its hot keys, of entries of one size (see
    `benchmarks.data`); all else of them averages out.
    """
    assert isinstance(data, PrefillData)
    q = data.q[:, 1::2].float()
    direction = q.mean(0).sign() / q.shape[-1] ** 0.5
    data.q[:, 1::2] = (q - (q * direction).sum(-1, keepdim=True) * direction).to(data.q.dtype)


def _answer(call: Callable[[], Tensor]) -> Tensor:
    """Return what a call writes into an output that holds NaN."""
    call().fill_(float("nan"))
    return call().clone()


def difference(present: Tensor, other: Tensor) -> dict[str, Any]:
    """Say whether two outputs of 16-bit numbers are the same, and if not, by how much at most.

    The difference of a token's head, relative to the other kernel's, by their norms.
    """
    for name, out in (("present", present), ("other", other)):
        if out.isnan().any():
            raise RuntimeError(f"the {name} kernel left NaN in its output")
    if torch.equal(present.view(torch.int16), other.view(torch.int16)):
        return {"same_bits": True}
    apart = (present.float() - other.float()).norm(dim=-1)
    size = other.float().norm(dim=-1).clamp(min=1e-30)  # a row without keys is 0
    return {"same_bits": False, "difference": (apart / size).max().item()}


def _turns(calls: dict[str, Callable[[], Tensor]]) -> Turns:
    """Time calls in rounds of a random order, each without a pause, and read the clock."""
    turns: Turns = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name in random.sample(list(calls), len(calls)):
            turns[name].append(power.turn(calls[name], _SETTLING_SECONDS, _TURN_SECONDS))
    return turns


def _decode_turns(calls: dict[str, Callable[[], Tensor]], clock: Clock) -> Turns:
    """Time calls, each run behind reads that fill the L2 cache with something else."""
    timings = interleave(dict(calls), clock, cold_l2=True)
    return {name: [{"ms": ms} for ms in timing.rounds_ms] for name, timing in timings.items()}


def summary(turns: Turns) -> dict[str, Any]:
    """Return medians of both, and of the rounds' ratios of present over other."""
    rounds = list(zip(turns["present"], turns["other"], strict=True))
    found: dict[str, Any] = {name: power.medians(seen) for name, seen in turns.items()}
    found["time"] = statistics.median(a["ms"] / b["ms"] for a, b in rounds)
    if "mhz" in rounds[0][0]:
        ratios = (a["ms"] * a["mhz"] / (b["ms"] * b["mhz"]) for a, b in rounds)
        found["cycles"] = statistics.median(ratios)
    return found


def table(results: dict[str, Any]) -> str:
    """Return a Markdown table of a result: time and cycles are those of present over other."""
    header = ["launch", "time", "cycles", "clock, MHz: present, other", "skipped", "bits"]
    return pages.table(header, [_row(entry) for entry in results["versus"]])


def _row(entry: dict[str, Any]) -> list[str]:
    clocks = [entry[name]["mhz"] for name in ("present", "other") if "mhz" in entry[name]]
    return [
        entry["target"],
        f"{entry['time']:.3f}",
        f"{entry['cycles']:.3f}" if "cycles" in entry else "–",
        ", ".join(f"{mhz:.0f}" for mhz in clocks) or "–",
        f"{entry['skipped']:.1%}" if "skipped" in entry else "–",
        "same" if entry["same_bits"] else f"differ by {entry['difference']:.1e}",
    ]


def _write_table(results: dict[str, Any]) -> None:
    """Print the table, and put it into the page where that has a place for it."""
    text = table(results)
    print(text)
    if "<!-- versus: begin -->" in PAGE.read_text():
        pages.fill(PAGE, {"versus": text})
        print(f"\nwritten into {PAGE}", file=sys.stderr)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versus", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    rendering = commands.add_parser("render")
    rendering.add_argument("--sources", type=Path, required=True, help="the other checkout")
    rendering.add_argument("--out", type=Path, required=True, help="a file for its kernels")
    rendering.add_argument("--commit", default="", help="of the other checkout, without git")
    running = commands.add_parser("run")
    running.add_argument("--other", type=Path, required=True, help="what render wrote")
    running.add_argument("--out", type=Path, default=RESULTS, help="the result file, made anew")
    running.add_argument("--commit", default="", help="of the present sources, without git")
    for command in (rendering, running):
        command.add_argument("--only", default="", help="targets that hold this text")
    commands.add_parser("table").add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.command != "table":
        arguments.launches = [launch for launch in TARGETS if arguments.only in str(launch)]
        if not arguments.launches:
            parser.error(f"--only {arguments.only!r}: no target holds this text")
    return arguments


def main() -> None:
    """Parse the command line and do what it says."""
    arguments = _arguments()
    if arguments.command == "table":
        _write_table(json.loads(arguments.results.read_text()))
    elif arguments.command == "render":
        rendered = render(arguments.sources, arguments.launches, arguments.commit)
        arguments.out.write_text(json.dumps(rendered, indent=1))
    else:
        other = json.loads(arguments.other.read_text())
        with torch.no_grad():
            run(arguments.out, other, arguments.launches, arguments.commit)


if __name__ == "__main__":
    main()
