"""The bfloat16 instructions of x86 CPUs: AVX512-BF16 and AMX.

They add ``a[0] b[0] + a[1] b[1]`` of pairs to float32 sums, and treat subnormal numbers as 0.
"""

from typing import Any

from llvmlite import ir

from tileattn.kernels.llvm.instructions.code import I8, I16, I32, Code


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat type, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_LANES = 32
_NUMBERS = ir.VectorType(_BFloat(), _LANES)
WORDS = ir.VectorType(I16, _LANES)
"""A register of bfloat16, as integers."""

TILE_ROWS, TILE_BYTES = 16, 64
_CONFIG = bytes([1, *[0] * 15]) + TILE_BYTES.to_bytes(2, "little") * 8
_CONFIG = (_CONFIG + bytes(16) + bytes([TILE_ROWS] * 8)).ljust(64, b"\0")


def dot(c: Code, sums: Any, pair: Any, pairs: Any) -> Any:
    """Add the dot products of one pair, a 32-bit integer, with a register of pairs."""
    left, right = (c.b.bitcast(x, _NUMBERS) for x in (c.splat(pair), pairs))
    return c.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", c.vector, sums, left, right)


def narrowed(c: Code, low: Any, high: Any) -> Any:
    """Round two vectors of float32 to a register of bfloat16."""
    x = c.intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", _NUMBERS, high, low)
    return c.b.bitcast(x, WORDS)


def paired(c: Code, even: Any, odd: Any) -> Any:
    """Round two vectors of float32 to pairs ``(even[i], odd[i])``."""
    x = narrowed(c, even, odd)
    order = [half * c.lanes + i for i in range(c.lanes) for half in (0, 1)]
    return c.b.shuffle_vector(x, x, ir.Constant(ir.VectorType(I32, _LANES), order))


# -- AMX tiles: 16 rows of 64 bytes, named by constant numbers -------------------------------------


def configure_tiles(c: Code) -> None:
    """Configure the shape of all AMX tiles of this thread."""
    name = "tile_config"
    place = c.module.globals.get(name)
    if place is None:
        kind = ir.ArrayType(I8, len(_CONFIG))
        place = ir.GlobalVariable(c.module, kind, name)
        place.initializer = ir.Constant(kind, bytearray(_CONFIG))
        place.global_constant, place.linkage, place.align = True, "internal", TILE_BYTES
    c.intrinsic("llvm.x86.ldtilecfg", ir.VoidType(), place)


def release_tiles(c: Code) -> None:
    """Release the AMX tiles of this thread."""
    c.intrinsic("llvm.x86.tilerelease", ir.VoidType())


def clear_tile(c: Code, tile: int) -> None:
    """Fill a tile with 0."""
    c.intrinsic("llvm.x86.tilezero", ir.VoidType(), ir.Constant(I8, tile))


def load_tile(c: Code, tile: int, start: Any, step: Any) -> None:
    """Load rows that are ``step`` bytes apart."""
    c.intrinsic("llvm.x86.tileloadd64", ir.VoidType(), ir.Constant(I8, tile), start, step)


def store_tile(c: Code, tile: int, start: Any, step: Any) -> None:
    """Store rows that are ``step`` bytes apart."""
    c.intrinsic("llvm.x86.tilestored64", ir.VoidType(), ir.Constant(I8, tile), start, step)


def multiply_tiles(c: Code, sums: int, left: int, right: int) -> None:
    """Add ``left right`` to sums: rows of bfloat16 times rows of pairs."""
    numbers = (ir.Constant(I8, n) for n in (sums, left, right))
    c.intrinsic("llvm.x86.tdpbf16ps", ir.VoidType(), *numbers)
