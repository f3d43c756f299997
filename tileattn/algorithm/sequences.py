"""Where the sequences of a call are, and where their keys and values are.

A layout yields one ``Sequence`` for each batch entry. The loops of ``spec`` ask a ``KVSource`` for
blocks of keys and values and know nothing of how they are stored.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from tileattn.algorithm.mask import SlidingWindow
from tileattn.problem import Operands, Problem

Array = NDArray[Any]


class KVSource(Protocol):
    """Keys and values of some key heads of one sequence."""

    @property
    def heads(self) -> int:
        """Key heads."""

    @property
    def Dv(self) -> int:  # noqa: N802 - the letter of the field
        """Head dimension of values."""

    def keys(self, span: slice) -> Array:
        """Return a block of keys, shape (heads, 1, N, D)."""

    def values(self, span: slice) -> Array:
        """Return a block of values, shape (heads, 1, N, Dv)."""

    def of_heads(self, heads: slice) -> "KVSource":
        """Return those of some key heads."""


@dataclass(frozen=True, slots=True)
class ContiguousKV:
    """Keys and values that are slices of two arrays."""

    k: Array  # (heads, Nk, D)
    v: Array  # (heads, Nk, Dv)

    @property
    def heads(self) -> int:
        return len(self.k)

    @property
    def Dv(self) -> int:  # noqa: N802 - the letter of the field
        return int(self.v.shape[-1])

    def keys(self, span: slice) -> Array:
        return self.k[:, None, span]

    def values(self, span: slice) -> Array:
        return self.v[:, None, span]

    def of_heads(self, heads: slice) -> "ContiguousKV":
        return ContiguousKV(self.k[heads], self.v[heads])


class Sequence(NamedTuple):
    """One sequence of a call."""

    entry: int  # of arrays with a batch axis, and of the dropout
    q: Array  # (Hq, Nq, D)
    kv: KVSource
    window: SlidingWindow


class SequenceLayout(Protocol):
    """How the sequences of a call lie in its arrays."""

    def sequences(self, problem: Problem, operands: Operands) -> Iterator[Sequence]:
        """Yield the sequences, batch entries ascending."""


class Batched:
    """Sequences that are batch entries of arrays with axes (B, H, N, D)."""

    def sequences(self, problem: Problem, operands: Operands) -> Iterator[Sequence]:
        P, x = problem, operands
        for b in range(P.B):
            length, offset = int(x.kv_lengths[b]), int(x.q_offset[b])
            window = SlidingWindow(P.Nq, length, offset, *P.window)
            yield Sequence(b, x.q[b], ContiguousKV(x.k[b], x.v[b]), window)
