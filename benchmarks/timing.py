"""Time of device work: contestants interleaved in rounds, each run behind a short spin.

A GPU at its power limit clocks by what it did in the last tenth of a second: a kernel is up to 11 %
faster behind a pause or one that draws less, and up to 20 % slower behind one that draws more. So
what is compared alternates in one loop, in an order that is drawn anew for each round; each turn
begins with runs that do not count, until the clock is this kernel's own; and the ratio is taken
within each round. The spin keeps the GPU busy until the host has enqueued the run, so that launch
time stays out. With `cold_l2` a buffer larger than the L2 cache is read before each run (a written
one would leave lines to be written back during it); memory is the limit there, and the lead short.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Call = Callable[[], object]

ROUNDS = 5
_LONG_ROUNDS = 3  # where a round's runs that count take `_LONG_SECONDS` or more
_LONG_SECONDS = 1.0
_LEAD_SECONDS = 0.15  # of runs that do not count; a long run's times then stay within 1 %
_MOST_LEAD = 1000  # runs: shorter ones do not reach the power limit
_CPU_ROUNDS = 2  # enough to show that it works
_TURN_SECONDS = 0.02  # of each contestant in a round; a longer run happens once in it
_MAX_REPS = 12
_SPIN_HZ = 2e9  # cycles of torch.cuda._sleep in a second, at most
_FLUSH_BYTES = 256 << 20


@dataclass
class Timing:
    """Median milliseconds of each round, of `reps` runs each."""

    rounds_ms: list[float]
    reps: int

    @property
    def median_ms(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.rounds_ms)

    @property
    def quartiles_ms(self) -> tuple[float, float]:
        """First and third quartile over the rounds."""
        if len(self.rounds_ms) < 2:
            return self.rounds_ms[0], self.rounds_ms[0]
        first, _, third = statistics.quantiles(self.rounds_ms, n=4, method="inclusive")
        return first, third


def speedup(base: Timing, other: Timing) -> float:
    """Return how many times faster `other` is than `base`: the median of the rounds' ratios."""
    pairs = zip(base.rounds_ms, other.rounds_ms, strict=True)
    return statistics.median(b / o for b, o in pairs)


class Clock:
    """Times calls on a device: by events on a GPU, by the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flush: torch.Tensor | None = None

    def synchronize(self) -> None:
        """Wait for the device, and raise what went wrong on it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def sample(
        self, call: Call, reps: int, spin_seconds: float, *, lead: int, cold_l2: bool
    ) -> list[float]:
        """Return the milliseconds of `reps` runs, after `lead` that do not count."""
        if self.device.type == "cpu":
            return [self._host_ms(call) for _ in range(reps)]
        for _ in range(lead):
            call()
        events = []
        for _ in range(reps):
            if cold_l2:
                self._read_through_l2()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(int(spin_seconds * _SPIN_HZ))
            start.record()
            call()
            end.record()
            events.append((start, end))
        self.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def estimate(self, call: Call) -> tuple[float, float]:
        """Return the seconds that a run takes, and those of its enqueueing."""
        self.synchronize()
        start = time.perf_counter()
        call()
        enqueued = time.perf_counter() - start
        self.synchronize()
        return time.perf_counter() - start, enqueued

    def _read_through_l2(self) -> None:
        if self._flush is None:
            self._flush = torch.ones(_FLUSH_BYTES // 4, device=self.device)
        torch.sum(self._flush)

    @staticmethod
    def _host_ms(call: Call) -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3


def interleave(calls: dict[str, Call], clock: Clock, *, cold_l2: bool = False) -> dict[str, Timing]:
    """Time all calls, each of which has run before, in turns; a round gives one median per call."""
    on_cpu = clock.device.type == "cpu"
    timings, spins, leads, round_seconds = {}, {}, {}, 0.0
    for name, call in calls.items():
        seconds, enqueueing = clock.estimate(call)
        reps = min(max(round(_TURN_SECONDS / max(seconds, 1e-6)), 1), _MAX_REPS)
        timings[name] = Timing([], 1 if on_cpu else reps)
        spins[name] = min(max(2 * enqueueing, 100e-6), 4e-3)
        settling = 0 if cold_l2 else min(math.ceil(_LEAD_SECONDS / max(seconds, 1e-6)), _MOST_LEAD)
        leads[name] = max(reps, settling)
        round_seconds += seconds * reps
    rounds = _CPU_ROUNDS if on_cpu else _LONG_ROUNDS if round_seconds > _LONG_SECONDS else ROUNDS
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            reps, lead = timings[name].reps, leads[name]
            times = clock.sample(calls[name], reps, spins[name], lead=lead, cold_l2=cold_l2)
            timings[name].rounds_ms.append(statistics.median(times))
    return timings
