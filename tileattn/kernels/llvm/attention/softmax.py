"""Online softmax on vectors of scores, as ``algorithm/softmax.py``."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tileattn.kernels.llvm.instructions.code import Code, i64
from tileattn.kernels.llvm.instructions.numerics import exp, log, plus_log
from tileattn.kernels.llvm.tiles.compensated_sum import CompensatedSum
from tileattn.kernels.llvm.tiles.tile import Tile

M, L = 0, 1
Put = Callable[[Any, list[Any], list[Any]], None]
"""Takes the index of a row, that row, and the next row."""


def finite(c: Code, m: Any) -> Any:
    """Clip infinities, which cannot be subtracted from themselves, to the largest numbers."""
    largest = float(np.finfo(c.dtype).max)
    return c.minimum(c.const(largest), c.maximum(c.const(-largest), m))


class RowState:
    """Online softmax state of some rows: m and l in ``state``, the sum of values in ``acc``.

    ``acc`` has ``columns`` rows. Each lane is a row; with ``one_row``, lanes of scores hold keys of
    one row, and all lanes of the state are equal.
    """

    def __init__(
        self, c: Code, state: Tile, acc: Tile, columns: Any, *, one_row: bool = False
    ) -> None:
        self.c, self.state, self.acc, self.columns = c, state, acc, columns
        self._one_row = one_row

    def clear(self) -> None:
        """Start without any keys."""
        for row, x in ((M, -math.inf), (L, 0.0)):
            self.state.put(row, [self.c.const(x) for _ in self.state.vectors])
        self.acc.fill(self.columns, self.c.const(0.0))

    def update(self, s: Tile, keys: Any, factor: Any = None, put: Put | None = None) -> None:
        """Turn scores, rows of keys, into ``p = exp(s - m)``; rescale l and acc.

        Scores are the rows of ``s``, times a positive factor. P takes their place, or goes to
        ``put``, two rows at a time.
        """
        c, b = self.c, self.c.b
        tops = [c.const(-math.inf) for _ in s.vectors]
        tops = c.loop(i64(0), keys, lambda j, m: list(map(c.maximum, s.row(j), m)), tops)
        scale = c.const(1.0) if factor is None else c.splat(factor)
        tops = self._over_keys([b.fmul(x, scale) for x in tops], c.maximum)
        shift, rescale = self._raise(tops)

        def weights(j: Any) -> list[Any]:
            # Rounded as the maximum is: a fused product could be far above it.
            return self._weights([b.fmul(x, scale) for x in s.row(j)], shift)

        def body(j: Any, sums: list[Any]) -> list[Any]:
            p = weights(j)
            s.put(j, p)
            return list(map(b.fadd, sums, p))

        def pair(put: Put, j: Any, sums: list[Any]) -> list[Any]:
            two = weights(j), weights(b.add(j, i64(1)))
            put(j, *two)
            return [b.fadd(x, b.fadd(*p)) for x, *p in zip(sums, *two, strict=True)]

        start = [c.const(0.0) for _ in s.vectors]
        if put is None:
            sums = c.loop(i64(0), keys, body, start)
        else:
            sums = c.loop(i64(0), keys, partial(pair, put), start, step=2)
        self._rescale(rescale, self._over_keys(sums, b.fadd))

    def merge(self, other: "RowState") -> None:
        """Merge the state of the same rows over other keys."""
        c, m = self.c, other.state.row(M)
        shift, rescale = self._raise(m)
        weight = self._weights(m, shift)
        self._rescale(rescale, list(map(c.b.fmul, other.state.row(L), weight)))

        def sums(d: Any) -> list[Any]:
            return list(map(c.fma, other.acc.row(d), weight, self.acc.row(d)))

        self.acc.set_rows(self.columns, sums)

    def sink(self, logits: list[Any]) -> None:
        """Add the sink logits, one for each row, to the denominator."""
        shift, rescale = self._raise(logits)
        self._rescale(rescale, self._weights(logits, shift))

    def _weights(self, scores: list[Any], shift: list[Any]) -> list[Any]:
        """Return ``exp(score - shift)``."""
        c = self.c
        return [exp(c, c.b.fsub(x, y)) for x, y in zip(scores, shift, strict=True)]

    def _raise(self, tops: list[Any]) -> tuple[list[Any], list[Any]]:
        """Raise m to new maxima; return the shift of scores, and the factor of l and acc."""
        c, old = self.c, self.state.row(M)
        m = list(map(c.maximum, tops, old))
        self.state.put(M, m)
        shift = [finite(c, x) for x in m]
        return shift, self._weights(old, shift)

    def _rescale(self, factors: list[Any], terms: list[Any]) -> None:
        """Multiply l and acc; add to l."""
        self.state.put(L, list(map(self.c.fma, self.state.row(L), factors, terms)))

        self.acc.set_rows(
            self.columns, lambda d: list(map(self.c.b.fmul, self.acc.row(d), factors))
        )

    def _over_keys(self, vectors: list[Any], combine: Callable[[Any, Any], Any]) -> list[Any]:
        """Combine the keys in lanes, if lanes hold keys."""
        if not self._one_row:
            return vectors
        return [self.c.splat(self.c.fold(x, combine)) for x in vectors]

    def finalize(self, dropout_scale: Any) -> tuple[list[Any], list[Any]]:
        """Return the logsumexp, and the weight ``dropout_scale / l`` of acc."""
        c, l = self.c, self.state.row(L)  # noqa: E741 - the letter of the papers
        scale = c.splat(dropout_scale)
        least = c.b.fmul(scale, c.const(float(np.finfo(c.dtype).tiny)))
        weight = [c.b.fdiv(scale, c.maximum(least, x)) for x in l]  # NaN stays
        return [plus_log(c, *x) for x in zip(self.state.row(M), l, strict=True)], weight

    def log_l(self) -> list[Any]:
        """Return ``log(l)``: the logsumexp less m."""
        return [log(self.c, x) for x in self.state.row(L)]


class CompensatedState(RowState):
    """Softmax over several sections or splits of the keys, with compensated sums.

    ``low`` holds the rounding errors of m, l and acc.
    """

    def __init__(
        self, c: Code, state: Tile, acc: Tile, columns: Any, low: Tile, *, one_row: bool = False
    ) -> None:
        super().__init__(c, state, acc, columns, one_row=one_row)
        self._low = low
        self._l = CompensatedSum(c, state, low)
        self._acc = CompensatedSum(c, acc, Tile(c, low.at(2), len(low.vectors)))

    def start(self) -> None:
        """Start with the current state as the first section."""
        self._low.fill(self.c.b.add(self.columns, i64(2)), self.c.const(0.0))

    def merge(self, other: RowState) -> None:
        """Merge the state of the same rows over another section."""
        m = other.state.row(M)
        shift, rescale = self._raise(m)
        weight = self._weights(m, shift)

        def weighted(x: list[Any]) -> list[Any]:
            return list(map(self.c.b.fmul, x, weight))

        self._l.add(L, weighted(other.state.row(L)), rescale)
        self.c.each(self.columns, lambda d: self._acc.add(d, weighted(other.acc.row(d)), rescale))

    def settle(self, to: RowState) -> None:
        """Store the rounded state in ``to``."""
        to.state.put(M, self.state.row(M))
        to.state.put(L, self._l.value(L))
        to.acc.set_rows(self.columns, self._acc.value)
