"""Fast memory of a worker: reused buffers, and shortcuts for NumPy.

Every load and store is reported to ``tileattn.traffic.record``.
"""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm.heads import HeadGroup
from tileattn.algorithm.memory import Memory, Operand, RowConstant
from tileattn.algorithm.softmax import RowState, finite, masked_matmul
from tileattn.algorithm.tile_mask import TileMask
from tileattn.backends.numpy.small_scores import has_small_scores
from tileattn.traffic import record

Array = NDArray[Any]


class Scratch:
    """Named buffers that are allocated once and used again for every tile."""

    def __init__(self) -> None:
        self._buffers: dict[str, Array] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return the buffer of this name, uninitialised, with a shape and dtype."""
        nbytes = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._buffers[name] = np.empty(nbytes, np.uint8)
        return buffer[:nbytes].view(dtype).reshape(shape)


class _Idle(threading.local):
    """Unused buffers of the current thread."""

    def __init__(self) -> None:
        self.scratches: list[Scratch] = []


_idle = _Idle()


@contextmanager
def borrowed_scratch() -> Iterator[Scratch]:
    """Lend the tile buffers of this thread to one task.

    A signal handler that calls the package while a task runs gets other buffers.
    """
    idle = _idle.scratches
    try:
        scratch = idle.pop()
    except IndexError:
        scratch = Scratch()
    yield scratch
    idle.append(scratch)  # dropped after an error


class TileMemory(Memory):
    """Fast memory of one task.

    Notes
    -----
    With one more column a matmul subtracts a constant of each row: ``[Q, -lse] [K, 1]^T`` is
    ``S - lse`` and ``[dO, -delta] [V, 1]^T`` is ``dP - delta``. It saves two passes over the tile.
    """

    def __init__(
        self,
        dtype: np.dtype[Any],
        scratch: Scratch,
        small_scores: dict[int, bool | Array],
        sums: np.dtype[Any] | None = None,
    ) -> None:
        super().__init__(dtype)
        self.sums = sums or dtype  # dtype of sums over tiles
        self._scratch = scratch
        self._small_scores = small_scores  # of the head groups, by their ``id``

    def take(self, name: str, shape: tuple[int, ...]) -> Array:
        """Return the buffer of this name, uninitialised."""
        return self._scratch.take(name, shape, self.dtype)

    def load(self, name: str, x: Array, scale: float | None = None) -> Array:
        """Load a block; a block that BLAS can read is used in place.

        BLAS reads blocks of the accumulation dtype with unit stride and rows that do not overlap.
        """
        record.read(name, x)
        row, column = x.strides[-2:]
        packed = column == x.itemsize and row >= x.shape[-1] * x.itemsize and row % x.itemsize == 0
        ready = x.dtype == self.dtype and x.flags.aligned and (packed or x.shape[-2] == 1)
        if scale is None and ready:
            return x
        copy = self.take(name, x.shape)
        copy[...] = x
        if scale is not None:
            copy *= self.dtype.type(scale)
        return copy

    def load_left(
        self, name: str, x: Array, constant: RowConstant, scale: float | None = None
    ) -> Operand:
        """Load rows and, as one more column, the constant of each, negated."""
        record.read(name, x)
        record.read(constant.name, constant.high)
        extended = self.take(name, (*x.shape[:-1], x.shape[-1] + 1))
        rows = extended[..., :-1]
        if scale is None:
            rows[...] = x
        else:
            np.multiply(x, self.dtype.type(scale), out=rows, dtype=self.dtype)
        extended[..., -1] = -constant.high
        return Operand(rows, constant, extended)

    def load_right(self, name: str, x: Array) -> Operand:
        """Load rows and one more column of ones."""
        record.read(name, x)
        extended = self.take(f"block of {name}", (*x.shape[:-1], x.shape[-1] + 1))
        extended[..., :-1] = x
        extended[..., -1] = 1
        return Operand(extended[..., :-1], None, extended)

    def zeros(self, name: str, shape: tuple[int, ...]) -> Array:
        """Clear the buffer of this name."""
        buffer = self._scratch.take(name, shape, self.sums)
        buffer.fill(0)
        return buffer

    def another(self) -> "TileMemory":
        """Return memory with buffers of its own."""
        return TileMemory(self.dtype, Scratch(), self._small_scores, self.sums)

    def row_state(
        self, heads: HeadGroup, rows: int, columns: int | None = None
    ) -> "BoundedRowState":
        """Return the state of ``rows`` rows of each head, with the columns of v by default."""
        small: bool | Array = False
        if columns is None:
            columns = heads.kv.Dv
            found = self._small_scores.get(id(heads))
            if found is None:
                found = self._small_scores[id(heads)] = has_small_scores(heads)
            small = found
        return BoundedRowState.made((*heads.q.shape[:2], rows), columns, self, small)

    def load_state(self, state: RowState) -> RowState:
        """Report the loads of FlashAttention's Algorithm 1."""
        for name, x in (("out", state.acc), ("l", state.l), ("m", state.m)):
            record.read(name, x)
        return state

    def store_state(self, state: RowState) -> None:
        """Report the stores of FlashAttention's Algorithm 1."""
        for name, x in (("out", state.acc), ("l", state.l), ("m", state.m)):
            record.write(name, x)

    def matmul(self, name: str, a: Array, b: Array) -> Array:
        """Compute ``a @ b.T`` in the buffer of this name."""
        out = self.take(name, (*a.shape[:-1], b.shape[-2]))
        return np.matmul(a, b.swapaxes(-1, -2), out=out)

    def matmul_minus(
        self, name: str, a: Operand, b: Operand, between: Callable[[Array], None] | None = None
    ) -> Array:
        """Compute ``between(a @ b.T) - a.constant``; without ``between``, by one more column.

        If some heads have a low word, the constant is subtracted in two steps; heads without one
        then get the result of one more column, so their bits do not depend on other heads.
        """
        constant, left, right = a.constant, a.extended, b.extended
        if constant is None or left is None or right is None:
            raise TypeError("a must come from load_left, and b from load_right")
        if between is None and constant.low is None:
            return self.matmul(name, left, right)
        s = self.matmul(name, a.x, b.x)
        if between is not None:
            between(s)
        s += left[..., -1:]
        if constant.low is not None:
            s -= constant.low[..., None]
            if between is None and constant.split is not None and not constant.split.all():
                np.copyto(s, left @ right.swapaxes(-1, -2), where=~constant.split)
        return s

    def masked_matmul(self, name: str, p: Array, x: Array, visible: TileMask | None) -> Array:
        """Compute ``p @ x`` in the buffer of this name; masked-out pairs never meet."""
        return masked_matmul(p, x, visible, self.take(name, (*p.shape[:-1], x.shape[-1])))

    def store(self, name: str, to: Array, x: Array | float) -> None:
        """Store a block."""
        to[...] = x
        record.write(name, to)

    def add(self, name: str, to: Array, x: Array) -> None:
        """Add to a block."""
        record.read(name, to)
        to += x
        record.write(name, to)


@dataclass(slots=True)
class BoundedRowState(RowState):
    """A softmax state that computes no maximum for rows with small scores."""

    memory: TileMemory | None = None  # for the weighted sum of a tile; None allocates it
    small: bool | Array = False  # rows with small scores, whose m stays 0

    @classmethod
    def made(
        cls, rows: tuple[int, ...], columns: int, memory: TileMemory, small: bool | Array
    ) -> "BoundedRowState":
        """Return the state of rows without any keys, in the memory's buffers."""
        m = np.full(rows, -np.inf, memory.dtype)
        if small is not False:
            m[...] = np.where(small, 0, m)
        l = np.zeros(rows, memory.sums)  # noqa: E741 - the letter of the papers
        return cls(m, l, memory.zeros("acc", (*rows, columns)), memory, small)

    def rows(self, which: slice) -> "BoundedRowState":
        """Return a view of some rows; updating it updates this state."""
        m, l, acc = self.m[..., which], self.l[..., which], self.acc[..., which, :]  # noqa: E741 - as the papers
        return BoundedRowState(m, l, acc, self.memory, self.small)

    def update(
        self, s: Array, v: Array, visible: TileMask | None = None, weights: Array | None = None
    ) -> None:
        """Update with one tile, as ``RowState.update``.

        BLAS sums the rows. Nothing is rescaled for the first tile.
        """
        first = not self.l.any()
        if self.small is True:
            np.exp(s, out=s)
            if visible is not None:
                visible.masked_fill(s, 0)
        else:
            if visible is not None:
                visible.masked_fill(s, -np.inf)
            m = np.maximum(self.m, s.max(axis=-1))
            if self.small is not False:
                m = np.where(self.small, self.m, m)
            shift = finite(m)
            np.subtract(s, shift[..., None], out=s)
            np.exp(s, out=s)
            if not first:
                rescale = np.exp(self.m - shift)
                self.l *= rescale
                self.acc *= rescale[..., None]
            self.m[...] = m
        total = s @ np.ones(s.shape[-1], s.dtype)
        if weights is not None:
            np.multiply(s, weights, out=s)
        if self.small is True:
            visible = None  # small heads have finite keys and values
        self.l += total
        self.acc += self._weighted(s, v, visible)

    def finalize(self, dropout_scale: float = 1.0, out: Array | None = None) -> tuple[Array, Array]:
        """Divide by the denominator, in place of ``acc`` by default."""
        return RowState.finalize(self, dropout_scale, self.acc if out is None else out)

    def _weighted(self, p: Array, v: Array, visible: TileMask | None) -> Array:
        if self.memory is None:
            return masked_matmul(p, v, visible)
        return self.memory.masked_matmul("weighted", p, v, visible)
