"""Sums for the gradients of a bias and of ``aux``: their layout, and their totals."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tileattn.algorithm.parameter_gradient import ElementSums, ParameterSums, own_axes
from tileattn.algorithm.scores import aux_number, learned_elements
from tileattn.backends.addresses import address_of
from tileattn.backends.llvm.arrays import Array
from tileattn.call.problem import Operands, Problem
from tileattn.expressions.nodes import Node
from tileattn.kernels.llvm.params import DBIAS_OF_KEYS, DBIAS_OF_ROWS, DBIAS_OF_TILES

_BYTES = 8  # bytes of a float64 sum


class Layout(NamedTuple):
    """How the gradient of the elements that one node reads is summed over tasks."""

    node: Node
    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    sharing: tuple[bool, bool]  # batch entries share sums; heads share sums
    own_bytes: int  # of the private sums of a task; 0 if it has none


def layouts(P: Problem, x: Operands) -> list[Layout]:
    """Lay out the sums of all elements whose gradients are computed.

    A task has all queries of some keys. It adds directly to the array's sums if no other task adds
    to the same elements, or if tasks add in order: to the elements of one query, after the tasks of
    earlier keys. Otherwise it has private sums.
    """
    found = []
    learned = learned_elements(P.score_mod) if P.score_mod and x.wants("aux") else ()
    for node in learned:
        shape = x.aux[aux_number(node)].shape
        names = tuple(own_axes(node, shape, P))
        sharing = "b" not in names and P.B > 1, "h" not in names and P.Hq > 1
        alone = "j" in names or ("i" in names and not any(sharing))
        own_bytes = 0 if alone else _BYTES * int(np.prod(shape))
        found.append(Layout(node, shape, names, sharing, own_bytes))
    return found


def element_sums(found: Sequence[Layout]) -> dict[str | Node, ParameterSums]:
    """Allocate the sums."""
    return {x.node: ElementSums(x.shape, x.names) for x in found}


def places(found: Sequence[Layout], sums: Mapping[Any, Any]) -> list[int]:
    """Return, for each layout, the address of its sums and the offset of private sums, or -1."""
    numbers, at = list[int](), 0
    for x in found:
        numbers += [address_of(sums[x.node].sums), at if x.own_bytes else -1]
        at += x.own_bytes
    return numbers


def sharing(P: Problem, x: Operands, learned: Sequence[Layout]) -> dict[str, int]:
    """Return the parameters for how dbias is summed, and which key heads share a task."""
    kind, over_batch, over_heads = 0, False, False
    if x.bias is not None and x.wants("bias"):
        b, h, n, m = x.bias.shape
        kind = DBIAS_OF_ROWS if m == 1 else DBIAS_OF_KEYS if n == 1 else DBIAS_OF_TILES
        if kind == DBIAS_OF_TILES:
            over_batch, over_heads = b < P.B, h < P.Hq
    for layout in learned:
        over_batch |= layout.sharing[0]
        over_heads |= layout.sharing[1]
    count, step, group_step = 1, 0, 1
    if over_heads:
        count, step, group_step = P.Hkv, 1, P.Hkv
    if over_batch:
        count, step, group_step = P.B, P.Hkv, 1
    if over_batch and over_heads:
        count, step = P.B * P.Hkv, 1
    return {
        "dbias_kind": kind, "sharing": count, "sharing_step": step, "group_step": group_step
    }  # fmt: skip


def bias_sums(P: Problem, bias: Array | None) -> Array | None:
    """Allocate the sums of dbias."""
    if bias is None:
        return None
    b, h, n, m = bias.shape
    if m == 1:
        return np.zeros((P.B, P.Hq, P.Nq, 1), np.float64)  # each over all keys
    if n == 1:
        return np.zeros((P.B, P.Hq, 1, P.Nk), P.accum_dtype)
    return np.zeros((b, h, n, m), P.accum_dtype)


def bias_gradient(bias: Array, sums: Array) -> Array:
    """Sum over the broadcast axes of the bias."""
    axes = tuple(axis for axis in range(4) if bias.shape[axis] != sums.shape[axis])
    total = sums.sum(axis=axes, keepdims=True, dtype=np.float64) if axes else sums
    return total.astype(bias.dtype, copy=False)
