"""Matmuls of bfloat16 with float32 sums, by AVX512-BF16 or AMX.

The left operand has plain rows with any stride. The right operand interleaves *pairs* of rows:
element ``[k, j]`` is number ``k % 2`` of the pair ``[k // 2, j]``, 32 bits.
"""

from functools import partial
from typing import Any

from llvmlite import ir

from tileattn.kernels.llvm.instructions import bfloat16
from tileattn.kernels.llvm.instructions.code import I1, I32, I64, POINTER, Code, i64
from tileattn.kernels.llvm.instructions.kernel import Kernel
from tileattn.kernels.llvm.sizes import PAIR
from tileattn.kernels.llvm.target import Target
from tileattn.kernels.llvm.tiles.matmul import store_sums

_OPERANDS = [POINTER, I64, POINTER, I64, POINTER, I64]
_BLOCKS = {"avx512": ((4,), (4, 1)), "amx": ((32, 16), (2, 1))}
"""Rows and vectors of the register blocks, from large to small."""


def grain(target: Target) -> tuple[int, int]:
    """Return the rows and terms of the smallest block; all blocks are multiples of it."""
    return _BLOCKS[target.bf16][0][-1], 32 if target.bf16 == "amx" else 2


def bf16_matmul(
    kernel: Kernel, c: Code, vectors: Any, n_i: Any, n_k: Any, a: Any, b: Any, to: Any, *, add: bool
) -> None:
    """Emit ``C[i, :] (+)= sum over k of A[i, k] * B[k, :]``.

    Rows of B and C are ``vectors`` vectors. Strides are bytes: ``a = (A, a_i)``, ``b = (B, b_k)``
    from pair to pair, ``to = (C, c_i)``. Rows and terms are rounded up to the grain: A or B is 0
    in the padding and the other one finite, and C has room for the rows.
    """
    heights, widths = _BLOCKS[kernel.target.bf16]
    rows, terms = grain(kernel.target)

    def body(
        c: Code, vectors: Any, a: Any, a_i: Any, b: Any, b_k: Any, to: Any, c_i: Any, n_i: Any,
        n_k: Any, add: Any,
    ) -> None:  # fmt: skip
        n_i, n_k = c.rounded_up(n_i, rows), c.rounded_up(n_k, terms)

        def row(height: int, i: Any, _: Any) -> None:
            left, place = c.at(a, c.b.mul(i, a_i)), c.at(to, c.b.mul(i, c_i))

            def block(width: int, v: Any, _: Any) -> None:
                column = c.b.mul(v, i64(c.lanes * c.size))
                part, right = _block(kernel, height, width), c.at(b, column)
                c.b.call(part, [left, a_i, right, b_k, c.at(place, column), c_i, n_k, add])

            _in_steps(c, vectors, widths, block)

        _in_steps(c, n_i, heights, row)  # outer loop over rows of A, which come from further away

    function = kernel.function("bf16_matmul", [I64, *_OPERANDS, I64, I64, I1], body)
    c.b.call(function, [vectors, *a, *b, *to, n_i, n_k, ir.Constant(I1, add)])


def _in_steps(c: Code, count: Any, sizes: tuple[int, ...], body: Any) -> None:
    """Cover a range with steps of the largest size, then of the smaller ones."""
    start = i64(0)
    for size in sizes:
        end = c.rounded_down(count, size)
        c.loop(start, end, partial(body, size), step=size)
        start = end


def _block(kernel: Kernel, rows: int, vectors: int) -> ir.Function:
    """Return the function of one register block."""
    body = _tiles if kernel.target.bf16 == "amx" else _vectors
    kinds = [*_OPERANDS, I64, I1]
    return kernel.function(f"bf16_matmul_{rows}x{vectors}", kinds, partial(body, rows, vectors))


def _vectors(
    rows: int, vectors: int, c: Code, a: Any, a_i: Any, b: Any, b_k: Any, to: Any, c_i: Any,
    n_k: Any, add: Any,
) -> None:  # fmt: skip
    """Keep sums in vectors; pairs of A are broadcast."""
    width = c.lanes * c.size
    starts, places = [a], [to]
    for _ in range(1, rows):
        starts.append(c.at(starts[-1], a_i))
        places.append(c.at(places[-1], c_i))
    places = [c.at(place, width * j) for place in places for j in range(vectors)]

    def term(k: Any, sums: list[Any]) -> list[Any]:
        here, step = c.at(b, c.b.mul(k, b_k)), c.b.mul(k, i64(PAIR))
        row = [c.load(c.at(here, width * j)) for j in range(vectors)]
        new = []
        for i, start in enumerate(starts):
            pair = c.b.load(c.at(start, step), typ=I32, align=2)
            few = sums[i * vectors : (i + 1) * vectors]
            new += [bfloat16.dot(c, x, pair, y) for x, y in zip(few, row, strict=True)]
        return new

    zero = [c.const(0.0)] * len(places)
    sums = c.loop(i64(0), c.b.sdiv(n_k, i64(2)), term, zero)
    store_sums(c, sums, places, add)


def _tiles(
    rows: int, vectors: int, c: Code, a: Any, a_i: Any, b: Any, b_k: Any, to: Any, c_i: Any,
    n_k: Any, add: Any,
) -> None:  # fmt: skip
    """Keep sums in AMX tiles, 16 rows of a vector each."""
    width, height = bfloat16.TILE_BYTES, bfloat16.TILE_ROWS
    down = range(rows // height)
    sums = {(i, j): i * vectors + j for i in down for j in range(vectors)}
    left = [4 + i for i in down]
    right = [6 + j for j in range(vectors)]
    starts = [c.at(a, c.b.mul(a_i, i64(height * i))) for i in down]
    places = {(i, j): c.at(to, c.b.mul(c_i, i64(height * i)), width * j) for i, j in sums}

    def load() -> None:
        for at, tile in sums.items():
            bfloat16.load_tile(c, tile, places[at], c_i)

    def clear() -> None:
        for tile in sums.values():
            bfloat16.clear_tile(c, tile)

    c.when_else(add, load, clear)

    def term(k: Any, _: Any) -> None:
        here, step = c.at(b, c.b.mul(k, c.b.mul(b_k, i64(height)))), c.b.mul(k, i64(width))
        for j, tile in enumerate(right):
            bfloat16.load_tile(c, tile, c.at(here, width * j), b_k)
        for i, start in enumerate(starts):
            bfloat16.load_tile(c, left[i], c.at(start, step), a_i)
            for j, tile in enumerate(right):
                bfloat16.multiply_tiles(c, sums[i, j], left[i], tile)

    c.loop(i64(0), c.b.sdiv(n_k, i64(2 * height)), term)
    for at, tile in sums.items():
        bfloat16.store_tile(c, tile, places[at], c_i)
