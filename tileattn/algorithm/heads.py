"""Heads that are computed together, with all that their tiles need.

Every array has the axes ``(Hkv, G, rows, columns)``: ``G`` query heads for each key head.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm import philox
from tileattn.algorithm.function_mask import FunctionMask
from tileattn.algorithm.mask import AttentionMask
from tileattn.algorithm.scores import ScoreFunction, ScoreMods
from tileattn.algorithm.sequences import KVSource, Place, Sequence, sequences
from tileattn.algorithm.tile_mask import TileMask
from tileattn.algorithm.tiles import Tile, cut
from tileattn.call.problem import Operands, Problem

Array = NDArray[Any]

_ORIGIN = (0, 0, 0, 0)
_WHOLE = Place(0, slice(None), slice(None))

SMALL = 1 << 16  # scores of one head up to which several heads are computed together


@dataclass
class HeadGroup:
    """Some heads of one sequence, with all that their tiles need."""

    q: Array  # (Hkv, G, Nq, D), in the caller's dtype
    kv: KVSource
    scale: float
    mask: AttentionMask
    score_mods: ScoreMods
    dtype: np.dtype[Any]  # in which sums are accumulated
    batch: int = 0  # number of the sequence
    place: Place = _WHOLE
    q_heads: slice = field(default_factory=lambda: slice(0, 1))
    group: int = 1  # query heads of one key head; a group of heads may hold a part of them
    dropout_p: float = 0.0
    seed: int = 0
    sinks: Array | None = None  # (Hkv, G, 1), logits that join the softmax denominator
    origin: tuple[int, int, int, int] = _ORIGIN  # (b, h, i, j), from which dropout counts

    @property
    def kv_head(self) -> int:
        """First key head of the group, among all."""
        return int(self.q_heads.start) // self.group

    @property
    def dropout_scale(self) -> float:
        """``1 / (1 - dropout_p)``, which multiplies the probabilities that are kept."""
        return 1.0 / (1.0 - self.dropout_p)

    def of(self, x: Array) -> Array:
        """View this group's part of an array with axes (B, Hq, Nq, ...), by key heads."""
        rows = x[self.place.batch, self.q_heads, self.place.queries]
        return rows.reshape(self.q.shape[:2] + rows.shape[1:])

    def tile_mask(self, tile: Tile) -> TileMask | None:
        """Return the mask of a tile, by key heads; None if every pair is visible."""
        visible = self.mask.tile_mask(tile)
        if visible is None:
            return None
        shape = self.q.shape[:2] if len(visible.pairs) > 1 else (1, 1)
        pairs = visible.pairs.reshape(shape + visible.pairs.shape[1:])
        return TileMask(visible.keys, pairs, visible.N)

    def keep(self, tile: Tile) -> Array | None:
        """Return the mask of the probabilities that dropout keeps; None without dropout."""
        if not self.dropout_p:
            return None
        b, h, i, j = self.origin
        heads = np.arange(h + self.q_heads.start, h + self.q_heads.stop)
        rows, keys = (i + tile.q0, i + tile.q1), (j + tile.k0, j + tile.k1)
        keep = philox.keep_tile(self.seed, self.dropout_p, b + self.batch, heads, *rows, *keys)
        return keep.reshape(self.q.shape[:2] + keep.shape[1:])

    def weights(self, tile: Tile, visible: TileMask | None) -> Array | None:
        """Return the factors of the probabilities in the weighted sum of values; None for 1.

        They are 0 where dropout drops, and descales of quantised values. A descale of a masked-out
        value never counts, whatever it holds.
        """
        keep = self.keep(tile)
        if self.kv.v_descale is None:
            return keep
        descales = self.kv.columns(self.kv.v_descale, tile.keys)
        if visible is not None and not np.isfinite(descales).all():
            descales = np.where(visible.dense(), descales, 0)
        return descales if keep is None else keep * descales


def head_groups(problem: Problem, operands: Operands, together: int = 1) -> Iterator[HeadGroup]:
    """Cut a problem into groups of heads, sequence by sequence, heads ascending.

    A group has ``together`` heads, and more where their score matrices are small.
    """
    group = problem.group
    if not problem.Hq:
        return
    function = None
    if problem.mask_mod is not None:
        constants = problem.constants
        function = FunctionMask(problem.mask_mod, operands.aux, constants=constants)
    of_heads = operands.block_mask is not None and operands.block_mask.kinds.shape[1] > 1
    apart = of_heads or (function is not None and function.over_heads)
    for sequence in sequences(problem, operands):
        small = SMALL // max(1, sequence.q.shape[1] * sequence.kv.N)
        # Heads that differ in the blocks they skip are apart.
        heads = 1 if apart else max(together, small)
        keys, queries = (heads // group, group) if heads >= group else (1, heads)
        for kv in cut(problem.Hkv, keys):
            for part in cut(group, queries):
                yield _head_group(problem, operands, sequence, slice(*kv), slice(*part), function)


def _head_group(
    P: Problem,
    x: Operands,
    sequence: Sequence,
    kv: slice,
    part: slice,
    function: FunctionMask | None,
) -> HeadGroup:
    b, window = sequence.entry, sequence.window
    heads = slice(kv.start * P.group + part.start, (kv.stop - 1) * P.group + part.stop)
    shape = (kv.stop - kv.start, part.stop - part.start)

    def split(option: Array | None) -> Array | None:
        """View the group's part of an option with axes (B or 1, Hq or 1, ...) by key heads."""
        if option is None:
            return None
        entry = option[b if len(option) > 1 else 0]
        entry = entry[heads] if len(entry) > 1 else entry
        lead = shape if len(entry) > 1 else (1, 1)
        view: Array = entry.reshape(lead + entry.shape[1:])
        return view

    slopes = None if x.alibi_slopes is None else split(x.alibi_slopes[..., None, None])
    mask = None if x.mask is None else x.mask[b if len(x.mask) > 1 else 0]
    if mask is not None and len(mask) > 1:
        mask = mask[heads]
    kv_source = sequence.kv.of_heads(kv)
    k_descale = kv_source.k_descale
    score_function = None
    if P.score_mod is not None:
        each = np.arange(heads.start, heads.stop).reshape(*shape, 1, 1)
        score_function = ScoreFunction(P.score_mod, x.aux, b, each, P.constants)
    return HeadGroup(
        q=sequence.q[heads].reshape(shape + sequence.q.shape[1:]),
        kv=kv_source,
        scale=P.scale,
        mask=AttentionMask(window, sequence.kv.N, mask, x.block_mask, b, heads, function),
        score_mods=ScoreMods.of(
            *(P.softcap, slopes, split(x.bias), window.offset, score_function),
            None if k_descale is None else partial(kv_source.columns, k_descale),
        ),
        dtype=P.accum_dtype,
        batch=b,
        place=sequence.place,
        q_heads=heads,
        group=P.group,
        dropout_p=P.dropout_p,
        seed=P.seed,
        sinks=None if x.sinks is None else split(x.sinks[None, :, None]),
        origin=_ORIGIN if x.origin is None else tuple(x.origin[b].tolist()),
    )
