"""Keys and values of 8 bits on a GPU, contiguous, packed and in pages, beside the oracle."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tests.arrays import paged
from tests.on_gpu import bits, host, needs_gpu, poisoned, sent
from tileattn import reference
from tileattn.errors import UnsupportedError
from tileattn.testing import assert_attention_close, error_bound

pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread")]

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
KINDS = [E4M3, np.int8]
B, LENGTHS, CAPACITY = 3, np.array([2300, 0, 333]), 2400
DESCALES = ["number", "heads", "sequences", "tokens"]
HEADS = [(8, 2, 1), (8, 8, 3), (16, 1, 2), (8, 2, 21), (4, 2, 150), (8, 2, 4)]  # Hq, Hkv and Nq
FEW, MANY = (8, 2, 3), HEADS[3]  # of the Hopper kernel for few rows, and of split-KV


def quantised(rng: np.random.Generator, shape: tuple[int, ...], kind: Any) -> Any:
    """Draw numbers of 8 bits, the extreme ones included."""
    if kind is np.int8:
        return rng.integers(-128, 128, shape).astype(np.int8)
    return (rng.normal(size=shape) * 60).clip(-448, 448).astype(E4M3)


def drawn(
    heads: tuple[int, int, int], dims: tuple[int, int], dtype: Any, kind: Any, scales: str
) -> tuple[list[Any], dict[str, Any]]:
    """Draw q, k and v, and descales with the shape of ``scales``."""
    (Hq, Hkv, Nq), D = heads, dims[0]
    rng = np.random.default_rng(Hq + Nq + D)
    q = rng.normal(size=(B, Hq, Nq, D)).astype(dtype)
    k, v = (quantised(rng, (B, Hkv, CAPACITY, n), kind) for n in dims)
    shape = {"number": (), "heads": (Hkv,), "sequences": (B, Hkv), "tokens": (B, Hkv, CAPACITY)}
    of = [np.float32(2.0 ** rng.uniform(-9, -4, shape[scales])) for _ in "kv"]
    given = (float(x) for x in of) if scales == "number" else of
    return [q, k, v], dict(zip(("k_descale", "v_descale"), given, strict=True))


def there(options: dict[str, Any]) -> dict[str, Any]:
    return {n: sent(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}


def forward(arrays: list[Any], options: dict[str, Any]) -> tileattn.Attention:
    q, k, v = map(sent, arrays)
    return tileattn.forward(q, k, v, **there(options))


def check(arrays: list[Any], options: dict[str, Any]) -> tileattn.Attention:
    """Compare a call with the oracle."""
    with poisoned():
        found = forward(arrays, options)
    expected = reference.forward(*arrays, **options)
    assert_attention_close(host(found), expected, error_bound(*arrays, **options))
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lengths": {"kv_lengths": LENGTHS, "causal": True},
    "modified": {"kv_lengths": LENGTHS, "softcap": 3.0, "window": (700, 2)},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("scales", DESCALES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda x: x.__name__)
@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32], ids=lambda x: x.__name__)
def test_descales(dtype: Any, kind: Any, scales: str, name: str) -> None:
    arrays, descales = drawn(HEADS[0], (128, 128), dtype, kind, scales)
    check(arrays, descales | OPTIONS[name])


@pytest.mark.parametrize("dims", [(64, 64), (40, 72), (192, 128), (256, 256), (33, 7)], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda x: x.__name__)
def test_sizes(kind: Any, heads: tuple[int, int, int], dims: tuple[int, int]) -> None:
    arrays, descales = drawn(heads, dims, BF16, kind, "tokens")
    check(arrays, descales | OPTIONS["lengths"])


@pytest.mark.parametrize(
    ("heads", "page"), [*((MANY, n) for n in (1, 3, 16, 64)), *((FEW, n) for n in (3, 16, 48, 64))]
)
@pytest.mark.parametrize("scales", DESCALES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda x: x.__name__)
@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=lambda x: x.__name__)
def test_pages(dtype: Any, kind: Any, scales: str, heads: tuple[int, int, int], page: int) -> None:
    """A row has the bits that it has with a contiguous cache, if the same kernel computes it."""
    arrays, descales = drawn(heads, (64, 64), dtype, kind, scales)
    given = descales | OPTIONS["lengths"]
    q, *cache = arrays
    spare = {E4M3: E4M3(np.nan), np.int8: np.int8(77)}[kind]
    (k, table), (v, _) = (paged(x, LENGTHS, page, spare) for x in cache)
    own = descales
    if scales == "tokens":
        own = {n: paged(x[..., None], LENGTHS, page, np.nan)[0][..., 0] for n, x in own.items()}
    options = there(own | {"kv_lengths": LENGTHS, "block_table": table, "causal": True})
    with poisoned():
        found = tileattn.forward(*map(sent, (q, k, v)), **options)
    expected = reference.forward(*arrays, **given)
    assert_attention_close(host(found), expected, error_bound(*arrays, **given))
    if heads == MANY or page > 3:
        assert bits(found) == bits(forward(arrays, given))


@pytest.mark.parametrize("scales", ["number", "heads", "sequences", "tokens"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda x: x.__name__)
def test_packed(kind: Any, scales: str) -> None:
    rng = np.random.default_rng(3)
    ends_q, ends_k = np.array([0, 3, 3, 70, 71]), np.array([0, 300, 310, 310, 1100])
    q = rng.normal(size=(8, 71, 96)).astype(np.float16)
    k, v = (quantised(rng, (2, 1100, 96), kind) for _ in "kv")
    shape = {"number": (), "heads": (2,), "sequences": (4, 2), "tokens": (2, 1100)}[scales]
    of = [np.float32(2.0 ** rng.uniform(-9, -4, shape)) for _ in "kv"]
    given = (float(x) for x in of) if scales == "number" else of
    descales = dict(zip(("k_descale", "v_descale"), given, strict=True))
    check([q, k, v], descales | {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k, "causal": True})


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e4])
@pytest.mark.parametrize("dtype", [np.float16, BF16], ids=lambda x: x.__name__)
def test_values_of_any_size(dtype: Any, scale: float) -> None:
    """Factors may differ by powers of ten from token to token, and q from row to row."""
    (q, k, v), descales = drawn(HEADS[1], (128, 128), dtype, np.int8, "tokens")
    rng = np.random.default_rng(0)
    descales["v_descale"] = np.float32(
        min(scale, 100.0) * 10.0 ** rng.uniform(-3, 0, descales["v_descale"].shape)
    )
    if dtype is BF16:
        q = (q.astype(np.float32) * scale).astype(BF16)
        descales["k_descale"] = np.float32(descales["k_descale"] / scale)
    check([q, k, v], descales)


@pytest.mark.parametrize("key", [2310, 2299, 2298, 77])
@pytest.mark.parametrize("heads", [MANY, FEW], ids=str)
@pytest.mark.parametrize("of", ["k", "v", "k_descale", "v_descale"])
@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=lambda x: x.__name__)
def test_not_a_number(dtype: Any, of: str, heads: tuple[int, int, int], key: int) -> None:
    """NaN reaches the rows that attend to it, and no others."""
    arrays, given = drawn(heads, (128, 64), dtype, E4M3, "tokens")
    given["kv_lengths"] = LENGTHS
    given["causal"] = True
    target = {"k": arrays[1], "v": arrays[2]} | given
    target[of][(0, 1, key, 5) if len(of) == 1 else (0, 1, key)] = np.nan
    found = host(check(arrays, given)).out.astype(np.float32)
    attends = np.arange(heads[2]) + LENGTHS[0] - heads[2] >= key
    spoiled = np.isnan(found).any(-1)
    half = heads[0] // 2
    assert not spoiled[:, :half].any()
    assert not spoiled[1:].any()
    np.testing.assert_array_equal(
        spoiled[0, half:], np.broadcast_to(attends & (key < LENGTHS[0]), (half, heads[2]))
    )


@pytest.mark.parametrize("times", [1, 20])
def test_a_row_has_the_same_bits_in_any_batch(times: int) -> None:
    """In a large batch a work tile is a whole split, in a small one a piece of it."""
    arrays, given = drawn(HEADS[0], (128, 128), BF16, E4M3, "tokens")
    repeated = [np.concatenate([x] * times) for x in arrays]
    whole = forward(repeated, {n: np.concatenate([x] * times) for n, x in given.items()})
    for b in range(B):
        rows = [x[b : b + 1] for x in arrays]
        own = {n: x[b : b + 1] for n, x in given.items()}
        one = forward(rows, own)
        assert bits(one) == bits((whole.out[b : b + 1], whole.lse[b : b + 1]))


def test_no_keys() -> None:
    arrays, given = drawn(HEADS[0], (64, 64), BF16, np.int8, "heads")
    q, k, v = arrays
    check([q, k[:, :, :0], v[:, :, :0]], given)


def test_what_kernels_do_not_support_is_named() -> None:
    arrays, given = drawn(HEADS[0], (64, 64), BF16, np.int8, "heads")
    with pytest.raises(UnsupportedError, match="dropout_p"):
        forward(arrays, given | {"dropout_p": 0.5})
    arrays, given = drawn(HEADS[0], (320, 64), BF16, np.int8, "heads")
    with pytest.raises(UnsupportedError, match="256"):
        forward(arrays, given)


def append(caches: list[Any], rows: list[Any], **options: Any) -> None:
    (k_cache, v_cache), (k, v) = caches, rows
    tileattn.append_kv(k_cache, v_cache, k, v, **options)


@pytest.mark.parametrize("scales", ["number", "sequences", "tokens"])
@pytest.mark.parametrize("layout", ["contiguous", "packed", "pages"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda x: x.__name__)
@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32], ids=lambda x: x.__name__)
def test_append(dtype: Any, kind: Any, layout: str, scales: str) -> None:
    """The kernel stores the bytes that NumPy stores, and writes the same factors."""
    rng = np.random.default_rng(5)
    D, Dv, page, capacity = 48, 33, 8, 40
    new = [(rng.normal(size=(B, 2, 7, n)) * 10.0 ** rng.integers(-4, 1)) for n in (D, Dv)]
    for x in new:  # rows of zeros, huge numbers, NaN and infinity
        x[0, 0, 1] = 0
        x[0, 0, 2, 3], x[1, 0, 0, 4], x[1, 1, 0, 5] = 2e4, np.nan, -np.inf
    rows = [x.astype(dtype) for x in new]
    given: dict[str, Any] = {"kv_lengths": np.array([0, 5, 30])}
    given["rotary"] = tuple(rng.normal(size=(capacity, 16)).astype(np.float32) for _ in range(2))
    given["interleaved"] = scales == "number"
    lead = B
    if layout == "packed":
        given["cu_seqlens"] = np.array([0, 9, 9, 21])
        given["kv_lengths"] = np.array([0, 5, 20])
        rows = [x.swapaxes(0, 1).reshape(2, 21, x.shape[-1]) for x in rows]
    if layout == "pages":
        lead = 20
        given["block_table"] = rng.permutation(lead)[: B * 5].reshape(B, 5)
    size = page if layout == "pages" else capacity
    caches = [np.zeros((lead, 2, size, n), kind) for n in (D, Dv)]
    shape = {"number": (), "sequences": (B, 2), "tokens": (lead, 2, size)}[scales]
    of = [np.full(shape, 2.0 ** rng.integers(-8, 0), np.float32) for _ in "kv"]
    if scales == "sequences":
        of[0][0] = 0
    descales = [float(x) for x in of] if scales == "number" else of
    found = [sent(x) for x in caches]
    wrote: list[Any] = [sent(x) if isinstance(x, np.ndarray) else x for x in descales]
    factors = {"k_descale": descales[0], "v_descale": descales[1]}
    append(caches, rows, **given, **factors)
    options = there(given) | {"rotary": tuple(map(sent, given["rotary"]))}
    factors = {"k_descale": wrote[0], "v_descale": wrote[1]}
    append(found, list(map(sent, rows)), **options, **factors)
    for cache, expected in zip(found, caches, strict=True):
        np.testing.assert_array_equal(cache.get().astype(np.float32), expected.astype(np.float32))
    if scales != "number":
        for factor, wanted in zip(wrote, descales, strict=True):
            np.testing.assert_array_equal(factor.get(), wanted)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("scales", DESCALES)
@pytest.mark.parametrize("page", [0, 16])
def test_explain(page: int, scales: str) -> None:
    arrays, options = drawn(HEADS[0], (64, 64), BF16, np.int8, scales)
    options |= {"kv_lengths": LENGTHS}
    if page:
        q, *cache = arrays
        (k, options["block_table"]), (v, _) = (paged(x, LENGTHS, page, 0) for x in cache)
        arrays = [q, k, v]
        if scales == "tokens":
            options |= {
                n: paged(options[n][..., None], LENGTHS, page)[0][..., 0]
                for n in ("k_descale", "v_descale")
            }
    said = tileattn.explain(*map(sent, arrays), **there(options))
    assert said.kernel == "forward_decode_sm90"


@pytest.mark.parametrize("kind", KINDS, ids=lambda x: x.__name__)
def test_append_what_has_8_bits(kind: Any) -> None:
    rng = np.random.default_rng(6)
    rows = [quantised(rng, (B, 2, 3, n), kind) for n in (17, 64)]
    caches = [np.zeros((B, 2, 9, n), kind) for n in (17, 64)]
    found = [sent(x) for x in caches]
    append(caches, rows, kv_lengths=[0, 5, 6])
    append(found, list(map(sent, rows)), kv_lengths=[0, 5, 6])
    assert bits(found) == [x.tobytes() for x in caches]
