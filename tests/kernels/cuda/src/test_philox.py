"""Dropout of the kernels, run on the CPU: it keeps the same pairs as NumPy, from any origin."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kernels.cuda.src.on_host import dropped
from tileattn.algorithm.philox import keep_tile

SEED, P, HEAD, PLACE, ATOMS = 0x0123456789ABCDEF, 0.4, (1, 3), (32, 80), (3, 4)
END = 2**31 - 1


@pytest.mark.parametrize(
    "origin",
    [
        *(None, (0, 0, 0, 0), (2, 5, 48, 160), (2, 5, 8, 0), (0, 1, 16, 24), (0, 0, 8, 8)),
        *((1, 0, 3, 0), (0, 0, 0, 13), (3, 70_000, 21, 1007), (END, END, END, END)),
    ],
    ids=str,
)
def test_dropout_keeps_the_same_pairs(origin: tuple[int, ...] | None, tmp_path: Path) -> None:
    fields = {"seed": SEED, "threshold": int(P * 2**32)}
    b, h, i, j = (0, 0, 0, 0) if origin is None else origin
    array = None
    if origin is not None:
        array = np.full((HEAD[0] + 1, 4), 7)
        array[HEAD[0]] = origin
    pairs, rows, transposed = dropped(tmp_path, fields, array, HEAD, PLACE, ATOMS)
    heads, (M, N) = np.array([h + HEAD[1]]), pairs.shape

    def kept(i0: int, m: int, j0: int, n: int) -> Any:
        i0, j0 = i + i0, j + j0
        return keep_tile(SEED, P, b + HEAD[0], heads, i0, i0 + m, j0, j0 + n)[0]

    np.testing.assert_array_equal(pairs, kept(PLACE[0], M, PLACE[1], N))
    np.testing.assert_array_equal(rows, kept(PLACE[0], M, PLACE[1], N))
    np.testing.assert_array_equal(transposed, kept(PLACE[1], N, PLACE[0], M).T)
