"""Write the support table of docs/backends.md from what the backends answer, or check it.

The answers are those of ``why_not``, which depend on the problem alone. Whether a backend can run
on this machine (``unavailable``) is left out, so that every machine makes the same table.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tileattn import BlockMask
from tileattn.backends import registry
from tileattn.backends.protocol import Backend
from tileattn.problem import Problem, parse
from tools import pages
from tools.pages import table

PAGE = "backends.md"
BEGIN = "<!-- support table: python -m tools.support_table --write -->"
END = "<!-- end of support table -->"


class Sizes(NamedTuple):
    """Axes of a problem."""

    B: int = 2
    Hq: int = 4
    Hkv: int = 4
    Nq: int = 40
    Nk: int = 56
    D: int = 64
    Dv: int = 64


def make(sizes: Sizes, dtype: Any = np.float32, ndim: int = 4, **options: Any) -> Problem:
    """Return the problem of a call with arrays of these sizes."""
    B, Hq, Hkv, Nq, Nk, D, Dv = sizes
    shapes = ((B, Hq, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, Dv))
    q, k, v = (np.zeros(shape[4 - ndim :], dtype) for shape in shapes)
    return parse(q, k, v, options)[0]


def representative() -> dict[str, Problem]:
    """List what the table has a row for, in order."""
    plain = Sizes()
    B, Hq, _, Nq, Nk, _, _ = plain
    blocks = BlockMask(np.ones((3, 4), bool), block_size=(16, 16))
    return {
        "float32": make(plain),
        "float64": make(plain, np.float64),
        "float16": make(plain, np.float16),
        "bfloat16": make(plain, ml_dtypes.bfloat16),
        "arrays of two or three axes": make(Sizes(B=1), ndim=3),
        "grouped-query heads": make(Sizes(Hkv=2)),
        "`D` of 20": make(Sizes(D=20, Dv=20)),
        "`D` of 128": make(Sizes(D=128, Dv=128)),
        "`D` of 256": make(Sizes(D=256, Dv=256)),
        "`D` of 192, `Dv` of 128": make(Sizes(D=192, Dv=128)),
        "one query, many keys": make(Sizes(Nq=1, Nk=4096)),
        "an axis of length 0": make(Sizes(Nk=0)),
        "`softcap`": make(plain, softcap=30.0),
        "`alibi_slopes`": make(plain, alibi_slopes=np.ones(Hq, np.float32)),
        "`bias`": make(plain, bias=np.zeros((Nq, Nk), np.float32)),
        "`causal`": make(plain, causal=True),
        "`window`": make(plain, window=(16, 8)),
        "`mask`": make(plain, mask=np.ones((Nq, Nk), bool)),
        "`block_mask`": make(plain, block_mask=blocks),
        "`kv_lengths`": make(plain, kv_lengths=np.arange(B)),
        "`q_offset`": make(plain, q_offset=np.arange(B)),
        "`sinks`": make(plain, sinks=np.zeros(Hq, np.float32)),
        "`dropout_p`": make(plain, dropout_p=0.1, seed=1),
        "several options together": make(
            plain,
            causal=True,
            softcap=30.0,
            bias=np.zeros((Nq, Nk), np.float32),
            sinks=np.zeros(Hq, np.float32),
            dropout_p=0.1,
        ),
    }


def lines(able: Iterable[Backend], problems: dict[str, Problem]) -> Iterator[str]:
    """Make the table, and under it one numbered line for each reason."""
    able, reasons = list(able), dict[str, int]()

    def cell(backend: Backend, problem: Problem) -> str:
        reason = backend.why_not(problem)
        if reason is None:
            return "yes"
        return f"no ({reasons.setdefault(reason, len(reasons) + 1)})"

    rows = ([what, *(cell(x, problem) for x in able)] for what, problem in problems.items())
    *made, empty = table(["", *(f"`{backend.name}`" for backend in able)], rows)
    yield from made
    yield from [empty] * bool(reasons)
    yield from (f"{number}. {reason}" for reason, number in reasons.items())


def main(argv: list[str] | None = None) -> int:
    """Check or write the page; the exit status is 1 where a check finds it stale."""

    def update(page: str) -> str:
        able = map(registry.get, registry.names())
        return pages.updated(page, BEGIN, END, lines(able, representative()))

    return pages.main(argv, __doc__, {PAGE: update})


if __name__ == "__main__":
    sys.exit(main())
