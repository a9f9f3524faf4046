"""Runs a measurement in a process of its own, and goes on without what crashed or hung it.

A faulty kernel can leave a GPU process unusable or waiting for ever; the time on the machine is
worth more than that. The measuring process leaves a note of what it does in the result file, which
is also the sign that it is alive.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from pathlib import Path

from benchmarks.result_file import save

_QUIET_SECONDS = 40.0  # without a sign of life
_START_SECONDS = 120.0  # until the first one, which comes after the imports
_GRACE_SECONDS = 30.0  # after the budget
_MAX_DEATHS = 4


def run(command: list[str], path: Path, time_budget: float, quiet: float = _QUIET_SECONDS) -> int:
    """Run `command` with the seconds left as its last argument until it ends well.

    Returns the number of steps that were given up.
    """
    deadline = time.monotonic() + time_budget
    deaths = 0
    while deaths < _MAX_DEATHS:
        left = deadline - time.monotonic()
        process = subprocess.Popen([*command, str(max(left, 0.0))])
        reason = _watch(process, path, deadline + _GRACE_SECONDS, quiet)
        if not reason:
            return deaths
        deaths += 1
        if not _give_up_step(path, reason):
            break
    return deaths


def _watch(process: subprocess.Popen[bytes], path: Path, deadline: float, quiet: float) -> str:
    """Wait for the process; return how it died, or an empty text."""
    started = time.time()
    while True:
        try:
            code = process.wait(0.5)
            return f"exit status {code}" if code else ""
        except subprocess.TimeoutExpired:
            pass
        sign = path.stat().st_mtime if path.exists() else 0.0
        limit = sign + quiet if sign > started else started + _START_SECONDS
        if time.time() > limit or time.monotonic() > deadline:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it for a while
                process.wait(20)
            return "no sign of life" if time.time() > limit else "past the time budget"


def _give_up_step(path: Path, reason: str) -> bool:
    """Mark the step in which the process died as done; return whether there was one."""
    results = json.loads(path.read_text()) if path.exists() else {}
    doing = results.pop("doing", None)
    print(f"died ({reason}) in {doing}", flush=True)
    if doing is None:
        return False
    results["died"].append({**doing, "reason": reason})
    results["done"].append(doing["step"])
    save(path, results)
    return True
