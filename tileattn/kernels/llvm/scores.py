"""Algorithm layer: score modifiers and masks of a tile; twin of ``scores.py`` and ``mask.py``.

A tile of scores has one of the two axes in vector lanes and the other in its rows: keys in rows
forward, queries in rows backward. ``Pairs`` hides which.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from tileattn.kernels.llvm.instructions import I8, I64, Code, i64
from tileattn.kernels.llvm.kernel import Params
from tileattn.kernels.llvm.numerics import tanh
from tileattn.kernels.llvm.params import BIAS_DTYPES
from tileattn.kernels.llvm.philox import in_upper_half, words_of
from tileattn.kernels.llvm.tile import Tile

Row = Callable[[Any], list[Any]]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Which queries and keys a tile has: for each of its rows, one vector of integers or more.

    Parameters
    ----------
    keys : callable
        Keys of a row.
    positions : callable
        Positions of the queries on the key axis, 64-bit integers.
    low, high : callable
        The keys that the window lets the queries attend to: ``low <= j < high``.
    slopes : callable
        ALiBi's slopes.
    """

    keys: Row
    positions: Row
    low: Row
    high: Row
    slopes: Row


def apply_score_mods(
    c: Code, p: Params, s: Tile, rows: Any, pairs: Pairs, bias: Tile, grad: Tile | None
) -> None:
    """Turn scaled products into scores; where asked, write the derivative by the products."""
    b = c.b

    def softcap() -> None:
        # Of a cap that scores cannot tell from 0, or from none, the quotient stays a number.
        cap = c.splat(p.softcap)

        def body(n: Any, _: Any) -> None:
            t = [tanh(c, b.fdiv(x, cap)) for x in s.row(n)]
            s.put(n, [b.fmul(x, cap) for x in t])
            if grad is not None:
                one = c.const(1.0)
                grad.put(n, [c.fma(b.fneg(x), x, one) for x in t])

        c.loop(i64(0), rows, body)

    def alibi() -> None:
        def body(n: Any, _: Any) -> None:
            new = []
            given = zip(s.row(n), pairs.positions(n), pairs.keys(n), pairs.slopes(n), strict=True)
            for x, i, j, slope in given:
                distance = b.sub(i, _wide(c, j))
                negative = b.icmp_signed("<", distance, ir.Constant(distance.type, None))
                size = b.select(negative, b.neg(distance), distance)
                new.append(b.fsub(x, b.fmul(slope, b.sitofp(size, c.vector))))
            s.put(n, new)

        c.loop(i64(0), rows, body)

    def add() -> None:
        c.loop(i64(0), rows, lambda n, _: s.put(n, list(map(b.fadd, s.row(n), bias.row(n)))))

    c.when(p.given("softcap"), softcap)
    c.when(p.given("alibi_slopes"), alibi)
    c.when(p.given("bias"), add)


def mask_tile(c: Code, p: Params, s: Tile, rows: Any, pairs: Pairs, visible: Tile) -> None:
    """Find the visible pairs of a tile and set the scores of all others to -inf.

    ``visible`` holds the dense mask and the block mask, if there are any; afterwards it is 0 where
    a pair is masked out.
    """
    b, zero, ones = c.b, c.ints(0), c.ints(-1)
    minus_infinity = c.const(-math.inf)
    dense, biased = b.or_(p.given("mask"), p.given("block_kinds")), p.given("bias")
    unmasked, unbiased = (c.splat(b.not_(x)) for x in (dense, biased))

    def body(n: Any, _: Any) -> None:
        scores, seen = [], []
        for x, j, low, high, given in zip(
            s.row(n), pairs.keys(n), pairs.low(n), pairs.high(n), visible.row(n, c.integers),
            strict=True,
        ):  # fmt: skip
            inside = b.and_(b.icmp_signed(">=", j, low), b.icmp_signed("<", j, high))
            inside = b.and_(inside, b.or_(unmasked, b.icmp_signed("!=", given, zero)))
            finite = b.or_(unbiased, b.fcmp_unordered("!=", x, minus_infinity))
            inside = b.and_(inside, finite)
            scores.append(b.select(inside, x, minus_infinity))
            seen.append(b.select(inside, ones, zero))
        s.put(n, scores)
        visible.put(n, seen)

    c.loop(i64(0), rows, body)


def load_mask(c: Code, source: Any, step: Any, count: Any, to: Any, to_step: int) -> None:
    """Load booleans as integers of the width of a sum."""

    def body(n: Any, _: Any) -> None:
        x = c.load(c.at(source, c.b.mul(n, step)), I8)
        c.store(c.b.zext(x, c.integer), c.at(to, c.b.mul(n, i64(to_step))))

    c.loop(i64(0), count, body)


def load_bias(
    c: Code, p: Params, source: Any, step: Any, count: Any, to: Any, to_step: int
) -> None:
    """Load a run of the bias, whose dtype the field ``bias_dtype`` numbers."""
    for number, dtype in enumerate(BIAS_DTYPES):
        if dtype == "float16" and not c.target.half:
            continue

        def body(n: Any, _: Any, dtype: str = dtype) -> None:
            x = c.load_as(dtype, c.at(source, c.b.mul(n, step)))
            c.store(x, c.at(to, c.b.mul(n, i64(to_step))))

        def run(body: Any = body) -> None:
            c.loop(i64(0), count, body)

        c.when(c.b.icmp_signed("==", p.bias_dtype, i64(number)), run)


def keep_tile(
    c: Code, p: Params, keep: Tile, first: Any, end: Any, batch: Any, i: list[Any], heads: list[Any]
) -> None:
    """Which probabilities dropout keeps, a row for each key from ``first``, a multiple of 16."""
    b = c.b

    def body(block: Any, _: Any) -> None:
        def each(n: Any, _: Any) -> None:
            j = b.add(block, n)
            halves: tuple[list[Any], list[Any]] = [], []
            for query, head in zip(i, heads, strict=True):
                query, head = _wide(c, query), _wide(c, head)  # noqa: PLW2901 - wider
                key = p.seed_low, p.seed_high
                words = words_of(c, query, head, c.splat(batch), c.splat(j), key)
                upper = in_upper_half(c, query)
                for half, kept in enumerate(halves):
                    word = b.select(upper, words[2 + half], words[half])
                    kept.append(b.sext(_kept(c, p, word), c.integers))
            row = b.sub(j, first)
            keep.put(row, halves[0])
            keep.put(b.add(row, i64(8)), halves[1])

        c.loop(i64(0), i64(8), each)

    c.loop(first, end, body, step=16)


def keep_row(c: Code, p: Params, batch: Any, head: Any, i: Any, keys: list[Any]) -> list[Any]:
    """Which probabilities of query i dropout keeps, a lane for each key."""
    b = c.b
    lower = c.splat(b.icmp_signed("==", b.and_(i, i64(8)), i64(0)))
    kept = []
    for j in (_wide(c, x) for x in keys):
        key = p.seed_low, p.seed_high
        words = words_of(c, c.splat(i), c.splat(head), c.splat(batch), j, key)
        even, odd = (b.select(lower, words[half], words[2 + half]) for half in (0, 1))
        kept.append(_kept(c, p, b.select(in_upper_half(c, j), odd, even)))
    return kept


def _wide(c: Code, x: Any) -> Any:
    return c.b.sext(x, ir.VectorType(I64, c.lanes)) if c.size < 8 else x


def _kept(c: Code, p: Params, word: Any) -> Any:
    return c.b.icmp_unsigned(">=", word, c.splat(p.threshold))
