"""Products of float32 matrices on float16 tensor cores.

Each operand is multiplied by a power of two and split into two float16 numbers: ``high`` has the
first 11 significant bits, ``low`` the following ones. Three of the four products of the parts are
summed in float32: ``high high`` in one sum, the cross products ``high low`` and ``low high`` in
another. The fourth, ``low low``, is at most ``2**-22 |x| |y|`` and is left out.

`scores`, `weighted_sum` and `gradient_product` emulate the kernels. They round float32 sums to
nearest; tensor cores truncate sums, which is not emulated.

References
----------
Ootomo and Yokota, Recovering single precision accuracy from Tensor Cores while surpassing the FP32
theoretical peak performance, arXiv:2203.03341.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tileattn.algorithm.tiles import cut

Array = NDArray[Any]

TILE_ROWS = 64
"""Rows of a tile, from row 0 of the sequence. The rows of a tile share a factor."""

LOW_SCALE = np.float32(2.0**11)
"""Factor of ``low``, which keeps it in the range of float16."""

SMALLEST_ROW = np.float32(2.0**-24)
"""Least ratio of the largest element of a row that is not 0 to the largest of its tile."""

FORWARD_P_FACTOR = np.float32(2.0**11)
"""Factor of P in the forward pass. P may reach ``2**15``: its running maximum may lag."""

BACKWARD_P_FACTOR = np.float32(2.0**15)
"""Factor of P in the backward pass: ``2**8`` in the exponent, and ``2**7`` before the split."""


class Split(NamedTuple):
    """The two float16 parts of float32 numbers, of the same shape: ``high + low * 2**-11``."""

    high: Array
    low: Array


def power_of_two(largest: ArrayLike) -> Array:
    """Return the float32 factor that moves a finite number >= 0 into ``[2**14, 2**15)``.

    With ``b`` the exponent field of the number, which is 0 for 0 and for subnormal numbers, the
    field of the factor is ``min(268 - b, 253)``. So the factor is from ``2**-113`` to ``2**126``,
    and its inverse is normal. Numbers below ``2**-112`` stay below ``2**14``.

    Examples
    --------
    >>> power_of_two(np.array([0.75, 1.0, 3.0, 2.0**14], np.float32)).tolist()
    [32768.0, 16384.0, 8192.0, 1.0]
    """
    field = np.asarray(largest, np.float32).view(np.uint32) >> 23
    factor: Array = (np.minimum(268 - field, 253) << 23).view(np.float32)
    return factor


def inverse_power(factor: ArrayLike) -> Array:
    """Return the exact inverse of a factor: its exponent field is 254 less that of the factor."""
    bits = np.asarray(factor, np.float32).view(np.uint32)
    inverse: Array = (np.uint32(254 << 23) - bits).view(np.float32)
    return inverse


def split(x: Array, factor: ArrayLike) -> Split:
    """Split ``y = x * factor``, below ``2**15``, into float16 parts, rounded to nearest even.

    ``high = float16(y)`` and ``low = float16((y - high) * 2**11)``.

    Notes
    -----
    The error of ``high + low * 2**-11`` is at most ``max(2**-23 |y|, 2**-36)``. Let
    ``2**e <= |y| < 2**(e + 1)``. If ``high`` is normal, ``|y - high|`` is at most ``2**(e - 11)``.
    It is a multiple of ``2**(e - 23)``, the last place of y, so it has up to 13 bits. float16 keeps
    11 of them: the error is at most ``2**(e - 23)``. Subnormal float16 numbers have the spacing
    ``2**-24``. So if ``high`` is subnormal, ``|y - high|`` is at most ``2**-25``; if ``low`` is, it
    has an error of up to ``2**-25``, and ``low * 2**-11`` of up to ``2**-36``.

    With the factor of the largest element, elements have an error of ``2**-23 |x|`` down to
    ``2**-27`` of the largest. Smaller elements have up to ``2**-50`` of the largest.
    """
    with np.errstate(all="ignore"):  # of numbers that are not finite
        y = x * np.asarray(factor, np.float32)
        high = y.astype(np.float16)
        return Split(high, ((y - high.astype(np.float32)) * LOW_SCALE).astype(np.float16))


def split_tiles(x: Array, tile_rows: int = TILE_ROWS) -> tuple[Array, Array, Array]:
    """Split rows with a factor for each tile: keys and values, and q and dout in the backward pass.

    The largest finite ``|element|`` of a tile gives its factor. A tile is not splittable if it has
    a NaN or an infinity, or if the largest ``|element|`` of a row is not 0 but below ``2**-24`` of
    the largest of the tile: such a row would lose digits.

    Parameters
    ----------
    x : array of float32, shape (..., N, D)
        Rows. Rows of the last tile past row N are zero.
    tile_rows : int
        Rows of a tile.

    Returns
    -------
    high, low : array of float16, shape (..., N, D)
        Parts of x times the factor; unspecified in tiles that are not splittable.
    inverse : array of float32, shape (..., ceil(N / tile_rows))
        Inverse factor of each tile; NaN if the tile is not splittable.
    """
    finite = np.isfinite(x)
    of_row = np.where(finite, np.abs(x), np.float32(0)).max(axis=-1, initial=0)
    largest = _tiles(of_row, tile_rows)
    of_tile = largest.max(axis=-1, initial=0)
    with np.errstate(over="ignore"):  # an infinite quotient is not below the largest, either
        small = (largest > 0) & (largest / SMALLEST_ROW < of_tile[..., None])
    bad = small | ~_tiles(finite.all(axis=-1), tile_rows, fill=True)
    factor = power_of_two(of_tile)
    high, low = split(x, np.repeat(factor, tile_rows, axis=-1)[..., : x.shape[-2], None])
    return high, low, np.where(bad.any(axis=-1), np.float32(np.nan), inverse_power(factor))


def split_rows(x: Array) -> tuple[Array, Array, Array]:
    """Split rows (..., N, D) as tiles of one row: q in the forward pass. Inverse: (..., N)."""
    return split_tiles(x, tile_rows=1)


def scores(q: Array, k: Array, tile_rows: int = 1) -> Array:
    """Return ``q k^T`` of three products, up to the truncation of tensor cores.

    The backward pass computes ``q k^T`` again, and ``dout v^T``, in the same way.

    Parameters
    ----------
    q : array of float32, shape (..., M, D)
        Queries. The inverse factors of a query and of a tile of k must have a finite product. Below
        ``2**-138`` the cross products count as 0, below ``2**-149`` all products: the scores have
        an error of up to ``D 2**-120``.
    k : array of float32, shape (..., N, D)
        Keys.
    tile_rows : int
        Rows of q that share a factor: 1 in the forward pass, ``TILE_ROWS`` in the backward pass.

    Returns
    -------
    array of float32, shape (..., M, N)
        ``(q_high k_high + 2**-11 (q_high k_low + q_low k_high)) / factors``; NaN for tiles of q and
        k that are not splittable.

    Notes
    -----
    Tensor cores sum ``q_high k_high`` over 64 columns at a time, since they truncate, and over 128
    columns if D is above 128. They sum the cross products over all columns: an error of this sum is
    multiplied by ``2**-11``.
    """
    *q_parts, q_inverse = split_tiles(q, tile_rows)
    *k_parts, k_inverse = split_tiles(k)
    q_high, q_low = (x.astype(np.float32) for x in q_parts)
    k_high, k_low = (x.astype(np.float32).swapaxes(-1, -2) for x in k_parts)
    cross = q_high @ k_low + q_low @ k_high
    total = np.zeros_like(cross)
    D = q.shape[-1]
    for lo, hi in cut(D, 64 if D <= 128 else 128):
        total += q_high[..., lo:hi] @ k_high[..., lo:hi, :]
    of_query = np.repeat(q_inverse, tile_rows, axis=-1)[..., : q.shape[-2], None]
    of_key = np.repeat(k_inverse, TILE_ROWS, axis=-1)[..., None, : k.shape[-2]]
    inverse = of_query * of_key
    result: Array = total * inverse + cross * (inverse / LOW_SCALE)
    return result


def weighted_sum(p: Array, v: Array, keys: int = TILE_ROWS) -> Array:
    """Return ``p v`` of three products for each tile of v, up to the truncation of tensor cores.

    P needs no factor of its tile: ``split(p, 1)`` keeps all digits down to ``2**-13``, and smaller
    numbers have an error of up to ``2**-36``. In the forward pass this is ``2**-24`` and ``2**-47``
    of the largest P of the row. The backward pass computes ``P^T dout`` in the same way: dv.

    Parameters
    ----------
    p : array of float32, shape (..., M, N)
        P times ``FORWARD_P_FACTOR`` or ``BACKWARD_P_FACTOR``, from 0 to ``2**15``.
    v : array of float32, shape (..., N, Dv)
        Values.
    keys : int
        Keys, or queries for dv, in one sum of the tensor cores: 64, or 32 if D or Dv is above 192
        (in the generic kernels above 64; 16 queries for dv).

    Returns
    -------
    array of float32, shape (..., M, Dv)
        ``(p_high v_high + 2**-11 (p_high v_low + p_low v_high)) / factor``, added sum by sum; NaN
        if a tile is not splittable.
    """
    one = np.ones(p.shape[:-1], np.float32)
    return _tile_products(p, v, lambda columns: (*split(columns, 1), one), keys)


def gradient_product(ds: Array, x: Array, rows: int = TILE_ROWS) -> Array:
    """Return ``ds x`` of three products for each tile of x, up to the truncation of tensor cores.

    ``dS k`` is dq and ``dS^T q`` is dk, before the scale.

    Parameters
    ----------
    ds : array of float32, shape (..., M, N)
        dS or its transpose. The rows of each tile of as many columns as x has rows in one sum have
        their own factors.
    x : array of float32, shape (..., N, D)
        Keys or queries. The inverse factors of a row of ds and of a tile of x must have a finite
        product. Small products add an error of up to ``N 2**-120``, as in `scores`.
    rows : int
        Rows of x in one sum of the tensor cores: 64, or 32 for dq if D or Dv is above 128, and for
        dk above 192. In the generic kernels 16 for dk, and 16 or 32 for dq.

    Returns
    -------
    array of float32, shape (..., M, D)
        ``(ds_high x_high + 2**-11 (ds_high x_low + ds_low x_high)) / factors``, added tile by tile;
        NaN if a tile of x is not splittable, and in rows with NaN or infinities.
    """
    return _tile_products(ds, x, split_rows, rows)


def _tile_products(
    a: Array,
    x: Array,
    split_columns: Callable[[Array], tuple[Array, Array, Array]],
    depth: int,
) -> Array:
    """Return ``a x``, added after each ``depth`` rows of x.

    ``split_columns`` splits as many columns of a, and returns an inverse factor of each row.
    """
    *x_parts, x_inverse = split_tiles(x)
    batch = np.broadcast_shapes(a.shape[:-2], x.shape[:-2])
    out = np.zeros((*batch, a.shape[-2], x.shape[-1]), np.float32)
    for lo, hi in cut(x.shape[-2], depth):
        *a_parts, a_inverse = split_columns(a[..., lo:hi])
        a_high, a_low = (y.astype(np.float32) for y in a_parts)
        x_high, x_low = (y[..., lo:hi, :].astype(np.float32) for y in x_parts)
        inverse = (a_inverse * x_inverse[..., lo // TILE_ROWS, None])[..., None]
        out += (a_high @ x_high) * inverse
        out += (a_high @ x_low + a_low @ x_high) * (inverse / LOW_SCALE)
    return out


def _tiles(of_rows: ArrayLike, tile_rows: int, fill: Any = 0) -> Array:
    """Cut the last axis into tiles (..., tiles, tile_rows) and fill the last one."""
    x = np.asarray(of_rows)
    missing = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % tile_rows)]
    whole = np.pad(x, missing, constant_values=fill)
    return whole.reshape(*x.shape[:-1], whole.shape[-1] // tile_rows, tile_rows)
