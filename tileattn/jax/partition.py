"""Calls on arrays that are sharded over the batch or the heads: each device computes its part.

A call is partitioned if no result depends on the indices of batch entries and heads: dropout,
functions and block masks do. The arrays of other calls are gathered. Axes of tokens and of head
dimensions are always gathered.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import NamedSharding, PartitionSpec

from tileattn.call.options import OPTIONS
from tileattn.jax.numbers import NUMBERS

Roles = tuple[str | None, ...]
"""Roles of the axes of an array: ``"b"``, batch; ``"h"`` and ``"g"``, heads of q and of k."""

Axes = Mapping[str, tuple[str, ...]]
"""Mesh axes over which the batch is sharded (``"b"``), and the heads (``"heads"``)."""

_FREE = frozenset(
    name
    for name, x in OPTIONS.items()
    if x.value in ("number", "integer", "flag", "window") and not x.by_index
)
"""Static options that mean the same for each batch entry and head."""

_ROLES: dict[str, Roles] = {
    "q": ("b", "h", None, None),
    "k": ("b", "g", None, None),
    "v": ("b", "g", None, None),
    "out": ("b", "h", None, None),
    "lse": ("b", "h", None),
    NUMBERS: (None,),
    **{
        name: tuple(axis if axis in "bh" else None for axis in x.axes)
        for name, x in OPTIONS.items()
        if x.axes and "." not in x.axes
    },
}
"""Roles by name of the array; leading axes may be left out."""

_SHARED_BY = {"b": "b", "h": "heads", "g": "heads"}
_PER_ROW = ("q", "k", "v", "out", "lse")  # arrays that lack the same leading axes


@dataclass(frozen=True)
class Partition:
    """The roles of all axes of a call.

    Parameters
    ----------
    operands, results : tuple of Roles
        Roles of the axes of each array.
    sizes : mapping of str to int
        Length of the axes of each role.
    """

    operands: tuple[Roles, ...]
    results: tuple[Roles, ...]
    sizes: Mapping[str, int]

    def rule(self) -> SdyShardingRule:
        """Return the rule by which XLA propagates shardings between the arrays."""
        are_equal, whole = self.sizes["h"] == self.sizes["g"], list[str]()  # as they appear

        def factor(role: str | None) -> str:
            if role is None:
                whole.append(f"x{len(whole)}")
                return whole[-1]
            return "g" if role == "h" and are_equal else role

        operands, results = (
            tuple(ArrayMapping(*map(factor, roles)) for roles in every)
            for every in (self.operands, self.results)
        )
        return SdyShardingRule(operands, results, need_replication_factors=tuple(whole))

    def axes(self, mesh: Mapping[str, int], specs: Sequence[Any]) -> Axes:
        """Choose mesh axes for batch and heads from the shardings of the operands."""
        found: dict[str, tuple[str, ...]] = {"b": (), "heads": ()}
        for roles, spec in zip(self.operands, specs, strict=True):
            for role, entry in zip(roles, spec, strict=False):
                axes = entry if isinstance(entry, tuple) else (entry,) * (entry is not None)
                if role is None or not axes or found[_SHARED_BY[role]]:
                    continue
                size = self.sizes["b" if role == "b" else "g"]
                taken = {*found["b"], *found["heads"]}
                if size % prod(mesh[x] for x in axes) == 0 and taken.isdisjoint(axes):
                    found[_SHARED_BY[role]] = axes
        return found

    @staticmethod
    def spec(roles: Roles, axes: Axes) -> PartitionSpec:
        """Return the sharding of an array."""
        return PartitionSpec(*(role and (axes[_SHARED_BY[role]] or None) for role in roles))

    @staticmethod
    def summed(roles: Roles, axes: Axes) -> tuple[str, ...]:
        """List the mesh axes over which the devices' parts of a result are summed."""
        own = {_SHARED_BY[role] for role in roles if role is not None}
        return tuple(x for name, those in axes.items() if name not in own for x in those)


def partition_of(on_arrays: Any, avals: Sequence[Any], shapes: Sequence[Any]) -> Partition | None:
    """Return the roles of a call's axes; None if it cannot be partitioned."""
    results: Sequence[str] | None = getattr(on_arrays.on_host, "results", None)
    if results is None:
        return None
    options, names = dict(on_arrays.on_host.call.options), _names(on_arrays.tree, len(avals))
    used = {name for name, x in options.items() if not (x is None or x is False or x == 0)}
    if not used <= _FREE or not {*names, *results} <= _ROLES.keys():
        return None
    # A gradient has the name and the shape of its operand.
    known = {name: x.shape for name, x in zip((*results, *names), (*shapes, *avals), strict=True)}
    ndim = len(known["q"])
    q, k = ((1,) * (4 - ndim) + known[name] for name in "qk")
    sizes = {"b": q[0], "h": q[1], "g": k[1]}
    if 0 in sizes.values():
        return None
    operands, found = (
        tuple(_roles(name, known[name], ndim, sizes) for name in every)
        for every in (names, results)
    )
    everywhere = {"b": ("b",), "heads": ("heads",)}
    for roles, x in zip(found, shapes, strict=True):
        if Partition.summed(roles, everywhere) and np.dtype(x.dtype).itemsize < 4:
            return None  # each part would be rounded before the sum
    return Partition(operands, found, sizes)


def _names(tree: Any, count: int) -> tuple[str, ...]:
    """Name the operands."""
    given, *rows = jax.tree.unflatten(tree, range(count))
    found = dict(zip(rows, ("out", "lse", "out", "lse"), strict=False))
    for name, number in given.items():
        found |= dict.fromkeys(jax.tree.leaves(number), name)
    return tuple(found[number] for number in range(count))


def _roles(name: str, shape: tuple[int, ...], ndim: int, sizes: Mapping[str, int]) -> Roles:
    """Return the roles of an array's axes; None for axes that broadcast."""
    every = _ROLES[name]
    lacking = 4 - ndim if name in _PER_ROW else len(every) - len(shape)
    return tuple(
        role if role is not None and size == sizes[role] and size > 1 else None
        for role, size in zip(every[lacking:], shape, strict=True)
    )


def typed(partition: Partition | None, avals: Sequence[Any], shapes: Sequence[Any]) -> list[Any]:
    """Return the types of the results, with their shardings under explicit sharding."""
    plain = [jax.core.ShapedArray(x.shape, x.dtype) for x in shapes]
    shardings = [x.sharding for x in avals]
    mesh = next((x.mesh for x in shardings if any(x.spec)), None)
    if partition is None or mesh is None:
        return plain
    axes = partition.axes(mesh.shape, [x.spec for x in shardings])
    return [
        x.update(sharding=NamedSharding(mesh, partition.spec(roles, axes)))
        for x, roles in zip(plain, partition.results, strict=True)
    ]


def sharded_as(x: jax.Array, found: jax.Array) -> jax.Array:
    """Reshard a gradient as its array, which explicit sharding requires."""
    own, other = (jax.typeof(array).sharding for array in (x, found))
    return found if own == other else jax.sharding.reshard(found, own)


def partitioned(
    partition: Partition, shapes: Sequence[Any], made: Callable[[Sequence[Any]], Any]
) -> Any:
    """Return a function that XLA partitions; ``made(shapes)`` makes it for these results."""

    def parts(mesh: Any, operands: Any, results: Any) -> Any:
        """Return the shardings of the arrays, and the function that each device runs."""
        axes = partition.axes(mesh.shape, [_spec(mesh, x) for x in operands])
        given, found = (
            tuple(NamedSharding(mesh, partition.spec(roles, axes)) for roles in every)
            for every in (partition.operands, partition.results)
        )
        own = [
            jax.ShapeDtypeStruct(sharding.shard_shape(x.shape), x.dtype)
            for sharding, x in zip(found, results, strict=True)
        ]
        run = made(own)

        def on_device(*arrays: Any) -> Any:
            return [
                jax.lax.psum(x, over) if (over := partition.summed(roles, axes)) else x
                for x, roles in zip(run(*arrays), partition.results, strict=True)
            ]

        return mesh, on_device, list(found), given

    def followed(mesh: Any, operands: Any, _results: Any) -> Any:
        """Return the shardings of the results, for partitioners that ignore the rule."""
        axes = partition.axes(mesh.shape, [_spec(mesh, x) for x in operands])
        return [NamedSharding(mesh, partition.spec(roles, axes)) for roles in partition.results]

    function = custom_partitioning(made(shapes))
    function.def_partition(parts, followed, sharding_rule=partition.rule(), decode_shardings=False)
    return function


def _spec(mesh: Any, x: Any) -> Any:
    """Return the sharding of an array; () if it uses a part of a mesh axis."""
    try:
        decode = importlib.import_module("jax._src.sharding_impls").parse_flatten_op_sharding
        return decode(x.sharding._hlo_sharding, mesh)[0]
    except Exception:  # the function is private to JAX: it may move, or raise another error
        return ()  # the array counts as replicated: a right result, with more communication
