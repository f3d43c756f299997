"""Error bounds of the results of a call."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.call.options import options_with
from tileattn.call.parse import refuse_caches
from tileattn.dtypes import accum_dtype
from tileattn.oracle.dense import Backward, Forward, evaluate_backward, evaluate_forward
from tileattn.oracle.packed import padded
from tileattn.reference import check_call
from tileattn.results import Attention, Gradients
from tileattn.testing.rounding import (
    Rounding,
    finite,
    floors,
    norm,
    storing,
    summing,
)
from tileattn.validation import on_host

Array = NDArray[Any]


_FULL = 1.0021  # a factor after which products are rounded; those of short numbers, as 0.5, are not


class Bound(NamedTuple):
    """The bound of one result.

    Parameters
    ----------
    error : float
        Largest allowed Frobenius norm of ``actual - expected``.
    dtype : numpy.dtype
        Dtype that the result must have.
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
    """Return the error bound and the dtype of each result of a call.

    Parameters
    ----------
    q, k, v : array
        As in ``tileattn.forward``, also packed: NumPy arrays, or arrays and tensors of PyTorch,
        CuPy and JAX, which are copied.
    dout : array, shape (B, Hq, Nq, Dv), optional
        Upstream gradient of ``out``. Without it, only ``out`` and ``lse`` are bounded.
    dlse : array, shape (B, Hq, Nq), optional
        Upstream gradient of ``lse``.
    **options
        The options of the call.

    Returns
    -------
    dict of str to Bound
        By result: ``out``, ``lse``, and with ``dout`` also ``dq``, ``dk``, ``dv`` and, if the call
        has them, ``dbias``, ``dsinks`` and ``daux[0]``, ``daux[1]``, ...

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As ``tileattn.reference``.

    Notes
    -----
    Let ``unfused`` be the formula on whole matrices, evaluated in the accumulation dtype (float32,
    or float64 for float64 arrays) and rounded to the dtype of the result. The bound is

    ``2 ||unfused - exact|| + rounding``.

    The first term is the accuracy that the package promises. The second matters where unfused
    attention happens to be exact (one key, small integers, equal scores) and another order of
    operations is not. It is the root of the sum of squares of

    * half a unit in the last place of every stored element (the results, P and dS), and a whole
      unit of ``out``, from which ``delta`` is computed;
    * two units in the last place, in the accumulation dtype, of the modifiers of every score and of
      ``lse``, which is a relative error of P, and of ``dout v^T`` and every product in it.

    It does not grow with the number of summed terms, so it stays near one unit in the last place of
    the result unless terms cancel. Norms are absolute, so a result that is exactly zero needs no
    special case. Elements that are not finite are compared by position, and do not count here.

    For float64 the oracle is no more exact than the result. There the error of unfused attention is
    measured in float32 against float64, on rounded inputs, and scaled by the ratio of the machine
    epsilons. The oracle may have the same error, so the first term is three times that error. If q
    and k hold short numbers, such as 0.5, unfused attention sums them without rounding, which no
    order that scales q first can. So the larger of two measurements counts; the second multiplies q
    by a number that is not short.
    """
    q, k, v, dout, dlse = on_host((q, k, v, dout, dlse))
    options = {name: on_host(x) for name, x in options.items()}
    if dout is not None:
        refuse_caches("backward", options)
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
    unavoidable = _unavoidable_errors(forward, backward, dlse, storing(dtype), summing(sums))
    exact = _results(forward, backward)
    errors = _unfused_errors(exact, (q, k, v, dout, dlse), options, dtypes)
    bounds = {}
    for name, result in exact.items():
        stored = np.sqrt(np.sum(storing(dtypes[name]).of(finite(result))))
        floor = np.hypot(unavoidable[name], stored)
        bounds[name] = Bound(float(errors[name] + floor), dtypes[name])
    return bounds


def named(results: Attention | Gradients) -> dict[str, Array]:
    """Return the results of a call by name, with one entry per gradient of ``aux``."""
    daux = results.daux if isinstance(results, Gradients) else None
    return results._asdict() | {f"daux[{n}]": x for n, x in enumerate(daux or ())}


def _results(forward: Forward, backward: Backward | None) -> dict[str, Array]:
    """Return the results that are not None, by name."""
    results = named(forward.results)
    if backward is not None:
        results |= named(backward.grads)
    return {name: result for name, result in results.items() if result is not None}


def _unavoidable_errors(
    f: Forward, b: Backward | None, dlse: Array | None, store: Rounding, sums: Rounding
) -> dict[str, float]:
    """Return the norm of the uncertainty of each result, without padding of packed sequences."""
    cu_seqlens = f.options.cu_seqlens_q
    # Padded rows attend to no key, but their lse includes a sink: replace it by that of no key.
    f = replace(f, lse=padded(f.results.lse, 3, cu_seqlens, fill=-np.inf))
    return floors(f, b, None if dlse is None else padded(dlse, 3, cu_seqlens), store, sums)


def _unfused_errors(
    exact: dict[str, Array],
    arrays: Sequence[Array | None],
    options: dict[str, Any],
    dtypes: Mapping[str, np.dtype[Any]],
) -> dict[str, float]:
    """Return the allowed multiple of the error of unfused attention, by result."""
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
    """Return a multiple of the error of the unfused formula in float32, rounded to ``dtypes``."""
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
