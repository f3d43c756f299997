"""Compare results with the oracle."""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from tileattn.results import Attention, Gradients
from tileattn.testing.bounds import Bound, named

Array = NDArray[Any]


def assert_attention_close(
    actual: Attention | Gradients,
    expected: Attention | Gradients,
    bounds: Mapping[str, Bound],
    *,
    names: Iterable[str] | None = None,
    array_type: type[Any] = np.ndarray,
) -> None:
    """Compare the results of a call with the oracle.

    Parameters
    ----------
    actual : Attention or Gradients
        Results of the backend.
    expected : Attention or Gradients
        Results of ``tileattn.reference``, in float64.
    bounds : mapping of str to Bound
        Bounds from ``error_bound``.
    names : iterable of str, optional
        Results to compare; all by default.
    array_type : type
        Class that the arrays of ``actual`` must have. Other arrays than NumPy's are copied to the
        host by their ``get`` method.

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
    """
    if type(actual) is not type(expected):
        _fail("the result", f"is {type(actual).__name__}, expected {type(expected).__name__}")
    mine, others = named(actual), named(expected)
    for name in {**others, **mine} if names is None else names:
        ours, theirs = mine.get(name), others.get(name)
        if ours is None and theirs is None:
            continue
        if ours is None or theirs is None:
            _fail(name, f"is {_kind(ours)}, expected {_kind(theirs)}")
        if name not in bounds:
            _fail(name, f"has no bound; bounds are given for {', '.join(bounds)}")
        _assert_close(name, ours, theirs, bounds[name], array_type)


def _assert_close(
    name: str, actual: Any, expected: Array, bound: Bound, array_type: type[Any]
) -> None:
    if not isinstance(actual, array_type):
        _fail(name, f"is {_kind(actual)}, expected {array_type.__module__}.{array_type.__name__}")
    if actual.shape != expected.shape:
        _fail(name, f"has shape {actual.shape}, expected {expected.shape}")
    if actual.dtype != bound.dtype:
        _fail(name, f"has dtype {actual.dtype}, expected {bound.dtype}")
    on_host = actual if isinstance(actual, np.ndarray) else actual.get()
    ours = on_host.astype(np.float64)
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
