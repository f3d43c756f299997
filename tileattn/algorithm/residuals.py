"""Residuals of the backward pass for each query, and the sums of its gradients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tileattn.algorithm.heads import Array, HeadGroup
from tileattn.algorithm.memory import RowConstant
from tileattn.algorithm.parameter_gradient import ParameterSums
from tileattn.algorithm.tiles import Tile, cut
from tileattn.call.problem import Problem
from tileattn.expressions.nodes import Node


class HeadResiduals(NamedTuple):
    """The residuals of a group of heads, by key heads."""

    dout: Array  # (Hkv, G, Nq, Dv)
    delta: RowConstant  # dS = P (dP - delta)
    lse: RowConstant  # P = exp(S - lse)


@dataclass(slots=True)
class Residuals:
    """The residuals of all heads: axes (B, Hq, Nq, ...)."""

    dout: Array  # (B, Hq, Nq, Dv), upstream gradient of out
    delta: Array  # rowsum(dout * out) - dlse
    lse: Array  # of the forward pass, 0 in place of -inf; the row maximum where large
    log_l: Array  # where large, lse less the row maximum; 0 elsewhere
    large: Array  # rows in whose probabilities the rounding of lse would show

    @classmethod
    def saved(cls, problem: Problem, dout: Array, lse: Array) -> "Residuals":
        """Take over the logsumexp; delta is not computed yet."""
        lse = np.where(lse == -np.inf, 0, lse).astype(problem.accum_dtype, copy=False)
        large = has_large_lse(lse, problem.dtype)
        return cls(dout, np.empty_like(lse), lse, np.zeros_like(lse), large)

    def of(self, heads: HeadGroup) -> "HeadResiduals":
        """View the residuals of a head group."""
        dout, delta, lse, log_l, large = map(
            heads.of, (self.dout, self.delta, self.lse, self.log_l, self.large)
        )
        split = np.asarray(large.any(axis=-1))[..., None, None]
        words = (lse, log_l, split) if split.any() else (lse,)
        return HeadResiduals(dout, RowConstant("delta", delta), RowConstant("lse", *words))

    def blocks_of_large_rows(
        self, groups: Sequence[HeadGroup], block_size: tuple[int, int]
    ) -> list[tuple[HeadGroup, int, int, list[Tile]]]:
        """List the query blocks with large rows, each with its tiles."""
        if not self.large.any():
            return []
        block_q, block_k = block_size
        blocks: dict[tuple[int, int], list[Tile]] = {}
        for n, heads in enumerate(groups):
            large: Array = np.asarray(heads.of(self.large).any(axis=(0, 1)))
            for span in cut(heads.mask.Nk, block_k):
                for tile in heads.mask.column_tiles(*span, block_q):
                    q0 = tile.q0 - tile.q0 % block_q
                    if large[q0 : q0 + block_q].any():
                        blocks.setdefault((n, q0), []).append(tile)
        return [
            (groups[n], q0, min(q0 + block_q, groups[n].mask.window.Nq), tiles)
            for (n, q0), tiles in blocks.items()
        ]


@dataclass(slots=True)
class Sums:
    """Sums of the gradients: many tasks add to ``dq`` and parameters, one to ``dk`` and ``dv``.

    None for a gradient that is not requested.
    """

    dq: Array | None
    dk: Array | None
    dv: Array | None
    parameters: dict[str | Node, ParameterSums]

    @property
    def of_scores(self) -> bool:
        """True if a gradient needs dS."""
        return self.dq is not None or self.dk is not None or bool(self.parameters)

    @property
    def of_tiles(self) -> bool:
        """True if a gradient needs P."""
        return self.dv is not None or self.of_scores


def has_large_lse(lse: Array, dtype: np.dtype[Any]) -> Array:
    """Return the rows in which the rounding of the logsumexp would show in the gradients.

    Half a unit in the last place of lse is a relative error of the row's P. At 16 it is 1e-6 in
    float32; at 512 it is 3e-5, a thirtieth of a unit of float16. Rows without a finite lse have
    none.
    """
    size = np.abs(lse)
    flags: Array = (size > (512 if dtype.itemsize == 2 else 16)) & (size < np.inf)
    return flags


def rounding_of_lse(lse: Array, D: int, q_norm: Array, key_norm: Array) -> Array:
    """Bound the rounding error of a logsumexp, given the norms of scaled queries and of keys.

    A dot product of D terms is off by about ``eps sqrt(D) |q_i| |k_j|``.
    """
    size = np.abs(lse) + math.sqrt(D) * q_norm * key_norm
    bound: Array = 2 * np.finfo(lse.dtype).eps * size
    return bound


def row_norms(x: Array) -> Array:
    """Euclidean norm of each row, NaN or infinite where the row is."""
    return np.asarray(np.sqrt(np.einsum("...d,...d->...", x, x)))
