"""Memory traffic: reads and writes of slow memory, and a recorder of actual ones."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from numpy.typing import NDArray


class Traffic(NamedTuple):
    """Reads and writes of slow memory, array by array.

    Parameters
    ----------
    reads, writes : dict of str to int
        Elements that are read and written, by the name of the array.
    sizes : dict of str to int
        Bytes of an element, by the name of the array.
    """

    reads: dict[str, int]
    writes: dict[str, int]
    sizes: dict[str, int]

    @property
    def elements(self) -> int:
        """Elements read and written, of all arrays."""
        return sum(self.reads.values()) + sum(self.writes.values())

    @property
    def nbytes(self) -> int:
        """Bytes read and written, of all arrays."""
        return sum(self.moved.values())

    @property
    def moved(self) -> dict[str, int]:
        """Bytes read and written, by the name of the array."""
        return {
            name: (self.reads.get(name, 0) + self.writes.get(name, 0)) * size
            for name, size in self.sizes.items()
        }


class _Recorder(NamedTuple):
    traffic: Traffic
    lock: threading.Lock

    def add(self, counts: dict[str, int], name: str, block: NDArray[Any]) -> None:
        with self.lock:
            counts[name] = counts.get(name, 0) + block.size
            self.traffic.sizes[name] = block.itemsize


_recorder: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)


@contextmanager
def recorded() -> Iterator[Traffic]:
    """Record the blocks that the NumPy backend loads and stores.

    Yields
    ------
    Traffic
        Filled while the block runs, with the loads and stores of all worker threads.

    Notes
    -----
    Only calls of ``backend="numpy"`` inside the block count, not calls of other threads meanwhile.
    Of nested blocks, the inner one counts. Masks, bias, dlse and sinks are not counted, as in the
    model.

    Examples
    --------
    >>> import numpy as np
    >>> import tileattn
    >>> from tileattn.traffic.record import recorded
    >>> x = np.zeros((1, 1, 100, 64), np.float32)
    >>> with recorded() as traffic:
    ...     attention = tileattn.forward(x, x, x, backend="numpy")
    >>> traffic.reads["q"] == x.size
    True
    """
    traffic = Traffic({}, {}, {})
    token = _recorder.set(_Recorder(traffic, threading.Lock()))
    try:
        yield traffic
    finally:
        _recorder.reset(token)


def read(name: str, block: NDArray[Any]) -> None:
    """Count a block that is read from slow memory, inside ``recorded``."""
    recorder = _recorder.get()
    if recorder is not None:
        recorder.add(recorder.traffic.reads, name, block)


def write(name: str, block: NDArray[Any]) -> None:
    """Count a block that is written to slow memory, inside ``recorded``."""
    recorder = _recorder.get()
    if recorder is not None:
        recorder.add(recorder.traffic.writes, name, block)
