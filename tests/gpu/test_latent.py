"""Latent attention: values that are a view of the keys, contiguous and in pages."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tests.on_gpu import bits, host, needs_gpu, poisoned, sent
from tileattn import reference
from tileattn.errors import UnsupportedError
from tileattn.testing import assert_attention_close, error_bound

pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread")]

D, DV, CAPACITY = 576, 512, 1300
LENGTHS = np.array([1290, 0, 333])
BF16 = ml_dtypes.bfloat16


def drawn(
    Hq: int, Nq: int, dtype: Any = BF16, B: int = 3, Nk: int = CAPACITY, dim: int = D
) -> tuple[Any, Any]:
    rng = np.random.default_rng(Hq + Nq)
    q, c = rng.normal(size=(B, Hq, Nq, dim)), rng.normal(size=(B, 1, Nk, dim))
    return q.astype(dtype), c.astype(dtype)


def forward(q: Any, c: Any, Dv: int = DV, **options: Any) -> tileattn.Attention:
    return tileattn.forward(q, c, c[..., :Dv], **options)


def check(q: Any, c: Any, Dv: int = DV, **options: Any) -> tileattn.Attention:
    """Hold a call on the GPU to the oracle."""
    there = {
        name: sent(x) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x
        for name, x in options.items()
    }
    on_gpu = sent(q), sent(c)
    said = tileattn.explain(*on_gpu, on_gpu[1][..., :Dv], **there)
    assert said.kernel == "forward_latent_sm90"
    with poisoned():
        found = forward(*on_gpu, Dv, **there)
    expected = reference.forward(q, c, c[..., :Dv], **options)
    assert_attention_close(host(found), expected, error_bound(q, c, c[..., :Dv], **options))
    return found


@pytest.mark.parametrize("dtype", [BF16, np.float16], ids=lambda x: x.__name__)
@pytest.mark.parametrize("Nq", [1, 2, 4])
@pytest.mark.parametrize("Hq", [16, 20, 128])
def test_heads_and_queries(Hq: int, Nq: int, dtype: Any) -> None:
    q, c = drawn(Hq, Nq, dtype)
    check(q, c, kv_lengths=LENGTHS, causal=True)


@pytest.mark.parametrize("Nk", [1, 63, 64, 65, 128, 300])
def test_one_piece(Nk: int) -> None:
    check(*drawn(16, 2, Nk=Nk), causal=True)


@pytest.mark.parametrize("lengths", [(0, 1, 63), (64, 65, 127), (511, 512, 513), (1024, 1300, 2)])
def test_lengths(lengths: tuple[int, ...]) -> None:
    check(*drawn(16, 3), kv_lengths=np.array(lengths), causal=True)


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": np.linspace(-1, 3, 32)},
        {"causal": True, "q_offset": [-2, 5, 900]},
        {"window": (300, 1), "softcap": 3.0},
        {"alibi_slopes": np.linspace(0.1, 1, 32), "scale": 0.1},
        {"scale": 40.0},
        {"scale": -0.05},
    ],
    ids="-".join,
)
def test_options(options: dict[str, Any]) -> None:
    check(*drawn(32, 3), kv_lengths=LENGTHS, **options)


@pytest.mark.parametrize("dims", [(576, 500), (320, 264), (512, 512)], ids=str)
def test_other_head_dimensions(dims: tuple[int, int]) -> None:
    check(*drawn(16, 2, dim=dims[0]), dims[1] // 8 * 8, kv_lengths=LENGTHS, causal=True)


def test_several_key_heads() -> None:
    rng = np.random.default_rng(0)
    q, c = (rng.normal(size=(3, heads, n, D)).astype(BF16) for heads, n in ((8, 2), (2, 700)))
    check(q, c, kv_lengths=np.array([700, 0, 65]), causal=True)


@pytest.mark.parametrize("Hq", [5, 40], ids=["several splits", "one split"])
def test_what_is_not_finite(Hq: int) -> None:
    """Masked out it changes nothing; attended to it propagates, in its rows alone."""
    q, c = drawn(Hq, 3)
    c[0, 0, 1290:], c[1], c[2, 0, 333:] = np.nan, np.inf, np.nan
    check(q, c, kv_lengths=LENGTHS, causal=True)
    c[0, 0, 1289, 7], c[0, 0, 1288, 300] = np.nan, np.inf  # of the last queries alone
    c[2, 0, 3, 570] = -np.inf
    check(q, c, kv_lengths=LENGTHS, causal=True)


def in_pages(c: Any, page: int, table: Any, pages: int) -> Any:
    """Lay out keys in pages; unused rows are NaN."""
    made = np.full((pages, 1, page, D), np.nan, c.dtype)
    for b, n in np.ndindex(table.shape):
        rows = c[b, :, n * page : (n + 1) * page]
        kept = max(0, min(page, int(LENGTHS[b]) - n * page))
        made[table[b, n], :, :kept] = rows[:, :kept]
    return made


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("page", [8, 16, 64, 128])
def test_pages_have_the_bits_of_a_contiguous_cache(page: int, there: bool) -> None:
    q, c = drawn(24, 2)
    width = -(-CAPACITY // page)
    rng = np.random.default_rng(page)
    table = rng.permutation(3 * width + 2)[: 3 * width].reshape(3, width)
    pages = sent(in_pages(c, page, table, 3 * width + 2))
    for b in range(3):
        table[b, -(-int(LENGTHS[b]) // page) :] = rng.choice([-1, 2**40])
    options: dict[str, Any] = {"kv_lengths": LENGTHS, "causal": True}
    expected = forward(sent(q), sent(c), **options)
    if there:
        options["kv_lengths"], table = sent(LENGTHS), sent(table)
    for _ in range(2):
        with poisoned():
            found = forward(sent(q), pages, block_table=table, **options)
        assert bits(found) == bits(expected)


def test_pages_that_it_does_not_read() -> None:
    q, c = (sent(x) for x in drawn(16, 1))
    pages = c[:, :, :1280].reshape(-1, 1, 64, D)
    table = np.arange(60).reshape(3, 20)
    options: dict[str, Any] = {"kv_lengths": np.minimum(LENGTHS, 1280), "block_table": table}
    with pytest.raises(UnsupportedError, match="no view"):
        tileattn.forward(q, pages, pages[..., :DV].copy(), **options)


def test_values_of_their_own_after_a_view() -> None:
    """A cached call knows whether values are a view."""
    q, c = drawn(16, 1, Nk=200)
    there = sent(q), sent(c)
    other = sent(-c)
    for v, values in ((there[1], c), (other, -c), (there[1], c)):
        found = tileattn.forward(*there, v[..., :DV])
        arrays = q, c, values[..., :DV]
        assert_attention_close(host(found), reference.forward(*arrays), error_bound(*arrays))


def test_the_same_bits_in_any_batch() -> None:
    rng = np.random.default_rng(0)
    q, c = (sent(x) for x in drawn(16, 2))
    batch = forward(q, c, kv_lengths=LENGTHS, causal=True)
    for b in range(3):
        n = int(LENGTHS[b])
        alone = forward(q[b : b + 1], c[b : b + 1], kv_lengths=[n], causal=True)
        assert bits([x[b : b + 1] for x in batch]) == bits(alone)
        more = rng.integers(0, CAPACITY, 3)
        more[1] = n
        among = forward(q[[2, b, 0]], c[[2, b, 0]], kv_lengths=more, causal=True)
        assert bits([x[1:2] for x in among]) == bits(alone)


def test_a_graph_replays_other_lengths() -> None:
    import cupy

    arrays = drawn(16, 1)
    q, c = map(sent, arrays)
    lengths, out = sent(LENGTHS), cupy.empty((*q.shape[:-1], DV), q.dtype)
    pool = cupy.cuda.MemoryPool()  # nobody else gets what a replay writes to
    with cupy.cuda.Stream(non_blocking=True) as stream:
        with cupy.cuda.using_allocator(pool.malloc):
            forward(q, c, kv_lengths=lengths, out=out)
            stream.begin_capture()
            forward(q, c, kv_lengths=lengths, out=out)
            graph = stream.end_capture()
        for given in ([7, 1300, 0], [1024, 1025, 512]):
            lengths.set(np.array(given))
            graph.launch(stream)
            stream.synchronize()
            assert bits([out]) == bits([forward(q, c, kv_lengths=given).out])
