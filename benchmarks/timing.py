"""Time of device work: contestants interleaved in rounds, each run behind a short spin.

A GPU slows down with heat and power, by what it did in the last tens of milliseconds: a kernel is
faster behind a pause or behind one that draws less. So what is compared alternates in one loop, in
an order that is drawn anew for each round; each turn begins with as many runs that do not count as
runs that do; and the ratio is taken within each round. The spin keeps the GPU busy until the host
has enqueued the run, so that launch time stays out. With `cold_l2` a buffer larger than the L2
cache is read before each run (a written one would leave lines to be written back during it).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Call = Callable[[], object]

ROUNDS = 5
_LONG_ROUNDS = 3  # where a round of all contestants takes `_LONG_SECONDS` or more
_LONG_SECONDS = 1.0
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

    def sample(self, call: Call, reps: int, spin_seconds: float, *, cold_l2: bool) -> list[float]:
        """Return the milliseconds of `reps` runs, after as many that do not count."""
        if self.device.type == "cpu":
            return [self._host_ms(call) for _ in range(reps)]
        for _ in range(reps):
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
    timings, spins, round_seconds = {}, {}, 0.0
    for name, call in calls.items():
        seconds, enqueueing = clock.estimate(call)
        reps = min(max(round(_TURN_SECONDS / max(seconds, 1e-6)), 1), _MAX_REPS)
        timings[name] = Timing([], 1 if on_cpu else reps)
        spins[name] = min(max(2 * enqueueing, 100e-6), 4e-3)
        round_seconds += seconds * 2 * reps
    rounds = _CPU_ROUNDS if on_cpu else _LONG_ROUNDS if round_seconds > _LONG_SECONDS else ROUNDS
    draw = random.Random(0)
    for _ in range(rounds):
        for name in draw.sample(list(calls), len(calls)):
            times = clock.sample(calls[name], timings[name].reps, spins[name], cold_l2=cold_l2)
            timings[name].rounds_ms.append(statistics.median(times))
    return timings
