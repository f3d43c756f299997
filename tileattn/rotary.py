"""Rotary position embedding of queries and keys."""

from typing import Any

import numpy as np

from tileattn.backends.registry import ensure_one_owner
from tileattn.call.parse import check_dtype
from tileattn.call.sequences import as_integers
from tileattn.dtypes import accum_dtype
from tileattn.messages import called
from tileattn.validation import check_flags


def rope(
    x: Any,
    cos: Any,
    sin: Any,
    *,
    positions: Any = None,
    interleaved: bool = False,
    inverse: bool = False,
) -> Any:
    """Rotate pairs of columns by angles that grow with the position.

    Parameters
    ----------
    x : array, shape (B, H, N, D), (H, N, D) or (N, D)
        Queries or keys; float16, bfloat16, float32 or float64. Packed sequences are (H, T, D).
    cos, sin : array, shape (M, R / 2)
        Cosine and sine of the angle of each pair, for positions 0 to M - 1, of any of these dtypes.
        The first R columns of x are rotated, the others stay.
    positions : int, array or sequence of int of shape (N,) or (B, N), or None
        Position of each row; an integer is the position of the first row, and None is 0.
    interleaved : bool
        True if columns 2c and 2c + 1 are a pair (GPT-J); False for c and c + R / 2 (GPT-NeoX,
        Llama).
    inverse : bool
        Rotate back: the gradient of ``rope`` is ``rope`` of the upstream gradient with
        ``inverse=True``.

    Returns
    -------
    array
        A new array of the shape and dtype of x. It is computed in float32, to which the tables are
        rounded, or in float64 where x is float64.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it. Positions on a device are not
        checked: positions outside the tables use the nearest row.

    References
    ----------
    Su et al., RoFormer, arXiv:2104.09864, equation 34.

    Examples
    --------
    >>> import numpy as np
    >>> import tileattn
    >>> angle = np.arange(6)[:, None] * 10_000.0 ** (-np.arange(4) / 4)
    >>> q = np.ones((2, 6, 8))
    >>> rotated = tileattn.rope(q, np.cos(angle), np.sin(angle))
    >>> bool(np.allclose(tileattn.rope(rotated, np.cos(angle), np.sin(angle), inverse=True), q))
    True
    """
    for name, array in (("x", x), ("cos", cos), ("sin", sin)):
        check_dtype(name, array)
    owner = ensure_one_owner({"x": x, "cos": cos, "sin": sin}, {"positions": positions})
    if not 2 <= x.ndim <= 4:
        raise ValueError(
            f"{called('x')} must have shape (N, D), (H, N, D) or (B, H, N, D); got {x.shape}"
        )
    check_tables(x, cos, sin)
    check_flags(interleaved=interleaved, inverse=inverse)
    p = _positions(x, positions, len(cos))
    kernel = getattr(owner, "rope", None)
    if kernel is not None:
        return kernel(x, cos, sin, p, bool(interleaved), bool(inverse))
    sums = accum_dtype(x.dtype)
    rows = _rows(x, p)
    c, s = (table[rows].astype(sums, copy=False) for table in (cos, sin))
    if c.ndim == 3:  # one for each batch entry, shared by its heads
        c, s = c[:, np.newaxis], s[:, np.newaxis]
    half = cos.shape[1]
    first, second = slice(0, half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    if inverse:
        s = -s
    rotated = x.copy()
    with np.errstate(all="ignore"):
        a, b = (x[..., columns].astype(sums, copy=False) for columns in (first, second))
        rotated[..., first] = (a * c - b * s).astype(x.dtype, copy=False)
        rotated[..., second] = (b * c + a * s).astype(x.dtype, copy=False)
    return rotated


def check_tables(x: Any, cos: Any, sin: Any) -> None:
    """Raise ValueError if tables do not have the shape that rows of an array need."""
    if cos.ndim != 2 or 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"{called('cos')} must have shape (M, R / 2), with R at most the head dimension, "
            f"{x.shape[-1]}; got {cos.shape}"
        )
    if sin.shape != cos.shape:
        raise ValueError(
            f"{called('sin')} must have the shape of {called('cos')}, {cos.shape}; got {sin.shape}"
        )


def _positions(x: Any, positions: Any, M: int) -> Any:
    """Validate positions: one integer, that of the first row, or one for each row."""
    N = x.shape[-2]
    shape = f"({N},)" if x.ndim < 4 else f"({N},) or {(x.shape[0], N)}"
    what, rows = (
        f"an integer, or integers of shape {shape}",
        f"from 0 to {M - 1}, the rows of {called('cos')}",
    )
    p = as_integers("positions", 0 if positions is None else positions, what)
    if p.shape == () and isinstance(p, np.ndarray):
        first, last = int(p), int(p) + N - 1
        if N and (first < 0 or last >= M):
            raise ValueError(f"{called('positions')} must be {rows}; got {first} to {last}")
        return p
    if p.shape not in ((), (N,)) and (x.ndim < 4 or p.shape != (x.shape[0], N)):
        raise ValueError(f"{called('positions')} must be {what}; got shape {p.shape}")
    if isinstance(p, np.ndarray):
        for wrong in p[(p < 0) | (p >= M)].flat:
            raise ValueError(f"{called('positions')} must be {rows}; got {wrong}")
    return p


def _rows(x: Any, p: Any) -> Any:
    """Return the rows of the tables for the rows of x."""
    N = x.shape[-2]
    if p.shape == () and isinstance(p, np.ndarray):
        return slice(int(p), int(p) + N)
    p = np.asarray(p, like=x)
    return p if p.shape else p + np.arange(N, like=p)
