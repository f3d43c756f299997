"""One cell of the memory benchmark: who, which passes, how many tokens; and what that needs."""

import math
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_cells import Cell
from benchmarks.gpu_device import DTYPES, Inputs, Shapes
from benchmarks.gpu_peers import Contestant, Mask, Plain, Tileattn

CONTESTANTS = ("plain", "tileattn")
PASSES = ("forward", "both")

# Arrays of N x N that plain attention has at once. CuPy copies what it multiplies transposed.
SQUARES = {("cpu", "forward"): 1, ("cpu", "both"): 2, ("gpu", "forward"): 1, ("gpu", "both"): 3}


@dataclass(frozen=True)
class Case:
    """One contestant at one size.

    Parameters
    ----------
    device : str
        ``cpu`` or ``gpu``.
    contestant : str
        ``plain`` or ``tileattn``.
    kind : str
        ``forward``, or ``both`` for forward and then backward.
    dtype : str
        A name of ``gpu_device.DTYPES``.
    H, N, D : int
        Heads, tokens, and the width of a head.
    B : int
        Batch entries.
    """

    device: str
    contestant: str
    kind: str
    dtype: str
    H: int
    N: int
    D: int
    B: int = 1

    @property
    def shapes(self) -> Shapes:
        """Shapes of q, k, v and of the gradient that arrives."""
        return Cell(self.kind, self.dtype, self.B, self.H, self.N, self.D, causal=False).shapes

    @property
    def inputs(self) -> int:
        """Bytes of the inputs; the gradient that arrives counts in both passes."""
        return sum(map(math.prod, self.shapes)) * DTYPES[self.dtype].itemsize

    @property
    def needs(self) -> int:
        """Bytes of inputs, outputs and arrays of N x N: no run takes less."""
        size, rows = DTYPES[self.dtype].itemsize, self.B * self.H * self.N
        outputs = (1 if self.kind == "forward" else 4) * rows * self.D * size
        if self.contestant == "tileattn":
            return self.inputs + outputs + rows * max(size, 4)  # and lse
        return self.inputs + outputs + SQUARES[self.device, self.kind] * rows * self.N * size

    def run(self, inputs: Inputs, xp: Any) -> Any:
        """Compute the passes; the result keeps the outputs alive."""
        who: Contestant = Plain(xp) if self.contestant == "plain" else Tileattn(reuse=False)
        everything = Mask(causal=False)
        if self.kind == "forward":
            return who.forward(inputs, everything)()
        backward = who.backward(inputs, everything)  # runs the forward pass
        return backward()
