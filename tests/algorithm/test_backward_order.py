"""Tasks of a backward pass add to shared rows in their order, whatever the threads do.

A tile of the first key block is held up until the others have gone as far as they may.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tileattn import BlockMask, Gradients
from tileattn.algorithm import spec
from tileattn.algorithm.parameter_gradient import AxisSums
from tileattn.algorithm.tiles import Tile
from tileattn.backends import threads
from tileattn.backends.numpy import backend as numpy_backend
from tileattn.backends.numpy.backend import NumpyBackend
from tileattn.backends.numpy.memory import TileMemory
from tileattn.call.parse import parse

BLOCK = 16
WAIT = 0.4  # seconds, in which a task that fails to wait shows it

Array = NDArray[Any]


@pytest.fixture
def hold_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[bool]]]:
    """Hold up a tile of the first key block until another tile's sums have been added.

    The list that it returns says whether they were, or the wait was in vain.
    """
    monkeypatch.setattr(numpy_backend, "_SERIAL_WORK", 0)
    threads._crew.cache_clear()
    compute = spec.backward_tile
    adds: dict[str, Any] = {"dq": TileMemory.add, "dbias": AxisSums.add}

    def prepare(
        held: tuple[int, int], other: tuple[int, int], sums: str = "dq", wait: float = WAIT
    ) -> list[bool]:
        added, current, waited = threading.Event(), threading.local(), list[bool]()

        def tile_of(heads: Any, saved: Any, block: Any, tile: Tile, *more: Any) -> Any:
            result = compute(heads, saved, block, tile, *more)
            current.tile = tile
            if (tile.q0, tile.k0) == held:
                waited.append(added.wait(wait))
            return result

        def add(*args: Any) -> None:
            adds[sums](*args)
            tile = getattr(current, "tile", None)
            if tile is not None and (tile.q0, tile.k0) == other:
                added.set()

        monkeypatch.setattr(spec, "backward_tile", tile_of)
        if sums == "dq":
            monkeypatch.setattr(TileMemory, "add", add)
        else:
            monkeypatch.setattr(AxisSums, "add", add)
        return waited

    yield prepare
    threads._crew.cache_clear()


def gradients(Nq: int, Nk: int, options: dict[str, Any]) -> Gradients:
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.normal(size=(1, 2, n, 8)).astype(np.float32) for n in (Nq, Nk, Nk, Nq))
    problem, operands = parse(q, k, v, options)
    backend = NumpyBackend(backward_tile=(BLOCK, BLOCK))
    attention = backend.forward(problem, operands, None)
    return backend.backward(problem, operands, dout, attention, None, deterministic=True)


@pytest.mark.parametrize("visible", [(1, 1, 1), (1, 0, 1, 1)])
def test_key_blocks_add_to_dq_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
    hold_up: Callable[..., list[bool]],
    visible: tuple[int, ...],
) -> None:
    """After an empty block, too: its task has nothing to add, but waits."""
    Nk = BLOCK * len(visible)
    options = {"block_mask": BlockMask(np.array([visible], np.bool_), (BLOCK, BLOCK))}
    monkeypatch.setattr(threads, "worker_count", lambda: 1)
    expected = gradients(BLOCK, Nk, options)
    monkeypatch.setattr(threads, "worker_count", lambda: 3)
    hold_up((0, 0), (0, Nk - BLOCK))
    np.testing.assert_array_equal(gradients(BLOCK, Nk, options).dq, expected.dq)


@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 48, 1), (2, 1, 32), (1, 1, 1)])
def test_sums_of_a_bias_have_a_fixed_order(
    monkeypatch: pytest.MonkeyPatch, hold_up: Callable[..., list[bool]], shape: tuple[int, ...]
) -> None:
    """The second key block adds its first rows between the first block's first and second."""
    bias = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    monkeypatch.setattr(threads, "worker_count", lambda: 1)
    expected = gradients(48, 32, {"bias": bias})
    monkeypatch.setattr(threads, "worker_count", lambda: 2)
    hold_up((BLOCK, 0), (0, BLOCK), "dbias")
    np.testing.assert_array_equal(gradients(48, 32, {"bias": bias}).dbias, expected.dbias)


def test_a_key_block_adds_before_the_one_before_has_ended(
    monkeypatch: pytest.MonkeyPatch, hold_up: Callable[..., list[bool]]
) -> None:
    """The first key block's second tile waits for the sums of the second key block's first."""
    monkeypatch.setattr(threads, "worker_count", lambda: 2)
    waited = hold_up((BLOCK, 0), (0, BLOCK), wait=20)
    gradients(2 * BLOCK, 2 * BLOCK, {})
    assert waited == [True]


def test_an_error_wakes_the_tasks_that_wait(
    monkeypatch: pytest.MonkeyPatch, hold_up: Callable[..., list[bool]]
) -> None:
    """The first key block fails when the second has begun, and would wait for it for ever."""
    monkeypatch.setattr(threads, "worker_count", lambda: 2)
    hold_up((0, 0), (0, 0))
    begun, compute, results = threading.Event(), spec.backward_tile, []

    def fails(heads: Any, saved: Any, block: Any, tile: Tile, *more: Any) -> Any:
        if tile.k0 == 0:
            begun.wait(10)
            raise MemoryError("the first key block")
        begun.set()
        return compute(heads, saved, block, tile, *more)

    def call() -> None:
        with pytest.raises(MemoryError, match="the first key block"):
            gradients(BLOCK, 2 * BLOCK, {})
        results.append("raised")

    monkeypatch.setattr(spec, "backward_tile", fails)
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(20)
    assert results == ["raised"]
