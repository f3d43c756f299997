"""Axes of a mesh over which arrays vary inside ``shard_map``: what a callback returns has none."""

from typing import Any

import jax


def axes_of(tree: Any) -> frozenset[str]:
    """Return the axes over which some array varies."""
    found: frozenset[str] = frozenset()
    return found.union(*map(_axes, jax.tree.leaves(tree)))


def varying(tree: Any, axes: frozenset[str]) -> Any:
    """Let arrays vary over axes; the transpose sums over those that are new to an array."""

    def cast(x: Any) -> Any:
        return jax.lax.pcast(x, tuple(sorted(axes - _axes(x))), to="varying")

    return jax.tree.map(cast, tree)


def _axes(x: Any) -> frozenset[str]:
    kind = jax.typeof(x)
    # JAX has renamed the attribute.
    axes = kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying
    return frozenset(axes)
