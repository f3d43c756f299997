"""Block-sparse masks: the kind of each block, and the pairs of partial blocks."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.call.block_pairs import (
    EMPTY,
    FULL,
    PARTIAL,
    Recorder,
    Stored,
    Traced,
    decide,
)
from tileattn.expressions.build import apply
from tileattn.expressions.functions import check_parameters, expression_of
from tileattn.expressions.nodes import INDICES, constant, replaced
from tileattn.expressions.parameters import Expression, joined
from tileattn.expressions.quadtree import kinds_by_intervals
from tileattn.messages import must_be
from tileattn.validation import integers_of, lengths_of, refuse_masked

__all__ = ["EMPTY", "FULL", "PARTIAL", "BlockMask"]

Predicate = Callable[[Any, Any, Any, Any], Any]

_STRIP = 1 << 24  # pairs evaluated at a time during classification: 16 MB of booleans


class BlockMask:
    """A boolean mask known block by block; empty blocks cost nothing.

    Block ``(a, c)`` covers queries ``a * bq`` to ``(a + 1) * bq - 1`` and keys ``c * bk`` to
    ``(c + 1) * bk - 1``; the last blocks of each axis may reach past its end. Indices are those of
    the arrays: ``q_offset`` does not move them.

    Parameters
    ----------
    blocks : array of bool, broadcastable to (B, Hq, ceil(Nq / bq), ceil(Nk / bk))
        True for a full block, False for an empty one. At least two axes.
    block_size : (int, int)
        ``(bq, bk)``, queries and keys of a block.

    Raises
    ------
    TypeError
        If ``blocks`` is not a boolean array, or a block size is not an integer.
    ValueError
        If ``blocks`` has fewer than two or more than four axes, or a block size is below 1.

    Notes
    -----
    ``a & b``, ``a | b`` and ``~a`` combine masks of one block size.

    Examples
    --------
    >>> import numpy as np
    >>> import tileattn
    >>> mask = tileattn.BlockMask(np.eye(4, dtype=bool), block_size=(16, 16))
    >>> mask.density
    0.25
    >>> (~mask).density, (mask | ~mask).density
    (0.75, 1.0)
    """

    def __init__(self, blocks: NDArray[np.bool_], block_size: tuple[int, int] = (128, 128)) -> None:
        blocks = _boolean("blocks", blocks)
        if not 2 <= blocks.ndim <= 4:
            raise ValueError(f"blocks must have from two to four axes; got shape {blocks.shape}")
        kinds = np.where(blocks, np.int8(FULL), np.int8(EMPTY))
        self._set(kinds, _block_size(block_size), None, None)

    def _set(
        self,
        kinds: NDArray[np.int8],
        block_size: tuple[int, int],
        lengths: tuple[int, int] | None,
        pairs: Traced | Stored | None,
    ) -> None:
        self.kinds = kinds.reshape((1,) * (4 - kinds.ndim) + kinds.shape)
        self.kinds.setflags(write=False)
        self.block_size = block_size
        self.lengths = lengths
        self._pairs = pairs

    @property
    def expression(self) -> Expression | None:
        """Expression of the whole mask; None if the pairs of partial blocks are stored."""
        return self._pairs.visible if isinstance(self._pairs, Traced) else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.kinds.setflags(write=False)  # pickle makes writable arrays

    @classmethod
    def from_mask(
        cls, mask: NDArray[np.bool_], block_size: tuple[int, int] = (128, 128)
    ) -> "BlockMask":
        """Classify the blocks of a dense mask; copy the pairs of partial blocks as bits.

        Parameters
        ----------
        mask : array of bool, shape (..., Nq, Nk), at most four axes
            True = attended. Leading axes broadcast against (B, Hq).
        block_size : (int, int)
            Queries and keys of a block.

        Returns
        -------
        BlockMask
            The same mask, by blocks.

        Raises
        ------
        TypeError, ValueError
            As the constructor does.
        """
        mask = _boolean("mask", mask)
        if not 2 <= mask.ndim <= 4:
            raise ValueError(f"mask must have from two to four axes; got shape {mask.shape}")
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)

        def pairs(b: Any, h: Any, i: Any, j: Any) -> Any:
            return mask[b, h, i, j]

        return cls._classify(pairs, mask.shape, _block_size(block_size))

    @classmethod
    def from_predicate(
        cls,
        visible: Predicate,
        shape: tuple[int, int, int, int],
        block_size: tuple[int, int] = (128, 128),
    ) -> "BlockMask":
        """Classify the blocks of a predicate without an array of Nq x Nk.

        Parameters
        ----------
        visible : callable
            ``visible(b, h, i, j)`` takes four broadcastable integer arrays (batch, query head,
            query, key) and returns booleans that broadcast with them. It is read here, and never
            again. If it can be traced, as a ``mask_mod``, intervals classify many blocks at a time.
            Otherwise it is called for all pairs, and the pairs of partial blocks are stored, one
            bit each.
        shape : (int, int, int, int)
            ``(B, Hq, Nq, Nk)``; ``B`` or ``Hq`` of 1 holds for every batch entry or head.
        block_size : (int, int)
            Queries and keys of a block.

        Returns
        -------
        BlockMask
            The predicate, by blocks.

        Raises
        ------
        TypeError, ValueError
            If ``visible`` is not callable, ``shape`` is not four lengths, or the
            predicate does not return booleans.
        """
        if not callable(visible) or isinstance(visible, type):
            raise TypeError(must_be("visible", "a function", visible))
        check_parameters(visible, "visible", INDICES)
        shape, block_size = lengths_of("shape", shape), _block_size(block_size)
        expression = _expression(visible)
        if expression is None:
            return cls._classify(visible, shape, block_size)
        return cls._from_expression(expression, shape, block_size)

    @classmethod
    def _classify(
        cls, predicate: Predicate, shape: tuple[int, ...], block_size: tuple[int, int]
    ) -> "BlockMask":
        """Classify by all pairs, and store the pairs of partial blocks."""
        B, Hq, Nq, Nk = shape
        bq, bk = block_size
        kinds = np.full((B, Hq, -(-Nq // bq), -(-Nk // bk)), FULL, np.int8)
        recorder = Recorder(kinds, block_size)
        b, h = np.arange(B)[:, None, None, None], np.arange(Hq)[:, None, None]
        for a, c0, c1 in _strips(shape, block_size):
            i = np.arange(a * bq, min((a + 1) * bq, Nq))[:, None]
            j = np.arange(c0 * bk, min(c1 * bk, Nk))
            pairs = np.broadcast_to(
                _evaluated(predicate, (b, h, i, j), (B, Hq, i.size, j.size)),
                (B, Hq, i.size, j.size),
            )
            starts = np.arange(0, j.size, bk)
            some = np.logical_or.reduceat(pairs.any(axis=2), starts, axis=-1)
            every = np.logical_and.reduceat(pairs.all(axis=2), starts, axis=-1)
            kinds[:, :, a, c0:c1] = np.where(every, FULL, np.where(some, PARTIAL, EMPTY))
            in_b, in_h, column = np.nonzero(some & ~every)
            whole = np.zeros((B, Hq, bq, (c1 - c0) * bk), np.bool_)
            whole[:, :, : i.size, : j.size] = pairs
            blocks = whole.reshape(B, Hq, bq, c1 - c0, bk).swapaxes(2, 3)
            place = in_b, in_h, np.full_like(column, a), c0 + column
            recorder.keep(place, blocks[in_b, in_h, column])
        return cls._new(kinds, block_size, (Nq, Nk), recorder.pairs())

    @classmethod
    def _from_expression(
        cls, visible: Expression, shape: tuple[int, int, int, int], block_size: tuple[int, int]
    ) -> "BlockMask":
        """Classify by intervals; evaluate the pairs of blocks that intervals do not decide."""
        (B, Hq, Nq, Nk), (node, constants) = shape, (visible.node, visible.constants)
        # One batch entry or head represents all.
        for n, name in ((B, "b"), (Hq, "h")):
            node = replaced(node, name, constant(0)) if n == 1 else node
        kinds = kinds_by_intervals(node, shape, block_size, constants=constants)
        pairs = Traced(Expression(node, constants))
        decide(kinds, pairs, (Nq, Nk), block_size, kinds == PARTIAL)
        whole = np.ascontiguousarray(np.broadcast_to(kinds, (B, Hq, *kinds.shape[2:])))
        return cls._new(whole, block_size, (Nq, Nk), pairs)

    @classmethod
    def _new(cls, *facts: Any) -> "BlockMask":
        mask = cls.__new__(cls)
        mask._set(*facts)
        return mask

    def __invert__(self) -> "BlockMask":
        kinds, pairs = (FULL - self.kinds).astype(np.int8), self._pairs
        if isinstance(pairs, Traced):
            visible = pairs.visible
            pairs = Traced(Expression(apply("invert", visible.node), visible.constants))
        elif pairs is not None:
            pairs = ~pairs
        return self._new(kinds, self.block_size, self.lengths, pairs)

    def __and__(self, other: "BlockMask") -> Any:
        return self._combined(other, "&", np.minimum, "bitwise_and")

    def __or__(self, other: "BlockMask") -> Any:
        return self._combined(other, "|", np.maximum, "bitwise_or")

    def _combined(self, other: Any, sign: str, chosen: np.ufunc, operation: str) -> Any:
        """Combine two masks; two partial blocks may become a block of any kind."""
        if not isinstance(other, BlockMask):
            return NotImplemented
        if self.block_size != other.block_size:
            raise ValueError(
                f"the masks of {sign} must have blocks of one size; got {self.block_size} and "
                f"{other.block_size}"
            )
        lengths = {x.lengths for x in (self, other) if x.lengths is not None}
        shapes = self.kinds.shape, other.kinds.shape
        lead = zip(shapes[0][:2], shapes[1][:2], strict=True)
        fits = shapes[0][2:] == shapes[1][2:] and all(n == m or 1 in (n, m) for n, m in lead)
        if len(lengths) > 1 or not fits:
            raise ValueError(
                f"the masks of {sign} must fit one problem; got {shapes[0]} and {shapes[1]} "
                f"blocks, for (Nq, Nk) = {self.lengths} and {other.lengths}"
            )

        kinds = chosen(self.kinds, other.kinds)
        if not lengths:  # both consist of whole blocks
            return self._new(kinds, self.block_size, None, None)
        known, mine, others = lengths.pop(), self.expression, other.expression
        if mine is None or others is None:

            def both(*indices: Any) -> Any:
                return chosen(self.visible(*indices), other.visible(*indices))

            pairs: Any = decide(kinds, both, known, self.block_size, kinds == PARTIAL)
        else:
            pairs = Traced(joined(operation, mine, others))
            undecided = (self.kinds == PARTIAL) & (other.kinds == PARTIAL)
            decide(kinds, pairs, known, self.block_size, undecided)
        return self._new(kinds, self.block_size, known, pairs)

    @property
    def density(self) -> float:
        """Fraction of the blocks that are not empty; sparsity is 1 - density."""
        return float(np.mean(self.kinds != EMPTY)) if self.kinds.size else 0.0

    def check(self, B: int, Hq: int, Nq: int, Nk: int) -> None:
        """Raise ValueError if this mask does not fit a problem of these sizes.

        Parameters
        ----------
        B, Hq, Nq, Nk : int
            Sizes of the problem.

        Raises
        ------
        ValueError
            Naming ``block_mask``, its shape and the shape that would fit.
        """
        bq, bk = self.block_size
        fits = (B, Hq, -(-Nq // bq), -(-Nk // bk))
        good = all(n in (1, m) for n, m in zip(self.kinds.shape[:2], fits[:2], strict=True))
        if not good or self.kinds.shape[2:] != fits[2:]:
            raise ValueError(
                f"block_mask must have blocks that broadcast over batch and heads to {fits}, for "
                f"Nq={Nq}, Nk={Nk} and blocks of {self.block_size}; got {self.kinds.shape}"
            )
        if self.lengths not in (None, (Nq, Nk)):
            raise ValueError(
                f"block_mask must be made for (Nq, Nk) = {(Nq, Nk)}; got one for {self.lengths}"
            )

    def kind(self, b: int, heads: slice, q0: int, q1: int, k0: int, k1: int) -> int:
        """Return the kind of any tile: queries q0 to q1 - 1 and keys k0 to k1 - 1 of some heads.

        Parameters
        ----------
        b : int
            Batch entry.
        heads : slice
            Query heads computed together.
        q0, q1, k0, k1 : int
            The tile; it need not be aligned with the blocks, and must not be empty.

        Returns
        -------
        int
            ``EMPTY``, ``PARTIAL`` or ``FULL``.
        """
        bq, bk = self.block_size
        entry = self.kinds[b if self.kinds.shape[0] > 1 else 0]
        entry = entry[heads] if len(entry) > 1 else entry
        part = entry[:, q0 // bq : (q1 - 1) // bq + 1, k0 // bk : (k1 - 1) // bk + 1]
        low, high = int(part.min()), int(part.max())
        return low if low == high else PARTIAL

    def visible(self, b: Any, h: Any, i: Any, j: Any) -> NDArray[np.bool_]:
        """Return True if query ``i`` of batch ``b`` and head ``h`` attends to key ``j``.

        Parameters
        ----------
        b, h, i, j : int or array of int
            Broadcastable indices.

        Returns
        -------
        array of bool
            In the broadcast shape.
        """
        bq, bk = self.block_size
        B, Hq = self.kinds.shape[:2]
        shape = np.broadcast_shapes(*map(np.shape, (b, h, i, j)))
        b, h = 0 if B == 1 else b, 0 if Hq == 1 else h
        kinds = self.kinds[b, h, i // bq, j // bk]
        visible = kinds == FULL
        if self._pairs is not None and (kinds == PARTIAL).any():
            visible = np.where(kinds == PARTIAL, self._pairs(b, h, i, j), visible)
        return np.asarray(np.broadcast_to(visible, shape))

    def to_dense(self, shape: tuple[int, int, int, int]) -> NDArray[np.bool_]:
        """Return the mask as a dense array.

        Parameters
        ----------
        shape : (int, int, int, int)
            ``(B, Hq, Nq, Nk)``.

        Returns
        -------
        array of bool, shape (B, Hq, Nq, Nk)
            True = attended.
        """
        self.check(*shape)
        b, h, i, j = np.ogrid[tuple(slice(n) for n in shape)]
        return self.visible(b, h, i, j)

    def __repr__(self) -> str:
        return (
            f"BlockMask({self.kinds.shape} blocks of {self.block_size}, density {self.density:.3g})"
        )


def _expression(visible: Predicate) -> Expression | None:
    """Trace a predicate; return None for one that needs arrays."""
    try:
        return expression_of(visible, (), "visible")
    except Exception:  # the same error comes with arrays, or there is none
        return None


def _strips(shape: tuple[int, ...], block_size: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    """Yield a query block and a range of key blocks, with a bounded number of pairs."""
    B, Hq, Nq, Nk = shape
    bq, bk = block_size
    nq, nk = -(-Nq // bq), -(-Nk // bk)
    width = max(1, _STRIP // max(1, B * Hq * bq * bk))
    for a in range(nq if B * Hq else 0):
        for c0 in range(0, nk, width):
            yield a, c0, min(c0 + width, nk)


def _evaluated(
    predicate: Predicate, indices: tuple[NDArray[Any], ...], tile: tuple[int, ...]
) -> NDArray[np.bool_]:
    """Evaluate a predicate on a tile; raise an error for an invalid result."""
    try:
        pairs = predicate(*indices)
    except ValueError as error:
        if "truth value" not in str(error):
            raise
        raise ValueError(
            "visible must not ask whether a whole array is true: use & and | for and and or, and "
            "numpy.where for if"
        ) from error
    pairs = _boolean("the result of visible", pairs)
    lengths = zip(pairs.shape[::-1], tile[::-1], strict=False)
    if pairs.ndim > 4 or any(n not in (1, m) for n, m in lengths):
        raise ValueError(
            f"visible must return a shape that broadcasts to that of its indices, {tile}; got "
            f"{pairs.shape}"
        )
    return pairs


def _boolean(name: str, x: Any) -> NDArray[np.bool_]:
    refuse_masked(name, x)
    if not isinstance(x, np.ndarray | np.bool_) or x.dtype != np.bool_:
        raise TypeError(must_be(name, "a NumPy array of booleans", x))
    return np.asarray(x)


def _block_size(size: Any) -> tuple[int, int]:
    bq, bk = integers_of("block_size", size, "a pair (queries, keys) of positive integers", 2, 1)
    return bq, bk
