"""The caller's own functions of a module of code: what its key in the cache is made of."""

from dataclasses import dataclass
from functools import cached_property

from tileattn.expressions.derivative import derivatives
from tileattn.expressions.nodes import Kind, Node, constant

_SCORE = Node("input", Kind.FLOAT, (), "s")

LIBRARY = ("exp", "log", "log2", "tanh", "sin", "cos", "pow")
"""Functions of the C library, of float64: what there are no vectors for."""


@dataclass(frozen=True)
class Functions:
    """The expressions of a module, and what is known of the arrays that they read.

    Parameters
    ----------
    score_mod, mask_mod : Node or None
        The expressions.
    aux : tuple of (str, int)
        Name of the dtype and number of axes of each array.
    """

    score_mod: Node | None = None
    mask_mod: Node | None = None
    aux: tuple[tuple[str, int], ...] = ()

    @property
    def key(self) -> str:
        """Text that tells these functions from all others."""
        nodes = self.score_mod, self.mask_mod, self.derivative
        return f"{[x and x.digest.hex() for x in nodes]} {self.aux}"

    @cached_property
    def derivative(self) -> Node:
        """The derivative of the new score by the old one."""
        found = {} if self.score_mod is None else derivatives(self.score_mod)
        return found.get(_SCORE, constant(0.0))

    def why_not(self) -> str | None:
        """Say why a function is not served."""
        learned = () if self.score_mod is None else derivatives(self.score_mod)
        if any(x.op == "aux" for x in learned):
            return "score_mod: there is no code for the gradients of aux"
        return None


NO_FUNCTIONS = Functions()
