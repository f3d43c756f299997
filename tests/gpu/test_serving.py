"""Rotary positions and growing caches: CuPy arrays have the results of NumPy's."""

from typing import Any

import numpy as np
import pytest

import tileattn
from tests.on_gpu import needs_gpu, sent
from tileattn.dtypes import DTYPES, accum_dtype

pytestmark = needs_gpu

B, H, N, D, DV = 2, 3, 4, 12, 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("positions", [3, [4, 0, 9, 1], np.arange(8).reshape(B, N)], ids=str)
def test_rope(positions: Any, there: bool, dtype: Any) -> None:
    """Up to a few roundings of the dtype of x."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(B, H, N, D)).astype(dtype)
    tables = rng.normal(size=(2, 10, 4))
    p = sent(np.asarray(positions)) if there else positions
    for options in ({}, {"interleaved": True}, {"inverse": True}):
        expected = tileattn.rope(x, *tables, positions=positions, **options)
        found = tileattn.rope(sent(x), *sent(tables), positions=p, **options)
        assert found.dtype == dtype
        epsilon = {2: 2.0**-7}.get(dtype.itemsize, float(np.finfo(accum_dtype(dtype)).eps))
        error = np.abs(found.get().astype(np.float64) - expected.astype(np.float64))
        assert (error <= 8 * epsilon * np.maximum(np.abs(expected.astype(np.float64)), 1)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("there", range(8))
@pytest.mark.parametrize("paged", [False, True])
def test_append_kv(paged: bool, there: int, dtype: Any) -> None:
    """Each of the integers may be on the GPU, or on the host."""
    rng = np.random.default_rng(0)
    lead, rows = (6, 3) if paged else (B, 9)
    caches = [np.full((lead, rows, H, n), np.nan, dtype).swapaxes(1, 2) for n in (D, DV)]
    new = [rng.normal(size=(H, 8, n)).astype(dtype) for n in (D, DV)]
    options: dict[str, Any] = {"kv_lengths": np.array([1, 5]), "cu_seqlens": np.array([0, 5, 8])}
    if paged:
        options["block_table"] = np.array([[0, 4, 2], [3, 1, 5]])
    mixed = {name: sent(x) if there >> n & 1 else x for n, (name, x) in enumerate(options.items())}
    sent_caches = [sent(x) for x in caches]
    lengths = tileattn.append_kv(*sent_caches, *map(sent, new), **mixed)
    expected = tileattn.append_kv(*caches, *new, **options)
    np.testing.assert_array_equal(getattr(lengths, "get", lambda: lengths)(), expected)
    for cache, found in zip(caches, sent_caches, strict=True):
        assert found.get().tobytes() == cache.tobytes()
