"""CPU time of plan() and run(), and of getting a kernel from the disk cache."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import flashskip
from benchmarks.cases import Case
from benchmarks.contestant import Contestant, Unsupported
from benchmarks.data import make_data
from benchmarks.timing import Clock
from flashskip import _env, _kernels

_REPEATS = 400
_BETWEEN_SYNCS = (
    20  # calls: far below the depth of the launch queue, which would make the host wait
)


def measure(
    case: Case, contestants: Iterable[Contestant], clock: Clock
) -> dict[str, dict[str, Any]]:
    """Return the median microseconds of plan() and run() of each contestant on one small case."""
    data = make_data(case, 0.0, clock.device)
    repeats = _REPEATS if clock.device.type == "cuda" else 2
    found: dict[str, dict[str, Any]] = {}
    for contestant in contestants:
        if contestant.available():
            continue
        try:
            prepared = contestant.prepare(case, data)
            times = {"run_us": median_us(prepared.run, clock, repeats)}
            if prepared.plan is not None:
                times["plan_us"] = median_us(prepared.plan, clock, repeats)
        except Unsupported:
            continue
        except Exception as error:  # one contestant's failure is not another's
            times = {"failed": f"{type(error).__name__}: {error}"[:500]}
            clock.synchronize()  # raises if it left the device unusable
        found[contestant.name] = times
    return found


def median_us(call: Callable[[], object], clock: Clock, repeats: int) -> float:
    """Return the median microseconds until `call` returns, the device being idle at first."""
    call()
    times = []
    gc.disable()
    try:
        for i in range(repeats):
            if i % _BETWEEN_SYNCS == 0:
                clock.synchronize()
            start = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - start)
    finally:
        gc.enable()
        clock.synchronize()
    return statistics.median(times) / 1e3


def cache_hit_ms(variant: flashskip.Variant) -> float:
    """Return the milliseconds from a Variant to a loaded kernel with the cubin on disk.

    What the process remembers is forgotten first; rendering, hashing, reading, loading are counted.
    """
    _kernels.kernel_for.cache_clear()
    _kernels.program_for.cache_clear()
    _env.kernel_cache.cache_clear()
    start = time.perf_counter()
    _kernels.kernel_for(variant)
    return (time.perf_counter() - start) * 1e3
