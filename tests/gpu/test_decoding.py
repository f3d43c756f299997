"""Few queries over many keys: the kernels that split the keys, contiguous, in pages and latent."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tests.arrays import paged
from tests.on_gpu import bits, captured, host, needs_gpu, poisoned, sent, sent_options
from tileattn import reference
from tileattn.backends.cupy import describe
from tileattn.dtypes import DTYPES
from tileattn.errors import UnsupportedError
from tileattn.testing import assert_attention_close, error_bound

pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread")]

B = 3
LENGTHS = np.array([2300, 0, 333])
CAPACITY = 2400
F16, BF16 = np.float16, ml_dtypes.bfloat16
WIDE, LATENT = (128, 128), (576, 512)
CAUSAL: dict[str, Any] = {"kv_lengths": LENGTHS, "causal": True}

Arrays = Sequence[Any]


def drawn(
    heads: tuple[int, int, int], dims: tuple[int, int], dtype: Any, capacity: int = CAPACITY
) -> list[Any]:
    """Draw q, k and v of (Hq, Hkv, Nq); latent values are the first columns of the keys."""
    (Hq, Hkv, Nq), (D, Dv) = heads, dims
    rng = np.random.default_rng(Hq + Nq)
    sizes = (B, Hq, Nq, D), (B, Hkv, capacity, D), (B, Hkv, capacity, Dv)
    q, k, v = (rng.normal(size=size).astype(dtype) for size in sizes)
    return [q, k, k[..., :Dv] if D > 256 else v]


def there(arrays: Arrays) -> list[Any]:
    """Send q, k and v; values that are a view of the keys stay one."""
    q, k, v = arrays
    keys = sent(k)
    return [sent(q), keys, keys[..., : v.shape[-1]] if np.shares_memory(k, v) else sent(v)]


def entries(arrays: Arrays, rows: Any) -> list[Any]:
    """Take entries of the batch; values that are a view of the keys stay one."""
    q, k, v = arrays
    keys = k[rows]
    return [q[rows], keys, keys[..., : v.shape[-1]] if np.shares_memory(k, v) else v[rows]]


def forward(arrays: Arrays, **options: Any) -> tileattn.Attention:
    return tileattn.forward(*there(arrays), **sent_options(options))


def check(arrays: Arrays, **options: Any) -> tileattn.Attention:
    """Hold a call on the GPU to the oracle; nothing that was there before is left."""
    with poisoned():
        found = forward(arrays, **options)
    expected = reference.forward(*arrays, **options)
    assert_attention_close(host(found), expected, error_bound(*arrays, **options))
    return found


def kernels(arrays: Arrays, **options: Any) -> str:
    return " ".join(tileattn.explain(*there(arrays), **sent_options(options)).kernels)


class Kernel(NamedTuple):
    """A kernel, and calls that it runs: Hq, Hkv and Nq, head dimensions, dtype."""

    name: str
    heads: tuple[int, int, int]
    dims: tuple[int, int]
    dtype: Any

    def drawn(self) -> list[Any]:
        """Draw the arrays of a call that it runs."""
        arrays = drawn(self.heads, self.dims, self.dtype)
        self.need(arrays, **CAUSAL)
        return arrays

    def need(self, arrays: Arrays, **options: Any) -> None:
        """Skip on GPUs without wgmma; elsewhere this kernel must run, if it is one with wgmma."""
        if not self.name.endswith("sm90"):
            return
        if describe.device_of(0).arch != "sm_90a":
            pytest.skip("the GPU does not have compute capability 9.0")
        said = kernels(arrays, **options)
        assert said.startswith(self.name), said


SPLIT = Kernel("forward_split", (8, 2, 2), (64, 64), F16)
FEW = Kernel("forward_decode_sm90", (8, 2, 2), WIDE, BF16)
ROWS = Kernel("forward_sm90", (64, 1, 2), WIDE, BF16)
MANY = Kernel("forward_sm90", (18, 2, 19), WIDE, BF16)  # two blocks of rows
VIEW = Kernel("forward_latent_sm90", (16, 1, 2), LATENT, BF16)

every_kernel = pytest.mark.parametrize(
    "kernel", [SPLIT, FEW, ROWS, MANY, VIEW], ids=("split", "few", "rows", "many rows", "latent")
)


# --- options --------------------------------------------------------------------------------------


def biased(Nq: int) -> dict[str, Any]:
    rng = np.random.default_rng(4)
    mask = rng.random((B, 1, Nq, CAPACITY)) < 0.7
    return {"bias": rng.normal(size=(1, 8, 1, CAPACITY)), "mask": mask}


def tree(Nq: int) -> Any:
    return np.tril(np.random.default_rng(3).random((B, Nq, Nq)) < 0.5) | np.eye(Nq, dtype=bool)


def function(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    return s + t[h, (i - j + b) % 40]


SHARED: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "plain": lambda _Hq, _Nq: {},
    "sinks": lambda Hq, _: {"causal": True, "sinks": np.linspace(-1, 3, Hq)},
    "window": lambda _Hq, _Nq: {"window": (300, 2), "softcap": 3.0},
    "offset": lambda _Hq, _Nq: {"q_offset": [-2, 5, 9000], "causal": True},
    "left": lambda _Hq, _Nq: {"window": (1500, None), "q_offset": 1900, "scale": -0.2},
    "large scores": lambda _Hq, _Nq: {"scale": 40.0},
}
"""Options of every kernel, by the numbers of heads and queries."""

ALIBI: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "alibi": lambda Hq, _: {"alibi_slopes": np.linspace(0.1, 1, Hq), "scale": 0.1},
    "alibi, offset": lambda Hq, Nq: (
        SHARED["offset"](Hq, Nq) | {"alibi_slopes": np.linspace(0.1, 1, Hq)}
    ),
}
GENERIC: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "tree": lambda _, Nq: {"tree_mask": tree(Nq)},
    "bias": lambda _, Nq: biased(Nq),
    "function": lambda _Hq, _Nq: {
        "score_mod": function,
        "aux": (np.random.default_rng(2).normal(size=(8, 40)),),
    },
    "far": lambda _Hq, _Nq: {"bias": np.full((1, 1, 1, CAPACITY), -1e6), "scale": 40.0},
}
LARGE: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "very large scores": lambda _Hq, _Nq: {"scale": 3000.0}
}
OPTIONS = {
    SPLIT: SHARED | ALIBI | GENERIC,
    FEW: SHARED | LARGE,
    ROWS: SHARED | LARGE,
    MANY: SHARED | LARGE,
    VIEW: SHARED | ALIBI,
}
HEADS = {
    SPLIT: [(8, Hkv, Nq) for Hkv in (8, 2, 1) for Nq in (1, 5)],
    FEW: [(8, 8, 1), (8, 1, 2), (16, 2, 4), (5, 1, 5), (3, 3, 32)],
    ROWS: [(40, 1, 1), (128, 1, 1), (24, 2, 3), (16, 2, 16), (5, 1, 25), (2, 2, 64)],
    MANY: [(10, 1, 17), (14, 2, 33), (6, 1, 64)],
    VIEW: [(Hq, 1, Nq) for Hq in (16, 20, 128) for Nq in (1, 2, 4)] + [(8, 2, 2)],
}


@pytest.mark.parametrize(
    ("kernel", "heads", "name"),
    [(x, heads, name) for x in OPTIONS for heads in HEADS[x] for name in OPTIONS[x]],
    ids=lambda x: x.name if isinstance(x, Kernel) else str(x),
)
def test_options(kernel: Kernel, heads: tuple[int, int, int], name: str) -> None:
    arrays = drawn(heads, kernel.dims, kernel.dtype)
    options = {"kv_lengths": LENGTHS} | OPTIONS[kernel][name](heads[0], heads[2])
    kernel.need(arrays, **options)
    assert kernel in (VIEW, MANY) or "forward_combine" in kernels(arrays, **options)
    check(arrays, **options)


@pytest.mark.parametrize("heads", [(4, 2, 49), (8, 1, 5), (40, 1, 1)], ids=str)
def test_rows_without_keys_over_one_split(heads: tuple[int, int, int]) -> None:
    """No other kernel writes the rows of a sequence that has no keys."""
    Hq, Hkv, Nq = heads
    rng = np.random.default_rng(0)
    shapes = [(3, Hq, Nq, 64), (3, Hkv, 300, 64), (3, Hkv, 300, 64)]
    arrays = [rng.standard_normal(shape).astype(F16) for shape in shapes]
    for lengths in ([0, 300, 1], [0, 0, 0]):
        check(arrays, kv_lengths=np.array(lengths), sinks=np.linspace(-1, 3, Hq))


def test_the_options_that_wgmma_leaves_to_another_kernel() -> None:
    arrays = drawn((40, 1, 1), (64, 64), F16)
    given = {"kv_lengths": LENGTHS, "alibi_slopes": np.linspace(0.1, 1, 40)}
    assert kernels(arrays, **given).startswith("forward_split")
    check(arrays, **given)


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [WIDE, (64, 64), (256, 256), (20, 33), (192, 128), (7, 5)])
@pytest.mark.parametrize("heads", [(8, 2, 1), (8, 1, 7), (8, 1, 15)], ids=str)
def test_dtypes_and_head_dimensions(heads: Any, dims: tuple[int, int], dtype: Any) -> None:
    check(drawn(heads, dims, dtype), **CAUSAL)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=lambda x: x.__name__)
@pytest.mark.parametrize("dims", [WIDE, (256, 256), (192, 128), (64, 128), (96, 192), (24, 40)])
@pytest.mark.parametrize("heads", [(64, 1, 2), (7, 1, 9)], ids=str)
def test_head_dimensions_of_many_rows(heads: Any, dims: tuple[int, int], dtype: Any) -> None:
    arrays = drawn(heads, dims, dtype, capacity=9000)
    options: dict[str, Any] = {"kv_lengths": np.array([8999, 1, 4097]), "causal": True}
    ROWS.need(arrays, **options)
    check(arrays, **options)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=lambda x: x.__name__)
@pytest.mark.parametrize("dims", [LATENT, (576, 496), (320, 264), (512, 512)], ids=str)
def test_latent_head_dimensions(dims: tuple[int, int], dtype: Any) -> None:
    arrays = drawn((16, 1, 2), dims, dtype)
    VIEW.need(arrays, **CAUSAL)
    check(arrays, **CAUSAL)


@every_kernel
@pytest.mark.parametrize(
    "lengths", [(0, 1, 63), (64, 65, 127), (511, 512, 513), (1024, 2400, 2)], ids=str
)
def test_lengths(kernel: Kernel, lengths: tuple[int, ...]) -> None:
    check(kernel.drawn(), kv_lengths=np.array(lengths), causal=True)


@every_kernel
@pytest.mark.parametrize("Nk", [1, 63, 64, 65, 128, 300])
def test_no_lengths_and_few_keys(kernel: Kernel, Nk: int) -> None:
    check(drawn(kernel.heads, kernel.dims, kernel.dtype, Nk), causal=True)


@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=lambda x: x.__name__)
@pytest.mark.parametrize("heads", [(4, 4, 1), (8, 2, 2), (16, 1, 1)], ids=str)
@pytest.mark.parametrize("Nk", [1, 17, 200, 511])
def test_short_caches_have_the_same_bits_with_lengths(Nk: int, heads: Any, dtype: Any) -> None:
    """The kernel is the same: a cache of which each key counts is no other cache."""
    arrays = drawn(heads, WIDE, dtype, Nk)
    assert kernels(arrays).startswith(("forward_split", "forward_decode_sm90"))
    plain = check(arrays)
    longer = [arrays[0], *(np.concatenate([x, np.full_like(x, np.nan)], 2) for x in arrays[1:])]
    given = forward(longer, kv_lengths=np.full(B, Nk))
    assert bits(plain) == bits(given)


def test_one_split_is_not_combined() -> None:
    arrays = drawn((8, 2, 3), WIDE, BF16, capacity=100)
    options: dict[str, Any] = {"kv_lengths": np.array([100, 0, 1]), "causal": True}
    assert kernels(arrays, **options).startswith(("forward_split", "forward_decode_sm90"))
    assert "forward_combine" not in kernels(arrays, **options)
    check(arrays, **options)


@pytest.mark.parametrize(
    ("heads", "dims", "dtype"), [((8, 2, 3), (36, 36), F16), ((48, 1, 2), (128, 64), BF16)]
)
@pytest.mark.parametrize("view", [lambda x: x[:, :, ::2], lambda x: x[..., 1 : x.shape[-1] - 3]])
def test_views(view: Any, heads: Any, dims: tuple[int, int], dtype: Any) -> None:
    """Every other row, and rows that begin and end at no vector of 16 bytes."""
    whole = drawn(heads, (dims[0] + 4, dims[1] + 4), dtype, capacity=2 * CAPACITY)
    found = tileattn.forward(*(view(sent(x)) for x in whole), **CAUSAL)
    arrays = [view(x).copy() for x in whole]
    bound = error_bound(*arrays, **CAUSAL)
    assert_attention_close(host(found), reference.forward(*arrays, **CAUSAL), bound)


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [{"causal": True}, {"window": (600, 0)}], ids=str)
@pytest.mark.parametrize(
    "kernel",
    [
        *(SPLIT._replace(heads=(8, 2, 4), dtype=x) for x in (F16, np.float32)),
        *(ROWS._replace(heads=(24, 2, 4), dtype=x) for x in (F16, BF16)),
        MANY,
        *(VIEW._replace(heads=(heads, 2, 4)) for heads in (10, 80)),  # several splits, and one
    ],
    ids=lambda x: f"{x.name} {x.heads[0]} {np.dtype(x.dtype)}",
)
def test_what_is_not_finite(kernel: Kernel, mask: dict[str, Any]) -> None:
    """Masked out it changes nothing; attended to it propagates, in its rows alone."""
    q, k, v = kernel.drawn()
    k[0, 0, 2298], v[0, 0, 2299, 3], v[2, 1, 332] = np.nan, np.inf, np.nan
    k[0, 1, 700], v[0, 1, 20, 9], k[2, 0, 3, -1] = np.inf, -np.inf, -np.inf
    v[:, :, 2350:], k[:, :, 2350:] = np.inf, np.nan
    check([q, k, v], kv_lengths=LENGTHS, **mask)


@every_kernel
def test_what_is_masked_out_leaves_the_bits(kernel: Kernel) -> None:
    q, k, v = kernel.drawn()
    clean = bits(forward([q, k, v], **CAUSAL))
    for b, n in enumerate(LENGTHS):
        k[b, :, n:], v[b, :, n:] = np.nan, np.inf
    for _ in range(3):
        assert bits(forward([q, k, v], **CAUSAL)) == clean


@pytest.mark.parametrize("scale", [2.0, 300.0])
def test_scores_far_below_zero(scale: float) -> None:
    q, k, v = drawn((20, 1, 3), (64, 64), F16)
    check([abs(q), -abs(k), v], scale=scale, **CAUSAL)


# --- the same bits --------------------------------------------------------------------------------


@every_kernel
def test_the_same_bits_in_any_batch(kernel: Kernel) -> None:
    rng = np.random.default_rng(0)
    arrays = kernel.drawn()
    batch = forward(arrays, **CAUSAL)
    for b, n in enumerate(LENGTHS.tolist()):
        alone = forward(entries(arrays, [b]), kv_lengths=[n], causal=True)
        assert bits([x[b : b + 1] for x in batch]) == bits(alone)
        place = rng.permutation(np.array([b] * 50 + [0] * 30 + [2] * 20))  # several splits an SM
        others = np.where(place == b, n, rng.integers(0, CAPACITY, place.size))
        among = forward(entries(arrays, place), kv_lengths=others, causal=True)
        for at in np.flatnonzero(place == b)[[0, -1]]:
            assert bits([x[at : at + 1] for x in among]) == bits(alone)


@every_kernel
@pytest.mark.parametrize("kind", [np.int32, np.int64], ids=lambda x: x.__name__)
def test_a_graph_replays_other_lengths(kernel: Kernel, kind: Any) -> None:
    arrays = kernel.drawn()
    given = there(arrays)
    lengths = sent(LENGTHS.astype(kind))
    with captured(lambda: tileattn.forward(*given, kv_lengths=lengths)) as (results, replay):
        for others in ([7, 2400, 0], [2400, 1025, 1024], [0, 0, 0]):
            lengths.set(np.array(others, kind))
            replay()
            found = tileattn.forward(*given, kv_lengths=others)
            assert bits(results) == bits(found)
            bound = error_bound(*arrays, kv_lengths=others)
            expected = reference.forward(*arrays, kv_lengths=others)
            assert_attention_close(host(found), expected, bound)


@pytest.mark.parametrize("options", [{}, {"window": (9000, 0)}], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=lambda x: x.__name__)
def test_the_room_of_a_cache_does_not_matter(dtype: Any, options: dict[str, Any]) -> None:
    """Nor how many queries there are: a warp, or a thread block, joins the splits of a query."""
    size, lengths = np.dtype(dtype).itemsize, np.array([16000, 0, 5000])
    room = 16 * 2048 // size
    q, k, v = drawn((8, 2, 2), WIDE, dtype, capacity=room + 1000)
    found = []
    for capacity, copies in ((room, 1), (room + 1000, 1), (room, 6)):
        given = [q, k[:, :, :capacity], v[:, :, :capacity]]
        arrays = [sent(np.tile(x, (copies, 1, 1, 1))) for x in given]
        more = {"kv_lengths": np.tile(np.minimum(lengths, room - 300), copies), **options}
        out, lse = tileattn.forward(*arrays, **more)
        found.append(bits((out[-B:], lse[-B:])))
        explained = tileattn.explain(*arrays, **more)
        joins = "one thread block" if copies == 1 else "one warp"
        assert any(f"forward_combine: {joins} for each" in x for x in explained.reasons)
    assert found[0] == found[1] == found[2]


# --- pages ----------------------------------------------------------------------------------------


PAGED = [
    *((SPLIT._replace(dims=(128, 64), dtype=x), n)
      for x in (BF16, np.float32) for n in (1, 8, 16, 50, 120, 2400)),
    *((VIEW, n) for n in (8, 16, 64, 128)),
]  # fmt: skip


@pytest.mark.parametrize("kind", [None, np.int64, np.int32], ids=str)
@pytest.mark.parametrize(
    ("kernel", "page"), PAGED, ids=[f"{x.name} {np.dtype(x.dtype)} {n}" for x, n in PAGED]
)
def test_pages_have_the_bits_of_a_contiguous_cache(kernel: Kernel, page: int, kind: Any) -> None:
    """Lengths and the table on the host, or on the GPU as integers of either kind."""
    q, k, v = arrays = kernel.drawn()
    far = 2**30 if kind is np.int32 else 2**40
    (pages, table), (values, _) = (paged(x, LENGTHS, page, far=far) for x in (k, v))
    if np.shares_memory(k, v):
        values = pages[..., : v.shape[-1]]

    def sent_as(x: Any) -> Any:
        return x if kind is None else sent(x.astype(kind))

    expected = forward(arrays, kv_lengths=sent_as(LENGTHS), causal=True)
    for turn in (slice(None), slice(None), slice(None, None, -1)):  # with another table at last
        given = {"kv_lengths": sent_as(LENGTHS[turn]), "block_table": sent_as(table[turn])}
        with poisoned():
            found = forward([q[turn].copy(), pages, values], **given, causal=True)
        assert bits(found) == bits([x[turn] for x in expected])


def test_latent_pages_that_are_not_read() -> None:
    q, c, _ = VIEW.drawn()
    pages = sent(c[:, :, :1280].reshape(-1, 1, 64, c.shape[-1]))
    table = np.arange(60).reshape(3, 20)
    options: dict[str, Any] = {"kv_lengths": np.minimum(LENGTHS, 1280), "block_table": table}
    with pytest.raises(UnsupportedError, match="not a view"):
        tileattn.forward(sent(q), pages, pages[..., :512].copy(), **options)


def test_values_of_their_own_after_a_view() -> None:
    """A cached call knows whether values are a view."""
    q, c, _ = VIEW.drawn()
    given = sent(q), sent(c)
    other = sent(-c)
    for v, values in ((given[1], c), (other, -c), (given[1], c)):
        found = tileattn.forward(*given, v[..., :512])
        arrays = q, c, values[..., :512]
        assert_attention_close(host(found), reference.forward(*arrays), error_bound(*arrays))
