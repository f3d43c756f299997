"""Score modifiers and masks of a tile, as ``algorithm/scores.py`` and ``algorithm/mask.py``.

A tile of scores has keys in rows and queries in vector lanes (forward), or the other way round
(backward, decoding). ``Pairs`` abstracts from the order.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tileattn.kernels.llvm.attention.block_mask import block_bits
from tileattn.kernels.llvm.attention.expressions import TileFunctions
from tileattn.kernels.llvm.attention.parameter_gradient import ElementSums
from tileattn.kernels.llvm.instructions.code import I1, I64, NEVER, POINTER, Code, i64, same
from tileattn.kernels.llvm.instructions.kernel import Kernel, Params
from tileattn.kernels.llvm.instructions.numerics import tanh
from tileattn.kernels.llvm.params import BIAS_DTYPES
from tileattn.kernels.llvm.tiles.bits import Bits, packed
from tileattn.kernels.llvm.tiles.tile import Tile, size_of

Row = Callable[[Any], list[Any]]


@dataclass(frozen=True, slots=True)
class Pairs:
    """The queries and keys of a tile: vectors of integers for each of its rows."""

    keys: Row
    positions: Row  # of the queries on the key axis, in 64 bits
    low: Row  # window and length leave keys visible from here
    high: Row  # up to here
    slopes: Row  # of ALiBi
    functions: TileFunctions  # the caller's functions


@dataclass(frozen=True, slots=True)
class Grads:
    """Destinations of the derivatives of a tile's scores."""

    softcap: Tile  # derivative of the soft cap
    function: Tile  # derivative of the caller's function by its input score
    elements: ElementSums  # derivatives by elements of ``aux``


def apply_score_mods(
    c: Code, p: Params, s: Tile, rows: Any, pairs: Pairs, bias: Tile, grad: Grads | None = None
) -> None:
    """Turn scaled products into scores; with ``grad``, store their derivatives."""
    b = c.b

    def softcap() -> None:
        # The caller bounds the cap, so that the quotient is a number for any score.
        cap = c.splat(p.softcap)

        def body(n: Any) -> None:
            t = [tanh(c, b.fdiv(x, cap)) for x in s.row(n)]
            s.put(n, [b.fmul(x, cap) for x in t])
            if grad is not None:
                one = c.const(1.0)
                grad.softcap.put(n, [c.fma(b.fneg(x), x, one) for x in t])

        c.each(rows, body)

    def alibi() -> None:
        def body(n: Any) -> None:
            new = []
            given = zip(s.row(n), pairs.positions(n), pairs.keys(n), pairs.slopes(n), strict=True)
            for x, i, j, slope in given:
                distance = b.sub(i, c.wide(j))
                negative = b.icmp_signed("<", distance, same(distance.type, 0))
                size = b.select(negative, b.neg(distance), distance)
                new.append(b.fsub(x, b.fmul(slope, b.sitofp(size, c.vector))))
            s.put(n, new)

        c.each(rows, body)

    def function(n: Any) -> None:
        old = s.row(n)
        new = pairs.functions.scores(n, old, grad=grad is not None)
        if grad is not None:
            grad.elements.keep(n, new[2:], pairs.functions.elements(n, old))
            grad.function.put(n, new[1])
        s.put(n, new[0])

    c.when(p.given("softcap"), softcap)
    c.when(p.given("alibi_slopes"), alibi)
    c.when(p.given("bias"), lambda: s.apply(rows, b.fadd, bias))
    if pairs.functions.modify:
        c.each(rows, function)


def mask_tile(c: Code, p: Params, s: Tile, rows: Any, pairs: Pairs, visible: Bits) -> None:
    """Compute the visible pairs of a tile and set the scores of all others to -inf.

    On entry ``visible`` holds the bits of the dense mask and the block mask.
    """
    b, minus_infinity = c.b, c.const(-math.inf)
    may_mask = may_be_hidden(c, p, pairs.functions)
    unmasked, unbiased = (c.splat(b.not_(x)) for x in (masks_given(c, p), may_mask))

    def body(n: Any) -> None:
        scores, seen = [], []
        given = visible.row(n)
        if pairs.functions.mask:
            given = list(map(b.and_, given, pairs.functions.visible(n)))
        for x, j, low, high, stored in zip(
            s.row(n), pairs.keys(n), pairs.low(n), pairs.high(n), given, strict=True
        ):
            inside = b.and_(b.icmp_signed(">=", j, low), b.icmp_signed("<", j, high))
            inside = b.and_(inside, b.or_(unmasked, stored))
            finite = b.or_(unbiased, b.fcmp_unordered("!=", x, minus_infinity))
            inside = b.and_(inside, finite)
            scores.append(b.select(inside, x, minus_infinity))
            seen.append(inside)
        s.put(n, scores)
        visible.put(n, seen)

    c.each(rows, body)


def may_be_hidden(c: Code, p: Params, functions: TileFunctions) -> Any:
    """Return True if a score may be -inf, which masks its pair out."""
    return c.b.or_(p.given("bias"), same(I1, functions.modify))


def masks_given(c: Code, p: Params) -> Any:
    """Return True with a dense mask or a block mask; a mask_mod has a block mask."""
    dense = p.given("mask")  # both are optional
    return NEVER if dense is NEVER else c.b.or_(dense, p.given("block_kinds"))


def mask_bits(
    c: Code, p: Params, batch: Any, head: Any, i: Any, k0: Any, count: Any, ahead: tuple[int, int]
) -> Any:
    """Return the bits of up to 64 keys, starting at k0, that the stored masks leave visible.

    ``ahead`` is the distance to the next tile, in queries and keys.
    """

    def dense() -> list[Any]:
        source = p.row("mask", batch, head, i, k0)
        c.prefetch(c.at(source, _ahead(c, p, "mask", ahead)))
        return [packed(c, source, p.mask_j, count)]

    (bits,) = c.values_when(p.given("mask"), dense, i64(-1))

    def blocks() -> list[Any]:
        return [c.b.and_(block_bits(c, p, batch, head, i, k0, count), bits)]

    return c.values_when(p.given("block_kinds"), blocks, bits)[0]


def load_bias(
    kernel: Kernel, c: Code, p: Params, batch: Any, head: Any, i: Any, k0: Any, count: Any,
    to: Any, ahead: tuple[int, int],
) -> None:  # fmt: skip
    """Load the bias of query i, whose dtype the field ``bias_dtype`` numbers, as whole vectors."""

    def body(c: Code, given: Any, *run: Any) -> None:
        for number, dtype in enumerate(BIAS_DTYPES):
            if dtype != "float16" or c.target.half:
                load = partial(_run, c, dtype, *run)
                c.when(c.b.icmp_signed("==", given, i64(number)), load)

    function = kernel.function("load_bias", [I64, POINTER, I64, I64, I64, POINTER], body)
    source = p.row("bias", batch, head, i, k0)
    distance = _ahead(c, p, "bias", ahead)
    c.b.call(function, [p.bias_dtype, source, p.bias_j, distance, count, to])


def load_descales(
    kernel: Kernel, c: Code, p: Params, name: str, batch: Any, head: Any, k0: Any, n: Any, to: Any
) -> None:
    """Load the descales of n keys or values, starting at k0, as whole vectors."""

    def body(c: Code, source: Any, step: Any, count: Any, to: Any) -> None:
        _run(c, "float32", source, step, i64(0), count, to)

    function = kernel.function("load_descales", [POINTER, I64, I64, POINTER], body)
    step = getattr(p, f"{name}_j")

    def part(page: Any, row: Any, j: Any, count: Any) -> None:
        source = p.row(name, page, head, row)
        c.b.call(function, [source, step, count, c.at(to, c.bytes_of(j))])

    if p.has_paged(name):
        p.each_page(batch, k0, n, part)
    else:
        c.b.call(function, [p.row(name, batch, head, k0), step, n, to])


def _ahead(c: Code, p: Params, name: str, ahead: tuple[int, int]) -> Any:
    """Return the bytes to the next tile."""
    steps = (getattr(p, f"{name}_{axis}") for axis in "ij")
    return c.b.add(*(c.b.mul(x, i64(n)) for x, n in zip(steps, ahead, strict=True)))


def _run(c: Code, dtype: str, source: Any, step: Any, ahead: Any, count: Any, to: Any) -> None:
    """Load the numbers of ``count`` keys that are ``step`` bytes apart."""

    def strided(j: Any) -> None:
        c.store(c.load_as(dtype, c.row(source, step, j)), c.at(to, c.bytes_of(j)))

    def repeated() -> None:
        x = c.splat(c.load_as(dtype, source))
        c.loop(i64(0), count, lambda j, _: c.store(x, c.at(to, c.bytes_of(j))), step=c.lanes)

    def contiguous(j: Any, lanes: int) -> None:
        place = c.row(source, i64(size_of(dtype)), j)
        c.prefetch(c.at(place, ahead))
        c.store(c.load_as(dtype, place, lanes), c.at(to, c.bytes_of(j)))

    number = c.b.select(c.b.icmp_signed("==", step, i64(size_of(dtype))), i64(0), i64(2))
    number = c.b.select(c.b.icmp_signed("==", step, i64(0)), i64(1), number)
    cases = partial(c.each_vector, count, contiguous), repeated, partial(c.each, count, strided)
    c.choose(number, cases)
