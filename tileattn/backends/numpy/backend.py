"""The NumPy backend: runs the specification, with blocks in parallel on threads."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np

from tileattn.algorithm import invariant, spec
from tileattn.algorithm.heads import Array
from tileattn.algorithm.memory import Executor, Task, sum_dtype
from tileattn.backends import threads
from tileattn.backends.buffers import placed
from tileattn.backends.new_numbers import NewCall, NewNumbers
from tileattn.backends.numpy.blas import single_threaded
from tileattn.backends.numpy.memory import TileMemory, borrowed_scratch
from tileattn.backends.protocol import Explanation, takes_workspace
from tileattn.call.parse import CallKind, four_axes
from tileattn.call.prepared import DeviceMemory, PreparedCall
from tileattn.call.problem import Operands, Problem
from tileattn.call.scalars import scale_of
from tileattn.call.sequences import Packing
from tileattn.results import Attention, Gradients
from tileattn.traffic import explained

# Heads of a task; queries and keys of a tile. Few large NumPy calls beat many small ones: each
# releases the interpreter lock and waits for it again.
_FORWARD = (1, (384, 1024))
_FORWARD_BANDED = (4, (128, 1024))  # fewer masked-out pairs at the boundary of a window
_FORWARD_INVARIANT = (32, (1, 256))  # fixed: the keys of a tile decide about bits
_BACKWARD_ROWS = 512  # queries of a tile
_BACKWARD_KEYS = 1 << 15  # elements in a key block: 512 keys for D = 64, 256 for D = 128

_SERIAL_WORK = 1 << 23  # multiply-adds up to which one thread is faster than several


Result = TypeVar("Result")


class Workers(Executor):
    """Runs the tasks of one call on threads; small calls run on the calling thread."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.accum_dtype)
        self._parallel, self._sums = _is_parallel(problem), sum_dtype(problem)
        self._small_scores: dict[int, bool | Array] = {}

    def compute(self, work: Callable[..., Result]) -> Result:
        """Return ``work(executor=self)``; small calls limit BLAS to one thread."""
        if self._parallel:
            return work(executor=self)
        results: list[Result] = []
        single_threaded(lambda: results.append(work(executor=self)))
        return results[0]

    def run(self, tasks: Sequence[Task]) -> None:
        """Run the tasks, started in this order."""
        if self._parallel:
            threads.run([partial(self._run, task) for task in tasks], within=single_threaded)
        else:
            for task in tasks:
                self._run(task)

    def _run(self, task: Task) -> None:
        with np.errstate(all="ignore"), borrowed_scratch() as scratch:
            task(TileMemory(self.dtype, scratch, self._small_scores, self._sums))

    def ordered_sums(self, tasks: int) -> threads.OrderedSums:
        """Return the order in which tasks add to shared sums."""
        return threads.OrderedSums(tasks)


def is_array(x: Any) -> bool:
    """Return True for a NumPy array; not for a masked array or a two-dimensional matrix."""
    return isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray | np.matrix)


class NumpyNumbers(NewNumbers):
    """Runs calls of one kind with numbers that were not seen before.

    Parameters
    ----------
    backend : NumpyBackend
        The backend.
    """

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._backend = backend

    def plan(self, P: Problem, *_: Any) -> tuple[Sequence[Any], Problem]:
        """Return the sizes and the window of a call, and the problem of calls like it."""
        left, right = P.window
        sides = (-1 if side is None else side for side in (left, right))
        return (P.B, P.Hq, P.Hkv, P.Nq, P.Nk, P.D, P.Dv, *sides), P

    def start(self, call: NewCall, numbers: Sequence[Any], rest: Problem) -> Any:
        """Run a call."""
        kind, (q, k, v, *others), _, (scale, softcap, _, dropout_p, seed), _ = call
        B, Hq, Hkv, Nq, Nk, D, Dv, left, right, *_ = numbers
        lengths, offsets = call.lengths_and_offsets
        packing = None
        if rest.is_packed:
            packing = Packing(*(np.array(x, np.int64) for x in call.packed.values()))
        P = Problem(
            *(B, Hq, Hkv, Nq, Nk, D, Dv, rest.dtype),
            scale_of(None, D) if scale is None else scale,
            softcap,
            (None if left < 0 else left, None if right < 0 else right),
            *(dropout_p, seed, rest.ndim, kind.enabled_options, kind.score_mod, kind.mask_mod),
            call.constants,
            None if packing is None else packing.sizes[0],
            mask_options=kind.mask_options,
        )
        places = np.array(lengths, np.int64), np.array(offsets, np.int64)
        x = Operands(four_axes(q), four_axes(k), four_axes(v), *places, packing=packing)
        if others:
            dout, out, lse = others
            attention = Attention(four_axes(out), lse.reshape(B, Hq, Nq))
            result = self._backend.backward(P, x, four_axes(dout), attention, None, False)
        else:
            result = self._backend.forward(P, x, None)
        lead = (0,) * (4 - P.ndim)
        return type(result)(*[a if a is None else a[lead] for a in result]) if lead else result


class NumpyCall(PreparedCall):
    """Calls on NumPy arrays."""

    @cached_property
    def _new_numbers(self) -> NumpyNumbers:
        return NumpyNumbers(self.backend)

    def first(
        self,
        kind: CallKind,
        rows: Sequence[Any],
        options: Mapping[str, Any],
        deterministic: bool | None,
        _memory: DeviceMemory | None = None,  # results are NumPy arrays
        _gradients: tuple[str, ...] | None = None,
        /,
    ) -> Any:
        """Run a pass with other numbers, without validating its kind."""
        return self._new_numbers.run(kind, rows, options, is_forward=deterministic is None)


class NumpyBackend:
    """Attention on NumPy arrays; supports every problem.

    Parameters
    ----------
    forward_tile, backward_tile : (int, int) or None
        Queries and keys of a tile; by default the fastest known. They change only the rounding of
        results.
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
        """Return True for a NumPy array that is neither a masked array nor a matrix."""
        return is_array(x)

    def unavailable(self) -> str | None:
        """Return None: the backend always runs."""
        return None

    def why_not(self, problem: Problem) -> str | None:  # noqa: ARG002 - the protocol's argument
        """Return None: every problem is supported."""
        return None

    def prepare(self, problem: Problem) -> PreparedCall:
        """Return the prepared call of one signature."""
        return NumpyCall(self, problem)

    def forward(self, problem: Problem, operands: Operands, out: Array | None) -> Attention:
        """Compute attention; ``out`` is written at once, after everything else has succeeded."""
        together, tile = self._forward_tile(problem)
        compute = partial(spec.forward, problem, operands, tile, together=together)
        if problem.is_invariant:
            compute = partial(invariant.forward, problem, operands, tile[1], together=together)
        result = Workers(problem).compute(compute)
        return placed(result, out)

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
        """Compute the gradients; the workspace is not used."""
        tile = self._backward_tile(problem)
        compute = partial(spec.backward, problem, operands, dout, attention, dlse, tile)
        return Workers(problem).compute(compute)

    def explain(self, problem: Problem, operands: Operands) -> Explanation:
        """Describe what would run; reads only the option arrays."""
        together, (fq, fk) = self._forward_tile(problem)
        bq, bk = self._backward_tile(problem)
        tiles, moved, traffic = explained(problem, operands, (fq, fk), (bq, bk))
        parallel = _is_parallel(problem)
        columns = problem.D + problem.Dv
        size = problem.accum_dtype.itemsize
        return Explanation(
            backend=self.name,
            kernel=f"tileattn.algorithm.{'invariant' if problem.is_invariant else 'spec'}",
            forward_tile=(fq, fk),
            backward_tile=(bq, bk),
            workers=threads.worker_count() if parallel else 1,
            scratch_bytes=size
            * max(together * fq * (fk + columns), 2 * bq * bk + 2 * (bq + bk) * columns),
            tiles=tiles,
            bytes_moved=moved,
            traffic=traffic,
            reasons=(
                "q, k and v are NumPy arrays",
                threads.REASONS[parallel],
            ),
        )

    def _forward_tile(self, problem: Problem) -> tuple[int, tuple[int, int]]:
        """Return the heads of a task, and the queries and keys of a tile."""
        if problem.is_invariant:
            together, (block_q, block_k) = _FORWARD_INVARIANT
            return together, (block_q, self.forward_tile[1] if self.forward_tile else block_k)
        if self.forward_tile:
            return 1, self.forward_tile
        return _FORWARD if problem.window == (None, None) else _FORWARD_BANDED

    def _backward_tile(self, problem: Problem) -> tuple[int, int]:
        keys = min(max(_BACKWARD_KEYS // max(problem.D, problem.Dv, 1), 128), 512)
        return self.backward_tile or (_BACKWARD_ROWS, keys)


def _is_parallel(P: Problem) -> bool:
    """Return True if there is enough work for several threads."""
    pairs = P.B * P.Hq * P.Nq * P.Nk // max(1, P.sequences or 1)
    return pairs * (P.D + P.Dv) > _SERIAL_WORK
