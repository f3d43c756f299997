"""Keys that no query attends to may hold anything: no bit of a bfloat16 call depends on them."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="it compiles the kernels: pip install llvmlite")

from tests.arrays import normal
from tests.backends.llvm.test_backend import SIZES, both, multiplies_bfloat16


@multiplies_bfloat16
@pytest.mark.parametrize(
    ("chosen", "first", "end"),
    [
        ({"kv_lengths": [100, 37]}, (0, 0), (100, 37)),
        ({"causal": True, "q_offset": [0, 31]}, (0, 0), (75, 106)),
        ({"window": (20, None), "q_offset": [66, 40]}, (46, 20), (141, 141)),
        ({"window": (3, 5), "q_offset": [50, -5]}, (47, 0), (130, 75)),
        ({"causal": True, "q_offset": [-70, -80]}, (0, 0), (5, 0)),
    ],
    ids=str,
)
def test_keys_out_of_reach_may_hold_anything(
    chosen: dict[str, Any], first: tuple[int, int], end: tuple[int, int]
) -> None:
    q, k, v, dout = given = normal(SIZES, ml_dtypes.bfloat16)
    expected = both("llvm", given, **chosen)
    for batch, (low, high) in enumerate(zip(first, end, strict=True)):
        for hidden in (slice(0, low), slice(high, None)):
            k[batch, :, hidden], v[batch, :, hidden] = np.nan, np.inf
    found = both("llvm", (q, k, v, dout), **chosen)
    for ours, theirs in zip(
        (*found[0], *found[1][:3]), (*expected[0], *expected[1][:3]), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
