"""The clock of the GPU benchmark drops what it should, and its inputs are as they should be."""

from collections.abc import Iterator
from functools import partial
from itertools import chain, cycle, repeat
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.configurations import DTYPES, normal
from benchmarks.device import SETTLE_SECONDS, Gpu, repeats
from tests.benchmarks.fake_gpu import Fake


class Event:
    """A CUDA event that reads the clock of a device."""

    def __init__(self, device: "Ticking") -> None:
        self._device, self.at = device, 0.0

    def record(self) -> None:
        self.at = self._device.clock

    def synchronize(self) -> None: ...


def elapsed(start: Event, stop: Event) -> float:
    return 1e3 * (stop.at - start.at)


class Ticking(Gpu):
    """A device whose clock moves only when ``spend`` is called, by the next of some durations."""

    def __init__(self, durations: Iterator[float]) -> None:
        self.clock, self._durations = 0.0, durations
        self.order: list[str] = []
        cuda = SimpleNamespace(Event=partial(Event, self), get_elapsed_time=elapsed)
        self.xp = SimpleNamespace(cuda=cuda)

    def spend(self, name: str) -> None:
        self.order.append(name)
        self.clock += next(self._durations)


def test_the_first_calls_are_not_timed() -> None:
    device = Ticking(chain([1.0, 1.0], repeat(0.004)))
    times = device.time([partial(device.spend, "a"), partial(device.spend, "b")])
    assert times == pytest.approx([0.004] * repeats(0.004))


def test_the_clocks_settle_before_a_sample_counts() -> None:
    device = Ticking(chain([0.01] * 4, [0.02] * 20, repeat(0.01)))  # one warm-up, three to estimate
    assert device.time([partial(device.spend, "a")]) == pytest.approx([0.01] * 10)
    assert device.clock >= SETTLE_SECONDS


def test_the_inputs_take_turns() -> None:
    device = Ticking(repeat(0.01))
    device.time([partial(device.spend, "a"), partial(device.spend, "b")])
    assert "".join(device.order[-10:]) == "ab" * 5


def test_calls_that_take_turns_are_timed_apart() -> None:
    """Cold and rising clocks count for nobody."""
    device = Ticking(chain([9.0] * 2, [0.01] * 2, [0.05, 0.09] * 2, cycle([0.01, 0.04])))
    a, b = device.time_each([partial(device.spend, "a"), partial(device.spend, "b")])
    assert a == pytest.approx([0.01] * 12)  # rounds of 0.02 s, as they were before the load
    assert b == pytest.approx([0.04] * 12)
    assert "".join(device.order) == "ab" * (len(device.order) // 2)


@pytest.mark.parametrize(
    ("seconds", "calls"), [(1e-6, 1000), (1e-3, 50), (1e-2, 10), (0.05, 5), (2.0, 3)]
)
def test_a_measurement_is_neither_too_short_nor_too_long(seconds: float, calls: int) -> None:
    assert repeats(seconds) == calls


def test_the_sets_of_inputs_pass_the_l2_and_differ() -> None:
    shapes = ((2, 6, 20, 8), (2, 3, 20, 8), (2, 3, 20, 4), (2, 6, 20, 4))
    sets = Fake().inputs(shapes, "f32")
    assert len(sets) == -(-4 * 100_000 // (2 * 20 * (6 * 8 + 3 * 8 + 3 * 4 + 6 * 4) * 4))
    assert {tuple(x.shape for x in one) for one in sets} == {shapes}
    drawn = [x.tobytes() for one in sets for x in one]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_values_are_normal_in_every_dtype(dtype: str) -> None:
    x = normal(np, (50, 200), dtype)
    assert x.dtype == DTYPES[dtype]
    assert abs(x.astype(np.float64).mean()) < 0.05
    assert abs(x.astype(np.float64).std() - 1) < 0.05
