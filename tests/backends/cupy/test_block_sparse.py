"""Block masks as kernels read them: partial blocks, and lists of key tiles."""

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tileattn
from tests.backends.cupy import fake_cupy
from tests.backends.cupy.fake_cupy import Machine, at_host
from tileattn import BlockMask
from tileattn.algorithm.block_mask import EMPTY, FULL, PARTIAL
from tileattn.backends.cupy import streams
from tileattn.kernels.launch.block_sparse import (
    END,
    kv_indices,
    kv_indices_shape,
    kv_tiles_before,
    tile_kinds,
)

sides = st.sampled_from([1, 2, 3, 5, 8, 12])


@given(
    block=st.tuples(sides, sides),
    tile=st.tuples(sides, sides),
    shape=st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(1, 6)] * 2),
    share=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    seed=st.integers(0, 99),
)
def test_tiles_are_what_their_blocks_are(
    block: tuple[int, int], tile: tuple[int, int], shape: Any, share: float, seed: int
) -> None:
    """A tile is skipped where all its blocks are, seen where all are, and partly seen elsewhere."""
    blocks = np.random.default_rng(seed).random(shape) < share
    mask = BlockMask(blocks, block)
    pairs = np.repeat(np.repeat(blocks, block[0], axis=2), block[1], axis=3)
    kinds = tile_kinds(mask, tile)
    lists = kv_indices(mask, tile)
    rows, columns = (-(-n // side) for n, side in zip(pairs.shape[2:], tile, strict=True))
    assert kinds.shape == (*shape[:2], rows, columns)
    assert lists.shape == (*shape[:2], rows, columns + 1) == kv_indices_shape(mask, tile)
    for b, h, r in np.ndindex(*shape[:2], rows):
        wanted, entries = [], []
        for c in range(columns):
            seen = pairs[b, h, r * tile[0] :, c * tile[1] :][: tile[0], : tile[1]]
            wanted.append(FULL if seen.all() else PARTIAL if seen.any() else EMPTY)
            if seen.any():
                entries.append(2 * c + (not seen.all()))
        assert kinds[b, h, r].tolist() == wanted
        ends = [END] * (columns + 1 - len(entries))
        assert lists[b, h, r].tolist() == entries + ends


def test_a_block_that_is_partly_seen_makes_its_tiles_so() -> None:
    mask = BlockMask.from_mask(np.triu(np.ones((1, 1, 8, 8), bool)), (4, 4))
    assert tile_kinds(mask, (2, 4)).tolist() == [[[[1, 2], [1, 2], [0, 1], [0, 1]]]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    with fake_cupy.machine(monkeypatch) as made:
        made.arch = "sm_90a"
        yield made


def test_a_mask_is_listed_once_for_each_size_of_tiles(gpu: Machine) -> None:
    blocks = np.random.default_rng(0).random((2, 1, 5, 7)) < 0.5
    mask = BlockMask(blocks, (128, 128))
    for dim, keys in ((64, 128), (128, 128), (256, 64), (64, 128)):
        q = gpu.array((2, 3, 600, dim), np.float16)
        k = gpu.array((2, 3, 800, dim), np.float16)
        tileattn.forward(q, k, k, block_mask=mask)
        key, _, _, params = gpu.launches[-1]
        assert (key.kernel, key.block_q, key.block_k) == ("forward_sm90", 128, keys)
        wanted = kv_indices(mask, (128, keys))
        there = next(x for x in gpu.uploads if x.data.ptr == int(params["kv_indices"]))
        assert np.array_equal(at_host(there), wanted)
        strides = [s // 4 for s in wanted.strides]
        assert list(params["kv_indices_at"].tolist()) == [strides[0], 0, strides[2], 1]
    lists = [x for x in gpu.uploads if x.ndim == 4 and x.shape[-1] in {8, 15}]
    assert sorted(x.shape[-1] for x in lists) == [8, 15]


@pytest.mark.parametrize(
    ("captured", "streams_used", "kept"),
    [(False, (0, 0), False), (False, (7, 7), False), (True, (0, 0), True), (False, (0, 7), True)],
)
def test_what_is_made_of_a_mask_goes_with_it_unless_it_may_be_read_yet(
    gpu: Machine,
    monkeypatch: pytest.MonkeyPatch,
    captured: bool,
    streams_used: tuple[int, int],
    kept: bool,
) -> None:
    """Also where a plan that nobody can find again is still remembered."""
    monkeypatch.setattr(streams, "_kept", {})
    q = gpu.array((1, 2, 300, 64), np.float16)
    mask = BlockMask(np.ones((3, 3), bool))
    for stream in streams_used:
        gpu.stream = stream
        tileattn.forward(q, q, q, block_mask=mask)
        gpu.capturing = captured
    made = [weakref.ref(gpu.uploads.pop()) for _ in range(len(gpu.uploads))]
    assert len(made) == 3  # kinds, bits and lists
    assert all(x() is not None for x in made)
    del mask
    gc.collect()
    assert [x() is not None for x in made] == [kept] * 3


def test_default_streams_of_threads_are_not_one(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share a handle; a mask that both read is remembered once."""
    kept: dict[int, object] = {}
    monkeypatch.setattr(streams, "_kept", kept)
    gpu.stream = streams.PER_THREAD
    q = gpu.array((1, 2, 300, 64), np.float16)
    mask = BlockMask(np.ones((3, 3), bool))

    def call() -> None:
        tileattn.forward(q, q, q, block_mask=mask)

    call()
    call()
    assert not kept
    for _ in range(2):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert len(kept) == 2  # cells and lists


def test_a_later_call_brings_nothing_and_can_be_captured(gpu: Machine) -> None:
    q = gpu.array((1, 2, 300, 64), np.float16)
    mask = BlockMask(np.tri(3, dtype=bool))
    tileattn.forward(q, q, q, block_mask=mask)
    known = len(gpu.uploads)
    gpu.capturing = True
    tileattn.forward(q, q, q, block_mask=mask)
    assert len(gpu.uploads) == known
    first, second = (int(params["kv_indices"]) for *_, params in gpu.launches)
    assert first == second != 0


def test_counts_before_tiles_are_those_of_the_lists() -> None:
    mask = BlockMask(np.random.default_rng(0).random((2, 3, 5, 7)) < 0.5, (128, 128))
    for tile in ((128, 128), (192, 96)):
        lists, before = kv_indices(mask, tile), kv_tiles_before(mask, tile)
        assert before.shape == lists.shape
        for n in range(before.shape[-1]):
            assert np.array_equal(before[..., n], (lists < 2 * n).sum(-1))
        assert kv_tiles_before(mask, tile) is before
