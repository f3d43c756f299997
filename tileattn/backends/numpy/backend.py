"""NumPy arrays: runs the specification, blocks in parallel on threads."""

from functools import partial
from typing import Any

import numpy as np

from tileattn import record
from tileattn.algorithm import spec
from tileattn.algorithm.heads import Lane, lanes
from tileattn.algorithm.mask import cut
from tileattn.algorithm.softmax import Array
from tileattn.backends.numpy import threads
from tileattn.backends.numpy.backward import Backward
from tileattn.backends.protocol import Explanation, takes_workspace
from tileattn.problem import Operands, Problem
from tileattn.results import Attention, Gradients
from tileattn.traffic import compared, forward_traffic

# Measured with benchmarks/cpu.py --sweep. Few large calls beat many small ones, for each gives the
# interpreter lock away and waits for it; along a boundary, low tiles compute less that is hidden.
_FORWARD = (1, (384, 1024))  # heads of a lane, queries and keys of a tile
_FORWARD_BANDED = (4, (128, 1024))
_BACKWARD_ROWS = 512
_BACKWARD_KEYS = 1 << 15  # elements of a key block: 512 keys for D = 64, 256 for D = 128

_SERIAL_WORK = 1 << 23  # multiply-adds up to which starting a thread costs more than it brings


class NumpyBackend:
    """Attention on NumPy arrays; serves every problem.

    Parameters
    ----------
    forward_tile, backward_tile : (int, int) or None
        Queries and keys of a tile; None stands for what measures best. Results do not depend on
        them, up to rounding.
    """

    name = "numpy"

    def __init__(
        self,
        forward_tile: tuple[int, int] | None = None,
        backward_tile: tuple[int, int] | None = None,
    ) -> None:
        self.forward_tile = forward_tile
        self.backward_tile = backward_tile

    def owns(self, x: Any) -> bool:
        """Whether ``x`` is a NumPy array.

        Masked arrays are refused, for their mask would be lost, and matrices, which have two axes.
        """
        return isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray | np.matrix)

    def unavailable(self) -> str | None:
        """Why the backend cannot run here: it always can."""
        return None

    def why_not(self, problem: Problem) -> str | None:  # noqa: ARG002 - the protocol's argument
        """Why a problem is not served: every one is."""
        return None

    def forward(self, problem: Problem, operands: Operands, out: Array | None) -> Attention:
        """Compute attention.

        Parameters
        ----------
        problem : Problem
            What is asked.
        operands : Operands
            The arrays.
        out : array, shape (B, Hq, Nq, Dv), or None
            Where the output is written, in one go after everything else has succeeded.

        Returns
        -------
        Attention
            With four axes.
        """
        result = np.empty((problem.B, problem.Hq, problem.Nq, problem.Dv), problem.dtype)
        lse = np.empty((problem.B, problem.Hq, problem.Nq), problem.sum_dtype)
        together, (block_q, block_k) = self._forward_cut(problem)
        blocks = [
            (lane, span)
            for lane in lanes(problem, operands, together)
            for span in cut(problem.Nq, block_q)
        ]
        blocks.sort(key=lambda block: -_reach(*block))

        def task(lane: Lane, span: tuple[int, int]) -> None:
            with np.errstate(all="ignore"), threads.borrowed_scratch() as scratch:
                rows = spec.forward_rows(lane, *span, block_k, scratch)
                for name, whole, part in zip(("out", "lse"), (result, lse), rows, strict=True):
                    block = lane.heads_of(whole)[:, :, slice(*span)]
                    block[...] = part
                    record.write(name, block)

        threads.run([partial(task, *block) for block in blocks], _parallel(problem))
        if out is not None:
            out[...] = result
            result = out
        return Attention(result, lse)

    @takes_workspace
    def backward(
        self,
        problem: Problem,
        operands: Operands,
        dout: Array,
        attention: Attention,
        dlse: Array | None,
        deterministic: bool,  # noqa: ARG002 - sums have a fixed order in any case
        workspace: Array | None = None,  # noqa: ARG002 - each thread keeps its tiles
    ) -> Gradients:
        """Compute the gradients.

        Parameters
        ----------
        problem : Problem
            What is asked.
        operands : Operands
            The arrays.
        dout : array, shape (B, Hq, Nq, Dv)
            Gradient that arrives at the output.
        attention : Attention
            What the forward pass has returned, with four axes.
        dlse : array, shape (B, Hq, Nq), or None
            Gradient that arrives at the logsumexp.
        deterministic : bool
            Sums have a fixed order in any case.
        workspace : array of uint8, shape (n,), or None
            Left as it is: each thread keeps its tiles.

        Returns
        -------
        Gradients
            With four axes, those of bias and sinks in their own shape.
        """
        job = Backward(problem, operands, dout, attention, dlse, self._backward_tile(problem))
        for tasks in filter(None, (job.first_tasks(), job.tasks())):
            threads.run(tasks, _parallel(problem))
        return job.gradients()

    def explain(self, problem: Problem, operands: Operands) -> Explanation:
        """Say what would run.

        Parameters
        ----------
        problem : Problem
            What is asked.
        operands : Operands
            The arrays; only the options are looked at.

        Returns
        -------
        Explanation
            Tiles, workers, and the tiles and bytes that the schedule counts.
        """
        together, (fq, fk) = self._forward_cut(problem)
        bq, bk = self._backward_tile(problem)
        tiles, moved = forward_traffic(problem, operands, (fq, fk))
        parallel = _parallel(problem)
        columns = problem.D + problem.Dv
        size = problem.sum_dtype.itemsize
        return Explanation(
            backend=self.name,
            kernel="tileattn.algorithm.spec",
            forward_tile=(fq, fk),
            backward_tile=(bq, bk),
            workers=threads.worker_count() if parallel else 1,
            scratch_bytes=size
            * max(together * fq * (fk + columns), 2 * bq * bk + 2 * (bq + bk) * columns),
            tiles=tiles,
            bytes_moved=moved,
            traffic=compared(problem, operands, (fq, fk), (bq, bk)),
            reasons=(
                "q, k and v are NumPy arrays",
                "there is enough work for threads" if parallel else "threads would cost more",
            ),
        )

    def _forward_cut(self, problem: Problem) -> tuple[int, tuple[int, int]]:
        """Heads of a lane, and queries and keys of a tile; sizes and windows alone decide."""
        if self.forward_tile:
            return 1, self.forward_tile
        return _FORWARD if problem.window == (None, None) else _FORWARD_BANDED

    def _backward_tile(self, problem: Problem) -> tuple[int, int]:
        keys = min(max(_BACKWARD_KEYS // max(problem.D, problem.Dv, 1), 128), 512)
        return self.backward_tile or (_BACKWARD_ROWS, keys)


def _reach(lane: Lane, span: tuple[int, int]) -> int:
    """How many keys a query block reaches: its share of the work."""
    lo, hi = lane.sight.band.keys_of(*span)
    return hi - lo


def _parallel(P: Problem) -> bool:
    return P.B * P.Hq * P.Nq * P.Nk * (P.D + P.Dv) > _SERIAL_WORK
