"""A backend to copy: the shortest one that keeps the contract.

It computes one query at a time with NumPy, and supports the scale, causal masks, windows, lengths
and offsets. A backend of your own has the same members::

    tileattn.register_backend(MyBackend())
    tileattn.forward(q, k, v, backend="mine")

``TILEATTN_TEST_BACKEND=my_package:MyBackend python -m pytest --pyargs tileattn.testing`` checks it
against the contract.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tileattn.backends.protocol import Explanation
from tileattn.call.problem import Operands, Problem
from tileattn.results import Attention, Gradients

Array = NDArray[Any]

SUPPORTED = frozenset({"scale", "causal", "window", "kv_lengths", "q_offset"})
WITHOUT_EFFECT = frozenset({"seed", "origin"})  # with no dropout and no function


class Row(NamedTuple):
    """A query, and the keys that it attends to."""

    query: tuple[int, int, int]  # batch entry, head, index
    keys: tuple[int, int, slice]  # batch entry, KV head, range


class TemplateBackend:
    """Attention on NumPy arrays, one query at a time."""

    name = "template"

    def owns(self, x: Any) -> bool:
        """Return True for a NumPy array."""
        return isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray | np.matrix)

    def unavailable(self) -> str | None:
        """Return None: NumPy is always there. Else name what is missing and how to install it."""
        return None

    def why_not(self, problem: Problem) -> str | None:
        """Refuse a problem with any other option: an option is never ignored."""
        others = sorted(problem.enabled_options - SUPPORTED - WITHOUT_EFFECT)
        return f"{' and '.join(others)} would have no effect" if others else None

    def forward(self, problem: Problem, operands: Operands, out: Array | None) -> Attention:
        """Compute ``out`` and ``lse``; rows that attend to no key have 0 and -inf."""
        P, sums = problem, problem.accum_dtype
        found = np.zeros((P.B, P.Hq, P.Nq, P.Dv), P.dtype) if out is None else out
        lse = np.full((P.B, P.Hq, P.Nq), -np.inf, sums)
        with np.errstate(all="ignore"):
            for query, keys in rows(P, operands):
                scores = P.scale * (operands.k[keys].astype(sums) @ operands.q[query].astype(sums))
                largest = scores.max()
                weights = np.exp(scores - largest)
                total = weights.sum()
                found[query] = (weights / total) @ operands.v[keys].astype(sums)
                lse[query] = largest + np.log(total)
        return Attention(found, lse)

    def backward(
        self,
        problem: Problem,
        operands: Operands,
        dout: Array,
        attention: Attention,
        dlse: Array | None,
        deterministic: bool,
    ) -> Gradients:
        """Compute the gradients; each query adds to those of its keys, in order."""
        del deterministic  # always the same order
        P, x, sums = problem, operands, problem.accum_dtype
        dq, dk, dv = (np.zeros(array.shape, sums) for array in (x.q, x.k, x.v))
        with np.errstate(all="ignore"):
            for query, keys in rows(P, x):
                q, k, v, upstream, out = (
                    array.astype(sums)
                    for array in (
                        x.q[query],
                        x.k[keys],
                        x.v[keys],
                        dout[query],
                        attention.out[query],
                    )
                )
                p = np.exp(P.scale * (k @ q) - attention.lse[query])
                delta = upstream @ out - (0 if dlse is None else dlse[query])
                ds = P.scale * p * (v @ upstream - delta)
                dq[query] = ds @ k
                dk[keys] += np.outer(ds, q)
                dv[keys] += np.outer(p, upstream)
            dq, dk, dv = (array.astype(P.dtype) for array in (dq, dk, dv))
        return Gradients(dq, dk, dv, None, None)

    def explain(self, problem: Problem, operands: Operands) -> Explanation:
        """Say what would run."""
        del operands
        tile = 1, problem.Nk
        reason = "the template computes one query at a time"
        return Explanation(self.name, "template", tile, tile, 1, 0, reasons=(reason,))


def rows(problem: Problem, operands: Operands) -> Iterator[Row]:
    """Yield the queries that attend to a key; no other element may be read."""
    left, right = problem.window
    for b, h, i in np.ndindex(problem.B, problem.Hq, problem.Nq):
        place = i + int(operands.q_offset[b])  # on the key axis
        first = 0 if left is None else max(0, place - left)
        end = int(operands.kv_lengths[b])
        end = end if right is None else min(end, place + right + 1)
        if first < end:
            yield Row((b, h, i), (b, h // problem.group, slice(first, end)))
