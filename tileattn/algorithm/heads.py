"""Some heads of one batch entry, with everything that their tiles need.

Every array has the axes ``(Hkv, G, rows, columns)``: ``G`` query heads for each key head.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tileattn import record
from tileattn.algorithm import philox
from tileattn.algorithm.mask import Band, Sight, Tile, cut
from tileattn.algorithm.scores import Terms
from tileattn.algorithm.softmax import Array, Scratch
from tileattn.algorithm.tile_mask import Seen
from tileattn.problem import Operands, Problem

_SHARED_TILE = 1 << 16  # scores of one head up to which several heads share a lane

_WORTH_BOUNDING = 128  # queries from which a look at all norms costs less than maxima of tiles

_SAFE_EXPONENT = 30.0
"""Scores within this of zero need no running maximum: exp(30) = 1e13, far from any overflow."""


@dataclass
class Lane:
    """Some heads of one batch entry, with everything their tiles need.

    Parameters
    ----------
    q : array, shape (Hkv, G, Nq, D)
        Queries of these heads, in the caller's dtype.
    k, v : array, shapes (Hkv, 1, Nk, D) and (Hkv, 1, Nk, Dv)
        Keys and values.
    scale : float
        Multiplies ``q @ k.T``.
    sight : Sight
        The mask.
    terms : Terms
        Softcap, ALiBi and bias.
    dtype : numpy.dtype
        In which sums are kept.
    batch : int
        Batch entry.
    heads : slice
        Query heads.
    group : int
        Query heads of one key head in the whole problem, of which the lane may hold a part.
    dropout_p : float
        Share that is dropped.
    seed : int
        Of the dropout.
    sinks : array, shape (Hkv, G, 1), or None
        Logits that join the denominator.
    """

    q: Array
    k: Array
    v: Array
    scale: float
    sight: Sight
    terms: Terms
    dtype: np.dtype[Any]
    batch: int = 0
    heads: slice = field(default_factory=lambda: slice(0, 1))
    group: int = 1
    dropout_p: float = 0.0
    seed: int = 0
    sinks: Array | None = None
    _bounded: bool | Array | None = field(default=None, init=False)

    @property
    def kv(self) -> int:
        """First key head of the lane, among all."""
        return int(self.heads.start) // self.group

    def heads_of(self, x: Array) -> Array:
        """View the lane's part of an array with axes (B, Hq, ...) by key heads."""
        return x[self.batch, self.heads].reshape(self.q.shape[:2] + x.shape[2:])

    @property
    def gain(self) -> float:
        """What a kept probability is multiplied with."""
        return 1.0 / (1.0 - self.dropout_p)

    def seen(self, tile: Tile) -> Seen | None:
        """Which pairs of a tile are seen, by key heads, or None where all are."""
        seen = self.sight.seen(tile)
        if seen is None:
            return None
        shape = self.q.shape[:2] if len(seen.pairs) > 1 else (1, 1)
        return Seen(seen.keys, seen.pairs.reshape(shape + seen.pairs.shape[1:]), seen.N)

    def keep(self, tile: Tile) -> Array | None:
        """Which probabilities of a tile dropout keeps, or None where it is off."""
        if not self.dropout_p:
            return None
        heads = np.arange(self.heads.start, self.heads.stop)
        keep = philox.keep_tile(
            self.seed, self.dropout_p, self.batch, heads, tile.q0, tile.q1, tile.k0, tile.k1
        )
        return keep.reshape(self.q.shape[:2] + keep.shape[1:])

    @property
    def bounded(self) -> bool | Array:
        """Which heads have provably small scores.

        Returns
        -------
        bool or array of bool, shape (Hkv, G, 1)
            True where ``m = 0`` serves every row of a head, so that no maximum need be taken; one
            bool where all heads agree.

        Notes
        -----
        By Cauchy and Schwarz, ``|scale * q . k| <= |scale| * max |q| * max |k|``. Only rows and
        keys in reach of each other count, so that what nobody sees cannot change a bit of the
        result. The values count because ``acc`` is not yet divided.
        """
        if self._bounded is None:  # no cached_property: the child of a fork may find its lock taken
            self._bounded = self._find_bounded()
        return self._bounded

    def _find_bounded(self) -> bool | Array:
        sight = self.sight
        if sight.band.Nq < _WORTH_BOUNDING or sight.band.Nq * sight.Nk <= _SHARED_TILE:
            return False  # sizes decide, so that a head has the same bits alone and among others
        if not self.terms.plain or sight.mask is not None or sight.block_mask is not None:
            return False
        q = self.q[..., slice(*sight.band.queries_of(0, sight.Nk)), :]
        keys = slice(*sight.band.keys_of(0, sight.band.Nq))
        v = self.v[..., keys, :].astype(self.dtype, copy=False)
        qk = (x.astype(self.dtype, copy=False) for x in (q, self.k[..., keys, :]))
        reach = math.prod(norms(x).max(axis=-1, initial=0) for x in qk)
        largest = np.maximum(v.max(axis=(2, 3), initial=0), -v.min(axis=(2, 3), initial=0))
        room = np.finfo(self.dtype).max * math.exp(-_SAFE_EXPONENT) / max(sight.Nk, 1)
        flags: Array = (abs(self.scale) * reach <= _SAFE_EXPONENT) & (largest < room)
        if flags.all() or not flags.any():
            return bool(flags.all())
        return flags.reshape((*flags.shape, 1))


def load(
    x: Array, dtype: np.dtype[Any], name: str, scratch: Scratch, scale: float | None = None
) -> Array:
    """Bring a block into fast memory, in the dtype of the sums.

    Parameters
    ----------
    x : array, shape (..., rows, columns)
        The block.
    dtype : numpy.dtype
        Of the result.
    name : str
        Of the array, for the record, and of the buffer that is used where a copy is needed.
    scratch : Scratch
        Buffers.
    scale : float or None
        Multiplies the block.

    Returns
    -------
    array, shape (..., rows, columns)
        The block itself where it is ready for a matrix product (dtype, unit stride, rows that do
        not overlap), else a copy.
    """
    record.read(name, x)
    row, column = x.strides[-2:]
    packed = column == x.itemsize and row >= x.shape[-1] * x.itemsize and row % x.itemsize == 0
    if scale is None and x.dtype == dtype and x.flags.aligned and (packed or x.shape[-2] == 1):
        return x
    copy = scratch.take(name, x.shape, dtype)
    copy[...] = x
    if scale is not None:
        copy *= dtype.type(scale)
    return copy


def norms(x: Array) -> Array:
    """Euclidean norm of each row.

    Parameters
    ----------
    x : array, shape (..., rows, columns)
        In the dtype of the sums.

    Returns
    -------
    array, shape (..., rows)
        NaN or infinite where the row is.
    """
    squares: Array = np.einsum("...d,...d->...", x, x)
    return np.sqrt(squares)


def lanes(problem: Problem, operands: Operands, together: int = 1) -> Iterator[Lane]:
    """Cut a problem into lanes of some heads, more where their tiles are small.

    Parameters
    ----------
    problem : Problem
        What is asked.
    operands : Operands
        The arrays.
    together : int
        Heads of a lane where tiles are not small.

    Yields
    ------
    Lane
        Batch by batch, heads ascending.
    """
    group = problem.group
    if not problem.Hq:
        return
    together = max(together, _SHARED_TILE // max(1, problem.Nq * problem.Nk))
    if operands.block_mask is not None and operands.block_mask.kinds.shape[1] > 1:
        together = 1  # heads differ in the blocks they skip
    keys, queries = (together // group, group) if together >= group else (1, together)
    for b in range(problem.B):
        band = Band(
            problem.Nq, int(operands.kv_lengths[b]), int(operands.q_offset[b]), *problem.window
        )
        for kv in cut(problem.Hkv, keys):
            for part in cut(group, queries):
                yield _lane(problem, operands, band, b, slice(*kv), slice(*part))


def _lane(P: Problem, x: Operands, band: Band, b: int, kv: slice, part: slice) -> Lane:
    heads = slice(kv.start * P.group + part.start, (kv.stop - 1) * P.group + part.stop)
    shape = (kv.stop - kv.start, part.stop - part.start)

    def split(option: Array | None) -> Array | None:
        """View the lane's part of an option with axes (B or 1, Hq or 1, ...) by key heads."""
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
    return Lane(
        q=x.q[b, heads].reshape(shape + x.q.shape[2:]),
        k=x.k[b, kv][:, None],
        v=x.v[b, kv][:, None],
        scale=P.scale,
        sight=Sight(band, P.Nk, mask, x.block_mask, b, heads),
        terms=Terms(P.softcap, slopes, split(x.bias), band.offset),
        dtype=P.sum_dtype,
        batch=b,
        heads=heads,
        group=P.group,
        dropout_p=P.dropout_p,
        seed=P.seed,
        sinks=None if x.sinks is None else split(x.sinks[None, :, None]),
    )
