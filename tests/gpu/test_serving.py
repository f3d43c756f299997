"""Rotary positions and growing caches: CuPy arrays have the results of NumPy's."""

from typing import Any

import numpy as np
import pytest

import tileattn
from tests.on_gpu import needs_gpu, sent
from tileattn.dtypes import DTYPES

pytestmark = needs_gpu

B, H, N, D, DV = 2, 3, 4, 12, 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("positions", [3, [4, 0, 9, 1], np.arange(8).reshape(B, N)], ids=str)
def test_rope(positions: Any, there: bool, dtype: Any) -> None:
    """The same bits."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(B, H, N, D)).astype(dtype)
    tables = rng.normal(size=(2, 10, 4))
    p = sent(np.asarray(positions)) if there else positions
    for options in ({}, {"interleaved": True}, {"inverse": True}):
        expected = tileattn.rope(x, *tables, positions=positions, **options)
        found = tileattn.rope(sent(x), *sent(tables), positions=p, **options)
        assert found.dtype == dtype
        assert found.get().tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("there", range(8))
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
def test_append_kv(rotated: bool, paged: bool, there: int, dtype: Any) -> None:
    """Each of the integers may be on the GPU, or on the host."""
    rng = np.random.default_rng(0)
    lead, rows = (6, 3) if paged else (B, 9)
    caches = [np.full((lead, rows, H, n), np.nan, dtype).swapaxes(1, 2) for n in (D, DV)]
    new = [rng.normal(size=(H, 8, n)).astype(dtype) for n in (D, DV)]
    options: dict[str, Any] = {"kv_lengths": np.array([1, 5]), "cu_seqlens": np.array([0, 5, 8])}
    if paged:
        options["block_table"] = np.array([[0, 4, 2], [3, 1, 5]])
    mixed: dict[str, Any] = {
        name: sent(x.astype(np.int32)) if there >> n & 1 else x
        for n, (name, x) in enumerate(options.items())
    }
    if rotated:
        options["rotary"] = tuple(rng.normal(size=(2, 9, 5)).astype(dtype))
        mixed["rotary"] = tuple(map(sent, options["rotary"]))
    sent_caches = [sent(x) for x in caches]
    lengths = tileattn.append_kv(*sent_caches, *map(sent, new), **mixed)
    expected = tileattn.append_kv(*caches, *new, **options)
    np.testing.assert_array_equal(getattr(lengths, "get", lambda: lengths)(), expected)
    for cache, found in zip(caches, sent_caches, strict=True):
        assert found.get().tobytes() == cache.tobytes()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_append_many(dtype: Any, packed: bool, interleaved: bool) -> None:
    """Vectors of 16 bytes, and more tokens and heads than a thread block takes."""
    rng = np.random.default_rng(1)
    lengths, tokens, page = np.array([3, 77]), 301, 16
    new = [rng.normal(size=(2, tokens, 5, n)).astype(dtype).swapaxes(1, 2) for n in (128, 64)]
    options: dict[str, Any] = {"block_table": rng.permutation(60)[:48].reshape(2, 24)}
    options |= {"kv_lengths": lengths, "interleaved": interleaved}
    if packed:
        new = [x.swapaxes(0, 1).reshape(5, 2 * tokens, x.shape[-1]) for x in new]
        options["cu_seqlens"] = np.array([0, 500, 2 * tokens])
        options["block_table"] = rng.permutation(90)[:80].reshape(2, 40)
    tables = tuple(rng.normal(size=(2, 700, 48)).astype(np.float32))
    caches = [np.zeros((90, page, 5, n), dtype).swapaxes(1, 2) for n in (128, 64)]
    found = [sent(x) for x in caches]
    tileattn.append_kv(*caches, *new, **options, rotary=tables)
    there = {name: x if isinstance(x, bool) else sent(x) for name, x in options.items()}
    tileattn.append_kv(*found, *map(sent, new), **there, rotary=tuple(map(sent, tables)))
    for cache, one in zip(caches, found, strict=True):
        assert one.get().tobytes() == cache.tobytes()


def test_rows_past_the_capacity_are_not_written() -> None:
    """Lengths, offsets and pages on the device may be anything; the arrays lie in larger ones."""
    import cupy

    whole = [cupy.full((12, H, 4, n), cupy.nan, np.float32) for n in (D, DV)]
    caches = [x[3:9] for x in whole]
    table = sent(np.array([[0, 6, 2], [3, -1, 1 << 40]]))
    lengths = sent(np.array([1, 2]))
    new = [cupy.ones((2, H, 13, n), np.float32) for n in (D, DV)]
    more = tileattn.append_kv(*caches, *new, kv_lengths=lengths, block_table=table)
    assert more.get().tolist() == [14, 15]
    for offset in (-20, 1 << 62, -(1 << 63)):
        lengths[...] = offset
        tileattn.append_kv(*caches, *new, kv_lengths=lengths, block_table=table)
    for x in whole:
        rows = np.argwhere(x.get()[:, 0, :, 0] == 1).tolist()
        assert rows == [[n, row] for n in (3, 5, 6) for row in range(4) if (n, row) not in SKIPPED]


SKIPPED = {(3, 0), (6, 0), (6, 1)}  # rows before the lengths: of page 0, and of page 3


def test_append_in_a_graph() -> None:
    """A captured call appends after the lengths that it finds at its replay."""
    import cupy

    cache = [cupy.zeros((2, H, 9, n), np.float32) for n in (D, DV)]
    new = [cupy.ones((2, H, 1, n), np.float32) for n in (D, DV)]
    lengths = sent(np.array([0, 4], np.int32))
    tileattn.append_kv(*cache, *new, kv_lengths=lengths)
    stream = cupy.cuda.Stream(non_blocking=True)
    pool = cupy.cuda.MemoryPool()
    stream.wait_event(cupy.cuda.get_current_stream().record())
    with stream, cupy.cuda.using_allocator(pool.malloc):
        tileattn.append_kv(*cache, *new, kv_lengths=lengths)
        stream.begin_capture()
        more = tileattn.append_kv(*cache, *new, kv_lengths=lengths)
        lengths[...] = more
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch()
        stream.synchronize()
    assert lengths.get().tolist() == [3, 7]
    found = cache[0].get()[:, 0, :, 0]
    assert np.argwhere(found).tolist() == [[0, 0], [0, 1], [0, 2], *([1, n] for n in (4, 5, 6))]
