"""How far off each result of a call may be."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.call.options import options_with
from tileattn.call.parse import refuse_pages
from tileattn.dtypes import accum_dtype
from tileattn.oracle.dense import Backward, Forward, evaluate_backward, evaluate_forward
from tileattn.oracle.packed import padded
from tileattn.reference import check_call
from tileattn.results import Attention, Gradients
from tileattn.testing.rounding import (
    Rounding,
    backward_floors,
    finite,
    forward_floors,
    norm,
    storing,
    summing,
)

Array = NDArray[Any]


_FULL = 1.0021  # times it, no number is short: products of short ones are summed without rounding


class Bound(NamedTuple):
    """The bound of one result.

    Parameters
    ----------
    error : float
        Largest Frobenius norm allowed for ``actual - expected``.
    dtype : numpy.dtype
        The dtype that the result must have.
    """

    error: float
    dtype: np.dtype[Any]


def error_bound(
    q: Array,
    k: Array,
    v: Array,
    dout: Array | None = None,
    *,
    dlse: Array | None = None,
    **options: Any,
) -> dict[str, Bound]:
    """Say how far off each result of a call may be, and which dtype it must have.

    Parameters
    ----------
    q, k, v : array
        NumPy arrays, as in ``tileattn.forward``; packed sequences, too.
    dout : array, shape (B, Hq, Nq, Dv), optional
        Upstream gradient of ``out``. Without it only ``out`` and ``lse`` are bounded.
    dlse : array, shape (B, Hq, Nq), optional
        Upstream gradient of ``lse``.
    **options
        The options of the call.

    Returns
    -------
    dict of str to Bound
        By the names of the results: ``out``, ``lse``, and with ``dout`` also ``dq``, ``dk``, ``dv``
        and, where the call has them, ``dbias``, ``dsinks`` and ``daux[0]``, ``daux[1]``, ...

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As ``tileattn.reference``.

    Notes
    -----
    With ``unfused`` the formula on whole matrices, evaluated in the accumulation dtype (float32, or
    float64 for float64 arrays) and rounded to the dtype of the result, the bound is

    ``2 ||unfused - exact|| + rounding``.

    The first term is the promise of the package. The second matters where unfused attention happens
    to be exact (one key, small integers, equal scores) and no other order of operations can be. It
    is the root of the sum of squares of

    * half a unit in the last place of every element that is stored (the results, P and dS), and a
      whole one of ``out`` where ``delta`` is computed from it;
    * two units in the last place, in the accumulation dtype, of the modifiers of every score and of
      ``lse``, which is a relative error of P, and of ``dout v^T`` and every product in it.

    It does not grow with the number of terms that are summed, so it stays near one unit in the last
    place of the result unless terms cancel. Norms are absolute, so that a result that is exactly
    zero needs no case of its own. Elements that are not finite count for nothing here: they are
    compared by position.

    For float64 the oracle is no more exact than the result. There the error of unfused attention is
    measured one precision lower, in float32 against float64 on the rounded inputs, and scaled by
    the ratio of the machine epsilons. The oracle may be off by as much again, so that the first
    term is three times that error. Where q and k hold short numbers, such as 0.5, unfused attention
    sums them without rounding, and no order that scales q first can. So the larger of two
    measurements counts, the second with q times a number that is not short.
    """
    if dout is not None:
        refuse_pages("backward", options)
    upstream = {"dlse": dlse} if dout is None else {"dlse": dlse, "dout": dout}
    options = check_call(q, k, v, options, **upstream)
    dtype = q.dtype
    sums = accum_dtype(dtype)
    dtypes = {"out": dtype, "lse": sums, "dq": dtype, "dk": dtype, "dv": dtype}
    for name in options_with(value="array", gradient=True):
        if options.get(name) is not None:
            dtypes[f"d{name}"] = np.asarray(options[name]).dtype
    dtypes |= {f"daux[{n}]": x.dtype for n, x in enumerate(options.get("aux") or ())}
    forward = evaluate_forward(q, k, v, np.float64, options)
    backward = None if dout is None else evaluate_backward(forward, dout, dlse)
    floors = _floors(forward, backward, dlse, storing(dtype), summing(sums))
    exact = _results(forward, backward)
    errors = _unfused_errors(exact, (q, k, v, dout, dlse), options, dtypes)
    bounds = {}
    for name, result in exact.items():
        floor = np.hypot(floors[name], np.sqrt(np.sum(storing(dtypes[name]).of(finite(result)))))
        bounds[name] = Bound(float(errors[name] + floor), dtypes[name])
    return bounds


def named(results: Attention | Gradients) -> dict[str, Array]:
    """Give the results of a call by their names, the gradients of ``aux`` one by one."""
    daux = results.daux if isinstance(results, Gradients) else None
    return results._asdict() | {f"daux[{n}]": x for n, x in enumerate(daux or ())}


def _results(forward: Forward, backward: Backward | None) -> dict[str, Array]:
    """Collect the results that there are, by name."""
    results = named(forward.results)
    if backward is not None:
        results |= named(backward.grads)
    return {name: result for name, result in results.items() if result is not None}


def _floors(
    f: Forward, b: Backward | None, dlse: Array | None, store: Rounding, sums: Rounding
) -> dict[str, float]:
    """Norms of the uncertainty of each result; padding of packed sequences adds nothing to them."""
    cu_seqlens = f.options.cu_seqlens_q
    # Padded rows see no key, but a sink: in place of it, their lse is that of no key at all.
    f = replace(f, lse=padded(f.results.lse, 3, cu_seqlens, fill=-np.inf))
    floors = forward_floors(f, store, sums)
    if b is not None:
        dense_dlse = None if dlse is None else padded(dlse, 3, cu_seqlens)
        floors |= backward_floors(f, b, dense_dlse, store, sums)
    return floors


def _unfused_errors(
    exact: dict[str, Array],
    arrays: Sequence[Array | None],
    options: dict[str, Any],
    dtypes: Mapping[str, np.dtype[Any]],
) -> dict[str, float]:
    """Measure the allowed multiple of the error of unfused attention for each result."""
    if dtypes["out"] != np.float64:
        return _measured_errors(exact, arrays, options, dtypes, 2.0)
    factor = 3 * float(np.finfo(np.float64).eps / np.finfo(np.float32).eps)
    dtypes = dict.fromkeys(dtypes, np.dtype(np.float32))
    largest: dict[str, float] = dict.fromkeys(exact, 0.0)
    for times in (1.0, _FULL):
        q, *others = (None if x is None else x.astype(np.float32) for x in arrays)
        single = (None if q is None else q * np.float32(times), *others)
        exact = _evaluate(single, np.float64, options)
        errors = _measured_errors(exact, single, options, dtypes, factor)
        largest = {name: max(error, largest[name]) for name, error in errors.items()}
    return largest


def _measured_errors(
    exact: dict[str, Array],
    arrays: Sequence[Array | None],
    options: dict[str, Any],
    dtypes: Mapping[str, np.dtype[Any]],
    factor: float,
) -> dict[str, float]:
    """Measure a multiple of the error of the unfused formula in float32, rounded to ``dtypes``."""
    unfused = _evaluate(arrays, np.float32, options)
    with np.errstate(all="ignore"):
        rounded = {name: x.astype(dtypes[name]).astype(np.float64) for name, x in unfused.items()}
        return {name: factor * norm(x - exact[name]) for name, x in rounded.items()}


def _evaluate(
    arrays: Sequence[Array | None], dtype: Any, options: dict[str, Any]
) -> dict[str, Array]:
    q, k, v, dout, dlse = arrays
    forward = evaluate_forward(q, k, v, dtype, options)
    return _results(forward, None if dout is None else evaluate_backward(forward, dout, dlse))
