"""Command line: measure on a GPU, then make tables and figures anywhere from the results."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.groups import GROUPS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
COLD_GROUPS = ("first", "tiny")  # start with an empty kernel cache, so that builds are timed
NO_GPU = "torch finds no GPU here; to see the harness work: --group tiny --device cpu"


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
    run.add_argument(
        "--quiet-seconds",
        type=float,
        default=120.0,
        help="without a sign of life, after which a step is given up (a peer may compile)",
    )
    run.add_argument("--commit", default="", help="of the sources, where this copy has no git")
    run.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    commands.add_parser("table", help="write the tables of docs/benchmarks.md")
    commands.add_parser("plot", help="write docs/figures/")
    arguments = parser.parse_args()
    if arguments.command == "run":
        return _run(arguments, parser)
    from benchmarks import report, rows

    results = rows.load_results(RESULTS)
    if arguments.command == "table":
        report.write_tables(results, DOCS / "benchmarks.md")
        print(*map(report.bar_lines, results), sep="\n")
    else:
        from benchmarks import plot  # needs matplotlib

        plot.write_figures(results, DOCS / "figures")
    return 0


def _run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if arguments.in_process:
        return _measure(arguments)
    if arguments.device == "cpu" and arguments.group != "tiny":
        parser.error("--device cpu only proves that the harness works: use --group tiny")
    if arguments.group == "tiny" and arguments.out.resolve().is_relative_to(RESULTS):
        parser.error("the tiny group says nothing about speed: write it outside benchmarks/results")
    if arguments.device == "cuda" and not _has_gpu():
        print(NO_GPU, file=sys.stderr)
        return 2
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.unlink(missing_ok=True)
    from benchmarks import supervise

    with tempfile.TemporaryDirectory() as cache:
        os.environ["FLASHSKIP_CACHE_DIR"] = cache
        if arguments.group not in COLD_GROUPS:
            _build_kernels(arguments.group, arguments.cases, Path(cache))
        command = [sys.executable, "-m", "benchmarks", *sys.argv[1:], "--in-process"]
        given_up = supervise.run(
            [*command, "--time-budget"],
            arguments.out,
            arguments.time_budget,
            quiet=arguments.quiet_seconds,
        )
    if arguments.out.exists():
        print(f"wrote {arguments.out}", flush=True)
    return 1 if given_up else 0


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _build_kernels(group: str, case_filter: str, directory: Path) -> None:
    """Compile what a group needs on all cores, so that its time is spent on measuring."""
    from benchmarks.peers.flashskip import variants
    from flashskip._jit.build import build
    from flashskip._kernels import program_for

    cases = [case for case in GROUPS[group] if case_filter in case.name]
    programs = [program_for(variant) for variant in variants(cases)]
    build(programs, directory, jobs=os.cpu_count() or 1)


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
        arguments.out,
        arguments.group,
        device,
        case_filter=arguments.cases,
        contestants=chosen,
        commit=arguments.commit,
        cold=arguments.group in COLD_GROUPS,
    )
    with torch.no_grad():
        measurement.run(arguments.time_budget)
    return 0


if __name__ == "__main__":
    sys.exit(main())
