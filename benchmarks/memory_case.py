"""One cell of the memory benchmark: who, which passes, how many tokens; and what that needs."""

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import gpu_tiles
from benchmarks.gpu_cells import Cell
from benchmarks.gpu_device import DTYPES, Call, Inputs, Shapes
from benchmarks.gpu_peers import Contestant, Mask, Plain, Stepwise, Tileattn
from tileattn.kernels.config.tiles import TileSize

CONTESTANTS = ("plain", "tileattn")
PASSES = ("forward", "both")

# Bytes of the arrays of N x N that are there at once in a forward pass, and in both, over those of
# one such array. CuPy multiplies batches of 16 bits in float32, and copies what is transposed.
SQUARES = {
    "numpy": (1, 2),
    "cupy": (1, 3),
    "cupy, 16 bits": (3, 4),
    "pytorch": (2, 3),
    "tileattn": (0, 0),
}


@dataclass(frozen=True)
class Case:
    """One contestant at one size.

    Parameters
    ----------
    device : str
        ``cpu`` or ``gpu``.
    contestant : str
        ``plain``, ``pytorch`` or ``tileattn``.
    kind : str
        ``forward``, or ``both`` for forward and then backward.
    dtype : str
        A name of ``gpu_device.DTYPES``.
    H, N, D : int
        Heads, tokens, and the width of a head.
    B : int
        Batch entries.
    held : tuple
        Name of a kernel and numbers of a ``TileSize`` that tileattn is held to in a forward pass;
        empty where it chooses by itself.
    """

    device: str
    contestant: str
    kind: str
    dtype: str
    H: int
    N: int
    D: int
    B: int = 1
    held: tuple[Any, ...] = ()

    @property
    def text(self) -> str:
        """Written for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> "Case":
        """Read what ``text`` is."""
        fields = json.loads(text)
        return cls(**fields | {"held": tuple(fields["held"])})

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
        lse = rows * max(size, 4) if self.contestant == "tileattn" else 0
        return self.inputs + outputs + lse + self._squares * rows * self.N * size

    def refusal(self, there: int) -> dict[str, Any]:
        """Fields of a row that say why the case is not run; none where ``there`` bytes suffice."""
        if self.needs <= there:
            return {}
        reason = f"needs {self.needs / 1e9:.1f} GB and {there / 1e9:.1f} GB are free"
        return {"needs_bytes": self.needs, "free_bytes": there, "not_run": reason}

    @property
    def _squares(self) -> int:
        library = self.contestant
        if library == "plain":
            narrow = ", 16 bits" if DTYPES[self.dtype].itemsize == 2 else ""
            library = "numpy" if self.device == "cpu" else f"cupy{narrow}"
        return SQUARES[library][PASSES.index(self.kind)]

    def prepared(self, inputs: Inputs, xp: Any) -> Call:
        """Give the call that computes the passes; what it returns keeps the outputs alive."""
        if self.held:
            kernel, *tile = self.held
            return gpu_tiles.prepared(kernel, TileSize(*tile), inputs)
        everything, who = Mask(causal=False), self._who(xp)
        if self.kind == "forward":
            return who.forward(inputs, everything)

        def both() -> Any:
            return who.backward(inputs, everything)()  # what prepares it runs the forward pass

        return both

    def _who(self, xp: Any) -> Contestant:
        if self.contestant == "plain":
            return Plain(xp)
        return Stepwise() if self.contestant == "pytorch" else Tileattn(reuse=False)

    def run(self, inputs: Inputs, xp: Any) -> Any:
        """Compute the passes."""
        return self.prepared(inputs, xp)()
