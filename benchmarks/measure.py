"""One run of a group, step by step; the result file is complete after every step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks import ceilings, host, machine
from benchmarks.cases import Case
from benchmarks.check import check_output
from benchmarks.contestant import NOT_ASKED, Contestant, Unsupported
from benchmarks.data import MARGIN, THRESHOLD, Data, make_data
from benchmarks.groups import GROUPS, HOST_CASES
from benchmarks.peers import CONTESTANTS
from benchmarks.peers.flashskip import first_plan_seconds
from benchmarks.report import summary
from benchmarks.result_file import save
from benchmarks.timing import Clock, interleave

Results = dict[str, Any]


class WrongResult(Exception):
    """A contestant's output is outside its tolerance: it is not timed."""


class Measurement:
    """A group on a device; resumes where a former process left its result file."""

    def __init__(
        self,
        path: Path,
        group: str,
        device: torch.device,
        *,
        case_filter: str = "",
        contestants: Iterable[Contestant] = CONTESTANTS,
        commit: str = "",
        cold: bool = False,
    ) -> None:
        self.path = path
        self.clock = Clock(device)
        self.cases = [case for case in GROUPS[group] if case_filter in case.name]
        self.host_cases = HOST_CASES[group]
        self.cold = cold  # the kernel cache was empty at first: the builds are timed
        if path.exists():
            self.results: Results = json.loads(path.read_text())
        else:
            self.results = new_results(group, device, commit)
        self.save()
        self.contestants = tuple(c for c in contestants if self.is_present(c))

    def is_present(self, contestant: Contestant) -> bool:
        """Whether a contestant can run on this machine; if not, say why, once."""
        reason = contestant.available()
        if reason and contestant.name not in self.results["absent"]:
            print(f"without {contestant.name}: {reason}", flush=True)
            self.results["absent"][contestant.name] = reason
        return not reason

    def run(self, time_budget: float) -> None:
        """Do the steps that are left, as many as fit into `time_budget` seconds."""
        deadline = time.monotonic() + time_budget
        last = 0.0
        for key, step in self.steps():
            if key in self.results["done"]:
                continue
            started = time.monotonic()
            if started + last > deadline and key != "kernels":
                self.results["not_run"].append(key)
                continue
            self.doing(key)
            step()
            self.results["done"].append(key)
            del self.results["doing"]
            self.save()
            last = time.monotonic() - started
            print(f"[{last:5.1f} s] {summary(self.results, key)}", flush=True)
        self.save()

    def steps(self) -> Iterable[tuple[str, Callable[[], None]]]:
        """Name and do each step, in order of importance."""
        yield "ceilings", self.measure_ceilings
        for case in self.host_cases:
            yield f"host {case.name}", lambda case=case: self.measure_host(case)
        for case in self.cases:
            for share in case.shares:
                yield f"{case.name} {share}", lambda c=case, s=share: self.measure_case(c, s)
        yield "kernels", self.measure_kernels

    def measure_ceilings(self) -> None:
        """Measure what the machine can do."""
        self.results["ceilings"] = ceilings.measure(self.clock)

    def measure_host(self, case: Case) -> None:
        """Measure the CPU time of plan() and run()."""
        self.results["host"][case.name] = host.measure(case, self.contestants, self.clock)

    def measure_kernels(self) -> None:
        """Measure how long each kernel takes to load from the disk cache."""
        if self.cold and self.clock.device.type == "cuda":
            for variant in first_plan_seconds:
                hit = host.cache_hit_ms(variant)
                self.results["kernels"].setdefault(variant.symbol, {})["cache_hit_ms"] = hit

    def measure_case(self, case: Case, share: float) -> None:
        """Check and time all contestants on the same data."""
        data = make_data(case, share, self.clock.device)
        entries: dict[str, dict[str, Any]] = {}
        calls = {}
        for contestant in self.contestants:
            entry = {"ours": contestant.ours, "skips": contestant.skips}
            self.doing(f"{case.name} {share}", contestant.name)
            try:
                calls[contestant.name] = self.admit(contestant, case, data, share, entry)
            except Unsupported as error:
                if str(error) == NOT_ASKED:
                    continue
                entry["unsupported"] = str(error)
            except Exception as error:  # one contestant's failure is not another's
                entry["failed"] = f"{type(error).__name__}: {error}"[:500]
                self.clock.synchronize()  # raises if it left the device unusable
            entries[contestant.name] = entry
        self.doing(f"{case.name} {share}", "timing " + ", ".join(calls))
        cold_l2 = case.op == "decode" and self.clock.device.type == "cuda"
        for name, timing in interleave(calls, self.clock, cold_l2=cold_l2).items():
            entries[name] |= {"rounds_ms": timing.rounds_ms, "reps": timing.reps}
        if self.cold:
            for variant, seconds in first_plan_seconds.items():
                self.results["kernels"].setdefault(variant.symbol, {"first_plan_s": seconds})
        self.results["records"].append(
            {
                "op": case.op,
                "case": case.name,
                "shape": asdict(case),
                "work": case.work,
                "share": share,
                "contestants": entries,
            }
        )

    def admit(
        self,
        contestant: Contestant,
        case: Case,
        data: Data,
        share: float,
        entry: dict[str, Any],
    ) -> Callable[[], object]:
        """Prepare a contestant and check what it computes; return the call to time."""
        reason = self.death_of(contestant.name, case)
        if reason:
            raise Unsupported(reason)
        prepared = contestant.prepare(case, data)
        out = prepared.to_rows(prepared.run())
        self.clock.synchronize()
        entry["check"] = check_output(
            case,
            data,
            out,
            skips=contestant.skips,
            paged=prepared.paged,
            rounding=prepared.rounding,
        )
        if prepared.note:
            entry["note"] = prepared.note
        if not prepared.paged:
            entry["unpaged"] = True
        if entry["check"]["error"] > entry["check"]["tolerance"]:
            raise WrongResult("error {error:.2g}, at most {tolerance:.2g}".format(**entry["check"]))
        if prepared.skipped_share is not None and (share or contestant.ours):
            entry["skipped"] = prepared.skipped_share()
        if case.graph and self.clock.device.type == "cuda":
            return Captured(prepared.run)
        return prepared.run

    def death_of(self, contestant: str, case: Case) -> str:
        """Return where a contestant died: in this case, or twice in cases of this kind; or ""."""
        deaths = [
            f"{death['step']} ({death['reason']})"
            for death in self.results["died"]
            if death["contestant"] == contestant and death["step"].startswith(case.op)
        ]
        same = [death for death in deaths if death.startswith(f"{case.name} ")]
        return f"left out: died in {', '.join(deaths)}" if same or len(deaths) > 1 else ""

    def doing(self, step: str, contestant: str = "") -> None:
        """Leave a note of what is being done, for whoever finds this process dead."""
        self.results["doing"] = {"step": step, "contestant": contestant}
        self.save()

    def save(self) -> None:
        """Publish the results so far."""
        save(self.path, self.results)


class Captured:
    """A CUDA graph of one run, and the run itself, whose memory the graph reads."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.run = run
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            run()
        self.graph.replay()
        torch.cuda.synchronize()  # a faulty graph is found while its contestant is known

    def __call__(self) -> None:
        """Replay it."""
        self.graph.replay()


def new_results(group: str, device: torch.device, commit: str = "") -> Results:
    """Return results with nothing measured yet."""
    return {
        "group": group,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine.describe(device, commit),
        "data": {"margin": MARGIN, "threshold": THRESHOLD},
        "ceilings": {},
        "absent": {},
        "records": [],
        "host": {},
        "kernels": {},
        "done": [],
        "died": [],
        "not_run": [],
    }
