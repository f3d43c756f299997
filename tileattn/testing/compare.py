"""Compare results with the oracle."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from tileattn.results import Attention, Gradients
from tileattn.testing.bounds import Bound, named
from tileattn.validation import on_host

Array = NDArray[Any]
Results = Attention | Gradients | Mapping[str, Any] | Sequence[Any] | Any


def assert_attention_close(
    actual: Results,
    expected: Results,
    bounds: Mapping[str, Bound],
    *,
    names: Iterable[str] | None = None,
    array_type: type[Any] | None = None,
) -> None:
    """Compare the results of a call with the oracle.

    Parameters
    ----------
    actual : Attention, Gradients, array, tuple of array, or mapping of str to array
        What is tested. A single array is ``out``, a pair ``(out, lse)``, and three to five arrays
        are the gradients ``(dq, dk, dv, dbias, dsinks)``; a mapping has results by name. Arrays are
        NumPy's, or arrays and tensors of PyTorch, CuPy and JAX.
    expected : Attention, Gradients, array, tuple of array, or mapping of str to array
        What it is compared with, in float64: results of ``tileattn.reference``.
    bounds : mapping of str to Bound
        Bounds from ``error_bound``.
    names : iterable of str, optional
        Results to compare. By default all of both; if one is not an ``Attention`` or ``Gradients``,
        the ones that it has.
    array_type : type or None
        Class that the arrays of ``actual`` must have. Arrays of a library that is not listed above
        are copied to the host by their ``get`` method.

    Raises
    ------
    AssertionError
        If the type of the result, the class, shape or dtype of an array, or the positions of NaN
        and of either infinity differ, or if an error exceeds its bound.

    Notes
    -----
    ``expected`` is rounded to the dtype of ``actual`` first, so an overflow of that dtype is no
    difference. A NaN that ``expected`` lacks is a difference.

    Examples
    --------
    >>> import tileattn
    >>> from tileattn.testing import assert_attention_close, error_bound
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)
    >>> assert_attention_close(
    ...     tileattn.forward(q, k, v),
    ...     tileattn.reference.forward(q, k, v),
    ...     error_bound(q, k, v),
    ... )

    A kernel that returns the output alone, and nothing but arrays:

    >>> out, _ = tileattn.forward(q, k, v)
    >>> assert_attention_close(out, tileattn.reference.forward(q, k, v), error_bound(q, k, v))
    """
    both = actual, expected
    records = [isinstance(x, Attention | Gradients) for x in both]
    if all(records) and type(actual) is not type(expected):
        _fail("the result", f"is {type(actual).__name__}, expected {type(expected).__name__}")
    mine, others = map(_by_name, both)
    if names is None:
        names = [n for n in {**others, **mine} if all(records) or (n in mine and n in others)]
        if not names:
            _fail("the result", f"has {', '.join(mine)}, expected {', '.join(others)}")
    for name in names:
        ours, theirs = mine.get(name), others.get(name)
        if ours is None and theirs is None:
            continue
        if ours is None or theirs is None:
            _fail(name, f"is {_kind(ours)}, expected {_kind(theirs)}")
        if name not in bounds:
            _fail(name, f"has no bound; bounds are given for {', '.join(bounds)}")
        _assert_close(name, ours, theirs, bounds[name], array_type)


def _by_name(results: Results) -> dict[str, Any]:
    """Return results by name."""
    if isinstance(results, Attention | Gradients):
        return named(results)
    if isinstance(results, Mapping):
        return dict(results)
    if not isinstance(results, tuple | list):
        return {"out": results}
    fields = Attention._fields if len(results) <= len(Attention._fields) else Gradients._fields
    if len(results) > len(fields):
        _fail("the result", f"has {len(results)} arrays, expected at most {len(fields)}")
    return dict(zip(fields, results, strict=False))


def _assert_close(
    name: str, actual: Any, expected: Array, bound: Bound, array_type: type[Any] | None
) -> None:
    host = on_host(actual)
    if not isinstance(actual if array_type else host, kind := array_type or np.ndarray):
        _fail(name, f"is {_kind(actual)}, expected {kind.__module__}.{kind.__name__}")
    actual, expected = host, on_host(expected)
    if actual.shape != expected.shape:
        _fail(name, f"has shape {actual.shape}, expected {expected.shape}")
    if actual.dtype != bound.dtype:
        _fail(name, f"has dtype {actual.dtype}, expected {bound.dtype}")
    ours = (actual if isinstance(actual, np.ndarray) else actual.get()).astype(np.float64)
    with np.errstate(over="ignore"):
        theirs = np.asarray(expected).astype(bound.dtype).astype(np.float64)
    for what, found in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        differ = found(ours) != found(theirs)
        if differ.any():
            where = _index(np.argmax(differ), differ.shape)
            values = f"{ours[where]}, expected {theirs[where]}"
            _fail(name, f"has {what} at other positions than expected; at {where} it is {values}")
    compared = np.isfinite(theirs)
    difference = np.zeros(theirs.shape)
    difference[compared] = ours[compared] - np.asarray(expected, np.float64)[compared]
    error = float(np.linalg.norm(difference))
    ok = error <= bound.error  # false for NaN, in either
    if not ok:
        where = _index(np.argmax(np.abs(difference)), difference.shape)
        size = float(np.linalg.norm(theirs[compared]))
        _fail(
            name,
            f"has error {error:.3g} (Frobenius norm), above its bound {bound.error:.3g}; the norm "
            f"of the expected result is {size:.3g}; worst at {where}: {ours[where]}, "
            f"expected {float(expected[where])}",
        )


def _index(flat: np.intp, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(flat, shape))


def _kind(x: Any) -> str:
    return "None" if x is None else f"{type(x).__module__}.{type(x).__name__}"


def _fail(name: str, what: str) -> NoReturn:
    raise AssertionError(f"{name} {what}")
