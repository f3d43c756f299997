"""What a backend is, and how it explains a call."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from tileattn.call.prepared import PreparedCall
from tileattn.call.problem import Operands, Problem
from tileattn.results import Attention, Gradients

Method = TypeVar("Method", bound=Callable[..., Any])

_TITLES = {"flash1": "FlashAttention", "flash2": "FlashAttention-2"}


@dataclass(frozen=True)
class Explanation:
    """What would run for a call, and why.

    Parameters
    ----------
    backend, kernel : str
        Names of the backend and of the kernel.
    forward_tile, backward_tile : (int, int)
        Queries and keys of a tile.
    workers : int
        Threads, or SMs, that share the work.
    scratch_bytes : int
        Fast memory of one worker: shared memory on a GPU, tile buffers on a CPU.
    tiles : dict of str to int
        Tiles of the forward pass that are empty (``"skipped"``), partial and full, of all heads.
        With few queries, the query heads of a KV head share tiles.
    bytes_moved : dict of str to int
        Model of the bytes that the forward pass moves between slow and fast memory.
    reasons : tuple of str
        Why this backend, kernel and tile.
    kernels : tuple of str
        One line per launch of both passes: tile, grid, registers, shared memory.
    workspace_bytes : int
        Memory that the backward pass takes besides its results, and the size of its ``workspace``
        argument, if lse and the rows of dout and out are contiguous; 0 if unknown.
    traffic : dict of str to (int, int)
        Model of the bytes that the forward and the backward pass would move, by algorithm
        (``tileattn.traffic.ALGORITHMS``), with these tiles.
    """

    backend: str
    kernel: str
    forward_tile: tuple[int, int]
    backward_tile: tuple[int, int]
    workers: int
    scratch_bytes: int
    tiles: dict[str, int] = field(default_factory=dict)
    bytes_moved: dict[str, int] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    workspace_bytes: int = 0
    traffic: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        names = {"skipped": "empty"}
        tiles = ", ".join(f"{n:,} {names.get(kind, kind)}" for kind, n in self.tiles.items())
        moved = ", ".join(f"{name} {n / 1e6:,.2f} MB" for name, n in self.bytes_moved.items())
        lines = [
            f"backend   {self.backend} ({self.kernel})",
            f"tile size forward {self.forward_tile[0]} x {self.forward_tile[1]}, "
            f"backward {self.backward_tile[0]} x {self.backward_tile[1]} (queries x keys)",
            f"tiles     {tiles}",
            f"workers   {self.workers}, {self.scratch_bytes / 1024:,.0f} KiB of tile buffers each",
            f"traffic   {moved}",
            *self._passes(),
            *(f"launch    {kernel}" for kernel in self.kernels),
            *([f"workspace {self.workspace_bytes / 1e6:,.2f} MB"] if self.workspace_bytes else []),
            *(f"because   {reason}" for reason in self.reasons),
        ]
        return "\n".join(lines)

    def _passes(self) -> list[str]:
        """Return a line per pass, with the bytes of every algorithm."""
        totals = self.traffic.items()
        return [
            f"{title:<10}"
            + ", ".join(f"{_TITLES.get(name, name)} {of[n] / 1e6:,.2f} MB" for name, of in totals)
            for n, title in enumerate(("forward", "backward"))
            if totals
        ]


def takes_workspace(backward: Method) -> Method:
    """Mark a backend's ``backward`` as one that has the argument ``workspace``."""
    backward.takes_workspace = True  # type: ignore[attr-defined]  # a function has any attribute
    return backward


@runtime_checkable
class Backend(Protocol):
    """Something that runs problems on one kind of array.

    Notes
    -----
    Inputs are never written. Results belong to the library, device and stream of the inputs.

    A ``backward`` that is marked with `takes_workspace` has an argument ``workspace``, too. It gets
    it by name where a caller passes one: an array of uint8, of which all but its size has been
    checked.

    A method ``prepare(problem)`` may return a new `tileattn.call.prepared.PreparedCall`, which then
    runs all calls of one signature; `PreparingBackend` derives the two passes from it.

    Methods ``append_kv``, ``rope``, ``merge`` and ``cascade_tables`` are optional. They get
    validated arguments; without them array expressions run. ``append_kv`` gets ``descales`` by
    name, with three axes as in `tileattn.call.problem.Operands`, if the cache has 8 bits and new
    keys have more; it writes the descales ``of_tokens``. ``merge`` may return None: then array
    expressions run. For examples see ``tileattn.backends.cupy.token_rows``, ``merged_rows`` and
    ``shared_pages``.

    An optional method ``asarray`` copies a NumPy array to one of the backend, if it does not own
    NumPy arrays: ``tileattn.testing`` checks such a backend by it.

    An optional mapping ``external_memory`` has, for each kind of device such as ``"cuda"``, a class
    or function that returns a `tileattn.backends.external_memory.ExternalMemory`. Bridges to other
    libraries need it.
    """

    name: str

    def owns(self, x: Any) -> bool:
        """Return True if ``x`` is an array of this backend; must not import its library."""

    def unavailable(self) -> str | None:
        """Return why the backend cannot run here, with the command that fixes it; else None."""

    def why_not(self, problem: Problem) -> str | None:
        """Return one sentence that says why a problem is not supported; None if it is."""

    def forward(self, problem: Problem, operands: Operands, out: Any | None) -> Attention:
        """Compute ``out`` and ``lse`` with four axes; ``out`` is written where it is given."""

    def backward(
        self,
        problem: Problem,
        operands: Operands,
        dout: Any,
        attention: Attention,
        dlse: Any | None,
        deterministic: bool,
    ) -> Gradients:
        """Compute the gradients. They have four axes, but bias and sinks keep their own shape."""

    def explain(self, problem: Problem, operands: Operands) -> Explanation:
        """Say what would run."""


class PreparingBackend:
    """Mixin of backends that run every call by a `PreparedCall`: ``forward`` and ``backward``.

    A subclass that overrides one of the two is called through them.
    """

    def call_of(self, problem: Problem) -> PreparedCall:
        """Return a new prepared call of the backend."""
        raise NotImplementedError

    def prepare(self, problem: Problem) -> PreparedCall:
        """Return the prepared call of one signature."""
        own = (getattr(type(self), name) for name in ("forward", "backward"))
        inherited = (PreparingBackend.forward, PreparingBackend.backward)
        return self.call_of(problem) if (*own,) == inherited else PreparedCall(self, problem)

    def forward(self, problem: Problem, operands: Operands, out: Any | None) -> Attention:
        """Compute attention by a new prepared call."""
        return self.call_of(problem).forward(operands, out)

    @takes_workspace
    def backward(
        self,
        problem: Problem,
        operands: Operands,
        dout: Any,
        attention: Attention,
        dlse: Any | None,
        deterministic: bool,
        workspace: Any | None = None,
    ) -> Gradients:
        """Compute the gradients by a new prepared call."""
        call = self.call_of(problem)
        return call.backward(operands, dout, attention, dlse, deterministic, workspace)
