"""``backward(workspace=)``: what is refused, on the CPU; and what a GPU does with it."""

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import tileattn
from tests.on_gpu import bits, hold, needs_gpu, random_arrays
from tileattn import Gradients
from tileattn.backends.numpy.backend import NumpyBackend
from tileattn.backends.protocol import Backend, takes_workspace

Array = NDArray[Any]


def aligned(nbytes: int, beyond: int = 0) -> Array:
    """Make an array of bytes that starts past a multiple of 256."""
    whole = np.full(nbytes + 512, 7, np.uint8)
    first = -whole.ctypes.data % 256 + beyond
    return whole[first : first + nbytes]


def inputs() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 4, 7, 3), "k": (2, 2, 5, 3), "v": (2, 2, 5, 6), "dout": (2, 4, 7, 6)}
    made = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    out, lse = tileattn.forward(made["q"], made["k"], made["v"])
    return {**made, "out": out, "lse": lse}


# --- NumPy --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.parametrize("workspace", [np.empty(0, np.uint8), aligned(1000)], ids=len)
def test_numpy_needs_none_and_leaves_it_alone(workspace: Array) -> None:
    given = inputs()
    assert tileattn.explain(given["q"], given["k"], given["v"]).workspace_bytes == 0
    expected = tileattn.backward(**given)
    before = workspace.copy()
    grads = tileattn.backward(**given, workspace=workspace)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(grads, name), getattr(expected, name))
    np.testing.assert_array_equal(workspace, before)


def read_only() -> Array:
    x = aligned(64)
    x.setflags(write=False)
    return x


@pytest.mark.parametrize(
    ("workspace", "error", "message"),
    [
        (
            1000,
            TypeError,
            "must be a NumPy array; got 1000 (numpy.asarray(workspace) makes one)",
        ),
        (bytearray(64), TypeError, "must be a NumPy array; got an object of type bytearray"),
        (np.zeros(64), TypeError, "must have dtype uint8; got float64"),
        (aligned(64).view(np.int8), TypeError, "must have dtype uint8; got int8"),
        (aligned(64).reshape(8, 8), ValueError, "must have one axis; got shape (8, 8)"),
        (np.zeros((), np.uint8), ValueError, "must have one axis; got shape ()"),
        (aligned(64)[::2], ValueError, "must be contiguous; got strides (2,)"),
        (read_only(), ValueError, "must be writable; got a read-only array"),
        (
            aligned(64, 32),
            ValueError,
            "must start at a multiple of 256 bytes; it starts 32 bytes past one "
            "(workspace[224:] fits)",
        ),
    ],
    ids=str,
)
def test_what_is_refused(workspace: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^workspace {re.escape(message)}"):
        tileattn.backward(**inputs(), workspace=workspace, backend="numpy")


@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "out", "lse", "sinks"])
def test_a_workspace_that_overlaps_an_input(name: str) -> None:
    given = inputs() | {"sinks": np.zeros(4)}
    x = given[name]
    memory = aligned(256 + x.nbytes)
    memory[256:].view(x.dtype)[...] = x.ravel()
    given[name] = memory[256:].view(x.dtype).reshape(x.shape)
    before = memory.copy()
    with pytest.raises(ValueError, match=rf"^workspace must not overlap {name}"):
        tileattn.backward(**given, workspace=memory[:257])
    np.testing.assert_array_equal(memory, before)
    tileattn.backward(**given, workspace=memory[:256])


# --- backends of others -------------------------------------------------------------------------


class Takes(NumpyBackend):
    """Takes whatever comes."""

    name = "takes"

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    @takes_workspace
    def backward(self, *args: Any, **more: Any) -> Gradients:
        self.given.append(more)
        return super().backward(*args)


class TakesNone(NumpyBackend):
    """Was written before there were workspaces."""

    name = "takesnone"

    def backward(  # type: ignore[override]  # without a workspace, which is the point
        self, problem: Any, operands: Any, dout: Any, attention: Any, dlse: Any, fixed: bool
    ) -> Gradients:
        return super().backward(problem, operands, dout, attention, dlse, fixed)


def test_a_backend_gets_it_only_where_a_caller_passes_one() -> None:
    backend, workspace = Takes(), np.empty(0, np.uint8)
    assert isinstance(backend, Backend)
    tileattn.register_backend(backend)
    tileattn.backward(**inputs(), backend="takes")
    tileattn.backward(**inputs(), backend="takes", workspace=workspace)
    assert backend.given == [{}, {"workspace": workspace}]
    given = inputs()
    _, pullback = tileattn.vjp(given["q"], given["k"], given["v"], backend="takes")
    pullback(given["dout"], workspace=workspace)
    assert backend.given[2:] == [{"workspace": workspace}]


def test_a_backend_that_takes_none_says_so() -> None:
    tileattn.register_backend(TakesNone())
    assert tileattn.backward(**inputs(), backend="takesnone").dbias is None
    told = r"^workspace must be None: backend 'takesnone' takes none$"
    with pytest.raises(tileattn.UnsupportedError, match=told):
        tileattn.backward(**inputs(), backend="takesnone", workspace=np.empty(0, np.uint8))


# --- on a GPU -----------------------------------------------------------------------------------

on_gpu = pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
SHAPES = ((2, 4, 333, 64), (2, 2, 517, 64), (2, 2, 517, 64), (2, 4, 333, 64))


def gpu_marks(test: Any) -> Any:
    for mark in (*needs_gpu, pytest.mark.usefixtures("one_blas_thread")):
        test = mark(test)
    return test


def made_for(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """Make a workspace of exactly the bytes needed, all NaN in every type."""
    import cupy

    return cupy.full(tileattn.explain(q, k, v, **options).workspace_bytes, 0xFF, np.uint8)


def options_of(name: str) -> dict[str, Any]:
    """Return options by the name of the arrays that they add to a call."""
    if name == "sinks":
        (sinks,) = random_arrays((4,), dtype=ml_dtypes.bfloat16, seed=1)
        return {"sinks": sinks, "causal": True}
    if name == "bias":
        bias, slopes = random_arrays((4, 333, 517), (4,), seed=1)
        return {"bias": bias, "alibi_slopes": slopes.astype(np.float64)}
    return {"causal": True} if name == "plain" else {}


def given_of(name: str, dtype: Any) -> tuple[Any, ...]:
    """Return q, k, v, dout and options by the name of the case."""
    import cupy

    q, k, v, dout = random_arrays(*SHAPES, dtype=dtype)
    if name == "transposed":
        q, k = (cupy.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3) for x in (q, k))
    return q, k, v, dout, options_of(name)


@gpu_marks
@on_gpu
@pytest.mark.parametrize("name", ["plain", "sinks", "bias", "transposed"])
def test_the_same_bits_with_and_without(name: str, dtype: Any) -> None:
    """Two calls on one workspace: on bytes of NaN, and on what the first has left."""

    q, k, v, dout, options = given_of(name, dtype)
    attention = tileattn.forward(q, k, v, **options)
    workspace = made_for(q, k, v, options)
    for deterministic in (False, True, False):
        expected = tileattn.backward(
            dout, q, k, v, *attention, deterministic=deterministic, **options
        )
        for _ in range(2):
            grads = tileattn.backward(
                *(dout, q, k, v, *attention),
                deterministic=deterministic,
                workspace=workspace,
                **options,
            )
            # Without a fixed order the sums of dq differ from run to run.
            first = 0 if deterministic else 1
            assert bits(grads[first:]) == bits(expected[first:])
            hold((q, k, v, dout), attention, grads, options)
        workspace[...] = 0xFF


@gpu_marks
def test_calls_of_any_size_share_a_workspace() -> None:
    import cupy

    workspace = cupy.full(1 << 24, 0xFF, np.uint8)
    for rows, columns, dtype in (
        (700, 128, np.float16),
        (33, 64, np.float32),
        (700, 40, np.float16),
    ):
        q, k, v, dout = random_arrays(*[(2, 2, rows, columns)] * 4, dtype=dtype)
        attention = tileattn.forward(q, k, v)
        grads = tileattn.backward(dout, q, k, v, *attention, workspace=workspace)
        hold((q, k, v, dout), attention, grads, {})


@gpu_marks
@pytest.mark.parametrize("deterministic", [False, True])
def test_bytes_beside_the_workspace_stay(deterministic: bool) -> None:
    import cupy

    q, k, v, dout = random_arrays(*SHAPES, dtype=np.float16)
    attention = tileattn.forward(q, k, v)
    nbytes = tileattn.explain(q, k, v).workspace_bytes
    whole = cupy.full(nbytes + 2048, 0xA5, np.uint8)
    tileattn.backward(
        dout, q, k, v, *attention, deterministic=deterministic, workspace=whole[1024:-1024]
    )
    assert (whole[:1024] == 0xA5).all()
    assert (whole[-1024:] == 0xA5).all()


@gpu_marks
@on_gpu
@pytest.mark.parametrize("name", ["plain", "sinks", "bias", "transposed"])
def test_what_is_taken_from_the_pool(name: str, dtype: Any) -> None:
    """A pool of its own shows the most that was ever taken: results, and one piece without."""
    import cupy

    q, k, v, dout, options = given_of(name, dtype)
    attention = tileattn.forward(q, k, v, **options)
    tileattn.backward(dout, q, k, v, *attention, **options)  # what stays for later calls is there
    workspace = made_for(q, k, v, options)

    def taken(workspace: Any) -> int:
        pool = cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(pool.malloc):
            grads = tileattn.backward(dout, q, k, v, *attention, workspace=workspace, **options)
            results: int = sum(-(-x.nbytes // 512) * 512 for x in grads if x is not None)
            total: int = pool.total_bytes()
            assert pool.used_bytes() in (results, total)  # short calls have one piece for all
            return total - results

    assert taken(workspace) == 0
    assert taken(None) == -(-workspace.nbytes // 512) * 512


@gpu_marks
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_graph_works_in_the_workspace(deterministic: bool) -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    options: dict[str, Any] = {"causal": True}
    with stream:
        given = random_arrays(*SHAPES, dtype=np.float16)
        fresh = random_arrays(*SHAPES, dtype=np.float16, seed=9)
        q, k, v, dout = given
        out, lse = tileattn.forward(q, k, v, **options)
        workspace = made_for(q, k, v, options)
        call: dict[str, Any] = {"deterministic": deterministic, "workspace": workspace, **options}
        tileattn.backward(dout, q, k, v, out, lse, **call)  # loads kernels
        stream.begin_capture()
        grads = tileattn.backward(dout, q, k, v, out, lse, **call)
        graph = stream.end_capture()
        for new in (given, fresh):
            for x, y in zip((q, k, v, dout), [y.copy() for y in new], strict=True):
                x[...] = y
            attention = tileattn.forward(q, k, v, **options)
            out[...], lse[...] = attention
            workspace[...] = 0xFF
            for _ in range(2):
                graph.launch()
                stream.synchronize()
                hold((q, k, v, dout), attention, grads, options)
