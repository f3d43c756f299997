"""``out=`` shares no memory with an input, whatever the types, and its elements none among them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

import tileattn
from tests.backends.cupy.fake_cupy import Machine, at_host
from tileattn.backends.buffers import ensure_writable

Array = NDArray[Any]

B, HQ, N, D = 2, 3, 4, 8
SHAPE = (B, HQ, N, D)


def inputs() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(SHAPE).astype(np.float32) for name in "qkv"}


# --- what overlaps an input ---------------------------------------------------------------------


def test_views_of_other_classes(tmp_path: Path) -> None:
    """A mapped file and its plain view, and a subclass and its base."""

    class Named(np.ndarray):
        pass

    mapped = np.memmap(tmp_path / "q", np.float32, "w+", shape=SHAPE)
    mapped[...] = 1
    given = inputs() | {"q": mapped}
    for name, out in (("q", np.asarray(mapped)), ("v", given["v"].view(Named))):
        before = given[name].copy()
        with pytest.raises(ValueError, match=rf"^out must not overlap {name}$"):
            tileattn.forward(**given, out=out)
        np.testing.assert_array_equal(given[name], before)


OPTIONS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "bias": (np.float16, (HQ, N, N)),
    "mask": (np.bool_, (N, N)),
    "alibi_slopes": (np.float64, (B, HQ)),
    "sinks": (np.float32, (HQ,)),
    "kv_lengths": (np.int64, (B,)),
    "q_offset": (np.int32, (B,)),
}


@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_that_is_an_array(name: str) -> None:
    """Arrays of another dtype than ``out`` must not share its bytes; next to it they may lie."""
    dtype, shape = OPTIONS[name]
    memory = np.zeros(2 * 4 * B * HQ * N * D, np.uint8)
    out = memory[: memory.size // 2].view(np.float32).reshape(SHAPE)
    size = np.dtype(dtype).itemsize * int(np.prod(shape))
    for first, shared in ((0, True), (out.nbytes - size, True), (out.nbytes, False)):
        option = {name: memory[first : first + size].view(dtype).reshape(shape)}
        if shared:
            with pytest.raises(ValueError, match=rf"^out must not overlap {name}$"):
                tileattn.forward(**inputs(), out=out, **option)
        else:
            assert tileattn.forward(**inputs(), out=out, **option).out is out


@pytest.mark.usefixtures("cpu_backend")
def test_slices_of_one_padded_array_share_nothing() -> None:
    whole = np.random.default_rng(0).standard_normal((B, 5 * N + 1, HQ, 4 * D + 7))
    q, k, v, out = (whole[:, n : 5 * N : 5].swapaxes(1, 2)[..., 3 : D + 3] for n in range(4))
    beside = whole[:, 4 : 5 * N : 5].swapaxes(1, 2)[..., D:]
    expected = tileattn.forward(q.copy(), k.copy(), v.copy()).out
    np.testing.assert_array_equal(tileattn.forward(q, k, v, out=out).out, expected)
    np.testing.assert_array_equal(tileattn.forward(q, k, v, out=beside[..., :D]).out, expected)


# --- what overlaps itself -----------------------------------------------------------------------


@given(data=st.data())
def test_elements_that_overlap_are_found(data: st.DataObject) -> None:
    """Against the sorted addresses of all elements; every byte of them is in ``memory``."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    strides = data.draw(st.lists(st.integers(0, 40), min_size=len(shape), max_size=len(shape)))
    memory = np.zeros(1000, np.uint8)
    dtype = np.dtype(data.draw(st.sampled_from([np.uint8, np.uint16, np.float32])))
    x = as_strided(memory[:8].view(dtype), shape, strides)
    at = np.sort(sum(i * s for i, s in zip(np.indices(shape), strides, strict=True)).ravel())
    if (np.diff(at) < dtype.itemsize).any():
        with pytest.raises(ValueError, match=r"^out must not overlap itself; "):
            ensure_writable("out", x, {})
    else:
        ensure_writable("out", x, {})


@pytest.mark.parametrize(
    ("shape", "strides", "fine"),
    [
        ((2, 3), (12, 8), True),  # at 0, 8, 16 and 12, 20, 28
        ((2, 2), (8, 8), False),  # at 0, 8 and 8, 16: as many bytes as there are elements
        ((2, 3), (2, 8), False),  # at half of an element
        ((5, 1), (-4, 0), True),
        ((0, 5), (0, 0), True),
    ],
)
def test_steps_that_do_not_nest(shape: Any, strides: Any, fine: bool) -> None:
    x = as_strided(np.zeros(100, np.float32)[50:], shape, strides)
    if fine:
        ensure_writable("out", x, {})
    else:
        with pytest.raises(ValueError, match="must not overlap itself"):
            ensure_writable("out", x, {})


# --- CuPy arrays --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bias", "mask", "kv_lengths", "sinks", "alibi_slopes"])
def test_options_of_a_call_on_the_gpu(gpu: Machine, name: str) -> None:
    import cupy

    dtype, shape = OPTIONS[name]
    q, memory = gpu.array(SHAPE), gpu.array((2 * B * HQ * N * D,))
    out = memory[: q.size].reshape(SHAPE)
    for first, shared in ((q.nbytes - 4, True), (q.nbytes, False)):
        option: dict[str, Any] = {name: cupy.ndarray(shape, dtype, memory.data + first)}
        option["q_offset"] = 0
        for _ in range(2):  # the second one is known to be valid
            if shared:
                with pytest.raises(ValueError, match=rf"^out must not overlap {name}$"):
                    tileattn.forward(q, q, q, out=out, **option)
            else:
                tileattn.forward(q, q, q, out=out, **option)


def test_arrays_of_other_allocations_and_libraries_at_the_same_place(gpu: Machine) -> None:
    """A library may hand over a pointer alone, and managed memory is the host's, too."""
    import cupy
    from cupy.cuda import memory

    q, out = gpu.array(SHAPE), gpu.array(SHAPE)
    pointer = memory.UnownedMemory(out.data.ptr + out.nbytes - 4, 1, gpu, 0)
    sinks = cupy.ndarray((HQ,), np.float32, memory.MemoryPointer(pointer, 0))
    with pytest.raises(ValueError, match=r"^out must not overlap sinks$"):
        tileattn.forward(q, q, q, out=out, sinks=sinks)
    lengths = at_host(out).reshape(-1).view(np.int64)[:B]
    lengths[...] = N
    with pytest.raises(ValueError, match=r"^out must not overlap kv_lengths$"):
        tileattn.forward(q, q, q, out=out, kv_lengths=lengths)


@pytest.mark.parametrize("strides", [(0, 0, 4, 4), (96, 32, 0, 4)])
def test_steps_that_do_not_nest_on_the_gpu(gpu: Machine, strides: tuple[int, ...]) -> None:
    import cupy

    q, memory = gpu.array((2, 2, 2, 2)), gpu.array((100,)).data
    with pytest.raises(ValueError, match="out must not overlap itself"):
        tileattn.forward(q, q, q, out=cupy.ndarray(q.shape, np.float32, memory, strides))
    assert gpu.launches == []
