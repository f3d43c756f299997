"""Wall-clock times of runs of calls that nothing interrupts."""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks.configurations import Call
from benchmarks.cpu import PAUSE
from benchmarks.report import Row

ROUND_SECONDS = 2.0  # a slow participant stops after so long


class Queue(NamedTuple):
    """What a run of calls waits for."""

    drain: Call  # until all calls have ended
    settle: Call  # until nothing disturbs the next run

    @classmethod
    def of(cls) -> "Queue":
        """Pause before a run, until the threads of other libraries sleep."""

        def settle() -> None:
            gc.collect()
            time.sleep(PAUSE)

        return cls(int, settle)

    @classmethod
    def of_gpu(cls, drain: Call) -> "Queue":
        """Wait before a run for plans that earlier calls have asked for in the background."""
        from tileattn.backends.cupy import improvement

        def settle() -> None:
            gc.collect()
            improvement.finish()
            drain()

        return cls(drain, settle)


@dataclass
class Times:
    """Seconds of the calls of a participant, in several runs."""

    walls: list[float] = field(default_factory=list)  # of a call, in the mean of each run
    hosts: list[float] = field(default_factory=list)  # of each call, until it returned

    def add(self, calls: Sequence[Call], queue: Queue) -> int:
        """Time a run of calls; return how many there was time for."""
        queue.settle()
        hosts: list[float] = []
        clock = time.perf_counter
        start = now = clock()
        for call in calls:
            call()
            before, now = now, clock()
            hosts.append(now - before)
            if now - start > ROUND_SECONDS:
                break
        queue.drain()
        self.walls.append((clock() - start) / len(hosts))
        self.hosts += hosts
        return len(hosts)

    def figures(self) -> Row:
        """Return the median over runs, and the times on the host over all calls."""
        host = 1e6 * np.array(self.hosts)
        return {
            "us": 1e6 * median(self.walls),
            "host_us": float(np.median(host)),
            "host_p99_us": float(np.percentile(host, 99)),
            "host_max_us": float(host.max()),
        }


def deal(most: int, count: int, calls: int) -> list[list[int]]:
    """Deal distinct values below ``most`` to participants, each an even sample of the range.

    An odd stride keeps any hand from having more multiples of a power of two.
    """
    stride = count | 1
    drawn = np.random.default_rng(0).choice(most, min(stride * calls, most), replace=False)
    values = np.sort(drawn).tolist()
    size = min(len(values) // stride, calls)
    return [values[n::stride][:size] for n in range(count)]
