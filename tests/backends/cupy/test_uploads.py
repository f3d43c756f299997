"""What a call brings to the device once, and how long that stays there; no GPU."""

import ctypes
import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.backends.cupy.fake_cupy import Machine, at_host
from tileattn import BlockMask
from tileattn.backends.cupy import streams
from tileattn.backends.cupy.backend import CupyCall
from tileattn.call.prepared import CALLS
from tileattn.kernels.cuda.plan import block_sparse
from tileattn.kernels.cuda.plan.block_sparse import partial_blocks
from tileattn.kernels.cuda.plan.tile_kinds import TileKinds
from tileattn.kernels.cuda.plan.tile_lists import TileLists

CAUSAL: dict[str, Any] = {"causal": True}


@pytest.fixture
def gpu(h200: Machine) -> Machine:
    return h200


def arrays(gpu: Machine) -> tuple[Any, Any, Any]:
    q, k, v = (gpu.array((1, heads, 3000, 8), np.float16) for heads in (12, 2, 2))
    return q, k, v  # 288 blocks of 128 queries, for 264 groups


def assignments(gpu: Machine) -> list[int]:
    return [int(params["assignment"]) for *_, params in gpu.launches]


# --- lengths and assignments --------------------------------------------------------------------


def test_lengths_that_differ_are_copied_once(gpu: Machine) -> None:
    q, k = gpu.array((2, 3, 37, 8), np.float16), gpu.array((2, 3, 53, 8), np.float16)
    for _ in range(3):
        tileattn.forward(q, k, k, kv_lengths=np.array([50, 9]), q_offset=[0, 3])
    assert len(gpu.uploads) == 2
    for *_, params in gpu.launches:
        for name, x in (("kv_lengths", [50, 9]), ("q_offset", [0, 3])):
            assert list((ctypes.c_int64 * 2).from_address(int(params[name]))) == x
    tileattn.forward(q, k, k, kv_lengths=np.array([50, 8]), q_offset=[0, 3])
    assert len(gpu.uploads) == 4
    gpu.device = 1  # which has a copy of its own
    x, y = gpu.array(q.shape, np.float16, device=1), gpu.array(k.shape, np.float16, device=1)
    tileattn.forward(x, y, y, kv_lengths=np.array([50, 8]), q_offset=[0, 3])
    assert len(gpu.uploads) == 6
    gpu.device = 0
    # Addresses of each call stand before and after addresses that stay.
    mask = BlockMask(np.ones((3, 4), bool), (16, 16))
    tileattn.forward(q, k, k, kv_lengths=[9, 8], q_offset=[2, 1], block_mask=mask)
    names = ("kv_lengths", "q_offset", "block_kinds", "block_bits", "tile_list")
    found = {int(gpu.launches[-1][-1][name]) for name in names}
    assert found == {x.data.ptr for x in gpu.uploads[6:]}


def test_an_assignment_is_copied_once_for_each_set_of_lengths(gpu: Machine) -> None:
    given = arrays(gpu)
    for length in (3000, 1500, 1500, 3000):
        tileattn.forward(*given, **CAUSAL, kv_lengths=[length])
    assert len(gpu.uploads) == 2
    assert assignments(gpu) == [gpu.uploads[n].data.ptr for n in (0, 1, 1, 0)]
    table = at_host(gpu.uploads[0])
    assert table[0].tolist() == list(range(264))
    assert sorted(table[table < 144]) == list(range(144))


def test_a_first_call_in_a_capture_does_without(gpu: Machine) -> None:
    """Also where it would have been repeated: the calls after the capture have their table."""
    given = arrays(gpu)
    gpu.capturing = True
    for _ in range(2):
        tileattn.forward(*given, **CAUSAL)
    gpu.capturing = False
    for _ in range(2):
        tileattn.forward(*given, **CAUSAL)
    (table,) = gpu.uploads
    assert assignments(gpu) == [0, 0, table.data.ptr, table.data.ptr]


def test_without_an_assignment_no_thread_block_begins_late(gpu: Machine) -> None:
    q, k, v = (gpu.array((1, 16, 6000, 64), np.float16) for _ in range(3))
    for capturing in (True, False):
        gpu.capturing = capturing
        tileattn.forward(q, k, v)
    first, second = (blocks for _, blocks, *_ in gpu.launches)
    assert first == 132 < second
    assert assignments(gpu) == [0, gpu.uploads[0].data.ptr]


def test_equal_blocks_are_remembered_from_a_capture(gpu: Machine) -> None:
    given = arrays(gpu)
    gpu.capturing = True
    tileattn.forward(*given)
    (known,) = (x for x in CALLS.values() if isinstance(x, CupyCall))
    assert None in known.cached


# --- block masks --------------------------------------------------------------------------------


def test_a_mask_is_listed_once_for_each_size_of_tiles(gpu: Machine) -> None:
    pairs = np.random.default_rng(0).random((2, 1, 600, 800)) < 0.5
    pairs[:, :, :300] = False
    mask = BlockMask.from_mask(pairs, (128, 128))
    for dim, keys in ((64, 128), (128, 128), (256, 64), (64, 128)):
        q = gpu.array((2, 3, 600, dim), np.float16)
        k = gpu.array((2, 3, 800, dim), np.float16)
        tileattn.forward(q, k, k, block_mask=mask)
        key, _, _, params = gpu.launches[-1]
        assert (key.kernel, key.tile) == ("forward_sm90", (128, keys))
        kinds, bits = partial_blocks(mask)
        lists = TileLists(TileKinds((128, keys), (2, 3, 600, 800)), 1, backward=False)
        wanted = {"tile_list": lists.lists(mask)}
        wanted |= {"block_kinds": kinds, "block_bits": bits}
        for name, x in wanted.items():
            there = next(x for x in gpu.uploads if x.data.ptr == int(params[name]))
            assert np.array_equal(at_host(there), x)
    assert len(gpu.uploads) == 2 + 2
    gpu.device = 1  # which has copies of its own
    x, y = gpu.array(q.shape, np.float16, device=1), gpu.array(k.shape, np.float16, device=1)
    tileattn.forward(x, y, y, block_mask=mask)
    assert len(gpu.uploads) == 4 + 3
    gpu.device, gpu.capturing = 0, True  # nothing can be copied then
    tileattn.forward(q, k, k, block_mask=mask)
    assert gpu.launches[-1][-1]["tile_list"] == gpu.launches[0][-1]["tile_list"]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("captured", "handles"), [(False, (0, 0)), (False, (7, 7)), (True, (0, 0)), (False, (0, 7))]
)
def test_what_is_brought_goes_with_its_owner_unless_it_may_be_read_yet(
    gpu: Machine,
    monkeypatch: pytest.MonkeyPatch,
    masked: bool,
    captured: bool,
    handles: tuple[int, int],
) -> None:
    """A graph and another stream may read it: what a plan owns, or what is made of a mask.

    The latter also if a plan that no call can find again is still remembered.
    """
    monkeypatch.setattr(streams, "_captured", {})

    def call() -> list[Any]:
        """Return weak references to what two calls have brought."""
        q = gpu.array((1, 2, 300, 64), np.float16)
        mask = {"block_mask": BlockMask(np.ones((3, 3), bool))}
        for gpu.stream in handles:
            tileattn.forward(
                *((q, q, q) if masked else arrays(gpu)), **(mask if masked else CAUSAL)
            )
            gpu.capturing = captured
        made = [weakref.ref(gpu.uploads.pop()) for _ in range(len(gpu.uploads))]
        assert len(made) == (3 if masked else 1)  # kinds, bits and lists; an assignment
        assert all(x() is not None for x in made)
        return made

    gpu.busy = {*handles}
    made = call()
    CALLS.clear()
    gc.collect()
    is_read = captured or handles == (0, 7)
    assert [x() is not None for x in made] == [is_read] * len(made)
    gpu.busy.clear()
    gpu.capturing = False
    call()
    CALLS.clear()  # drops what was brought last, and looks at the others again
    gc.collect()
    assert [x() is not None for x in made] == [captured] * len(made)


def test_default_streams_of_threads_are_not_one(gpu: Machine) -> None:
    """They share a handle: the arrays wait for the kernels of other threads."""
    gpu.stream = streams.PER_THREAD
    q = gpu.array((1, 2, 300, 64), np.float16)
    mask = BlockMask(np.ones((3, 3), bool))

    def call() -> None:
        tileattn.forward(q, q, q, block_mask=mask)

    def events() -> list[int]:
        found = (x for x in block_sparse._made[mask].values() if isinstance(x, streams.Uploaded))
        return [len(x._events) for x in found]

    call()
    call()
    assert events() == [0, 0]  # blocks and lists
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert events() == [1, 1]
