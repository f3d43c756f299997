"""Partial results for tests of ``merge``, and a check of the merged results."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn import Attention, reference
from tileattn.testing import assert_attention_close, error_bound

Array = NDArray[Any]


def parts(
    count: int, dtype: Any, shape: tuple[int, ...], seed: int = 0
) -> tuple[list[Array], list[Array]]:
    """Draw partial results, of which some rows have no keys and hold NaN."""
    rng = np.random.default_rng(seed)
    sums = np.float64 if dtype == np.float64 else np.float32
    outs = [np.asarray(rng.normal(size=shape).astype(dtype)) for _ in range(count)]
    lses = [(5 * rng.normal(size=shape[:-1])).astype(sums) for _ in range(count)]
    for out, lse in zip(outs, lses, strict=True):
        empty = rng.random(lse.shape) < 0.3
        lse[empty], out[empty] = -np.inf, np.nan
        lse[..., :1] = -np.inf
    return outs, lses


def special_parts() -> tuple[list[Array], list[Array]]:
    """Return parts: lses are all triples of special numbers, and some outputs are special."""
    special = [np.nan, np.inf, -np.inf, 0.0, 3.0]
    lses = [x.reshape(-1).astype(np.float32) for x in np.meshgrid(*[special] * 3)]
    outs = [np.full((len(x), 4), n, np.float32) for n, x in enumerate(lses)]
    outs[1][:, 1:] = [np.nan, np.inf, -np.inf]
    return outs, lses


def check_merged(found: Attention, outs: list[Array], lses: list[Array]) -> None:
    """Compare merged results with the oracle.

    Merging is attention: each row has a key for each part, with the score lse and the value out.
    """
    rows, parts = lses[0].size, len(outs)
    assert (found.out.shape, found.lse.shape) == (outs[0].shape, lses[0].shape)
    v = np.stack([x.reshape(rows, -1) for x in outs], 1).reshape(rows, 1, parts, outs[0].shape[-1])
    q, k = np.zeros((rows, 1, 1, 1), v.dtype), np.zeros((rows, 1, parts, 1), v.dtype)
    scores = np.stack([x.reshape(rows) for x in lses], -1).reshape(rows, 1, 1, parts)
    options = {"bias": scores, "mask": ~np.isneginf(scores)}
    expected = reference.forward(q, k, v, **options)
    flat = tuple(x.reshape(y.shape) for x, y in zip(found, expected, strict=True))
    assert_attention_close(flat, expected, error_bound(q, k, v, **options))
