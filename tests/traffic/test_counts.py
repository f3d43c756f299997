"""The counts of the model against a loop over all blocks."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tileattn import BlockMask
from tileattn.call.parse import parse
from tileattn.oracle.dense import visibility
from tileattn.traffic import explained

B, HQ, HKV, NQ, NK, D, DV = 2, 4, 2, 37, 29, 8, 12
SHAPE = (B, HQ, NQ, NK)
TILE = (16, 8)

BLOCKS = np.random.default_rng(0).random((B, HQ, 3, 4)) < 0.5


def count(**options: Any) -> tuple[dict[str, int], dict[str, int], NDArray[np.bool_]]:
    q = np.zeros((B, HQ, NQ, D), options.pop("dtype", np.float32))
    k, v = np.zeros((B, HKV, NK, D), q.dtype), np.zeros((B, HKV, NK, DV), q.dtype)
    counts = explained(*parse(q, k, v, options), TILE, TILE)[:2]
    return *counts, visibility(SHAPE, options)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_everything_is_visible(dtype: Any) -> None:
    tiles, moved, _ = count(dtype=dtype)
    size = np.dtype(dtype).itemsize
    assert tiles == {"skipped": 0, "partial": 0, "full": B * HQ * 3 * 4}
    assert moved == {
        "q": B * HQ * NQ * D * size,
        "k": B * HQ * 3 * NK * D * size,
        "v": B * HQ * 3 * NK * DV * size,
        "out": B * HQ * NQ * DV * size,
        "lse": B * HQ * NQ * max(size, 4),
    }


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window": (5, 3), "q_offset": [0, -10]},
        {"kv_lengths": [13, 0]},
        {"block_mask": BlockMask(BLOCKS, TILE)},
    ],
    ids=str,
)
def test_masks_by_brute_force(options: dict[str, Any]) -> None:
    """Blocks across an edge of the mask count by the keys that are visible."""
    tiles, moved, visible = count(**options)
    expected = {"skipped": 0, "partial": 0, "full": 0}
    keys = 0
    for b, h, q0, k0 in np.ndindex(B, HQ, 3, 4):
        block = visible[b, h, q0 * 16 : (q0 + 1) * 16, k0 * 8 : (k0 + 1) * 8]
        used = np.flatnonzero(block.any(axis=0))
        if not used.size:
            expected["skipped"] += 1
            continue
        keys += used[-1] + 1 - used[0]
        expected["full" if block[:, used[0] : used[-1] + 1].all() else "partial"] += 1
    assert tiles == expected
    assert moved["k"] == keys * D * 4
    assert moved["v"] == keys * DV * 4
    assert moved["out"] == B * HQ * NQ * DV * 4


def test_tiles_in_parts_are_skipped_as_often() -> None:
    """Blocks of the mask are a quarter of a tile, so that a tile may count twice."""
    blocks = np.random.default_rng(1).random((B, HQ, 5, 8)) < 0.3
    options = {"block_mask": BlockMask(blocks, (8, 4))}
    tiles, _, visible = count(**options)
    expected = sum(
        not visible[b, h, q0 * 16 : (q0 + 1) * 16, k0 * 8 : (k0 + 1) * 8].any()
        for b, h, q0, k0 in np.ndindex(B, HQ, 3, 4)
    )
    assert 0 < expected == tiles["skipped"]
    assert tiles["full"] + tiles["partial"] + tiles["skipped"] > B * HQ * 3 * 4
