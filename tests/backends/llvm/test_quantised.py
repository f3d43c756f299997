"""Caches of 8 bits: elements, descales and layouts, in the kernels for few and for many queries."""

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

pytest.importorskip("llvmlite", reason="it compiles the kernels: pip install llvmlite")

import tileattn
from tests.backends.llvm.test_backend import on_x86
from tileattn import reference
from tileattn.backends import registry, threads
from tileattn.backends.llvm.backend import LlvmBackend
from tileattn.dtypes import CACHE_DTYPES, FLOAT8_E4M3FN, INT8, QUERY_DTYPES
from tileattn.kernels.llvm.sizes import SPLIT
from tileattn.kernels.llvm.target import AVX2
from tileattn.testing import assert_attention_close, error_bound

Array = NDArray[Any]
Guarded = Callable[[Array, bool], Array]

B, HQ, HKV, NK = 2, 6, 2, 150  # keys of several tiles, none of them whole
FEW, MANY = 2, 30  # queries of the decoding kernel, and of the other one
FAR = 2**40  # a page that there is not
DIMS = (1, 64, 80, 128, 256)
PAIRS = list(itertools.product(QUERY_DTYPES, CACHE_DTYPES))


def short_sum(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s + 0.1 * (i - j) * h - b


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "sinks": np.linspace(-1, 2, HQ)},
    "window": {"window": (20, 5), "softcap": 3.0},
    "ALiBi": {"alibi_slopes": np.linspace(0, 0.1, HQ), "dropout_p": 0.2, "seed": 7},
    "score_mod": {"score_mod": short_sum, "scale": 0.3},
    "mask_mod": {"mask_mod": lambda b, h, i, j: (j + b) % 5 != h},  # noqa: ARG005 - a mask_mod's
}


def pair_options(Nq: int, Nk: int) -> dict[str, dict[str, Any]]:
    """Make options with an element for each pair."""
    rng = np.random.default_rng(2)
    bias = rng.standard_normal((HQ, Nq, Nk)).astype(np.float32)
    return {"bias": {"bias": bias}, "mask": {"mask": rng.random((B, 1, Nq, Nk)) < 0.6}}


def stored(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Draw numbers of 8 bits: all of them but NaN."""
    bits = rng.integers(0, 256, shape).astype(np.uint8)
    return (bits if dtype == INT8 else bits - (bits & 0x7F == 0x7F)).view(dtype)


def descale(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Draw descales that make numbers of size 1."""
    return rng.uniform(0.5, 1.5, shape).astype(np.float32) / (70 if dtype == INT8 else 100)


def both_descales(
    rng: np.random.Generator, dtype: np.dtype[Any], of_k: tuple[int, ...], of_v: tuple[int, ...]
) -> dict[str, Any]:
    """Draw the options."""
    return {"k_descale": descale(rng, of_k, dtype), "v_descale": descale(rng, of_v, dtype)}


def check(q: Array, k: Array, v: Array, backend: str = "llvm", **options: Any) -> None:
    """Compare a call with the oracle."""
    found = tileattn.forward(q, k, v, backend=backend, **options)
    expected = reference.forward(q, k, v, **options)
    assert_attention_close(found, expected, error_bound(q, k, v, **options))


def contiguous(
    rng: np.random.Generator, dtype: np.dtype[Any], Nq: int, D: int, Dv: int
) -> tuple[Array, Array, Array]:
    """Make q, k and v of batch entries; k and v are (B, N, H, D) in memory."""
    q = rng.standard_normal((B, HQ, Nq, D))
    k, v = (stored(rng, (B, NK, HKV, n), dtype).swapaxes(1, 2) for n in (D, Dv))
    return q, k, v


def in_pages(
    rng: np.random.Generator, dtype: np.dtype[Any], page: int, lengths: list[int], D: int, Dv: int
) -> tuple[Array, Array, dict[str, Any]]:
    """Make pages with rows past the lengths, and entries of the table, that may not be read."""
    width = -(-max(lengths) // page) + 1
    count = len(lengths) * width
    k, v = (stored(rng, (count, page, HKV, n), dtype).swapaxes(1, 2) for n in (D, Dv))
    table = rng.permutation(count).reshape(len(lengths), width)
    for b, length in enumerate(lengths):
        table[b, -(-length // page) :] = FAR
    return k, v, {"block_table": table, "kv_lengths": lengths}


@pytest.mark.parametrize("Nq", [FEW, MANY])
@pytest.mark.parametrize(("q_dtype", "dtype"), PAIRS, ids=str)
def test_every_number(q_dtype: np.dtype[Any], dtype: np.dtype[Any], Nq: int) -> None:
    """With one key, lse is the score and the output the value: exactly each of 256 numbers."""
    numbers = np.arange(256, dtype=np.uint8).view(dtype)
    q, k = np.zeros((256, 1, Nq, 19), q_dtype), np.zeros((256, 1, 1, 19), dtype)
    v = np.broadcast_to(numbers, (256, 1, 1, 256))
    for d in (3, 18):  # in a whole vector, and past the last one
        q[...], k[...] = 0, 0
        q[..., d], k[:, 0, 0, d] = 1, numbers
        options: dict[str, Any] = {"scale": 1, "k_descale": 2, "v_descale": 0.5}
        out, lse = tileattn.forward(q, k, v, backend="llvm", **options)
        scores, values = numbers.astype(np.float32) * 2, numbers.astype(np.float32) / 2
        np.testing.assert_array_equal(lse, np.broadcast_to(scores[:, None, None], lse.shape))
        known = np.isfinite(scores)
        values = np.broadcast_to(values.astype(q_dtype), out.shape)
        ours, theirs = (x[known].astype(np.float32) for x in (out, values))
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("Nq", [FEW, MANY])
@pytest.mark.parametrize(("q_dtype", "dtype"), PAIRS, ids=str)
@pytest.mark.parametrize(("D", "Dv"), [*zip(DIMS, reversed(DIMS), strict=True), (128, 128)])
def test_head_dimensions(
    D: int, Dv: int, q_dtype: np.dtype[Any], dtype: np.dtype[Any], Nq: int
) -> None:
    rng = np.random.default_rng(D)
    q, k, v = contiguous(rng, dtype, Nq, D, Dv)
    descales = both_descales(rng, dtype, (HKV,), ())
    check(q.astype(q_dtype), k, v, **descales)


@pytest.mark.slow
@pytest.mark.parametrize("Nq", [FEW, MANY])
@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("name", [*OPTIONS, "bias", "mask"])
def test_options(name: str, dtype: np.dtype[Any], Nq: int) -> None:
    rng = np.random.default_rng(1)
    chosen = (OPTIONS | pair_options(Nq, NK))[name]
    q, k, v = contiguous(rng, dtype, Nq, 40, 24)
    shapes = (B, HKV, NK), (B, HKV)
    for shape, other in (shapes, shapes[::-1]):
        descales = both_descales(rng, dtype, shape, other)
        check(q.astype(np.float32), k, v, kv_lengths=[NK, 131], **descales, **chosen)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("page", [1, 3, 16])
def test_pages(page: int, chosen: dict[str, Any]) -> None:
    rng = np.random.default_rng(page)
    for Nq, dtype in itertools.product((FEW, MANY), CACHE_DTYPES):
        lengths = [NK, 1, 0, 37] if page > 1 else [NK, 5]
        k, v, paging = in_pages(rng, dtype, page, lengths, 40, 24)
        q = rng.standard_normal((len(lengths), HQ, Nq, 40)).astype(ml_dtypes.bfloat16)
        shapes = k.shape[:-1], (len(lengths), HKV)
        for shape, other in (shapes, shapes[::-1]):
            descales = both_descales(rng, dtype, shape, other)
            check(q, k, v, **paging, **descales, **chosen)


@pytest.mark.slow
@pytest.mark.parametrize("in_cache", [False, True], ids=["packed keys", "pages"])
@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
def test_packed_sequences(dtype: np.dtype[Any], in_cache: bool) -> None:
    """Lengths of 0 and 1, and sequences for each of the two kernels."""
    rng = np.random.default_rng(3)
    queries, keys = [40, 1, 0, 2, 3], [60, 1, 7, 0, 141]
    starts_q, starts_k = (np.cumsum([0, *x]) for x in (queries, keys))
    q = rng.standard_normal((HQ, starts_q[-1], 64)).astype(np.float16)
    if in_cache:
        k, v, chosen = in_pages(rng, dtype, 3, keys, 64, 80)
        of_tokens = k.shape[:-1]
    else:
        k, v = (stored(rng, (starts_k[-1], HKV, n), dtype).swapaxes(0, 1) for n in (64, 80))
        chosen, of_tokens = {"cu_seqlens_k": starts_k}, k.shape[:-1]
    shapes = [(), (HKV,), (len(keys), HKV), of_tokens]
    for shape, other in itertools.product(shapes, shapes):
        descales = both_descales(rng, dtype, shape, other)
        check(q, k, v, cu_seqlens_q=starts_q, causal=True, **chosen, **descales)


@settings(max_examples=60)
@given(st.data())
def test_strides(data: st.DataObject) -> None:
    """Arrays with gaps, in other orders, backwards along an axis, and with strides of 0."""

    def draw(*values: Any) -> Any:
        return data.draw(st.sampled_from(values))

    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    dtype, Nq, Nk = draw(*CACHE_DTYPES), draw(1, FEW, MANY), draw(0, 1, 7, 129, 150)

    def laid_out(x: Array, last: int) -> Array:
        order = data.draw(st.permutations(range(x.ndim - last)))
        wide = np.full([2 * n for n in x.shape[: x.ndim - last]] + [*x.shape[x.ndim - last :]], 0)
        wide = wide.astype(x.dtype).transpose(*order, *range(x.ndim - last, x.ndim))
        view = wide.transpose(np.argsort([*order, *range(x.ndim - last, x.ndim)]))
        view = view[tuple(slice(None, None, 2) for _ in range(x.ndim - last))]
        view[...] = x
        axis = data.draw(st.integers(0, x.ndim - last - 1))
        return np.flip(view, axis) if draw(False, True) else view

    q = rng.standard_normal((B, HQ, Nq, 33)).astype(np.float32)
    k, v = (laid_out(stored(rng, (B, HKV, Nk, n), dtype), 1) for n in (33, 17))
    descales: dict[str, Any] = {}
    for name in ("k_descale", "v_descale"):
        shape = draw((), (HKV,), (B, HKV), (B, HKV, Nk))
        x = descale(rng, shape, dtype)
        if shape and draw(False, True):
            x = np.broadcast_to(x[(slice(1),) * x.ndim], shape) if x.size else x
        elif shape:
            x = laid_out(x, 0)
        descales[name] = x
    check(q, k, v, causal=draw(False, True), **descales)


@pytest.mark.parametrize("Nq", [FEW, MANY])
@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
def test_keys_that_no_query_attends_to_may_hold_anything(dtype: np.dtype[Any], Nq: int) -> None:
    """The bits do not depend on them, nor on their descales."""
    rng = np.random.default_rng(4)
    q, k, v = contiguous(rng, dtype, Nq, 40, 24)
    descales = both_descales(rng, dtype, (B, HKV, NK), (B, HKV, NK))
    hidden = rng.random((B, 1, 1, NK)) < 0.4
    options: dict[str, Any] = {"mask": ~hidden, "kv_lengths": [141, 17], **descales}
    q = q.astype(np.float32)
    expected = tileattn.forward(q, k, v, backend="llvm", **options)
    check(q, k, v, **options)
    for b, end in enumerate(options["kv_lengths"]):
        columns = hidden[b, 0, 0] | (np.arange(NK) >= end)
        for x in (k, v):
            x[b][:, columns] = np.array(-128 if dtype == INT8 else np.nan).astype(dtype)
        for x in descales.values():
            x[b][:, columns] = np.nan
    found = tileattn.forward(q, k, v, backend="llvm", **options)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("Nq", [FEW, MANY])
@pytest.mark.parametrize("name", ["k", "v", "k_descale", "v_descale"])
def test_nan_that_are_attended_to_spread(name: str, Nq: int) -> None:
    rng = np.random.default_rng(5)
    q, k, v = contiguous(rng, FLOAT8_E4M3FN, Nq, 40, 24)
    descales = both_descales(rng, INT8, (B, HKV, NK), (B, HKV, NK))
    {"k": k, "v": v, **descales}[name][1, 1, NK - 1 - Nq // 2] = np.nan
    check(q.astype(np.float32), k, v, causal=True, **descales)


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("page", [None, 16])
def test_any_batch_and_number_of_workers_gives_the_same_bits(
    page: int | None, dtype: np.dtype[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(6)
    lengths = [2 * SPLIT + 9, 5, 3 * SPLIT]
    q = rng.standard_normal((3, 8, 1, 64)).astype(np.float32)
    options: dict[str, Any] = {"backend": "llvm", "k_descale": 0.01, "v_descale": 0.02}
    if page is None:
        k, v = (stored(rng, (3, HKV, 3 * SPLIT, 64), dtype) for _ in "kv")
        per_entry = [{"kv_lengths": [n]} for n in lengths]
        options |= {"kv_lengths": lengths}
    else:
        k, v, paging = in_pages(rng, dtype, page, lengths, 64, 64)
        table = paging["block_table"]
        per_entry = [
            {"kv_lengths": [n], "block_table": table[b : b + 1]} for b, n in enumerate(lengths)
        ]
        options |= paging
    expected = tileattn.forward(q, k, v, **options)
    for b, own in enumerate(per_entry):
        some = slice(b, b + 1) if page is None else slice(None)
        alone = tileattn.forward(q[b : b + 1], k[some], v[some], **{**options, **own})
        np.testing.assert_array_equal(alone.out[0], expected.out[b])
        np.testing.assert_array_equal(alone.lse[0], expected.lse[b])
    for workers in (1, 2, 5):
        monkeypatch.setattr(threads, "worker_count", lambda workers=workers: workers)
        threads._crew.cache_clear()
        found = tileattn.forward(q, k, v, **options)
        np.testing.assert_array_equal(found.out, expected.out)
        np.testing.assert_array_equal(found.lse, expected.lse)
    threads._crew.cache_clear()


@pytest.mark.parametrize("Nq", [FEW, MANY])
@pytest.mark.parametrize("shape", [(), (1,), (HKV,), (B, HKV), (B, HKV, NK)], ids=str)
def test_calls_that_repeat_read_their_own_descales(shape: tuple[int, ...], Nq: int) -> None:
    rng = np.random.default_rng(9)
    heads = 1 if shape == (1,) else HKV
    q, k, v = contiguous(rng, INT8, Nq, 40, 24)
    k, v, q = k[:, :heads], v[:, :heads], q.astype(np.float32)
    for _ in range(4):
        drawn = both_descales(rng, INT8, shape, shape)
        descales: dict[str, Any] = {name: np.asarray(x) for name, x in drawn.items()}
        check(q, k, v, **descales)
        descales["v_descale"][...] *= 2
        check(q, k, v, **descales)
        check(q, k, v, **descales | {"k_descale": float(rng.uniform(0, 0.1))})
    out = np.empty((B, HQ, Nq, 24), np.float32)
    found = tileattn.forward(q, k, v, out=out, backend="llvm", **descales)
    assert found.out is out
    expected = tileattn.forward(q, k, v, backend="llvm", **descales)
    np.testing.assert_array_equal(out, expected.out)


@pytest.mark.skipif(sys.platform == "win32", reason="mprotect is of POSIX")
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("page", [None, 1, 16, 130])
def test_nothing_beside_the_arrays_is_touched(
    guarded: Guarded, page: int | None, at_end: bool
) -> None:
    """Rows of an odd number of bytes; the last one ends where memory does."""
    rng = np.random.default_rng(7)
    for Nq, dtype in itertools.product((FEW, MANY), CACHE_DTYPES):
        q = guarded(rng.standard_normal((B, HQ, Nq, 37)).astype(np.float32), at_end)
        chosen: dict[str, Any] = {}
        if page is None:
            k, v = (stored(rng, (B, HKV, NK, n), dtype) for n in (37, 21))
        else:
            lengths = [2 * page, page + 1]
            k, v = (stored(rng, (4, HKV, page, n), dtype) for n in (37, 21))
            table = guarded(np.array([[3, 1], [0, 2]], np.int64), at_end)
            chosen = {"kv_lengths": lengths, "block_table": table}
        of_tokens = both_descales(rng, dtype, *[k.shape[:-1]] * 2)
        descales: dict[str, Any] = {n: guarded(x, at_end) for n, x in of_tokens.items()}
        check(q, guarded(k, at_end), guarded(v, at_end), **chosen, **descales)


@pytest.fixture
def avx2() -> Iterator[str]:
    """A backend with the kernels of AVX2, and short splits."""

    class Other(LlvmBackend):
        name = "avx2"

    registry.register_backend(Other(AVX2, split_keys=40))
    yield Other.name
    registry._loaded.pop(Other.name)


@on_x86
def test_kernels_of_cpus_without_avx512(avx2: str) -> None:
    rng = np.random.default_rng(8)
    for Nq, dtype in itertools.product((FEW, MANY), CACHE_DTYPES):
        q, k, v = contiguous(rng, dtype, Nq, 80, 33)
        descales = both_descales(rng, dtype, (B, HKV, NK), (HKV,))
        check(q.astype(np.float16), k, v, avx2, causal=True, **descales)
