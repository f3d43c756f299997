"""Growing caches: where new keys go, what stays, and what is refused before anything is written."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import tileattn
from tests.device_array import DeviceArray, owned
from tileattn.dtypes import DTYPES
from tileattn.testing import assert_attention_close, error_bound

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

    B, page = drawn(0, 4), data.draw(st.sampled_from([1, 2, 3, 5, 7, 16]))
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
    expected = tileattn.reference.forward(q, k, v)
    assert_attention_close(found, expected, error_bound(q, k, v))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_keys_are_rotated_at_their_positions(paged: bool, packed: bool, interleaved: bool) -> None:
    rng = np.random.default_rng(0)
    k_cache, v_cache = caches(6, 3) if paged else caches(2, 9)
    k, v = rng.normal(size=(2, HKV, 4, D)), rng.normal(size=(2, HKV, 4, DV))
    rotary = rng.normal(size=(9, 2)), rng.normal(size=(9, 2))
    old = [1, 5]
    positions = np.add.outer(old, np.arange(4))
    expected = k_cache.copy(), v_cache.copy()
    options: dict[str, Any] = {"kv_lengths": old}
    if paged:
        options["block_table"] = np.array([[0, 4, 2], [3, 1, 5]])
    rotated = tileattn.rope(k, *rotary, positions=positions, interleaved=interleaved)
    tileattn.append_kv(*expected, rotated, v, **options)
    if packed:
        k, v = (x.swapaxes(0, 1).reshape(HKV, 8, x.shape[-1]) for x in (k, v))
        options["cu_seqlens"] = [0, 4, 8]
    options |= {"rotary": rotary, "interleaved": interleaved}
    tileattn.append_kv(k_cache, v_cache, k, v, **options)
    np.testing.assert_array_equal(k_cache, expected[0])
    np.testing.assert_array_equal(v_cache, expected[1])


K, V = np.ones((2, HKV, 4, D)), np.ones((2, HKV, 4, DV))
TABLE = [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"kv_lengths": [0, 6]},
            ValueError,
            "kv_lengths must be from 0 to the capacity, 9, without the new keys; got 6 for "
            "sequence 1, which would have 10 keys",
        ),
        ({"kv_lengths": [-1, 0]}, ValueError, "kv_lengths must be from 0 to"),
        ({"kv_lengths": [1]}, ValueError, "kv_lengths must be an integer, or integers of"),
        ({"kv_lengths": None}, TypeError, "kv_lengths must be an integer, or integers of"),
        ({"k": K.astype(np.float32)}, TypeError, "k must have the dtype of k_cache, float64; got"),
        ({"k": K[0]}, ValueError, "k must have shape (B, Hkv, N, D); got (2, 4, 5)"),
        ({"k": K[:1], "v": V[:1]}, ValueError, "k must have the batch size of k_cache, 2; got 1"),
        (
            {"rotary": (np.ones((5, 2)), np.ones((5, 2)))},
            ValueError,
            "cos must have a row for each position; got 5 rows, and sequence 1 would",
        ),
        ({"rotary": np.ones((2, 9, 2))}, TypeError, "rotary must be a tuple (cos, sin) or None"),
        ({"rotary": (None, K)}, TypeError, "cos must be a NumPy or CuPy array; got None"),
        ({"rotary": (K[0, 0], K[0, 0])}, ValueError, "cos must have shape (M, R / 2)"),
        ({"interleaved": 1}, TypeError, "interleaved must be True or False; got 1"),
        ({"v": V[:, :, :3]}, ValueError, "v must have the shape of k, (2, 2, 4, 5), but"),
        ({"k": K[:, :, :, :4]}, ValueError, "k must have the heads of k_cache, 2 of dim"),
        ({"cu_seqlens": [0, 4, 8]}, ValueError, "k must have shape (Hkv, T, D); got"),
        (
            {"cu_seqlens": [0, 4, 7], "k": K.reshape(HKV, 8, D), "v": V.reshape(HKV, 8, DV)},
            ValueError,
            "cu_seqlens must end at the number of tokens of k, 8; got 7",
        ),
        (
            {"cu_seqlens": [0, 8], "k": K.reshape(HKV, 8, D), "v": V.reshape(HKV, 8, DV)},
            ValueError,
            "cu_seqlens must have one more entry than k_cache, 3; got 2",
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
        ([[0, 1, 2], [3, 4, 9]], "block_table must hold pages from 0 to 5; got 9 for page 2 of"),
        ([[0, 1, -1], [3, -4, 5]], "block_table must hold pages from 0 to 5; got -4 for page 1 of"),
        (
            [[0, 1, 2], [3, 1, 5]],
            "block_table must hold a page for each that gets new keys; got 1 for page 1 of "
            "sequence 0 and for page 1 of sequence 1",
        ),
        (
            [[4, 4, 2], [3, 1, 5]],
            "block_table must hold a page for each that gets new keys; got 4 for page 0 of "
            "sequence 0 and for page 1 of sequence 0",
        ),
        ([[0, 1, 2]], "k must have the batch size of block_table, 1; got 2"),
    ],
)
def test_pages_that_are_refused(table: Any, message: str) -> None:
    k_cache, v_cache = caches(6, 3)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        tileattn.append_kv(k_cache, v_cache, K, V, kv_lengths=[1, 4], block_table=table)
    assert np.isnan(k_cache).all()


def test_a_page_may_be_shared_by_those_that_do_not_write_to_it() -> None:
    """Sequences 0 and 1 have page 0 in common, and sequence 2 is page 2 of sequence 1."""
    k_cache, v_cache = caches(6, 3)
    table, old, starts = [[0, 1, 9], [0, 2, 9], [2, 3, 9]], [3, 4, 1], [0, 3, 5, 5]
    k, v = np.ones((HKV, 5, D)), np.ones((HKV, 5, DV))
    options: dict[str, Any] = {"kv_lengths": old, "block_table": table, "cu_seqlens": starts}
    assert tileattn.append_kv(k_cache, v_cache, k, v, **options).tolist() == [6, 6, 1]
    assert np.argwhere(k_cache[:, 0, :, 0] == 1).tolist() == [
        [1, 0],
        [1, 1],
        [1, 2],
        [2, 1],
        [2, 2],
    ]


def test_a_cache_may_be_filled_to_its_end_and_take_no_more() -> None:
    k_cache, v_cache = caches(2, 4)
    assert tileattn.append_kv(k_cache, v_cache, K, V, kv_lengths=0).tolist() == [4, 4]
    assert (k_cache == 1).all()
    for x in (k_cache, v_cache):
        x[...] = np.nan
    nothing = K[:, :, :0], V[:, :, :0]
    assert tileattn.append_kv(k_cache, v_cache, *nothing, kv_lengths=[4, 4]).tolist() == [4, 4]
    with pytest.raises(ValueError, match=r"^kv_lengths must be .* got 4 for sequence 0, "):
        tileattn.append_kv(k_cache, v_cache, K[:, :, :1], V[:, :, :1], kv_lengths=[4, 3])
    assert np.isnan(k_cache).all()
    assert np.isnan(v_cache).all()


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("pages", [0, 3])
def test_no_sequence_at_all(pages: int, paged: bool) -> None:
    k_cache, v_cache = caches(pages if paged else 0, 4)
    table = np.zeros((0, 2), np.int32) if paged else None
    new = np.zeros((0, HKV, 3, D)), np.zeros((0, HKV, 3, DV))
    found = tileattn.append_kv(k_cache, v_cache, *new, kv_lengths=[], block_table=table)
    assert (found.shape, found.dtype) == ((0,), np.int64)


def test_pages_without_rows() -> None:
    k_cache, v_cache = caches(3, 0)
    options: dict[str, Any] = {"kv_lengths": 0, "block_table": TABLE}
    found = tileattn.append_kv(k_cache, v_cache, K[:, :, :0], V[:, :, :0], **options)
    assert found.tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"from 0 to the capacity, 0, "):
        tileattn.append_kv(k_cache, v_cache, K, V, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_copied_to_the_bit(dtype: Any) -> None:
    rng = np.random.default_rng(0)

    def bits(*shape: int) -> Array:
        return rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)

    k_cache, v_cache, k, v = (
        bits(5, HKV, 3, D),
        bits(5, HKV, 3, DV),
        bits(HKV, 6, D),
        bits(HKV, 6, DV),
    )
    expected = k_cache.copy(), v_cache.copy()
    for cache, x in zip(expected, (k, v), strict=True):
        for n, place in enumerate([(4, 2), (1, 0), (1, 1), (1, 2), (0, 1), (0, 2)]):
            cache[place[0], :, place[1]] = x[:, n]
    given = (x.view(dtype) for x in (k_cache, v_cache, k, v))
    table = [[4, 1], [0, 3]]
    options: dict[str, Any] = {"kv_lengths": [2, 1], "cu_seqlens": [0, 4, 6]}
    tileattn.append_kv(*given, block_table=table, **options)
    np.testing.assert_array_equal(k_cache, expected[0])
    np.testing.assert_array_equal(v_cache, expected[1])


@pytest.mark.parametrize("there", range(8))
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_nothing_waits_for_a_device(
    there: int, paged: bool, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the integers may be on the device, or on the host."""
    owned(monkeypatch)
    rng = np.random.default_rng(there)
    k_cache, v_cache = caches(6, 3) if paged else caches(2, 9)
    k, v = rng.normal(size=(2, HKV, 4, D)), rng.normal(size=(2, HKV, 4, DV))
    options: dict[str, Any] = {"kv_lengths": np.array([1, 5], np.int32)}
    if packed:
        k, v = (x.swapaxes(0, 1).reshape(HKV, 8, x.shape[-1]) for x in (k, v))
        options["cu_seqlens"] = np.array([0, 5, 8])
    if paged:
        options["block_table"] = np.array([[0, 4, 2], [3, 1, 5]])
    sent = [DeviceArray(x.copy()) for x in (k_cache, v_cache, k, v)]
    mixed: dict[str, Any] = {
        name: DeviceArray(x) if there >> n & 1 else x for n, (name, x) in enumerate(options.items())
    }
    lengths = tileattn.append_kv(k_cache, v_cache, k, v, **options)
    found: Any = tileattn.append_kv(*sent, **mixed)
    counted = [mixed["kv_lengths"], mixed.get("cu_seqlens")]
    assert isinstance(found, DeviceArray) is any(isinstance(x, DeviceArray) for x in counted)
    np.testing.assert_array_equal(getattr(found, "host", found), lengths)
    np.testing.assert_array_equal(sent[0].host, k_cache)
    np.testing.assert_array_equal(sent[1].host, v_cache)


def test_arrays_of_two_libraries_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    owned(monkeypatch)
    k_cache, v_cache = caches(2, 9)
    with pytest.raises(TypeError, match=r"^v must be a NumPy array; got .*DeviceArray"):
        tileattn.append_kv(k_cache, v_cache, K, DeviceArray(V), kv_lengths=0)
    with pytest.raises(TypeError, match=r"^kv_lengths must be a NumPy array; got .*Dev"):
        tileattn.append_kv(k_cache, v_cache, K, V, kv_lengths=DeviceArray([0, 0]))
    sent = DeviceArray(k_cache), DeviceArray(v_cache)
    with pytest.raises(TypeError, match=r"^k must be an array of backend 'device'; got num"):
        tileattn.append_kv(*sent, K, V, kv_lengths=0)
    assert np.isnan(k_cache).all()


def test_caches_with_memory_of_their_own() -> None:
    k_cache, _ = caches(2, 9)
    with pytest.raises(ValueError, match=r"^k_cache must not overlap v_cache"):
        tileattn.append_kv(k_cache, k_cache, K, K, kv_lengths=0)
    with pytest.raises(ValueError, match=r"^k_cache must not overlap k$"):
        tileattn.append_kv(k_cache, k_cache.copy(), k_cache[:, :, :2], K[:, :, :2], kv_lengths=3)
    k_cache.setflags(write=False)
    with pytest.raises(ValueError, match=r"^k_cache must be writable"):
        tileattn.append_kv(k_cache, np.zeros_like(k_cache), K, K, kv_lengths=0)
    k_cache, v_cache = caches(2, 9)
    with pytest.raises(ValueError, match=r"^v_cache must not overlap v$"):
        tileattn.append_kv(k_cache, v_cache, K[:, :, :2], v_cache[:, :, 4:6], kv_lengths=3)
    v_cache.setflags(write=False)
    with pytest.raises(ValueError, match=r"^v_cache must be writable"):
        tileattn.append_kv(k_cache, v_cache, K, V, kv_lengths=0)
    wide = np.lib.stride_tricks.as_strided(k_cache, strides=(0, *k_cache.strides[1:]))
    with pytest.raises(ValueError, match=r"^k_cache must not overlap itself"):
        tileattn.append_kv(wide, np.zeros((2, HKV, 9, DV)), K, V, kv_lengths=0)
    assert np.isnan(k_cache).all()
