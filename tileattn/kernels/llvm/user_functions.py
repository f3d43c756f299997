"""The caller's score and mask functions in a module, and their key in the disk cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tileattn.expressions.derivative import derivatives
from tileattn.expressions.nodes import Kind, Node, constant
from tileattn.expressions.parameters import kernel_cells

_SCORE = Node("input", Kind.FLOAT, (), "s")

LIBRARY = (
    *("exp", "expm1", "log", "log1p", "log2", "tanh"),
    *("sin", "cos", "atan", "erf", "pow", "fmod"),
)
"""Functions of the C library on float64, for operations without a vector version."""


@dataclass(frozen=True)
class Functions:
    """The expressions of a module, and the kinds of the arrays that they read."""

    score_mod: Node | None = None
    mask_mod: Node | None = None
    aux: tuple[tuple[str, int], ...] = ()  # name of the dtype and number of axes of each array
    learning: bool = False  # gradients of the arrays are computed

    @property
    def key(self) -> str:
        """Text that identifies these functions."""
        nodes = self.score_mod, self.mask_mod, self.derivative
        return f"{[x and x.digest.hex() for x in nodes]} {self.aux} {self.learning}"

    @property
    def cells(self) -> Mapping[Node, int]:
        """The expressions that are loaded from cells, numbered; the cells follow the arrays."""
        return kernel_cells(self.score_mod, self.mask_mod)

    @cached_property
    def derivative(self) -> Node:
        """The derivative of the new score by the old one."""
        return self._derivatives.get(_SCORE, constant(0.0))

    @cached_property
    def learned(self) -> Mapping[Node, Node]:
        """Derivative of the new score by each element of ``aux`` whose gradient is computed."""
        found = self._derivatives.items() if self.learning else ()
        return {x: derivative for x, derivative in found if x.op == "aux"}

    @cached_property
    def _derivatives(self) -> Mapping[Node, Node]:
        return {} if self.score_mod is None else derivatives(self.score_mod)


NO_FUNCTIONS = Functions()


def slots(aux: Sequence[tuple[str, int]]) -> int:
    """Count the table entries of some arrays: an address, and length and stride of each axis."""
    return sum(1 + 2 * axes for _, axes in aux)
