"""What calls bring to the device, when, and how long that stays there; no GPU."""

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.backends.cupy.fake_cupy import Machine, at_host, settle, values_at
from tests.backends.cupy.test_improvement import CAUSAL, arrays
from tileattn import BlockMask
from tileattn.backends.cupy import streams
from tileattn.backends.cupy.backend import CupyCall
from tileattn.backends.cupy.driver_launch import VALUES
from tileattn.call.prepared import CALLS
from tileattn.kernels.cuda.plan import block_sparse
from tileattn.kernels.cuda.plan.block_sparse import partial_blocks
from tileattn.kernels.cuda.plan.plan import MAX_CARRIED
from tileattn.kernels.cuda.plan.tile_kinds import TileKinds
from tileattn.kernels.cuda.plan.tile_lists import TileLists


@pytest.fixture
def gpu(h200: Machine) -> Machine:
    return h200


# --- values -------------------------------------------------------------------------------------


def test_lengths_that_differ_are_stored_by_each_call(gpu: Machine) -> None:
    """Into its workspace, also while a stream is captured: nothing is copied, nor waited for."""
    given = {n: gpu.array((2, 3, 37, 8), np.float16, n) for n in range(2)}
    keys = {n: gpu.array((2, 3, 53, 8), np.float16, n) for n in range(2)}
    cases = [(0, False), (0, False), (1, False), (1, True), (0, True)]
    for length, (gpu.device, gpu.capturing) in enumerate(cases * 2):
        q, k = given[gpu.device], keys[gpu.device]
        lengths: dict[str, Any] = {"kv_lengths": [50, length], "q_offset": [0, 3]}
        tileattn.forward(q, k, k, **lengths)
        first, *_ = gpu.started
        assert first == "store_values"
        for name, x in lengths.items():
            assert values_at(gpu.launches[-1][-1][name], (2,)) == x
        gpu.started.clear()
    assert [*gpu.uploads, *gpu.sent, *gpu.planner.asked] == []


def test_many_lengths_are_stored_by_several_kernels(gpu: Machine) -> None:
    """One stores as many words as its parameters have room for."""
    q = gpu.array((4000, 1, 1, 8), np.float16)
    lengths = np.random.default_rng(0).integers(0, 2, 4000).tolist()
    tileattn.forward(q, q, q, kv_lengths=lengths)
    params = gpu.launches[-1][-1]
    assert values_at(params["kv_lengths"], (4000,)) == lengths
    assert values_at(params["q_offset"], (4000,)) == [n - 1 for n in lengths]
    sizes = [len(values) for _, values in gpu.stored]
    assert max(sizes) <= 8 * VALUES
    assert sum(sizes) == 2 * 8 * 4000
    assert gpu.uploads == []


def test_more_values_than_calls_carry_are_uploaded_once(gpu: Machine) -> None:
    q = gpu.array((1200, 1, 2, 8), np.float16)
    options: dict[str, Any] = {"dropout_p": 0.5, "origin": (1, 2, 16, 5)}
    for _ in range(5):
        tileattn.forward(q, q, q, **options)
        (x,) = gpu.uploads
        assert x.nbytes > MAX_CARRIED
        assert gpu.launches[-1][-1]["origin"] == x.data.ptr
        gpu.planner.work()
    assert at_host(x).tolist() == [[1, 2, 16, 5]] * 1200
    assert [*gpu.stored, *gpu.sent] == []


def test_addresses_of_each_call_stand_among_addresses_that_stay(gpu: Machine) -> None:
    q, k = gpu.array((2, 3, 37, 8), np.float16), gpu.array((2, 3, 53, 8), np.float16)
    mask = BlockMask(np.ones((3, 4), bool), (16, 16))
    tileattn.forward(q, k, k, kv_lengths=[9, 8], q_offset=[2, 1], block_mask=mask)
    params = gpu.launches[-1][-1]
    names = "block_kinds", "block_bits", "tile_list"
    assert {int(params[name]) for name in names} == {x.data.ptr for x in gpu.uploads}
    assert values_at(params["kv_lengths"], (2,)) == [9, 8]
    assert values_at(params["q_offset"], (2,)) == [2, 1]


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

    def call(*busy: int) -> list[Any]:
        """Return weak references to what calls have brought; then streams are busy."""
        q = gpu.array((1, 2, 300, 64), np.float16)
        mask = {"block_mask": BlockMask(np.ones((3, 3), bool))}
        given = ((q, q, q), mask) if masked else (arrays(gpu), CAUSAL)
        gpu.stream = handles[0]
        gpu.sent.clear()
        settle(gpu, lambda: tileattn.forward(*given[0], **given[1]))
        for gpu.stream in handles:
            tileattn.forward(*given[0], **given[1])
            gpu.busy, gpu.capturing = {*busy}, captured
        made = [weakref.ref(gpu.uploads.pop()) for _ in range(len(gpu.uploads))]
        made += [x.memory for x in gpu.sent]
        assert len(made) == (3 if masked else 1)  # kinds, bits and lists; an assignment
        assert all(x() is not None for x in made)
        return made

    made = call(*handles)
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
