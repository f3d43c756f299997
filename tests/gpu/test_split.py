"""Few queries over many keys: forward_split and forward_combine, and pages."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tests.on_gpu import bits, host, needs_gpu, poisoned, sent
from tileattn import reference
from tileattn.dtypes import DTYPES
from tileattn.testing import assert_attention_close, error_bound

pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread")]

B = 3
LENGTHS = np.array([2300, 0, 333])
CAPACITY = 2400
SLOPES = np.linspace(0.1, 1, 8)
TABLE = np.random.default_rng(2).normal(size=(8, 40))


def tree(Nq: int) -> dict[str, Any]:
    seen = np.tril(np.random.default_rng(3).random((B, Nq, Nq)) < 0.5) | np.eye(Nq, dtype=bool)
    return {"tree_mask": seen}


def biased(Nq: int) -> dict[str, Any]:
    rng = np.random.default_rng(4)
    mask = rng.random((B, 1, Nq, CAPACITY)) < 0.7
    return {"bias": rng.normal(size=(1, 8, 1, CAPACITY)), "mask": mask}


def function(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    return s + t[h, (i - j + b) % 40]


OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda _: {},
    "causal": lambda _: {"causal": True, "sinks": np.linspace(-1, 1, 8)},
    "window": lambda _: {"window": (300, 2), "softcap": 3.0, "alibi_slopes": SLOPES},
    "offset": lambda _: {"q_offset": [-2, 5, 9000], "causal": True, "alibi_slopes": SLOPES},
    "tree": tree,
    "bias": biased,
    "function": lambda _: {"score_mod": function, "aux": (TABLE,)},
    "far": lambda _: {"bias": np.full((1, 1, 1, CAPACITY), -1e6), "scale": 40.0},
}


def drawn(
    Hq: int, Hkv: int, Nq: int, D: int, Dv: int, dtype: Any, capacity: int = CAPACITY
) -> list[Any]:
    rng = np.random.default_rng(Nq)
    sizes = (B, Hq, Nq, D), (B, Hkv, capacity, D), (B, Hkv, capacity, Dv)
    return [rng.normal(size=size).astype(dtype) for size in sizes]


def options_there(options: dict[str, Any]) -> dict[str, Any]:
    """Send arrays; integers on the host stay there."""
    made = {
        name: x if isinstance(x, np.ndarray) and x.dtype.kind == "i" else sent(x)
        for name, x in options.items()
    }
    return made | {"aux": tuple(map(sent, options["aux"]))} if "aux" in options else made


def check(arrays: list[Any], options: dict[str, Any]) -> tileattn.Attention:
    """Hold a call on the GPU to the oracle; nothing that was there before is left."""
    with poisoned():
        found = tileattn.forward(*map(sent, arrays), **options_there(options))
    expected = reference.forward(*arrays, **options)
    assert_attention_close(host(found), expected, error_bound(*arrays, **options))
    return found


def kernels(arrays: list[Any], options: dict[str, Any]) -> str:
    return " ".join(tileattn.explain(*map(sent, arrays), **options_there(options)).kernels)


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("Nq", [1, 5])
def test_options(name: str, heads: tuple[int, int], Nq: int) -> None:
    options = {"kv_lengths": LENGTHS} | OPTIONS[name](Nq)
    arrays = drawn(*heads, Nq, 64, 64, np.float16)
    assert "forward_combine" in kernels(arrays, options)
    check(arrays, options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "dims", [(128, 128), (64, 64), (256, 256), (20, 33), (192, 128), (7, 5)], ids=str
)
def test_dtypes_and_head_dimensions(dims: tuple[int, int], dtype: Any) -> None:
    for Hkv, Nq in ((2, 1), (1, 7), (1, 15)):
        check(drawn(8, Hkv, Nq, *dims, dtype), {"kv_lengths": LENGTHS, "causal": True})


def test_no_lengths_and_one_piece() -> None:
    check(drawn(8, 2, 1, 128, 128, ml_dtypes.bfloat16), {})
    arrays = drawn(8, 2, 3, 128, 128, ml_dtypes.bfloat16, capacity=100)
    options: dict[str, Any] = {"kv_lengths": np.array([100, 0, 1]), "causal": True}
    assert "forward_split" in kernels(arrays, options)
    assert "forward_combine" not in kernels(arrays, options)
    check(arrays, options)


def test_odd_strides() -> None:
    wide = [np.repeat(x, 2, axis=-1) for x in drawn(8, 2, 3, 36, 36, np.float16)]
    there = [sent(x)[..., 1:37] for x in wide]
    options: dict[str, Any] = {"kv_lengths": LENGTHS, "causal": True}
    found = tileattn.forward(*there, **options)
    arrays = [np.ascontiguousarray(x[..., 1:37]) for x in wide]
    expected = reference.forward(*arrays, **options)
    assert_attention_close(host(found), expected, error_bound(*arrays, **options))


def spoil(k: Any, v: Any) -> None:
    """Put what is not finite among the keys and values, and past all lengths."""
    k[0, 0, 2298], v[0, 0, 2299], v[2, 1, 332] = np.nan, np.inf, np.nan
    k[0, 1, 700], v[0, 1, 20] = np.inf, -np.inf
    k[:, :, 2350:], v[:, :, 2350:] = np.nan, np.inf


@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=lambda x: x.__name__)
def test_what_is_not_finite(dtype: Any) -> None:
    """Masked out it changes nothing; attended to it propagates, in its rows alone."""
    q, k, v = drawn(8, 2, 4, 64, 64, dtype)
    spoil(k, v)
    for options in ({"causal": True}, {"window": (600, 0)}):
        check([q, k, v], {"kv_lengths": LENGTHS} | options)


def in_pages(x: Any, page: int, table: Any, pages: int) -> Any:
    """Lay out keys in pages; unused rows are NaN."""
    made = np.full((pages, x.shape[1], page, x.shape[3]), np.nan, x.dtype)
    for b, n in np.ndindex(table.shape):
        rows = x[b, :, n * page : (n + 1) * page]
        kept = max(0, min(page, int(LENGTHS[b]) - n * page))
        made[table[b, n], :, :kept] = rows[:, :kept]
    return made


@pytest.mark.parametrize("there", [None, np.int64, np.int32], ids=str)
@pytest.mark.parametrize("page", [1, 8, 16, 50, 120, 2400])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32], ids=lambda x: x.__name__)
def test_pages_have_the_bits_of_a_contiguous_cache(dtype: Any, page: int, there: Any) -> None:
    arrays = drawn(8, 2, 2, 128, 64, dtype)
    width = CAPACITY // page
    rng = np.random.default_rng(page)
    table = rng.permutation(B * width + 2)[: B * width].reshape(B, width)
    q, k, v = arrays
    k_pages, v_pages = (in_pages(x, page, table, B * width + 2) for x in (k, v))
    for b in range(B):
        far = 2**30 if there is np.int32 else 2**40
        table[b, -(-int(LENGTHS[b]) // page) :] = rng.choice([-1, far])
    options: dict[str, Any] = {"kv_lengths": LENGTHS, "causal": True}
    if there:
        options["kv_lengths"] = sent(LENGTHS.astype(there))
    expected = tileattn.forward(*map(sent, arrays), **options)
    options["block_table"] = sent(table.astype(there)) if there else table
    for _ in range(2):
        with poisoned():
            found = tileattn.forward(*map(sent, (q, k_pages, v_pages)), **options)
        assert bits(found) == bits(expected)
    if there:  # another table, of the same signature
        other = sent(table[::-1].astype(there))
        options |= {"kv_lengths": sent(LENGTHS[::-1].astype(there)), "block_table": other}
        found = tileattn.forward(*map(sent, (q[::-1].copy(), k_pages, v_pages)), **options)
        assert bits(found) == bits([x[::-1] for x in expected])


@pytest.mark.parametrize("options", [{}, {"window": (9000, 0)}], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=lambda x: x.__name__)
def test_the_room_of_a_cache_does_not_matter(dtype: Any, options: dict[str, Any]) -> None:
    """Nor whether a warp or a thread block joins the splits of a query: 16, or some more."""
    size, lengths = np.dtype(dtype).itemsize, np.array([16000, 0, 5000])
    room = 16 * 2048 // size
    q, k, v = drawn(8, 2, 2, 128, 128, dtype, capacity=room + 1000)
    found = []
    for capacity in (room, room + 1000):
        arrays = [q, k[:, :, :capacity], v[:, :, :capacity]]
        given = {"kv_lengths": np.minimum(lengths, room - 300), **options}
        found.append(bits(tileattn.forward(*map(sent, arrays), **given)))
        explained = tileattn.explain(*map(sent, arrays), **given)
        joins = "one warp" if capacity == room else "one thread block"
        assert any(f"forward_combine: {joins} for each" in x for x in explained.reasons)
    assert found[0] == found[1]


def test_the_same_bits_in_any_batch() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (sent(x) for x in drawn(8, 2, 2, 64, 64, np.float16))
    batch = tileattn.forward(q, k, v, kv_lengths=LENGTHS, causal=True)
    for b in range(B):
        n = int(LENGTHS[b])
        alone = tileattn.forward(*(x[b : b + 1] for x in (q, k, v)), kv_lengths=[n], causal=True)
        assert bits([x[b : b + 1] for x in batch]) == bits(alone)
        more = rng.integers(0, CAPACITY, B)
        more[1] = n
        placed = [x[[2, b, 0]] for x in (q, k, v)]
        among = tileattn.forward(*placed, kv_lengths=more, causal=True)
        assert bits([x[1:2] for x in among]) == bits(alone)


@pytest.mark.parametrize("kind", [np.int32, np.int64], ids=lambda x: x.__name__)
def test_a_graph_replays_other_lengths(kind: Any) -> None:
    import cupy

    arrays = drawn(8, 2, 1, 128, 128, ml_dtypes.bfloat16)
    q, k, v = map(sent, arrays)
    lengths, out = sent(LENGTHS.astype(kind)), cupy.empty(q.shape, q.dtype)
    pool = cupy.cuda.MemoryPool()  # nobody else gets what a replay writes to
    with cupy.cuda.Stream(non_blocking=True) as stream:
        with cupy.cuda.using_allocator(pool.malloc):
            tileattn.forward(q, k, v, kv_lengths=lengths, out=out)
            stream.begin_capture()
            tileattn.forward(q, k, v, kv_lengths=lengths, out=out)
            graph = stream.end_capture()
        for given in ([7, 2400, 0], [2400, 1025, 1024]):
            lengths.set(np.array(given, kind))
            graph.launch(stream)
            stream.synchronize()
            bound = error_bound(*arrays, kv_lengths=given)
            found = tileattn.forward(q, k, v, kv_lengths=given)
            assert bits([out]) == bits([found.out])
            assert_attention_close(host(found), reference.forward(*arrays, kv_lengths=given), bound)
