"""dbias: the gradient of the scores, summed over the axes along which the bias is broadcast."""

from collections.abc import Sequence

from tileattn.algorithm.heads import Array, HeadGroup
from tileattn.algorithm.tiles import Tile, tile_of
from tileattn.problem import Problem


def shape_of_sums(shape: Sequence[int], P: Problem) -> tuple[int, ...]:
    """Shape of the sum of dbias; a bias over neither axis is summed row by row first."""
    B, H, Nq, Nk = shape
    return B, H, P.Nq if Nk == 1 else Nq, Nk


def groups_sharing_sums(
    groups: Sequence[HeadGroup], bias: Array | None, P: Problem
) -> list[list[HeadGroup]]:
    """Gather the groups of one key head, or all over which a bias is broadcast."""
    over_batch = bias is not None and bias.shape[0] < P.B
    over_heads = bias is not None and bias.shape[1] < P.Hq
    sharing: dict[tuple[int, int], list[HeadGroup]] = {}
    for heads in groups:
        key = 0 if over_batch else heads.batch, 0 if over_heads else heads.kv_head
        sharing.setdefault(key, []).append(heads)
    return list(sharing.values())


def add_bias_gradient(dbias: Array, heads: HeadGroup, ds: Array, tile: Tile) -> None:
    """Add dS to dbias, summed over the axes along which the bias is broadcast."""
    for axis in (3, 2):
        if dbias.shape[axis] == 1:
            ds = ds.sum(axis=axis, keepdims=True)
    entry = tile_of(dbias[heads.batch if dbias.shape[0] > 1 else 0], tile)
    if dbias.shape[1] > 1:
        entry = entry[heads.q_heads]
        entry += ds.reshape(entry.shape)
    else:
        entry += ds.sum(axis=(0, 1))
