"""Growing caches: where new keys go, what stays, and what is refused before anything is written."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import tileattn

Array = NDArray[Any]

HKV, D, DV = 2, 5, 3


def caches(lead: int, rows: int) -> tuple[Array, Array]:
    """Make caches that hold NaN."""
    return np.full((lead, HKV, rows, D), np.nan), np.full((lead, HKV, rows, DV), np.nan)


@settings(max_examples=150)
@given(data=st.data())
def test_new_keys_are_behind_the_old_ones_and_nothing_else_changes(data: Any) -> None:
    def drawn(low: int, high: int) -> int:
        return int(data.draw(st.integers(low, high)))

    B, page = drawn(0, 4), drawn(1, 7)
    rng = np.random.default_rng(drawn(0, 99))
    old = [drawn(0, 12) for _ in range(B)]
    packed, paged = data.draw(st.booleans()), data.draw(st.booleans())
    counts = [drawn(0, 9) for _ in range(B)] if packed else [drawn(0, 9)] * B
    pages_of_one = -(-21 // page)
    table = rng.permutation(B * pages_of_one + 2)[: B * pages_of_one].reshape(B, pages_of_one)
    k_cache, v_cache = caches(B * pages_of_one + 2, page) if paged else caches(B, 21)
    T, options = sum(counts), dict[str, Any]()
    k, v = rng.normal(size=(HKV, T, D)), rng.normal(size=(HKV, T, DV))
    starts = np.cumsum([0, *counts])
    expected = k_cache.copy(), v_cache.copy()
    for b, length in enumerate(old):
        for n in range(counts[b]):
            j = length + n
            place = (table[b, j // page], slice(None), j % page) if paged else (b, slice(None), j)
            for cache, x in zip(expected, (k, v), strict=True):
                cache[place] = x[:, starts[b] + n]
    if packed:
        options["cu_seqlens"] = starts
    else:
        N = counts[0] if B else 3
        k, v = (x.reshape(HKV, B, N, x.shape[-1]).swapaxes(0, 1) for x in (k, v))
    if paged:
        options["block_table"] = table
    lengths = tileattn.append_kv(k_cache, v_cache, k, v, kv_lengths=old, **options)
    np.testing.assert_array_equal(lengths, np.add(old, counts) if B else [])
    assert lengths.dtype == np.int64
    for found, wanted in zip((k_cache, v_cache), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_caches_may_have_any_strides() -> None:
    k_cache, v_cache = (x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in caches(2, 9))
    k, v = np.ones((2, HKV, 4, D)), np.ones((2, HKV, 4, DV))
    tileattn.append_kv(k_cache[:, :, ::-1], v_cache, k, v, kv_lengths=[0, 5])
    assert np.isnan(k_cache[0, :, :5]).all()
    assert (k_cache[0, :, 5:] == 1).all()
    assert (v_cache[1, :, 5:] == 1).all()


def test_what_was_appended_is_attended_to() -> None:
    rng = np.random.default_rng(1)
    k, v = rng.normal(size=(2, 2, HKV, 10, 8))
    k_cache, v_cache = np.full((2, 6, HKV, 4, 8), np.nan)
    table = [[5, 1, 0], [3, 2, 4]]
    lengths: Any = [0, 0]
    for n in range(10):
        step = k[:, :, n : n + 1], v[:, :, n : n + 1]
        lengths = tileattn.append_kv(k_cache, v_cache, *step, kv_lengths=lengths, block_table=table)
    q = rng.normal(size=(2, 4, 3, 8))
    found = tileattn.forward(q, k_cache, v_cache, kv_lengths=lengths, block_table=table)
    np.testing.assert_allclose(found.out, tileattn.forward(q, k, v).out, rtol=1e-12)


K, V = np.ones((2, HKV, 4, D)), np.ones((2, HKV, 4, DV))
TABLE = [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"kv_lengths": [0, 6]},
            ValueError,
            "kv_lengths holds 6 for sequence 1, which would have 10 keys; lengths from 0 on are "
            "accepted, up to 9 keys",
        ),
        ({"kv_lengths": [-1, 0]}, ValueError, "kv_lengths holds -1 for sequence 0"),
        ({"kv_lengths": [1]}, ValueError, "kv_lengths has shape (1,); one integer or shape (2,)"),
        ({"kv_lengths": None}, TypeError, "kv_lengths is None; integers of shape (2,)"),
        ({"k": K.astype(np.float32)}, TypeError, "k has dtype float32; it must be that of k_cache"),
        ({"k": K[0]}, ValueError, "k has shape (2, 4, 5); (B, Hkv, N, D) is accepted"),
        ({"k": K[:1], "v": V[:1]}, ValueError, "k has batch size 1; it must be that of the cache"),
        ({"v": V[:, :, :3]}, ValueError, "v has shape (2, 2, 3, 3); but for the last axis it must"),
        ({"k": K[:, :, :, :4]}, ValueError, "k has 2 heads of dimension 4; those of k_cache are 2"),
        ({"cu_seqlens": [0, 4, 8]}, ValueError, "k has shape (2, 2, 4, 5); (Hkv, T, D) is"),
        (
            {"cu_seqlens": [0, 4, 7], "k": K.reshape(HKV, 8, D), "v": V.reshape(HKV, 8, DV)},
            ValueError,
            "cu_seqlens ends with 7; it must end with the number of tokens of k, 8",
        ),
        (
            {"cu_seqlens": [0, 8], "k": K.reshape(HKV, 8, D), "v": V.reshape(HKV, 8, DV)},
            ValueError,
            "cu_seqlens has 2 entries; 3 are accepted",
        ),
    ],
)
def test_what_is_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    k_cache, v_cache = caches(2, 9)
    call: dict[str, Any] = {"k": K, "v": V, "kv_lengths": [1, 2], **changed}
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        tileattn.append_kv(k_cache, v_cache, **call)
    assert np.isnan(k_cache).all()
    assert np.isnan(v_cache).all()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0, 1, 2], [3, 4, 9]], "block_table holds 9 for page 2 of sequence 1; 0 to 5 are"),
        ([[0, 1, 2], [3, 0, 1]], "block_table gives row 1 of page 0 to more than one key that is"),
        ([[0, 1, 2]], "k has batch size 2; it must be that of the cache, 1"),
    ],
)
def test_pages_that_are_refused(table: Any, message: str) -> None:
    k_cache, v_cache = caches(6, 3)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        tileattn.append_kv(k_cache, v_cache, K, V, kv_lengths=[1, 4], block_table=table)
    assert np.isnan(k_cache).all()


def test_caches_with_memory_of_their_own() -> None:
    k_cache, _ = caches(2, 9)
    with pytest.raises(ValueError, match=r"^k_cache overlaps v_cache"):
        tileattn.append_kv(k_cache, k_cache, K, K, kv_lengths=0)
    with pytest.raises(ValueError, match=r"^k_cache overlaps k;"):
        tileattn.append_kv(k_cache, k_cache.copy(), k_cache[:, :, :2], K[:, :, :2], kv_lengths=3)
    k_cache.setflags(write=False)
    with pytest.raises(ValueError, match=r"^k_cache is read-only"):
        tileattn.append_kv(k_cache, np.zeros_like(k_cache), K, K, kv_lengths=0)
