"""Rotary position embedding against complex numbers, and its gradient.

``error_bound`` is of attention and knows nothing of rotations; tolerances here are some units in
the last place of the dtype that is computed in, at numbers of the order of 1.
"""

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import tileattn
from tests.device_array import DeviceArray, owned
from tileattn.dtypes import BFLOAT16, DTYPES, FLOAT32, FLOAT64, accum_dtype

Array = NDArray[Any]

RNG = np.random.default_rng(0)
B, H, N, D, M = 2, 3, 7, 12, 40
X = RNG.normal(size=(B, H, N, D))
ANGLE = RNG.normal(size=(M, D // 2))
COS, SIN = np.cos(ANGLE), np.sin(ANGLE)


def by_complex_numbers(x: Array, angle: Array, positions: Array, interleaved: bool) -> Array:
    """Multiply pairs of columns, as complex numbers, by ``exp(i angle)``."""
    half, out = angle.shape[1], x.copy()
    for c in range(half):
        a, b = (2 * c, 2 * c + 1) if interleaved else (c, c + half)
        turned = (x[..., a] + 1j * x[..., b]) * np.exp(1j * angle[positions, c])
        out[..., a], out[..., b] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [0, 1, 4, 6])
@pytest.mark.parametrize(
    ("positions", "rows"),
    [
        (None, np.arange(N)),
        (5, np.arange(5, 5 + N)),
        ([3, 0, 39, 1, 1, 2, 7], np.array([3, 0, 39, 1, 1, 2, 7])),
        (np.arange(B * N, dtype=np.uint8).reshape(B, N), np.arange(B * N).reshape(B, 1, N)),
    ],
    ids=["none", "offset", "rows", "entries"],
)
def test_pairs_are_turned(positions: Any, rows: Array, half: int, interleaved: bool) -> None:
    cos, sin = COS[:, :half], SIN[:, :half]
    found = tileattn.rope(X, cos, sin, positions=positions, interleaved=interleaved)
    expected = by_complex_numbers(X, ANGLE[:, :half], rows, interleaved)
    # error_bound is for attention. A rotation in float64 is two products: a few ulp of either.
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("lead", [(), (H,), (B, H)])
def test_leading_axes_are_turned_alike(lead: tuple[int, ...]) -> None:
    x = RNG.normal(size=(*lead, N, D))
    expected = by_complex_numbers(x, ANGLE, np.arange(N), interleaved=False)
    np.testing.assert_allclose(tileattn.rope(x, COS, SIN), expected, rtol=1e-12, atol=1e-13)


@settings(max_examples=50)
@given(seed=st.integers(0, 999), interleaved=st.booleans(), offset=st.integers(0, M - N))
def test_the_gradient_is_the_rotation_back(seed: int, interleaved: bool, offset: int) -> None:
    """Also for tables that are no cosines and sines."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(2, B, H, N, D))
    tables = rng.normal(size=(2, M, D // 2))
    options: dict[str, Any] = {"positions": offset, "interleaved": interleaved}
    forward = np.vdot(y, tileattn.rope(x, *tables, **options))
    backward = np.vdot(x, tileattn.rope(y, *tables, inverse=True, **options))
    # Sums of the same products in another order; cancellation costs four digits at most.
    np.testing.assert_allclose(forward, backward, rtol=1e-10)


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32])
def test_sums_have_at_least_32_bits(dtype: Any) -> None:
    x = X.astype(dtype)
    found = tileattn.rope(x, COS, SIN)
    assert found.dtype == x.dtype
    exact = tileattn.rope(x.astype(np.float64), COS, SIN)
    rounding = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}[x.dtype.name]
    # Half an ulp of the dtype, and float32 sums of two products of about 3.
    np.testing.assert_allclose(found.astype(np.float64), exact, rtol=rounding, atol=4e-7)


@pytest.mark.parametrize("table", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tables_of_any_dtype_are_those_of_the_sums(dtype: Any, table: Any) -> None:
    x, cos, sin = X.astype(dtype), COS.astype(table), SIN.astype(table)
    found = tileattn.rope(x, cos, sin)
    sums = accum_dtype(np.dtype(dtype))
    np.testing.assert_array_equal(found, tileattn.rope(x, cos.astype(sums), sin.astype(sums)))
    assert found.dtype == dtype


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_inverse_rotates_back(dtype: Any, interleaved: bool) -> None:
    """Up to a rounding of each of the two, by half of epsilon, of numbers up to the pair's norm."""
    x = X.astype(dtype)
    there = tileattn.rope(x, COS, SIN, positions=3, interleaved=interleaved)
    back = tileattn.rope(there, COS, SIN, positions=3, interleaved=interleaved, inverse=True)
    epsilon = {FLOAT32: 2.0**-23, FLOAT64: 2.0**-52, BFLOAT16: 2.0**-7}.get(x.dtype, 2.0**-10)
    error = np.abs(back.astype(np.float64) - x.astype(np.float64))
    assert (error <= 4 * epsilon * np.abs(X).max()).all()
    assert not np.array_equal(there, x)


def test_packed_sequences_have_the_positions_of_their_tokens() -> None:
    starts = [0, 4, 4, 7]
    positions = [i + 2 for a, b in pairwise(starts) for i in range(b - a)]
    for x in (X[0], X[:1]):
        found = tileattn.rope(x, COS, SIN, positions=positions)
        for a, b in pairwise(starts):
            alone = tileattn.rope(x[..., a:b, :], COS, SIN, positions=2)
            np.testing.assert_array_equal(found[..., a:b, :], alone)


def test_columns_that_are_not_rotated_keep_their_bits() -> None:
    x = np.random.default_rng(0).integers(0, 1 << 16, (N, D), np.uint16).view(np.float16)
    found = tileattn.rope(x, COS[:, :2], SIN[:, :2])
    np.testing.assert_array_equal(found.view(np.uint16)[:, 4:], x.view(np.uint16)[:, 4:])


def at_device(positions: Any) -> Any:
    return DeviceArray(positions)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("positions", "send"),
    [
        (None, None),
        (5, None),
        (4, at_device),
        (np.arange(2, 2 + N, dtype=np.int32), at_device),
        (np.arange(B * N).reshape(B, N), at_device),
        (np.arange(B * N).reshape(B, N), None),
    ],
)
def test_nothing_waits_for_a_device(
    positions: Any, send: Any, interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned(monkeypatch)
    options: dict[str, Any] = {"interleaved": interleaved, "inverse": True}
    expected = tileattn.rope(X, COS, SIN, positions=positions, **options)
    there = positions if send is None else send(positions)
    found = tileattn.rope(*map(DeviceArray, (X, COS, SIN)), positions=there, **options)
    np.testing.assert_array_equal(found.host, expected)


def test_arrays_of_two_libraries_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    owned(monkeypatch)
    with pytest.raises(TypeError, match=r"^positions must be a NumPy array; got .*DeviceArray"):
        tileattn.rope(X, COS, SIN, positions=DeviceArray(np.arange(N)))
    with pytest.raises(TypeError, match=r"^sin must be an array of backend 'device'; got numpy"):
        tileattn.rope(DeviceArray(X), DeviceArray(COS), SIN)


def test_the_argument_stays_and_may_have_any_strides() -> None:
    x = np.empty((B, N, 2, H, D)).swapaxes(1, 3)[:, :, 0]
    x[...] = X
    found = tileattn.rope(x, np.asfortranarray(COS), SIN[:, ::-1][:, ::-1])
    np.testing.assert_array_equal(found, tileattn.rope(X, COS, SIN))
    np.testing.assert_array_equal(x, X)


def test_no_row_at_all() -> None:
    nothing = np.zeros((H, 0, D))
    assert tileattn.rope(nothing, COS, SIN).shape == nothing.shape
    assert tileattn.rope(nothing, COS[:0], SIN[:0], positions=[]).shape == nothing.shape


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"x": X.astype(int)}, TypeError, "x must have dtype float16, "),
        ({"x": X[0, 0, 0]}, ValueError, "x must have shape (N, D), (H, N, D)"),
        ({"cos": COS[0]}, ValueError, "cos must have shape (M, R / 2)"),
        ({"cos": np.ones((M, 7))}, ValueError, "cos must have shape (M, R / 2)"),
        ({"sin": SIN[1:]}, ValueError, "sin must have the shape of cos, (40, 6); got (39, 6)"),
        ({"positions": M - N + 1}, ValueError, "positions must be from 0 to 39, the rows of cos"),
        ({"positions": -1}, ValueError, "positions must be from 0 to 39"),
        ({"positions": [0] * 6 + [M]}, ValueError, "positions must be from 0 to 39, the rows of"),
        ({"positions": [0, 1]}, ValueError, "positions must be an integer, or integers of shape"),
        ({"positions": 1 << 61}, ValueError, "positions must hold integers up to 2**60"),
        ({"positions": [[0] * N] * 3}, ValueError, "positions must be an integer, or"),
        ({"positions": True}, TypeError, "positions must be an integer, or integers of shape (7,)"),
        (
            {"x": X[0, 0].view(np.matrix)},
            TypeError,
            "x must be a NumPy or CuPy array; got numpy.matrix",
        ),
        ({"sin": SIN.tolist()}, TypeError, "sin must be a NumPy or CuPy array; got ["),
        ({"cos": np.ma.array(COS)}, TypeError, "cos must be an array without a mask; got"),
        ({"inverse": None}, TypeError, "inverse must be True or False; got None"),
        ({"positions": 1.0}, TypeError, "positions must be an integer, or integers of shape (7,)"),
        ({"interleaved": 1}, TypeError, "interleaved must be True or False; got 1"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        tileattn.rope(**{"x": X, "cos": COS, "sin": SIN} | changed)
