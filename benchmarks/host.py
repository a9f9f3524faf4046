"""CPU time of plan(), of run() and of both, and of getting a kernel from the disk cache."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import flashskip
from benchmarks.cases import Case
from benchmarks.contestant import Contestant, Prepared, Unsupported
from benchmarks.data import make_data
from benchmarks.timing import Clock
from flashskip import _env, _kernels

_REPEATS = 80  # in a round
_ROUNDS = 5
_AWAKE_SECONDS = 300e-6  # of work before a timed call


def measure(
    case: Case, contestants: Iterable[Contestant], clock: Clock
) -> dict[str, dict[str, Any]]:
    """Return the median microseconds of plan(), run() and both on one small case.

    In rounds, as the host's speed changes too. Ours may not wait for the GPU: torch raises where it
    would, and that is the result.
    """
    data = make_data(case, 0.0, clock.device)
    found: dict[str, dict[str, Any]] = {}
    calls: list[tuple[Contestant, dict[str, Callable[[], object]]]] = []
    for contestant in contestants:
        if contestant.available():
            continue
        with _its_own_failure(contestant, found, clock):
            prepared = contestant.prepare(case, data)
            named: dict[str, Callable[[], object]] = {"run_us": prepared.run}
            if prepared.plan is not None:
                named |= {"plan_us": prepared.plan, "plan_run_us": _both(prepared)}
            calls.append((contestant, named))
    rounds, repeats = (_ROUNDS, _REPEATS) if clock.device.type == "cuda" else (1, 2)
    times: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for contestant, named in calls:
            if contestant.name in found:
                continue
            with _its_own_failure(contestant, found, clock):
                for name, call in named.items():
                    us = median_us(call, clock, repeats, may_wait=not contestant.ours)
                    times.setdefault(contestant.name, {}).setdefault(name, []).append(us)
    medians = {
        contestant: {name: statistics.median(us) for name, us in of_calls.items()}
        for contestant, of_calls in times.items()
    }
    return medians | found


@contextmanager
def _its_own_failure(
    contestant: Contestant, found: dict[str, dict[str, Any]], clock: Clock
) -> Iterator[None]:
    """Let one contestant's failure not be another's."""
    try:
        yield
    except Unsupported:
        return
    except Exception as error:
        found[contestant.name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
        clock.synchronize()  # raises if it left the device unusable


def _both(prepared: Prepared) -> Callable[[], object]:
    """Return the step of a serving loop that plans every time."""
    plan = prepared.plan
    assert plan is not None

    def plan_and_run() -> None:
        plan()
        prepared.run()

    return plan_and_run


def median_us(
    call: Callable[[], object], clock: Clock, repeats: int, *, may_wait: bool = True
) -> float:
    """Return the median microseconds until `call` returns, each time on an idle device.

    Waiting for the device puts the host's core to sleep on some machines, and a call right after
    takes up to three times as long. A serving loop is at work when it plans, so this is too.
    """
    call()
    times = []
    gc.disable()
    try:
        for _ in range(repeats):
            clock.synchronize()
            _stay_awake()
            with waiting_raises(clock.device.type == "cuda" and not may_wait):
                start = time.perf_counter_ns()
                call()
                times.append(time.perf_counter_ns() - start)
    finally:
        gc.enable()
        clock.synchronize()
    return statistics.median(times) / 1e3


def _stay_awake() -> None:
    until = time.perf_counter() + _AWAKE_SECONDS
    while time.perf_counter() < until:
        pass


@contextmanager
def waiting_raises(active: bool) -> Iterator[None]:
    """Make torch raise where it would wait for the GPU."""
    if active:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if active:
            torch.cuda.set_sync_debug_mode("default")


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
