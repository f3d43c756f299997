"""``append_kv`` and ``rope`` on CuPy arrays in host memory: their kernels run on the CPU."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tileattn
from tests.backends.cupy.fake_cupy import Machine, at_host, sent
from tileattn.dtypes import BFLOAT16, DTYPES
from tileattn.kernels.cuda.families.key import KernelKey

Array = NDArray[Any]

HKV, D, DV, M = 3, 24, 40, 40
ROTATED = [dtype for dtype in DTYPES if dtype.name != "float16"]  # which this CPU does not convert


def drawn(rng: np.random.Generator, dtype: Any, *shape: int) -> Array:
    return np.asarray(rng.normal(size=shape).astype(dtype))


def caches(dtype: Any, paged: bool) -> list[Array]:
    """Make caches that hold NaN, of rows whose heads are neighbours."""
    lead, rows = (9, 4) if paged else (3, 12)
    return [np.full((lead, rows, HKV, n), np.nan, dtype).swapaxes(1, 2) for n in (D, DV)]


@pytest.mark.parametrize("there", range(8))
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("integer", [np.int32, np.int64])
def test_append_kv(
    gpu: Machine, kernels: list[KernelKey], there: int, paged: bool, packed: bool, integer: Any
) -> None:
    """Each of the integers may be on the device, or on the host."""
    rng = np.random.default_rng(there)
    dtype = ROTATED[there % len(ROTATED)]
    tables = tuple(drawn(rng, ROTATED[there % 2], M, 8) for _ in range(2))
    options: dict[str, Any] = {"kv_lengths": np.array([1, 5, 0], integer)}
    new = [drawn(rng, dtype, 3, HKV, 4, n) for n in (D, DV)]
    if packed:
        options["cu_seqlens"] = np.array([0, 7, 7, 12], integer)
        new = [x.swapaxes(0, 1).reshape(HKV, 12, x.shape[-1]) for x in new]
    if paged:
        options["block_table"] = np.array([[0, 4, 2], [3, 8, 5], [7, 1, 6]], integer)
    mixed = {
        name: sent(gpu, x) if there >> n & 1 else x for n, (name, x) in enumerate(options.items())
    }
    for rotary, interleaved in ((None, False), (tables, False), (tables, True)):
        expected: Any = caches(dtype, paged)
        found: Any = [sent(gpu, x) for x in caches(dtype, paged)]
        given: Any = None if rotary is None else tuple(sent(gpu, x) for x in tables)
        arrays = [sent(gpu, x) for x in new]
        how: dict[str, Any] = {"interleaved": interleaved, "rotary": rotary}
        lengths = tileattn.append_kv(*expected, *new, **(options | how))
        more = tileattn.append_kv(*found, *arrays, **(mixed | how | {"rotary": given}))
        on_device = bool(there & 1 or (packed and there & 2))
        assert isinstance(more, np.ndarray) is not on_device
        np.testing.assert_array_equal(at_host(more) if on_device else more, lengths)
        for cache, wanted in zip(found, expected, strict=True):
            assert at_host(cache).tobytes() == wanted.tobytes()
    (key,) = set(kernels)
    assert (key.kernel, key.alignment_bytes) == ("append_kv", 16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_strides_and_alignments(gpu: Machine, kernels: list[KernelKey], dtype: Any) -> None:
    """Columns that are no neighbours, rows that start anywhere, and heads in reverse."""
    rng = np.random.default_rng(1)
    for step, first, columns in ((1, 0, 24), (1, 1, 24), (1, 0, 15), (2, 0, 8), (-1, 0, 24)):
        new = [drawn(rng, dtype, 2, HKV, 3, n) for n in (columns, 5)]
        expected, found = [], []
        for n in (columns, 5):
            whole = sent(gpu, np.zeros((2, HKV, 9, 2 * n + 2), dtype))
            found.append(
                whole[:, ::-1, :, first:][..., :: abs(step)][..., :n][..., :: np.sign(step)]
            )
            expected.append(np.zeros((2, HKV, 9, n), dtype))
        arrays = [sent(gpu, x) for x in new]
        tileattn.append_kv(*expected, *new, kv_lengths=[6, 2])
        tileattn.append_kv(*found, *arrays, kv_lengths=[6, 2])
        for cache, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(at_host(cache), wanted)
    assert {key.alignment_bytes for key in kernels} >= {dtype.itemsize}


@pytest.mark.parametrize("paged", [False, True])
def test_device_lengths_are_clamped(gpu: Machine, kernels: list[KernelKey], paged: bool) -> None:
    """Rows outside of a cache, and of pages that do not exist, are not written."""
    new = [sent(gpu, np.ones((3, HKV, 4, n), np.float32)) for n in (D, DV)]
    found = [sent(gpu, x) for x in caches(np.float32, paged)]
    table = np.array([[0, 4, 2], [3, 9, 5], [7, -1, 6]])
    lengths = [10, -2, 1 << 62] if not paged else [10, 3, 2]
    options: dict[str, Any] = {"block_table": sent(gpu, table)} if paged else {}
    there = sent(gpu, np.array(lengths))
    more = tileattn.append_kv(*found, *new, kv_lengths=there, **options)
    assert at_host(more).tolist() == [n + 4 for n in lengths]
    written = np.argwhere(at_host(found[0])[:, 0, :, 0] == 1).tolist()
    inside = [[0, 10], [0, 11], [1, 0], [1, 1]]
    assert written == ([[2, 2], [2, 3], [3, 3], [7, 2], [7, 3]] if paged else inside)
    starts = sent(gpu, np.array([2, 9, -5, 4]))
    packed = [sent(gpu, np.ones((HKV, 12, n), np.float32)) for n in (D, DV)]
    tileattn.append_kv(*found, *packed, kv_lengths=there, cu_seqlens=starts, **options)
    assert kernels


def test_a_failed_call_writes_nothing(gpu: Machine, kernels: list[KernelKey]) -> None:
    new = [sent(gpu, np.ones((3, HKV, 4, n), np.float32)) for n in (D, DV)]
    found = [sent(gpu, x) for x in caches(np.float32, False)]
    with pytest.raises(ValueError, match=r"^kv_lengths must be .* got 9 for sequence 1, "):
        tileattn.append_kv(*found, *new, kv_lengths=[0, 9, 1])
    tables = (sent(gpu, np.ones((9, 4))), sent(gpu, np.ones((9, 4))))
    with pytest.raises(ValueError, match=r"^cos must .* 9 rows, and sequence 2 "):
        tileattn.append_kv(*found, *new, kv_lengths=[0, 5, 6], rotary=tables)
    assert np.isnan(at_host(found[0])).all()
    assert not kernels


@pytest.mark.parametrize("dtype", ROTATED, ids=str)
@pytest.mark.parametrize("half", [0, 1, 8, 12])
@pytest.mark.parametrize("positions", [3, [4, 0, 9, 1], np.arange(8, dtype=np.int32)], ids=str)
def test_rope(
    gpu: Machine, kernels: list[KernelKey], positions: Any, half: int, dtype: Any
) -> None:
    """The same bits as NumPy's."""
    rng = np.random.default_rng(0)
    x = drawn(rng, dtype, 2, HKV, 4, D).swapaxes(1, 2).copy().swapaxes(1, 2)
    tables = [drawn(rng, BFLOAT16 if half == 8 else np.float64, 10, half) for _ in range(2)]
    shaped = np.reshape(positions, (2, 4)) if np.size(positions) == 8 else positions
    for there in (False, True):
        p = sent(gpu, shaped) if there and np.ndim(shaped) else shaped
        for options in ({}, {"interleaved": True}, {"inverse": True}):
            expected = tileattn.rope(x, *tables, positions=shaped, **options)
            arrays = [sent(gpu, y) for y in (x, *tables)]
            found = tileattn.rope(*arrays, positions=p, **options)
            assert at_host(found).tobytes() == expected.tobytes()
    assert {key.kernel for key in kernels} == {"rope"}


def test_positions_that_a_device_says_take_the_nearest_row(
    gpu: Machine, kernels: list[KernelKey]
) -> None:
    x, tables = np.ones((5, D)), [np.arange(20.0).reshape(10, 2)] * 2
    p = sent(gpu, np.array([-(1 << 62), 0, 9, 10, 1 << 62]))
    found = tileattn.rope(*(sent(gpu, y) for y in (x, *tables)), positions=p)
    expected = tileattn.rope(x, *tables, positions=[0, 0, 9, 9, 9])
    np.testing.assert_array_equal(at_host(found), expected)
    assert kernels


def test_many_tokens_and_heads(gpu: Machine, kernels: list[KernelKey]) -> None:
    """More than a thread block has of each, and more columns than it has threads."""
    rng = np.random.default_rng(0)
    for shape in ((2, 5, 700, 8), (1, 2, 3, 1200)):
        new = [drawn(rng, np.float32, *shape) for _ in range(2)]
        cache = np.zeros((shape[0], shape[1], shape[2] + 2, shape[3]), np.float32)
        found, expected = [sent(gpu, cache) for _ in range(2)], [cache.copy(), cache.copy()]
        tileattn.append_kv(*found, *(sent(gpu, x) for x in new), kv_lengths=1)
        tileattn.append_kv(*expected, *new, kv_lengths=1)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(at_host(one), other)
    assert kernels
