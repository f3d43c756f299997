"""Fast memory and the executor of tasks, in their plainest form.

The specification loads, computes and stores tiles through a ``Memory``. A faster backend brings its
own ``Memory`` and ``Executor`` with the same methods, as ``tileattn.backends.numpy`` does.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm.heads import HeadGroup
from tileattn.algorithm.softmax import RowState, masked_matmul
from tileattn.algorithm.tile_mask import TileMask
from tileattn.call.problem import Problem

Array = NDArray[Any]


_MANY = 1 << 15  # keys, or rows of a key head; above, float32 sums over tiles lose digits


def sum_dtype(P: Problem) -> np.dtype[Any]:
    """Return the dtype of sums over tiles: float64 for long sequences.

    Packed calls ignore the lengths: the length of one sequence must not change another's bits.
    """
    many = P.sequences is None and max(P.Nk, P.group * P.Nq) > _MANY
    return np.dtype(np.float64) if many else P.accum_dtype


class RowConstant(NamedTuple):
    """A number of each row, ``high + low``, that a matmul subtracts."""

    name: str  # of its array
    high: Array  # (..., M)
    low: Array | None = None  # (..., M)
    split: Array | None = None  # (Hkv, G, 1, 1): heads in which some row has a low word

    def rows(self, which: slice) -> "RowConstant":
        """View of some of the rows."""
        low = None if self.low is None else self.low[..., which]
        return RowConstant(self.name, self.high[..., which], low, self.split)


@dataclass(slots=True)
class Operand:
    """An operand of ``Memory.matmul_minus``: rows of a matrix, and the constant to subtract."""

    x: Array  # (..., M, C)
    constant: RowConstant | None = None  # of the left operand
    extended: Array | None = None  # (..., M, C + 1): the rows with one more column, if kept

    def rows(self, which: slice) -> "Operand":
        """View of some rows of a right operand."""
        extended = None if self.extended is None else self.extended[..., which, :]
        return Operand(self.x[..., which, :], None, extended)


class Memory:
    """Tiles in fast memory, each a new array in the accumulation dtype."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype

    def load(self, name: str, x: Array, scale: float | None = None) -> Array:
        """Load a block of the array ``name``, times the scale."""
        copy = x.astype(self.dtype)
        return copy if scale is None else copy * self.dtype.type(scale)

    def load_left(
        self, name: str, x: Array, constant: RowConstant, scale: float | None = None
    ) -> Operand:
        """Load the left operand of ``matmul_minus``."""
        return Operand(self.load(name, x, scale), constant)

    def load_right(self, name: str, x: Array) -> Operand:
        """Load the right operand of ``matmul_minus``."""
        return Operand(self.load(name, x))

    def zeros(self, name: str, shape: tuple[int, ...]) -> Array:
        """Make a sum."""
        return np.zeros(shape, self.dtype)

    def another(self) -> "Memory":
        """Return memory for tiles that are kept beside the tiles of this memory."""
        return self

    def row_state(self, heads: HeadGroup, rows: int, columns: int | None = None) -> RowState:
        """Return the state of ``rows`` rows of each head, with the columns of v by default."""
        columns = heads.kv.Dv if columns is None else columns
        return RowState.empty((*heads.q.shape[:2], rows), columns, self.dtype)

    def load_state(self, state: RowState) -> RowState:
        """Load the state of some rows, which FlashAttention's Algorithm 1 keeps in slow memory."""
        return state

    def store_state(self, state: RowState) -> None:
        """Store the state of some rows."""

    def matmul(self, name: str, a: Array, b: Array) -> Array:
        """Compute ``a @ b.T``."""
        return np.asarray(a @ b.swapaxes(-1, -2))

    def matmul_minus(
        self, name: str, a: Operand, b: Operand, between: Callable[[Array], None] | None = None
    ) -> Array:
        """Compute ``between(a @ b.T) - a.constant``, where ``between`` works in place."""
        s = self.matmul(name, a.x, b.x)
        if between is not None:
            between(s)
        if a.constant is not None:
            s -= a.constant.high[..., None]
            s -= 0 if a.constant.low is None else a.constant.low[..., None]
        return s

    def masked_matmul(self, name: str, p: Array, x: Array, visible: TileMask | None) -> Array:
        """Compute ``p @ x``, in which masked-out pairs never meet."""
        return masked_matmul(p, x, visible)

    def store(self, name: str, to: Array, x: Array | float) -> None:
        """Store a block of the array ``name``."""
        to[...] = x

    def add(self, name: str, to: Array, x: Array) -> None:
        """Add to a block of the array ``name``."""
        to += x


class OrderedSums(Protocol):
    """Sums that several tasks add to, block by block, each block in the order of the tasks."""

    def task(self, number: int) -> Any:
        """Return a context manager that yields the turn of one task: see `InOrder`."""


class InOrder:
    """Sums of tasks that run sequentially, so no task waits."""

    @contextmanager
    def task(self, number: int) -> Iterator["InOrder"]:
        """Yield the turn of one task."""
        yield self

    def begin(self, block: int) -> None:
        """Publish that this task is done with the blocks before this one."""

    def wait(self, block: int) -> None:
        """Wait until all earlier tasks are done with this block."""


Task = Callable[[Any], None]
"""A task of a grid; its argument is its fast memory, a ``Memory``."""


class Executor:
    """Runs a grid of tasks, here one after the other."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype

    def run(self, tasks: Sequence[Task]) -> None:
        """Run the tasks; they may run at the same time, and start in this order."""
        with np.errstate(all="ignore"):
            for task in tasks:
                task(Memory(self.dtype))

    def ordered_sums(self, tasks: int) -> OrderedSums:
        """Return the order in which ``tasks`` tasks add to shared sums."""
        return InOrder()
