"""Blocks with one more column, by which a matrix product subtracts a constant from each row."""

from typing import Any

import numpy as np

from tileattn import record
from tileattn.algorithm.mask import Tile
from tileattn.algorithm.softmax import Array, Scratch


def append_column(x: Array, column: Any, out: Array, scale: float | None = None) -> Array:
    """Write an array and one more column.

    Parameters
    ----------
    x : array, shape (..., N, C)
        The array.
    column : array of shape (..., N), or number
        The column.
    out : array, shape (..., N, C + 1)
        Where both are written.
    scale : float or None
        Multiplies the array, not the column.

    Returns
    -------
    array
        ``out``.
    """
    if scale is None:
        out[..., :-1] = x
    else:
        np.multiply(x, out.dtype.type(scale), out=out[..., :-1], dtype=out.dtype)
    out[..., -1] = column
    return out


def with_ones(name: str, x: Array, dtype: np.dtype[Any], scratch: Scratch) -> Array:
    """Bring a block of keys or values into fast memory, with a column of ones.

    Parameters
    ----------
    name : str
        Of the array, for the record and the buffer.
    x : array, shape (..., N, C)
        The block.
    dtype : numpy.dtype
        Of the result.
    scratch : Scratch
        Buffers.

    Returns
    -------
    array, shape (..., N, C + 1)
        A buffer.
    """
    record.read(name, x)
    shape = (*x.shape[:-1], x.shape[-1] + 1)
    return append_column(x, 1, scratch.take(f"block of {name}", shape, dtype))


def with_column(
    named: dict[str, Array],
    tile: Tile,
    dtype: np.dtype[Any],
    scratch: Scratch,
    scale: float | None = None,
) -> Array:
    """Bring rows of a tile into fast memory, with their statistic, negated, as one more column.

    Parameters
    ----------
    named : dict of str to array
        The array, shape (..., Nq, C), then the statistic, shape (..., Nq), by their names.
    tile : Tile
        Whose queries.
    dtype : numpy.dtype
        Of the result.
    scratch : Scratch
        Buffers.
    scale : float or None
        Multiplies the array.

    Returns
    -------
    array, shape (..., q1 - q0, C + 1)
        A buffer.
    """
    (name, x), (other, statistic) = named.items()
    rows, column = x[..., tile.queries, :], statistic[..., tile.queries]
    record.read(name, rows)
    record.read(other, column)
    out = scratch.take(name, (*rows.shape[:-1], rows.shape[-1] + 1), dtype)
    return append_column(rows, -column, out, scale)
