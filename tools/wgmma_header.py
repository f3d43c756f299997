"""Write the products of kernels/cuda/src/wgmma_sm90.cuh, or check that they are up to date.

The text of an instruction names each register of its result, so there is one function for each
number of columns, which C++ picks by the length of the array that it is given.
"""

import sys
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from tools import pages

HEADER = Path(__file__).parents[1] / "tileattn" / "kernels" / "cuda" / "src" / "wgmma_sm90.cuh"
BEGIN = "// Made by python -m tools.wgmma_header --write, from here"
END = "// to here."

COLUMNS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256)  # of keys in a block, or of a head
LENGTHS = [columns // 2 for columns in COLUMNS]  # a thread holds half of a column of 64 rows
TYPES = {"float16": "f16", "bfloat16": "bf16"}  # and what the instruction calls them
WIDTH = 118


def lines() -> Iterator[str]:
    yield "#define SUMS(i) \\"
    yield f"    {', '.join(_sum(i) for i in range(4))}, \\"
    yield f"    {', '.join(_sum(i) for i in range(4, 8))}"
    for shorter, length in pairwise([0, *LENGTHS]):
        yield from _names(shorter, length)
    for element in TYPES:
        for length in LENGTHS:
            yield from _both_in_shared_memory(element, length)
            yield from _a_in_registers(element, length)
    yield "#undef SUMS"
    yield from (f"#undef NAMES_{length}" for length in LENGTHS)


def _sum(i: int) -> str:
    return f'"+f"(d[i + {i}])'


def _names(shorter: int, length: int) -> Iterator[str]:
    """Define the names of registers in a text, as fewer of them and the rest."""
    names = ", ".join(f"%{i}" for i in range(shorter, length))
    # A string that is not the last of its list ends with the space that stood there.
    *broken, last = textwrap.wrap(names, WIDTH - len('    " " \\'))
    yield f"#define NAMES_{length} " + (f'NAMES_{shorter} ", " \\' if shorter else "\\")
    yield from (f'    "{line} " \\' for line in broken)
    yield f'    "{last}"'


def _both_in_shared_memory(element: str, length: int) -> Iterator[str]:
    a, b, add, a_mn, b_mn = (f"%{length + i}" for i in range(5))
    yield "template <bool A_MN, bool B_MN>"
    yield f"__device__ inline void wgmma({element}, float (&d)[{length}], Descriptor<A_MN> a,"
    yield "                             Descriptor<B_MN> b, bool add) {"
    yield from _product(element, length, add, f"{a}, {b}, p, 1, 1, {a_mn}, {b_mn}")
    yield '        : "l"(a.bits), "l"(b.bits), "r"(int(add)), "n"(int(A_MN)), "n"(int(B_MN)));'
    yield "}"


def _a_in_registers(element: str, length: int) -> Iterator[str]:
    *a, b, add, b_mn = (f"%{length + i}" for i in range(7))
    yield "template <bool B_MN>"
    yield f"__device__ inline void wgmma({element}, float (&d)[{length}], const u32 (&a)[4],"
    yield "                             Descriptor<B_MN> b, bool add) {"
    yield from _product(element, length, add, f"{{{', '.join(a)}}}, {b}, p, 1, 1, {b_mn}")
    yield '        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int(add)),'
    yield '          "n"(int(B_MN)));'
    yield "}"


def _product(element: str, length: int, add: str, rest: str) -> Iterator[str]:
    """Write an instruction and its results; a predicate says whether it adds to them."""
    start = f"setp.ne.b32 p, {add}, 0; wgmma.mma_async.sync.aligned.m64n{2 * length}k16."
    name = TYPES[element]
    yield f'    asm volatile("{{.reg .pred p; {start}"'
    yield f'                 "f32.{name}.{name} {{" NAMES_{length} "}}, {rest};}}"'
    sums = ", ".join(f"SUMS({i})" for i in range(0, length, 8))
    yield from textwrap.wrap(f"        : {sums}", WIDTH, subsequent_indent=" " * 10)


def main(argv: list[str] | None = None) -> int:
    """Check or write the header; the exit status is 1 where a check finds it stale."""
    return pages.main(argv, __doc__, pages.stale_part(HEADER, BEGIN, END, lines()))


if __name__ == "__main__":
    sys.exit(main())
