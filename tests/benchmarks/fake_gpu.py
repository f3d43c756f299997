"""NumPy in the place of the device of the GPU benchmark, with a clock that is made up."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.configurations import Call
from benchmarks.device import Gpu

MACHINE = {
    "gpu": "A GPU",
    "multiprocessors": 132,
    "clock_mhz": 1980.0,
    "driver": "1.2",
    "cuda": "13.0",
    "cupy": "14.2",
    "torch": None,
    "peers": {},
    "python": "3.11",
}


class Fake(Gpu):
    """NumPy in the place of the device: a call takes 1, 2 or 3 milliseconds."""

    def __init__(self) -> None:
        self.xp = np
        self._properties = {"l2CacheSize": 100_000}

    def time(self, calls: Sequence[Call]) -> list[float]:
        for call in calls:
            call()
        return [0.003, 0.001, 0.002]

    def time_each(self, calls: Sequence[Call]) -> list[list[float]]:
        return [self.time([call]) for call in calls]

    def replayed(self, call: Call) -> Call:
        return call

    def launch_overhead(self, call: Call, count: int = 100, rounds: int = 9) -> float:
        call()
        return 5e-6 + 0 * count * rounds

    def copy_rate(self) -> float:
        return 1e12

    def release(self) -> None:
        """Nothing is pooled."""

    def machine(self) -> dict[str, Any]:
        return MACHINE
