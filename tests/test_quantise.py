"""Rounding to 8 bits, and caches of 8 bits that grow."""

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import tileattn
from tests.device_array import DeviceArray, DeviceBackend, owned
from tileattn.dtypes import BFLOAT16, CACHE_DTYPES, FLOAT8_E4M3FN, INT8, QUERY_DTYPES
from tileattn.quantise import LARGEST, fitting_descale, quantised
from tileattn.testing import assert_attention_close, error_bound

Array = NDArray[Any]

B, HKV, ROWS, D, DV = 2, 2, 9, 5, 3

EVERY = {
    INT8: np.arange(-127, 128).astype(INT8),
    FLOAT8_E4M3FN: np.arange(256).astype(np.uint8).view(FLOAT8_E4M3FN),
}
"""Every number that is stored."""


def rounding_errors(x: Array, descale: Array, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return how far stored numbers are off, and how far the nearest ones are."""
    numbers = EVERY[dtype].astype(np.float64)
    numbers = numbers[np.isfinite(numbers)] * descale.astype(np.float64)
    found = quantised(x, descale, dtype).astype(np.float64) * descale
    exact = x.astype(np.float64)
    return np.abs(found - exact), np.abs(exact[..., np.newaxis] - numbers).min(axis=-1)


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([1e-30, 1e-3, 1.0, 1e20]))
def test_the_nearest_number_is_stored(dtype: np.dtype[Any], seed: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=40) * size).astype(np.float32)
    descale = np.asarray(size * rng.uniform(1e-4, 1), np.float32)
    off, least = rounding_errors(x, descale, dtype)
    ok = off <= least + np.abs(x) * 1e-6  # the quotient is rounded to float32 first
    assert ok.all()


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
def test_numbers_that_are_stored_stay(dtype: np.dtype[Any]) -> None:
    x = EVERY[dtype]
    found = quantised(x.astype(np.float32) * np.float32(0.25), np.asarray(0.25, np.float32), dtype)
    np.testing.assert_array_equal(found.astype(np.float32), x.astype(np.float32))


def test_ties_go_to_even() -> None:
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5], np.float32)
    one = np.asarray(1, np.float32)
    assert quantised(x, one, INT8).tolist() == [0, 2, 2, 0, -2]
    assert quantised(x + 16, one, FLOAT8_E4M3FN).tolist() == [16, 18, 18, 16, 14]


@pytest.mark.parametrize(
    ("x", "descale", "int8", "float8"),
    [
        (1e9, 1.0, 127, 448),
        (-1e9, 1.0, -127, -448),
        (np.inf, 1.0, 127, 448),
        (-np.inf, 1.0, -127, -448),
        (127.4, 1.0, 127, 128),
        (-128.0, 1.0, -127, -128),
        (np.nan, 1.0, 0, np.nan),
        (3.0, 0.0, 0, 0),
        (0.0, 0.0, 0, 0),
        (np.nan, 0.0, 0, np.nan),
    ],
)
def test_what_is_too_large_and_nan(x: float, descale: float, int8: int, float8: float) -> None:
    given = np.array([x], np.float32), np.asarray(descale, np.float32)
    assert quantised(*given, INT8).tolist() == [int8]
    np.testing.assert_equal(quantised(*given, FLOAT8_E4M3FN).astype(float), [float8])


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
def test_the_largest_element_of_a_row_fits(dtype: np.dtype[Any]) -> None:
    x = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float16)
    x[3] = 0
    descale = fitting_descale(x, dtype)
    assert descale.dtype == np.float32
    assert descale[3] == 0
    found = np.abs(quantised(x, descale, dtype).astype(np.float32))
    assert (np.delete(found, 3, axis=0).max(axis=-1) == LARGEST[dtype]).all()
    assert not found[3].any()


@pytest.mark.parametrize(
    ("row", "int8", "float8"),
    [
        ([1, np.nan], np.nan, 1 / np.float32(448)),
        ([1, np.inf], np.nan, np.nan),
        ([np.nan, np.nan], np.nan, 0),
        ([], 0, 0),
    ],
)
def test_descales_of_rows_that_are_not_finite(row: Any, int8: float, float8: float) -> None:
    x = np.asarray(row, np.float32)
    for dtype, expected in ((INT8, int8), (FLOAT8_E4M3FN, float8)):
        np.testing.assert_equal(fitting_descale(x, dtype).item(), np.float32(expected).item())
    dequantised = quantised(x, fitting_descale(x, INT8), INT8) * fitting_descale(x, INT8)
    assert np.isnan(dequantised).all() == bool(row) or not row


# --- caches --------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(data=st.data())
def test_new_keys_are_quantised_at_their_places_and_nothing_else_changes(data: Any) -> None:
    draw = data.draw
    dtype, wide = draw(st.sampled_from(CACHE_DTYPES)), draw(st.sampled_from(QUERY_DTYPES))
    page, paged, packed = (
        draw(st.sampled_from([1, 3, 16])),
        draw(st.booleans()),
        draw(st.booleans()),
    )
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    old = [draw(st.integers(0, 6)) for _ in range(B)]
    counts = (
        [draw(st.integers(0, 5)) for _ in range(B)] if packed else [draw(st.integers(0, 5))] * B
    )
    n = -(-12 // page)
    table = rng.permutation(B * n + 1)[: B * n].reshape(B, n)
    shape = (B * n + 1, HKV, page) if paged else (B, HKV, 12)
    wrong = 77 if dtype == INT8 else np.nan
    caches = [np.full((*shape, columns), wrong, dtype) for columns in (D, DV)]
    descales = [_descale(draw, rng, shape) for _ in caches]
    expected = [x.copy() for x in caches]
    expected_descales = [x.copy() for x in descales]
    starts, T = np.cumsum([0, *counts]), sum(counts)
    new = [rng.normal(size=(HKV, T, columns)).astype(wide) for columns in (D, DV)]
    for b, h in np.ndindex(B, HKV):
        for m in range(counts[b]):
            j = old[b] + m
            place = (table[b, j // page], h, j % page) if paged else (b, h, j)
            for x, cache, descale in zip(new, expected, expected_descales, strict=True):
                row = x[h, starts[b] + m]
                if descale.shape == shape:
                    descale[place] = fitting_descale(row, dtype)
                    factor = descale[place]
                else:
                    factor = np.broadcast_to(descale, (B, HKV))[b, h]
                cache[place] = quantised(row, factor, dtype)
    options: dict[str, Any] = {"block_table": table} if paged else {}
    if packed:
        options["cu_seqlens"] = starts
    else:
        new = [x.reshape(HKV, B, counts[0], x.shape[-1]).swapaxes(0, 1) for x in new]
    options |= dict(zip(("k_descale", "v_descale"), descales, strict=True))
    lengths = tileattn.append_kv(caches[0], caches[1], new[0], new[1], kv_lengths=old, **options)
    assert lengths.tolist() == np.add(old, counts).tolist()
    found = zip([*caches, *descales], [*expected, *expected_descales], strict=True)
    for mine, wanted in found:
        np.testing.assert_array_equal(mine.astype(np.float32), wanted.astype(np.float32))


def _descale(draw: Any, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    of = draw(st.sampled_from([(), (HKV,), (B, HKV), shape]))
    return np.asarray(rng.uniform(0.01, 0.1, of), np.float32)


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
def test_what_was_appended_is_attended_to(dtype: np.dtype[Any]) -> None:
    rng = np.random.default_rng(1)
    k, v = rng.normal(size=(2, B, HKV, 10, 8)).astype(BFLOAT16)
    k_cache, v_cache = np.zeros((2, 6, HKV, 4, 8), dtype)
    descales = np.full((2, 6, HKV, 4), np.nan, np.float32)
    named: dict[str, Any] = dict(zip(("k_descale", "v_descale"), descales, strict=True))
    table = [[5, 1, 0], [3, 2, 4]]
    lengths: Any = [0, 0]
    for n in range(0, 10, 2):
        step = k[:, :, n : n + 2], v[:, :, n : n + 2]
        lengths = tileattn.append_kv(
            *(k_cache, v_cache, *step), kv_lengths=lengths, block_table=table, **named
        )
    q = rng.normal(size=(B, 4, 3, 8)).astype(BFLOAT16)
    options = {"kv_lengths": lengths, "block_table": table, **named}
    found = tileattn.forward(q, k_cache, v_cache, **options)
    bounds = error_bound(q, k_cache, v_cache, **options)
    assert_attention_close(
        found, tileattn.reference.forward(q, k_cache, v_cache, **options), bounds
    )
    exact = tileattn.reference.forward(q, k, v).out
    off = np.linalg.norm(found.out.astype(np.float64) - exact) / np.linalg.norm(exact)
    assert 1e-4 < off < 0.1  # of 8 bits


def test_new_keys_may_be_quantised_already() -> None:
    k_cache, v_cache, k, v = caches(INT8)
    k, v = (np.full_like(x, 5, INT8) for x in (k, v))
    tileattn.append_kv(k_cache, v_cache, k, v, kv_lengths=[0, 5])
    assert (k_cache[0, :, :4] == 5).all()
    assert (k_cache[0, :, 4:] == 0).all()
    assert (v_cache[1, :, 5:] == 5).all()


def test_keys_are_rotated_before_they_are_quantised() -> None:
    k_cache, v_cache, k, v = caches(FLOAT8_E4M3FN)
    k = np.random.default_rng(0).normal(size=k.shape).astype(np.float32)
    rotary = np.random.default_rng(1).normal(size=(2, 9, 2)).astype(np.float32)
    rotated = tileattn.rope(k, *rotary, positions=np.add.outer([1, 5], np.arange(4)))
    descales: dict[str, Any] = {"k_descale": 0.01, "v_descale": np.array([0.1, 0.2], np.float32)}
    expected = k_cache.copy(), v_cache.copy()
    tileattn.append_kv(*expected, rotated, v, kv_lengths=[1, 5], **descales)
    new: dict[str, Any] = {"kv_lengths": [1, 5], "rotary": tuple(rotary), **descales}
    tileattn.append_kv(k_cache, v_cache, k, v, **new)
    np.testing.assert_array_equal(k_cache.view(np.uint8), expected[0].view(np.uint8))


def caches(dtype: np.dtype[Any]) -> tuple[Array, Array, Array, Array]:
    """Make empty caches, and keys and values to append."""
    shapes = (B, HKV, ROWS, D), (B, HKV, ROWS, DV), (B, HKV, 4, D), (B, HKV, 4, DV)
    kinds = dtype, dtype, np.float32, np.float32
    k_cache, v_cache, k, v = (np.zeros(*x) for x in zip(shapes, kinds, strict=True))
    return k_cache, v_cache, k, v


TOKENS = np.ones((B, HKV, ROWS), np.float32)
READ_ONLY = TOKENS.copy()
READ_ONLY.flags.writeable = False
ONES: dict[str, Any] = {"kv_lengths": 0, "k_descale": 1.0, "v_descale": 1.0}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"k_descale": None},
            ValueError,
            "k_descale must be given to store float32 in a cache of int8; got None",
        ),
        ({"v_descale": None}, ValueError, "v_descale must be given to store float32 in a cache"),
        (
            {"k": np.zeros((B, HKV, 4, D), np.int8), "v": np.zeros((B, HKV, 4, DV), np.int8)},
            ValueError,
            "k_descale must be None with k of int8 and a cache of int8: nothing is quantised",
        ),
        (
            {"k": np.zeros((B, HKV, 4, D))},
            TypeError,
            "k must have dtype float16, bfloat16, float32 or int8; got float64",
        ),
        (
            {"v": np.zeros((B, HKV, 4, DV), np.float16)},
            TypeError,
            "v must have the dtype of k, float32; got float16",
        ),
        (
            {"v_cache": np.zeros((B, HKV, ROWS, DV), FLOAT8_E4M3FN)},
            TypeError,
            "v_cache must have the dtype of k_cache, int8; got float8_e4m3fn",
        ),
        ({"k_descale": -1.0}, ValueError, "k_descale must be a number from 0 to the largest of"),
        (
            {"v_descale": np.array([1, np.nan], np.float32)},
            ValueError,
            "v_descale must hold finite numbers that are not negative; got nan",
        ),
        (
            {"k_descale": np.ones(5, np.float32)},
            ValueError,
            "k_descale must be a number, or have shape (Hkv,) = (2,), (B, Hkv) = (2, 2) or "
            "(B, Hkv, capacity) = (2, 2, 9); got (5,)",
        ),
        ({"k_descale": np.ones(2)}, TypeError, "k_descale must have dtype float32; got float64"),
        ({"v_descale": READ_ONLY}, ValueError, "v_descale must be writable; got a read-only array"),
        (
            {"k_descale": TOKENS, "v_descale": TOKENS},
            ValueError,
            "k_descale must not overlap v_descale",
        ),
        (
            {"v_descale": np.broadcast_to(np.float32(1), TOKENS.shape)},
            ValueError,
            "v_descale must be writable",
        ),
        (
            {
                "k": np.zeros((B, HKV, 4, D), np.int8),
                "v": np.zeros((B, HKV, 4, DV), np.int8),
                "rotary": (np.ones((9, 2)), np.ones((9, 2))),
                "k_descale": None,
                "v_descale": None,
            },
            TypeError,
            "rotary must be None with k of dtype int8; rotate k before quantising",
        ),
    ],
)
def test_refusals_write_nothing(changed: dict[str, Any], error: type, message: str) -> None:
    k_cache, v_cache, k, v = caches(INT8)
    given: dict[str, Any] = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, **ONES}
    with pytest.raises(error, match=re.escape(message)):
        tileattn.append_kv(**(given | changed))
    assert not k_cache.any()
    assert (TOKENS == 1).all()


def test_caches_of_16_bits_have_no_descales() -> None:
    k_cache, v_cache, k, v = (x.astype(ml_dtypes.bfloat16) for x in caches(INT8))
    with pytest.raises(ValueError, match="v_descale must be None with k of bfloat16 and a cache"):
        tileattn.append_kv(k_cache, v_cache, k, v, kv_lengths=0, v_descale=TOKENS)


def test_a_backend_with_a_kernel_of_its_own_gets_the_descales(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The descales have three axes; the kernel writes the descales of tokens."""
    owned(monkeypatch)
    got: list[dict[str, Any]] = []
    monkeypatch.setattr(DeviceBackend, "append_kv", lambda *_, **x: got.append(x), raising=False)
    k_cache, v_cache, k, v = (DeviceArray(x) for x in caches(INT8))
    tokens = DeviceArray(TOKENS.copy())
    tileattn.append_kv(k_cache, v_cache, k, v, kv_lengths=0, k_descale=2.5, v_descale=tokens)
    new = k.astype(np.int8), v.astype(np.int8)
    tileattn.append_kv(k_cache, v_cache, *new, kv_lengths=0)
    quantising, plain = got
    assert quantising["of_tokens"] == {"v_descale"}
    assert quantising["descales"]["v_descale"] is tokens
    factors = quantising["descales"]["k_descale"]
    assert factors.shape == (len(k_cache), k_cache.shape[1], 1)
    assert (factors.host == 2.5).all()
    assert plain["descales"] == {}
