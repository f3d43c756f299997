"""Gradients of arrays that the score modifiers read: a bias, and elements of the user's arrays.

The gradient of an element is the sum, over all pairs whose score reads it, of ``dS`` times the
derivative of the score. Tasks add to the sums in a fixed order, whatever the number of threads.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from tileattn.algorithm.heads import Array, HeadGroup
from tileattn.algorithm.scores import Partial, aux_number, learned_elements
from tileattn.algorithm.tiles import Tile, tile_of
from tileattn.call.problem import Operands, Problem
from tileattn.expressions.nodes import INDICES, Node


class TaskSums(Protocol):
    """Sums of one task for the gradient of a parameter."""

    def add(self, heads: HeadGroup, ds: Array, partial: Partial, tile: Tile) -> None:
        """Add the sums of one tile; earlier tasks are done with its queries."""

    def finish(self) -> None:
        """Finish the sums of the task; earlier tasks are done with all queries."""


class ParameterSums(Protocol):
    """The gradient of one parameter, summed over tasks."""

    over_batch: bool  # True if batch entries share sums
    over_heads: bool

    def task(self) -> TaskSums:
        """Return the sums of one task."""

    def total(self) -> Array:
        """Return the gradient, once all tasks are done."""


class AxisSums:
    """The gradient of a parameter of shape (B or 1, Hq or 1, Nq or 1, Nk or 1).

    Tasks of different key blocks add to different sums, or in order to the sums of one row: a
    parameter without query and key axes is summed row by row first.
    """

    def __init__(self, shape: Sequence[int], P: Problem) -> None:
        B, Hq, Nq, Nk = self._shape = tuple(shape)
        self.over_batch, self.over_heads = P.entries > B, Hq < P.Hq
        self._sums = np.zeros((B, Hq, P.Nq if Nk == 1 else Nq, Nk), P.accum_dtype)

    def task(self) -> "AxisSums":
        return self

    def add(self, heads: HeadGroup, ds: Array, partial: Partial, tile: Tile) -> None:
        """Add dS, summed over the axes along which the parameter is broadcast."""
        del partial  # its indices are the axes
        sums = self._sums
        for axis in (3, 2):
            if sums.shape[axis] == 1:
                ds = ds.sum(axis=axis, keepdims=True)
        entry = tile_of(sums[heads.batch if sums.shape[0] > 1 else 0], tile)
        if sums.shape[1] > 1:
            entry = entry[heads.q_heads]
            entry += ds.reshape(entry.shape)
        else:
            entry += ds.sum(axis=(0, 1))

    def finish(self) -> None:
        """Nothing is left to do."""

    def total(self) -> Array:
        sums = self._sums
        return sums if sums.shape == self._shape else sums.sum(axis=2, keepdims=True)


class ViewSums(AxisSums):
    """The gradient of an array indexed by some of b, h, i and j themselves, each at most once."""

    def __init__(self, shape: Sequence[int], names: Sequence[str], P: Problem) -> None:
        sizes = dict(zip(INDICES, (P.entries, P.Hq, P.Nq, P.Nk), strict=True))
        super().__init__([sizes[n] if n in names else 1 for n in INDICES], P)
        self._array_shape, self._names = tuple(shape), names

    def total(self) -> Array:
        sums = super().total()
        absent = tuple(axis for axis, name in enumerate(INDICES) if name not in self._names)
        present = [name for name in INDICES if name in self._names]
        used = sums.squeeze(absent).transpose([present.index(name) for name in self._names])
        whole = np.zeros(self._array_shape, sums.dtype)
        whole[tuple(map(slice, used.shape))] = used
        return whole


class ElementSums:
    """The gradient of an array at computed indices.

    Each task has private sums of the elements that it reads. It adds them to the gradient after all
    earlier tasks.
    """

    def __init__(self, shape: Sequence[int], names: Sequence[str | None]) -> None:
        self.shape = tuple(shape)
        self.sums = np.zeros(shape, np.float64).reshape(-1)
        self.over_batch, self.over_heads = "b" not in names, "h" not in names

    def task(self) -> "_ElementsOfTask":
        return _ElementsOfTask(self)

    def total(self) -> Array:
        return self.sums.reshape(self.shape)


class _ElementsOfTask:
    """Private sums of a task, in float64, from the first to the last element that it reads."""

    def __init__(self, whole: ElementSums) -> None:
        self._whole = whole
        self._first = 0
        self._sums = np.zeros(0)

    def add(self, heads: HeadGroup, ds: Array, partial: Partial, tile: Tile) -> None:
        """Add dS to the elements at the indices of its pairs."""
        del heads, tile
        element = np.zeros((1,) * ds.ndim, np.int64)
        for index, n in zip(partial.indices, self._whole.shape, strict=True):
            element = element * n + index
        repeated = tuple(axis for axis in range(ds.ndim) if element.shape[axis] < ds.shape[axis])
        ds = ds.sum(axis=repeated, keepdims=True)
        first = int(element.min())
        weights = ds.astype(np.float64, copy=False).ravel()
        sums = np.bincount((element - first).ravel(), weights)
        self._reach(first, first + len(sums))
        self._sums[first - self._first :][: len(sums)] += sums

    def finish(self) -> None:
        self._whole.sums[self._first :][: len(self._sums)] += self._sums

    def _reach(self, first: int, stop: int) -> None:
        """Extend the sums to cover the elements from ``first`` to ``stop``."""
        if not len(self._sums):
            self._first = first
        lo, hi = min(self._first, first), max(self._first + len(self._sums), stop)
        if hi - lo > len(self._sums):
            self._sums = np.pad(self._sums, (self._first - lo, hi - self._first - len(self._sums)))
            self._first = lo


def parameter_sums(P: Problem, x: Operands) -> dict[str | Node, ParameterSums]:
    """Allocate the gradients of the parameters of a call, by name."""
    sums: dict[str | Node, ParameterSums] = {}
    if x.bias is not None and x.wants("bias"):
        sums["bias"] = AxisSums(x.bias.shape, P)
    if P.score_mod is not None and x.wants("aux"):
        for node in learned_elements(P.score_mod):
            shape = x.aux[aux_number(node)].shape
            names = own_axes(node, shape, P)
            plain = [name for name in names if name is not None]
            if len(plain) == len(names) == len({*plain}):
                sums[node] = ViewSums(shape, plain, P)
            else:
                sums[node] = ElementSums(shape, names)
    return sums


def aux_gradients(
    x: Operands, sums: dict[str | Node, ParameterSums]
) -> tuple[Array | None, ...] | None:
    """Return the gradients of ``aux``: None for integer arrays, or if none are requested."""
    if not x.aux or not x.wants("aux"):
        return None
    totals: list[Array | None] = []
    for n, array in enumerate(x.aux):
        parts = [part.total() for node, part in sums.items() if aux_number(node) == n]
        total: Any = sum(parts[1:], start=parts[0]) if parts else np.zeros(array.shape)
        learned = array.dtype.kind not in "biu"
        totals.append(total.astype(array.dtype, copy=False) if learned else None)
    return tuple(totals)


def groups_sharing_sums(
    groups: Sequence[HeadGroup], sums: Iterable[ParameterSums]
) -> list[list[HeadGroup]]:
    """Collect the head groups that share sums: one key head, or more if a parameter broadcasts."""
    sums = list(sums)
    over_batch, over_heads = any(x.over_batch for x in sums), any(x.over_heads for x in sums)
    sharing: dict[tuple[int, int], list[HeadGroup]] = {}
    for heads in groups:
        key = 0 if over_batch else heads.batch, 0 if over_heads else heads.kv_head
        sharing.setdefault(key, []).append(heads)
    return list(sharing.values())


def own_axes(node: Node, shape: Sequence[int], P: Problem) -> list[str | None]:
    """Return the index that runs along each axis within its length; None for a computed index."""
    sizes = dict(zip(INDICES, (P.entries, P.Hq, P.Nq, P.Nk), strict=True))
    return [
        str(x.value) if x.op == "input" and sizes[str(x.value)] <= n else None
        for x, n in zip(node.inputs, shape, strict=True)
    ]
