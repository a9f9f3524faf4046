"""What limits a kernel: hardware counters of one launch, read by Nsight Compute.

``python -m benchmarks.counters run --out FILE`` on a Hopper GPU with ``ncu`` reads them for
`TARGETS`, or for those that hold the text of ``--only``, and replaces theirs in FILE. A launch is
replayed with cold caches until every counter is read, so its time is that of a kernel alone, a few
percent longer than in a measurement. ``table`` prints what a result file says.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import machine, pages
from benchmarks.contestant import Prepared
from benchmarks.data import THRESHOLD, make_data
from benchmarks.groups import CASES
from benchmarks.peers.flashskip import prepare
from benchmarks.result_file import save

RESULTS = Path(__file__).parent / "results" / "counters.json"
SECONDS = 120  # for all targets

_SECTIONS = (
    *("SpeedOfLight", "WarpStateStats", "SchedulerStats"),
    *("MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis"),
)
_PERCENT = {  # of the peak, over the whole launch
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "l2_hits": "lts__t_sector_hit_rate.pct",
    "xu": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",  # exponentials
}
_TIME, _BYTES = "gpu__time_duration.sum", "dram__bytes.sum.per_second"
_STALL, _PER_ISSUE = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"


class Target(NamedTuple):
    """One launch: a case of `benchmarks.groups`, its share of negligible tiles, and the kernel."""

    case: str
    share: float
    skips: bool

    def __str__(self) -> str:
        return f"{self.case}@{self.share}:{'skip' if self.skips else 'dense'}"

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read what `str` wrote."""
        case, _, rest = text.partition("@")
        share, _, kernel = rest.partition(":")
        return cls(case, float(share), kernel == "skip")


_LONG, _SHORT = "decode-1x131072-page64", "decode-256x1024-page64"
_8K, _32K = "prefill-1x8192-causal", "prefill-1x32768-causal"
_16K = "prefill-1x16384-full"
_DENSE_TO_SPARSE = ((0.0, False), (0.0, True), (0.75, True), (0.9, True))  # shares, skips
TARGETS = (
    *(Target(_LONG, *k) for k in _DENSE_TO_SPARSE),
    *(Target(_SHORT, 0.0, skips) for skips in (False, True)),
    Target("decode-128x16384-page64-h64/8", 0.0, False),
    *(Target("decode-64x8192-page64", *k) for k in ((0.0, False), (0.75, True), (0.9, True))),
    *(Target("decode-64x8192-page1", 0.0, skips) for skips in (False, True)),
    *(Target("decode-64x8192-page64-d64", *kernel) for kernel in ((0.0, False), (0.75, True))),
    Target("decode-64x8192-page64-d96", 0.0, False),
    *(Target("decode-64x16384-page64-fp8", *kernel) for kernel in ((0.0, False), (0.75, True))),
    *(Target("decode-64x8192-page16", *k) for k in ((0.0, False), (0.0, True), (0.9, True))),
    *(Target("decode-256x1024-page16", 0.0, skips) for skips in (False, True)),
    *(Target("decode-1x131072-page16", *k) for k in _DENSE_TO_SPARSE),
    *(Target(case, 0.0, skips) for case in (_8K, _32K, f"{_8K}-d64") for skips in (False, True)),
    *(Target(f"{_8K}-{shape}", 0.0, False) for shape in ("d256", "d192/128")),
    *(Target(f"{_8K}-page{n}", 0.0, skips) for n in (1, 16) for skips in (False, True)),
    *(Target("prefill-1x32768-full", 0.0, skips) for skips in (False, True)),
    *(Target("prefill-1x8192-full", 0.0, skips) for skips in (False, True)),
    *(Target("prefill-4x4096-full", 0.0, skips) for skips in (False, True)),
    *(Target(_16K, *k) for k in _DENSE_TO_SPARSE),
    *(Target("prefill-chunk-512-on-131072", 0.0, skips) for skips in (False, True)),
    *(Target("prefill-mix16-causal", 0.0, skips) for skips in (False, True)),
)


def prepare_target(target: Target) -> Prepared:
    """Make a target's data and plan its kernel."""
    case = CASES[target.case]
    data = make_data(case, target.share, torch.device("cuda", 0))
    options = {"skip_softmax_threshold": THRESHOLD} if target.skips else {}
    return prepare(case, data, **options)


def launch(targets: Iterable[Target]) -> None:
    """Launch each target's kernel once."""
    for target in targets:
        prepare_target(target).run()
        torch.cuda.synchronize()


def read(targets: Sequence[Target]) -> list[dict[str, Any]]:
    """Launch the targets under the profiler and return their counters."""
    profiler = ["ncu", "--clock-control", "none", "-k", "regex:flashskip", "--print-units", "base"]
    profiler += [word for section in _SECTIONS for word in ("--section", section)]
    profiler += ["--metrics", _PERCENT["xu"]]
    program = [sys.executable, "-m", "benchmarks.counters", "launch", *map(str, targets)]
    command = [*profiler, "--csv", "--page", "raw", *program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    rows = parse(done.stdout)
    if done.returncode or len(rows) != len(targets):
        raise RuntimeError(
            f"{len(rows)} launches were read, not {len(targets)}: "
            f"{(done.stdout + done.stderr)[-900:]}"
        )
    return rows


def parse(text: str) -> list[dict[str, Any]]:
    """Return the counters of each launch in the profiler's CSV output (raw page, base units)."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    names, *rest = csv.reader(lines) if lines else ([],)
    return [_record(dict(zip(names, row, strict=True))) for row in rest[1:]]  # after the units


def _record(row: dict[str, str]) -> dict[str, Any]:
    def number(name: str) -> float:
        return float(row[name].replace(",", ""))

    waits = {
        name.removeprefix(_STALL).removesuffix(_PER_ISSUE): number(name)
        for name in row
        if name.startswith(_STALL)
    }
    total = sum(waits.values())
    longest = sorted(waits, key=waits.__getitem__, reverse=True)[:5]
    return {
        "kernel": row["Kernel Name"],
        "us": number(_TIME) / 1e3,
        "dram_gbps": number(_BYTES) / 1e9,
        **{name: number(metric) for name, metric in _PERCENT.items()},
        "warps": {name: round(100 * waits[name] / total, 1) for name in longest},
    }


def run(path: Path, targets: Sequence[Target], commit: str) -> None:
    """Read counters and put them into a result file."""
    about = machine.describe(torch.device("cuda", 0), commit)
    results = json.loads(path.read_text()) if path.exists() else {"counters": []}
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    read_before = {entry["target"]: entry for entry in results["counters"]}
    for target, counters in zip(targets, read(targets), strict=True):
        entry = {"target": str(target), "date": when, "commit": about["commit"], **counters}
        read_before[str(target)] = entry
    order = {str(target): place for place, target in enumerate(TARGETS)}
    entries = sorted(read_before.values(), key=lambda entry: order.get(entry["target"], len(order)))
    save(path, {"date": when, "machine": about, "counters": entries})


def table(results: dict[str, Any], only: str) -> str:
    """Return a Markdown table of the entries whose target holds the text `only`."""
    header = ["launch", "µs", "DRAM, GB/s (of peak)", "L2", "L2 hits", "issue slots"]
    header += ["tensor pipe", "special functions"]
    body = []
    for e in results["counters"]:
        if only in e["target"]:
            waits = ", ".join(f"{k.replace('_', ' ')} {v:.0f} %" for k, v in e["warps"].items())
            memory = f"{e['dram_gbps']:.0f} ({e['dram']:.0f} %)"
            shown = ("l2", "l2_hits", "issue", "tensor", "xu")
            percents = [f"{e[name]:.0f} %" for name in shown]
            body.append([e["target"], f"{e['us']:.1f}", memory, *percents, waits])
    return pages.table([*header, "warps"], body)


def main() -> int:
    """Parse the command line and do what it says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counters", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "table"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, default=RESULTS, help="the result file")
        command.add_argument("--only", default="", help="targets that hold this text")
        command.add_argument("--commit", default="", help="of the sources, without git")
    commands.add_parser("launch").add_argument("targets", nargs="+", type=Target.parse)
    arguments = parser.parse_args()
    if arguments.command == "launch":
        with torch.no_grad():
            launch(arguments.targets)
    elif arguments.command == "run":
        chosen = [target for target in TARGETS if arguments.only in str(target)]
        run(arguments.out, chosen, arguments.commit)
    else:
        print(table(json.loads(arguments.out.read_text()), arguments.only))
    return 0


if __name__ == "__main__":
    sys.exit(main())
