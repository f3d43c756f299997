"""Mesh axes over which arrays vary inside ``shard_map``: JAX does not know them for callbacks."""

from typing import Any

import jax


def axes_of(tree: Any) -> frozenset[str]:
    """Return the axes over which at least one array varies."""
    found: frozenset[str] = frozenset()
    return found.union(*map(_axes, jax.tree.leaves(tree)))


def varying(tree: Any, axes: frozenset[str]) -> Any:
    """Let arrays vary over axes; the transpose sums over the axes that are new to an array."""

    def cast(x: Any) -> Any:
        return jax.lax.pcast(x, tuple(sorted(axes - _axes(x))), to="varying")

    return jax.tree.map(cast, tree)


def _axes(x: Any) -> frozenset[str]:
    if not isinstance(x, jax.core.Tracer):
        return frozenset()  # outside of shard_map
    kind = jax.typeof(x)
    # Newer versions of JAX have renamed the attribute.
    axes = kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying
    return frozenset(axes)
