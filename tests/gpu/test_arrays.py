"""CuPy arrays: layouts, sizes and errors that the contract suite does not reach."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tests.on_gpu import bits, check, host, needs_gpu, random_arrays
from tileattn import Attention, BlockMask, Gradients, reference
from tileattn.testing import assert_attention_close, error_bound

pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread")]

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


# --- layouts ------------------------------------------------------------------------------------


def _off_by_one(x: Any) -> Any:
    import cupy

    whole = cupy.empty(x.size + 1, x.dtype)
    view = whole[1:].reshape(x.shape)
    view[...] = x
    return view


def _tokens_before_heads(x: Any) -> Any:
    import cupy

    return cupy.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


def _transposed(x: Any) -> Any:
    import cupy

    return cupy.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3)


def _reversed(x: Any) -> Any:
    import cupy

    return cupy.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1]


def _padded(x: Any) -> Any:
    import cupy

    whole = cupy.empty((*x.shape[:3], x.shape[3] + 3), x.dtype)
    whole[..., : x.shape[3]] = x
    return whole[..., : x.shape[3]]


LAYOUTS = [_off_by_one, _tokens_before_heads, _transposed, _reversed, _padded]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("D", "Dv"), [(32, 48), (17, 33)])
def test_layouts(layout: Any, dtype: Any, D: int, Dv: int) -> None:
    shapes = ((2, 4, 67, D), (2, 2, 131, D), (2, 2, 131, Dv), (2, 4, 67, Dv))
    q, k, v, dout = (layout(x) for x in random_arrays(*shapes, dtype=dtype))
    check((q, k, v, dout), {"causal": True})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_of_any_layout(layout: Any) -> None:
    q, k, v = random_arrays((2, 4, 67, 32), (2, 2, 131, 32), (2, 2, 131, 48))
    expected = tileattn.forward(q, k, v)
    out = layout(random_arrays((2, 4, 67, 48))[0])
    attention = tileattn.forward(q, k, v, out=out)
    assert attention.out is out
    assert bits(attention) == bits(expected)


def test_inputs_that_are_broadcast() -> None:
    import cupy

    q, k, v, dout = random_arrays((2, 4, 40, 32), (2, 1, 50, 32), (1, 1, 50, 32), (2, 4, 40, 32))
    shape = (2, 2, 50, 32)
    check((q, cupy.broadcast_to(k, shape), cupy.broadcast_to(v, shape), dout), {})


# --- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("D", "Dv"), [(1, 1), (8, 256), (256, 8), (512, 512), (40, 513)])
def test_head_dimensions(D: int, Dv: int, dtype: Any) -> None:
    shapes = ((2, 2, 37, D), (2, 1, 53, D), (2, 1, 53, Dv), (2, 2, 37, Dv))
    arrays = random_arrays(*shapes, dtype=dtype)
    check(arrays, {"causal": True}, deterministic=True)
    check(arrays, {"window": (9, 3), "softcap": 5.0})


def test_more_heads_than_a_grid_has_rows() -> None:
    shape = (3, 30000, 5, 16)
    q, k, v, dout = random_arrays(shape, shape, shape, shape, dtype=np.float16)
    attention = tileattn.forward(q, k, v, causal=True)
    grads = tileattn.backward(dout, q, k, v, *attention, causal=True)
    for b, first in ((0, 0), (2, 29990)):
        part = np.s_[b : b + 1, first : first + 10]
        given = [x[part].get() for x in (q, k, v, dout)]
        bounds = error_bound(*given, causal=True)
        ours = Attention(*(x[part].get() for x in attention))
        assert_attention_close(ours, reference.forward(*given[:3], causal=True), bounds)
        dq, dk, dv = (x[part].get() for x in grads[:3])
        of_ours = Gradients(dq, dk, dv, None, None)
        expected = reference.backward(given[3], *given[:3], causal=True)
        assert_attention_close(of_ours, expected, bounds)


def test_arrays_of_more_than_two_to_the_31_elements() -> None:
    """Positions are told by the values, so that a wrong offset is a wrong result."""
    import cupy

    N, D = (1 << 25) + 192, 64
    free = cupy.cuda.runtime.memGetInfo()[0]
    if free < 45 * 10**9:
        pytest.skip(f"needs 45 GB of GPU memory, {free / 1e9:.0f} GB are free")
    k, v = cupy.zeros((1, 1, N, D), np.float16), cupy.zeros((1, 1, N, D), np.float16)
    q = cupy.zeros((1, 1, 2, D), np.float16)
    last = N - 70  # beyond 2**31 elements; the two queries attend to themselves and three before
    k[0, 0, last - 8 : last + 8] = random_arrays((16, D), dtype=np.float16)[0]
    v[0, 0, last - 8 : last + 8] = random_arrays((16, D), dtype=np.float16, seed=1)[0]
    q[...] = random_arrays(q.shape, dtype=np.float16, seed=2)[0]
    options: dict[str, Any] = {"window": (3, 0), "q_offset": last}
    attention = tileattn.forward(q, k, v, **options)
    part = np.s_[:, :, last - 8 : last + 8]
    given = q.get(), k[part].get(), v[part].get()
    short: dict[str, Any] = {"window": (3, 0), "q_offset": 8}
    dout = random_arrays(q.shape, dtype=np.float16, seed=3)[0]
    bounds = error_bound(*given, dout.get(), **short)
    assert_attention_close(host(attention), reference.forward(*given, **short), bounds)
    grads = tileattn.backward(dout, q, k, v, *attention, **options)
    dq, dk, dv = grads.dq.get(), grads.dk[part].get(), grads.dv[part].get()
    expected = reference.backward(dout.get(), *given, **short)
    assert_attention_close(Gradients(dq, dk, dv, None, None), expected, bounds)
    assert not grads.dk[:, :, last - 4000 : last - 8].any()
    assert not grads.dk[:, :, :4000].any()


# --- what is read and what is written -----------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_of_every_result_is_written(dtype: Any, deterministic: bool) -> None:
    """Also where queries attend to no key, and no query attends to keys."""
    shapes = ((2, 4, 90, 40), (2, 2, 61, 40), (2, 2, 61, 24), (2, 4, 90, 24))
    arrays = random_arrays(*shapes, dtype=dtype)
    bias, sinks = random_arrays((4, 90, 61), (4,), seed=1)
    choices: list[dict[str, Any]] = [
        {"causal": True},
        {"kv_lengths": [0, 61], "bias": bias},
        {"window": (4, 4), "q_offset": [1000, 3], "sinks": sinks},
        {"block_mask": BlockMask(np.eye(6, 4, dtype=np.bool_), (16, 16))},
    ]
    for options in choices:
        check(arrays, options, deterministic=deterministic)


def test_merge() -> None:
    import cupy

    q, k, v = random_arrays((2, 4, 30, 16), (2, 4, 50, 16), (2, 4, 50, 16))
    for dtype in DTYPES:
        given = [x.astype(dtype) for x in (q, k, v)]
        parts = [
            tileattn.forward(given[0], given[1][:, :, s], given[2][:, :, s], q_offset=0)
            for s in (slice(0, 20), slice(20, 20), slice(20, 50))
        ]
        merged = tileattn.merge([p.out for p in parts], [p.lse for p in parts])
        assert isinstance(merged.out, cupy.ndarray)
        whole = given[0].get(), given[1].get(), given[2].get()
        bounds = error_bound(*whole)
        assert_attention_close(merged, reference.forward(*whole), bounds, array_type=cupy.ndarray)


# --- lengths on the GPU, and errors -------------------------------------------------------------


def test_lengths_and_offsets_may_be_on_the_gpu() -> None:
    import cupy

    q, k, v, dout = random_arrays((2, 2, 30, 16), (2, 2, 50, 16), (2, 2, 50, 16), (2, 2, 30, 16))
    for dtype in (np.int64, np.int32):
        lengths, offsets = cupy.asarray([50, 7], dtype), cupy.asarray([3, -2], dtype)
        check((q, k, v, dout), {"causal": True, "kv_lengths": lengths})
        check((q, k, v, dout), {"causal": True, "kv_lengths": lengths, "q_offset": offsets})
    # Reading them would wait for the GPU, so lengths past the end count as the end.
    far = tileattn.forward(q, k, v, kv_lengths=cupy.asarray([1000, -5]), q_offset=0)
    near = tileattn.forward(q, k, v, kv_lengths=[50, 0], q_offset=0)
    assert bits(far) == bits(near)


def test_an_array_on_another_device_is_refused() -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one GPU")
    q, k, v = random_arrays((2, 2, 30, 16), (2, 2, 50, 16), (2, 2, 50, 16))
    expected = tileattn.forward(q, k, v)
    with cupy.cuda.Device(1):
        there = [x.copy() for x in (q, k, v)]
        assert bits(tileattn.forward(*there)) == bits(expected)
        with pytest.raises(ValueError, match=r"k must be on .*current device, 1; .* device 0"):
            tileattn.forward(there[0], k, there[2])
    with pytest.raises(ValueError, match=r"q must be on .*current device, 0; .* device 1"):
        tileattn.forward(there[0], k, v)


def test_out_of_memory_leaves_everything_as_it_was() -> None:
    import cupy

    q, k, v = random_arrays((1, 2, 3000, 64), (1, 2, 3000, 64), (1, 2, 3000, 64))
    out = cupy.full(q.shape, 7, np.float32)
    before = bits((q, k, v, out))
    pool = cupy.cuda.MemoryPool()
    pool.set_limit(size=1 << 12)
    with cupy.cuda.using_allocator(pool.malloc), pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        tileattn.forward(q, k, v, out=out)
    assert bits((q, k, v, out)) == before


def test_explain() -> None:
    q, k, v = random_arrays((2, 4, 500, 64), (2, 2, 700, 64), (2, 2, 700, 64), dtype=np.float16)
    choices: list[dict[str, Any]] = [{}, {"causal": True, "softcap": 3.0}]
    for options in choices:
        found = tileattn.explain(q, k, v, **options)
        assert found.backend == "cupy"
        assert found.workers > 0
        assert found.scratch_bytes > 0
        assert found.bytes_moved["out"] == q.nbytes
        for line in found.kernels:
            assert "registers" in line
