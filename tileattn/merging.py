"""Join partial results: attention over disjoint sets of keys."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tileattn.algorithm.softmax import RowState
from tileattn.backends.registry import ensure_one_owner
from tileattn.call.parse import check_array, check_dtype
from tileattn.dtypes import accum_dtype
from tileattn.messages import must_be
from tileattn.results import Attention


def merge(outs: Sequence[Any], lses: Sequence[Any]) -> Attention:
    """Join results over disjoint sets of keys into the result over their union.

    Parameters
    ----------
    outs : sequence of array, shape (..., N, Dv) each
        Outputs of the same queries over different keys.
    lses : sequence of array, shape (..., N) each
        Their logsumexps. Sinks, where there are any, belong to one of the calls only.

    Returns
    -------
    Attention
        As ``forward`` over all the keys would return it, up to rounding.

    Raises
    ------
    TypeError, ValueError
        If the sequences are empty or differ in length, or arrays in shape or dtype.

    Notes
    -----
    ``lse = log(sum_t exp(lse_t))`` and ``out = sum_t exp(lse_t - lse) * out_t``: associative and
    commutative up to rounding; a result with lse = -inf is the identity.

    On a GPU one kernel merges up to 8 results; it may round differently from NumPy.

    References
    ----------
    Milakov and Gimelshein, arXiv:1805.02867, section 3.1.

    Examples
    --------
    >>> import numpy as np
    >>> import tileattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 7, 8))
    >>> left = tileattn.forward(q, k[:3], v[:3])
    >>> right = tileattn.forward(q, k[3:], v[3:])
    >>> whole = tileattn.merge([left.out, right.out], [left.lse, right.lse])
    >>> bool(np.allclose(whole.out, tileattn.forward(q, k, v).out))
    True
    """
    outs, lses = parts_of(outs, lses)
    check_dtype("outs[0]", outs[0])
    owner = ensure_one_owner(_named("outs", outs) | _named("lses", lses), {})
    sums = accum_dtype(outs[0].dtype)
    for name, out in _named("outs", outs).items():
        check_array(name, out, outs[0].shape, outs[0].dtype)
    for name, lse in _named("lses", lses).items():
        check_array(name, lse, outs[0].shape[:-1], sums)
    kernel = getattr(owner, "merge", None)
    found: Attention | None = kernel and kernel(outs, lses)
    if found is not None:
        return found
    state = RowState.of_result(outs[0], lses[0], sums)
    with np.errstate(all="ignore"):
        for out, lse in zip(outs[1:], lses[1:], strict=True):
            state.merge(RowState.of_result(out, lse, sums))
        merged, lse = state.finalize()
    return Attention(merged.astype(outs[0].dtype, copy=False), lse)


def parts_of(outs: Any, lses: Any, kind: str = "arrays") -> tuple[list[Any], list[Any]]:
    """List the partial results; raise an error unless both are sequences of one length."""
    outs, lses = _listed("outs", outs, kind), _listed("lses", lses, kind)
    if len(outs) != len(lses) or not outs:
        raise ValueError(
            "outs and lses must have as many entries, and at least one; got "
            f"{len(outs)} and {len(lses)}"
        )
    return outs, lses


def _named(name: str, arrays: list[Any]) -> dict[str, Any]:
    return {f"{name}[{n}]": x for n, x in enumerate(arrays)}


def _listed(name: str, x: Any, kind: str) -> list[Any]:
    what = f"a sequence of {kind}"
    if hasattr(x, "dtype"):  # one array may hold the parts, or be one part
        remedy = f"list({name}) where its first axis counts the parts"
        raise TypeError(must_be(name, what, x, remedy))
    if not isinstance(x, Iterable):
        raise TypeError(must_be(name, what, x))
    return list(x)
