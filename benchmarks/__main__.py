"""Command line: measure on a GPU, then make tables and figures anywhere from the results."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.cases import GROUPS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"


def main() -> int:
    """Parse the command line and do what it says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure a group and write a result file")
    run.add_argument("--group", choices=GROUPS, required=True)
    run.add_argument("--out", type=Path, required=True, help="result file (JSON)")
    run.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    run.add_argument("--cases", default="", help="only cases whose name holds this text")
    run.add_argument("--contestants", default="", help="only these, separated by commas")
    run.add_argument("--time-budget", type=float, default=200.0, help="seconds")
    run.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    commands.add_parser("table", help="write the tables of docs/benchmarks.md")
    commands.add_parser("plot", help="write docs/figures/")
    arguments = parser.parse_args()
    if arguments.command == "run":
        return _run(arguments, parser)
    from benchmarks import plot, report

    results = report.load_results(RESULTS)
    if arguments.command == "table":
        report.write_tables(results, DOCS / "benchmarks.md")
    else:
        plot.write_figures(results, DOCS / "figures")
    return 0


def _run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if arguments.in_process:
        return _measure(arguments)
    if arguments.device == "cpu" and arguments.group != "tiny":
        parser.error("--device cpu only proves that the harness works: use --group tiny")
    if arguments.group == "tiny" and arguments.out.resolve().is_relative_to(RESULTS):
        parser.error("the tiny group says nothing about speed: write it outside benchmarks/results")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.unlink(missing_ok=True)
    from benchmarks import supervise

    with tempfile.TemporaryDirectory() as cache:  # empty, so that every kernel's build is timed
        os.environ["FLASHSKIP_CACHE_DIR"] = cache
        command = [sys.executable, "-m", "benchmarks", *sys.argv[1:], "--in-process"]
        given_up = supervise.run([*command, "--time-budget"], arguments.out, arguments.time_budget)
    if arguments.out.exists():
        print(f"wrote {arguments.out}", flush=True)
    return 1 if given_up else 0


def _measure(arguments: argparse.Namespace) -> int:
    import torch

    from benchmarks.measure import Measurement
    from benchmarks.peers import CONTESTANTS

    names = arguments.contestants.split(",") if arguments.contestants else []
    unknown = set(names) - {c.name for c in CONTESTANTS}
    if unknown:
        known = ", ".join(c.name for c in CONTESTANTS)
        raise SystemExit(f"no contestant {', '.join(unknown)}; there are {known}")
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    chosen = [c for c in CONTESTANTS if not names or c.name in names]
    measurement = Measurement(
        arguments.out, arguments.group, device, case_filter=arguments.cases, contestants=chosen
    )
    with torch.no_grad():
        measurement.run(arguments.time_budget)
    return 0


if __name__ == "__main__":
    sys.exit(main())
