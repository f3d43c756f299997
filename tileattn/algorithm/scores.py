"""Score modifiers, which turn ``scale * q @ k.T`` into scores, and their derivatives.

A modifier is one class here, one function in ``score_mod.cuh`` and one line in ``ScoreMods.of``.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm.tiles import Tile, tile_of
from tileattn.expressions.derivative import derivatives
from tileattn.expressions.evaluate import evaluate, places
from tileattn.expressions.nodes import Kind, Node, constant

Array = NDArray[Any]

_SCORE = Node("input", Kind.FLOAT, (), "s")


class Partial(NamedTuple):
    """The derivative of new scores by a parameter that is read for them."""

    parameter: "str | Node"  # bias, or an element of the user's arrays
    value: Array | None = None  # None for 1
    indices: Sequence[Array] = ()  # of the element, with the axes of the scores


class Grad(NamedTuple):
    """The derivatives of new scores by old scores, None for 1, and by parameters."""

    by_score: Array | None = None
    by_parameters: Sequence[Partial] = ()


class ScoreMod(Protocol):
    """One modifier of the scores of a tile."""

    can_mask: ClassVar[bool] = False  # True if it may return -inf, which masks the pair out

    def apply(self, s: Array, tile: Tile) -> None:
        """Modify the scores of a tile in place."""

    def apply_with_grad(self, s: Array, tile: Tile) -> Grad:
        """Apply the modifier; return its derivatives in new memory."""


class Descale(ScoreMod):
    """``s -> s * k_descale``: of quantised keys, whose descales have the shape (Hkv, 1, 1, keys).

    The products ``q @ k.T`` of the numbers that are stored have few bits, so this is where the keys
    are dequantised.
    """

    def __init__(self, descales: Callable[[slice], Array]) -> None:
        self._of = descales

    def apply(self, s: Array, tile: Tile) -> None:
        s *= self._of(tile.keys)

    def apply_with_grad(self, s: Array, tile: Tile) -> Grad:
        self.apply(s, tile)
        return Grad(np.array(np.broadcast_to(self._of(tile.keys), s.shape)))


class Softcap(ScoreMod):
    """``s -> softcap * tanh(s / softcap)``, from Gemma 2, arXiv:2408.00118."""

    def __init__(self, softcap: float) -> None:
        self._softcap = softcap

    def apply(self, s: Array, tile: Tile) -> None:  # noqa: ARG002 - the protocol's argument
        cap = self._tanh(s)
        s *= cap

    def apply_with_grad(self, s: Array, tile: Tile) -> Grad:  # noqa: ARG002 - as above
        """Cap the scores; the derivative is ``1 - tanh(s / softcap)**2``."""
        cap = self._tanh(s)
        grad = s * s
        np.subtract(np.asarray(1, s.dtype), grad, out=grad)
        s *= cap
        return Grad(grad)

    def _tanh(self, s: Array) -> Any:
        """Write ``tanh(s / cap)`` to s and return the cap.

        A cap that scores cannot tell from 0, or from none, stays within the range of the dtype,
        where the quotient is neither 0 / 0 nor below normal.
        """
        ends = np.finfo(s.dtype)
        cap = s.dtype.type(min(max(self._softcap, float(ends.tiny)), float(ends.max * ends.eps)))
        np.divide(s, cap, out=s)
        np.tanh(s, out=s)
        return cap


class ALiBi(ScoreMod):
    """``s -> s - slope * |p - j|``, slopes of (Hkv, G, 1, 1): Press et al., arXiv:2108.12409."""

    def __init__(self, slopes: Array, offset: int = 0) -> None:
        self._slopes = slopes
        self._offset = offset

    def apply(self, s: Array, tile: Tile) -> None:
        p = np.arange(tile.q0, tile.q1)[:, None] + self._offset
        distance = np.abs(p - np.arange(tile.k0, tile.k1)).astype(s.dtype)
        s -= self._slopes.astype(s.dtype) * distance

    def apply_with_grad(self, s: Array, tile: Tile) -> Grad:
        self.apply(s, tile)
        return Grad()


class Bias(ScoreMod):
    """``s -> s + bias``, a bias of shape (Hkv or 1, G or 1, Nq or 1, Nk or 1)."""

    can_mask: ClassVar[bool] = True

    def __init__(self, bias: Array) -> None:
        self._bias = bias

    def apply(self, s: Array, tile: Tile) -> None:
        s += tile_of(self._bias, tile).astype(s.dtype, copy=False)

    def apply_with_grad(self, s: Array, tile: Tile) -> Grad:
        self.apply(s, tile)
        return Grad(None, [Partial("bias")])


class ScoreFunction(ScoreMod):
    """The user's own: ``s -> score_mod(s, b, h, i, j, *aux)``, heads of shape (Hkv, G, 1, 1)."""

    can_mask: ClassVar[bool] = True

    def __init__(
        self,
        score_mod: Node,
        aux: Sequence[Array],
        batch: int,
        heads: Array,
        constants: Sequence[int] = (),
    ) -> None:
        self._new, self._aux, self._constants = score_mod, aux, constants
        self._place = {"b": np.int64(batch), "h": heads}

    def apply(self, s: Array, tile: Tile) -> None:
        s[...] = self._values([self._new], s, tile)[0]

    def apply_with_grad(self, s: Array, tile: Tile) -> Grad:
        by = function_derivatives(self._new)
        reads = [node for node in by if node.op == "aux"]
        indices = [index for node in reads for index in node.inputs]
        new, *values = self._values([self._new, *by.values(), *indices], s, tile)
        found = dict(zip(by, values, strict=False))
        place = iter(values[len(by) :])
        partials = []
        for node in reads:
            array = self._aux[aux_number(node)]
            own = places(node, array, [next(place) for _ in node.inputs], s.dtype)
            value = None if by[node] == constant(1.0) else np.array(found[node], ndmin=s.ndim)
            partials.append(Partial(node, value, [np.array(x, ndmin=s.ndim) for x in own]))
        grad = np.array(np.broadcast_to(found.get(_SCORE, s.dtype.type(0)), s.shape))
        s[...] = new
        return Grad(None if by.get(_SCORE) == constant(1.0) else grad, partials)

    def _values(self, outputs: Sequence[Node], s: Array, tile: Tile) -> list[Array]:
        """Evaluate expressions on a tile; one of them may be s itself."""
        i, j = np.arange(tile.q0, tile.q1)[:, None], np.arange(tile.k0, tile.k1)
        inputs = {**self._place, "s": s, "i": i, "j": j}
        return evaluate(outputs, inputs, self._aux, s.dtype, self._constants)


@lru_cache(maxsize=256)
def function_derivatives(score_mod: Node) -> dict[Node, Node]:
    """Differentiate the user's function, once."""
    return derivatives(score_mod)


def learned_elements(score_mod: Node) -> list[Node]:
    """List the elements of ``aux`` by which the user's function is differentiable."""
    return [node for node in function_derivatives(score_mod) if node.op == "aux"]


def aux_number(parameter: "str | Node") -> int:
    """Return the number of the array that a parameter is an element of; -1 for the bias."""
    return -1 if isinstance(parameter, str) else int(parameter.value or 0)


class ScoreMods(tuple[ScoreMod, ...]):
    """The modifiers of some heads, in order; without any, the score is ``scale * q @ k.T``.

    The score of query i at position p = i + offset and key j is::

        s = softcap * tanh(scale * q_i . k_j * k_descale_j / softcap) - slope * |p - j| + bias_ij
        s = score_mod(s, b, h, i, j, *aux)
    """

    __slots__ = ()

    @classmethod
    def of(
        cls,
        softcap: float | None = None,
        slopes: Array | None = None,
        bias: Array | None = None,
        offset: int = 0,
        function: ScoreFunction | None = None,
        k_descale: Callable[[slice], Array] | None = None,
    ) -> "ScoreMods":
        """Make the modifiers of a call, in the order of the formula; None for an absent one."""
        mods: Iterable[ScoreMod | None] = (
            None if k_descale is None else Descale(k_descale),
            None if softcap is None else Softcap(softcap),
            None if slopes is None else ALiBi(slopes, offset),
            None if bias is None else Bias(bias),
            function,
        )
        return cls(mod for mod in mods if mod is not None)

    @property
    def can_mask(self) -> bool:
        """True if a score may be -inf, which masks its pair out."""
        return any(mod.can_mask for mod in self)

    def apply(self, s: Array, tile: Tile) -> None:
        """Turn scaled products of a tile, shape (Hkv, G, queries, keys), into scores, in place."""
        for mod in self:
            mod.apply(s, tile)

    def apply_with_grad(self, s: Array, tile: Tile) -> list[Grad]:
        """Apply the modifiers; return the derivatives of each."""
        return [mod.apply_with_grad(s, tile) for mod in self]
