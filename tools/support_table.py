"""Write the support table of docs/backends.md from ``why_not`` of each backend, or check it.

The answers depend only on the problem, not on whether a backend runs on this machine
(``unavailable``), so every machine makes the same table.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from tileattn import BlockMask
from tileattn.backends import registry
from tileattn.backends.protocol import Backend
from tileattn.call.parse import parse
from tileattn.call.problem import Problem
from tools import pages
from tools.pages import DOCS, table

BEGIN = "<!-- support table: python -m tools.support_table --write -->"
END = "<!-- end of support table -->"


SIZES = {"B": 2, "Hq": 4, "Hkv": 4, "Nq": 40, "Nk": 56, "D": 64, "Dv": 64}


def make(dtype: Any = np.float32, ndim: int = 4, **given: Any) -> Problem:
    """Return the problem of a call with these options, and with some axes of other lengths."""
    B, Hq, Hkv, Nq, Nk, D, Dv = (given.pop(name, length) for name, length in SIZES.items())
    shapes = ((B, Hq, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, Dv))
    q, k, v = (np.zeros(shape[4 - ndim :], dtype) for shape in shapes)
    return parse(q, k, v, given)[0]


def paged() -> Problem:
    """Return the problem of a call whose keys are in pages."""
    q, k = (np.zeros(shape, np.float32) for shape in ((2, 4, 1, 64), (8, 4, 16, 64)))
    return parse(q, k, k, {"block_table": np.arange(8).reshape(2, 4), "kv_lengths": [50, 60]})[0]


def quantised() -> Problem:
    """Return the problem of a call whose keys and values have 8 bits."""
    q, k = np.zeros((2, 4, 1, 64), np.float16), np.zeros((2, 4, 56, 64), np.int8)
    return parse(q, k, k, {"k_descale": 0.5, "v_descale": 0.5})[0]


def representative() -> dict[str, Problem]:
    """Return the problems of the rows of the table."""
    B, Hq, _, Nq, Nk, _, _ = SIZES.values()
    blocks = BlockMask(np.ones((3, 4), bool), block_size=(16, 16))
    return {
        "float32": make(),
        "float64": make(np.float64),
        "float16": make(np.float16),
        "bfloat16": make(ml_dtypes.bfloat16),
        "arrays of two or three axes": make(B=1, ndim=3),
        "grouped-query heads": make(Hkv=2),
        "`D` of 20": make(D=20, Dv=20),
        "`D` of 128": make(D=128, Dv=128),
        "`D` of 256": make(D=256, Dv=256),
        "`D` of 192, `Dv` of 128": make(D=192, Dv=128),
        "one query, many keys": make(Nq=1, Nk=4096),
        "an axis of length 0": make(Nk=0),
        "`softcap`": make(softcap=30.0),
        "`alibi_slopes`": make(alibi_slopes=np.ones(Hq, np.float32)),
        "`bias`": make(bias=np.zeros((Nq, Nk), np.float32)),
        "`causal`": make(causal=True),
        "`window`": make(window=(16, 8)),
        "`mask`": make(mask=np.ones((Nq, Nk), bool)),
        "`block_mask`": make(block_mask=blocks),
        "`kv_lengths`": make(kv_lengths=np.arange(B)),
        "`q_offset`": make(q_offset=np.arange(B)),
        "`cu_seqlens_q`": make(B=1, cu_seqlens_q=[0, 9, Nq], cu_seqlens_k=[0, 20, Nk]),
        "`block_table`": paged(),
        "`k_descale`, `v_descale`": quantised(),
        "`tree_mask`": make(tree_mask=np.ones((1, Nq, Nq), bool)),
        "`prefix`": make(prefix=3, causal=True),
        "`origin`": make(origin=(0, 0, 16, 32), dropout_p=0.5),
        "`sinks`": make(sinks=np.zeros(Hq, np.float32)),
        "`dropout_p`": make(dropout_p=0.1, seed=1),
        "`score_mod`, `aux`": make(
            score_mod=lambda s, b, h, i, j, x: s + x[j],  # noqa: ARG005 - its parameters
            aux=(np.zeros(Nk, np.float32),),
        ),
        "`mask_mod`": make(mask_mod=lambda b, h, i, j: i >= j),  # noqa: ARG005 - its parameters
        "`invariant`": make(invariant=True),
        "several options together": make(
            causal=True,
            softcap=30.0,
            bias=np.zeros((Nq, Nk), np.float32),
            sinks=np.zeros(Hq, np.float32),
            dropout_p=0.1,
        ),
    }


def lines(able: Iterable[Backend], problems: dict[str, Problem]) -> Iterator[str]:
    """Yield the table, and below it a numbered line per reason."""
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
    """Check or write the page; the exit status is 1 if a check finds it stale."""
    made = lines(map(registry.get, registry.names()), representative())
    return pages.main(argv, __doc__, pages.stale_part(DOCS / "backends.md", BEGIN, END, made))


if __name__ == "__main__":
    sys.exit(main())
