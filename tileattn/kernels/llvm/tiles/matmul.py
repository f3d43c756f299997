"""Matmuls of tiles, with the sums of a block in registers."""

from functools import partial
from typing import Any

from llvmlite import ir

from tileattn.kernels.llvm.instructions.code import I1, I64, POINTER, Code, i64
from tileattn.kernels.llvm.instructions.kernel import Kernel
from tileattn.kernels.llvm.tiles.bits import Bits

_OPERANDS = [POINTER, I64, I64, POINTER, I64, POINTER, I64, I64, I64]


def matmul(
    kernel: Kernel, c: Code, vectors: Any, n_i: Any, n_k: Any, a: Any, b: Any, to: Any, *, add: bool
) -> None:
    """Emit ``C[i, :] (+)= sum over k of A[i, k] * B[k, :]``.

    A is read element by element and broadcast; rows of B and C are ``vectors`` vectors. Strides are
    bytes: ``a = (A, a_i, a_k)``, ``b = (B, b_k)``, ``to = (C, c_i)``; the address of ``A[i, k]`` is
    ``A + i * a_i + k * a_k``.
    """
    target = kernel.target

    def choose(c: Code, count: Any, *arguments: Any) -> None:
        cases = [_whole(kernel, v + 1) for v in range(target.vectors)]
        c.choose(c.b.sub(count, i64(1)), [partial(c.b.call, f, arguments) for f in cases])

    function = kernel.function("matmul", [I64, *_OPERANDS, I1], choose)
    c.b.call(function, [vectors, *a, *b, *to, n_i, n_k, ir.Constant(I1, add)])


def masked_matmul(
    kernel: Kernel, c: Code, vectors: Any, n_i: Any, n_k: Any, a: Any, b: Any, visible: Bits,
    to: Any, *, of_a: bool = False,
) -> None:  # fmt: skip
    """Emit ``C[i, :] += sum over k of A[i, k] * B[k, :]`` over visible pairs only.

    Operands of masked-out pairs may be NaN or infinite. The pairs are the elements ``(k, :)`` of B,
    or with ``of_a`` the elements ``(i, k)`` of A.
    """

    def body(
        c: Code, count: Any, a: Any, a_i: Any, a_k: Any, b: Any, b_k: Any, to: Any, c_i: Any,
        n_i: Any, n_k: Any, words: Any,
    ) -> None:  # fmt: skip
        pairs = Bits(c, words, kernel.target.vectors)

        def vector(i: Any, v: Any) -> None:
            column = c.b.mul(v, i64(c.lanes * c.size))

            def term(k: Any, sums: list[Any]) -> list[Any]:
                at = c.b.add(c.b.mul(i, a_i), c.b.mul(k, a_k))
                x = c.splat(c.load(c.at(a, at), c.scalar))
                seen = c.splat(pairs.get(i, k)) if of_a else pairs.vector(k, v)
                y = c.load(c.at(b, c.b.mul(k, b_k), column))
                return [c.b.select(seen, c.fma(x, y, sums[0]), sums[0])]

            total = c.loop(i64(0), n_k, term, [c.const(0.0)])
            place = c.at(to, c.b.mul(i, c_i), column)
            c.store(c.b.fadd(total[0], c.load(place)), place)

        c.loop(i64(0), n_i, lambda i, _: c.each(count, lambda v: vector(i, v)))

    name = "masked_matmul_of_a" if of_a else "masked_matmul"
    function = kernel.function(name, [I64, *_OPERANDS, POINTER], body)
    c.b.call(function, [vectors, *a, *b, *to, n_i, n_k, visible.start])


def store_sums(c: Code, sums: list[Any], places: list[Any], add: Any) -> None:
    """Store vectors; if ``add``, add what the places hold."""

    def store(*, more: bool) -> None:
        for place, x in zip(places, sums, strict=True):
            c.store(c.b.fadd(x, c.load(place)) if more else x, place)

    c.when_else(add, partial(store, more=True), partial(store, more=False))


def _whole(kernel: Kernel, vectors: int) -> ir.Function:
    """Return the function for rows of ``vectors`` vectors: blocks of rows, then single rows."""
    rows = kernel.target.rows
    parts = [_block(kernel, n, vectors) for n in (rows, 1)]

    def body(
        c: Code, a: Any, a_i: Any, a_k: Any, b: Any, b_k: Any, to: Any, c_i: Any, n_i: Any,
        n_k: Any, add: Any,
    ) -> None:  # fmt: skip
        tall = c.rounded_down(n_i, rows)

        def block(i: Any, part: Any) -> None:
            here = c.at(a, c.b.mul(i, a_i)), a_i, a_k, b, b_k, c.at(to, c.b.mul(i, c_i))
            c.b.call(part, [*here, c_i, n_k, add])

        c.loop(i64(0), tall, lambda i, _: block(i, parts[0]), step=rows)
        c.loop(tall, n_i, lambda i, _: block(i, parts[1]))

    return kernel.function(f"matmul_{vectors}", [*_OPERANDS, I1], body)


def _block(kernel: Kernel, rows: int, vectors: int) -> ir.Function:
    """Return the function of one register block of rows times vectors."""

    def body(
        c: Code, a: Any, a_i: Any, a_k: Any, b: Any, b_k: Any, to: Any, c_i: Any, n_k: Any, add: Any
    ) -> None:
        width = c.lanes * c.size
        starts = [a]
        for _ in range(1, rows):
            starts.append(c.at(starts[-1], a_i))

        def term(k: Any, sums: list[Any]) -> list[Any]:
            here, step = c.at(b, c.b.mul(k, b_k)), c.b.mul(k, a_k)
            row = [c.load(c.at(here, width * j)) for j in range(vectors)]
            new = []
            for i in range(rows):
                x = c.splat(c.load(c.at(starts[i], step), c.scalar))
                new += [c.fma(x, row[j], sums[i * vectors + j]) for j in range(vectors)]
            return new

        sums = c.loop(i64(0), n_k, term, [c.const(0.0)] * (rows * vectors))
        places, at = [], to
        for _ in range(rows):
            places += [c.at(at, width * j) for j in range(vectors)]
            at = c.at(at, c_i)
        store_sums(c, sums, places, add)

    kinds = [POINTER, I64, I64, POINTER, I64, POINTER, I64, I64, I1]
    return kernel.function(f"matmul_{rows}x{vectors}", kinds, body)
