"""The LLVM backend: kernels compiled for this CPU, on threads without the GIL."""

import functools
import importlib.util
from typing import Any

from tileattn.backends import threads
from tileattn.backends.described import Lengths
from tileattn.backends.llvm.call import LlvmCall
from tileattn.backends.llvm.parameter_gradient import layouts
from tileattn.backends.llvm.tasks import forward_work, is_parallel
from tileattn.backends.numpy.backend import is_array
from tileattn.backends.protocol import Explanation, PreparingBackend
from tileattn.call.prepared import PreparedCall
from tileattn.call.problem import Operands, Problem
from tileattn.dtypes import NAMED
from tileattn.kernels.llvm.compile import bf16_host, host
from tileattn.kernels.llvm.sizes import (
    DECODE_KEYS,
    DECODE_ROWS,
    ROWS,
    SPLIT,
    few_queries,
    scratch_bytes,
)
from tileattn.kernels.llvm.target import Target
from tileattn.traffic import explained

OLDEST = (0, 47)
"""Release of llvmlite that the kernels need, as the extra ``cpu`` says."""

_LONGEST = (1 << 31) - 1  # queries or keys: indices of a tile have 32 bits
_MIN_BF16_ROWS = 16  # query rows per KV head from which bfloat16 matmuls are faster than float32


class LlvmBackend(PreparingBackend):
    """Attention on NumPy arrays, by kernels that LLVM compiles.

    Gradients of q, k and v are always computed.

    Parameters
    ----------
    target : Target or None
        CPU to compile for; None is this CPU.
    kernel : str or None
        Forward kernel for every problem; None chooses for each.
    split_keys : int
        Keys in a split of the decoding kernel; the bits of results depend on it.
    """

    name = "llvm"

    def __init__(
        self, target: Target | None = None, kernel: str | None = None, split_keys: int = SPLIT
    ) -> None:
        self._target, self._kernel, self.split_keys = target, kernel, split_keys

    @property
    def target(self) -> Target:
        """CPU that kernels are compiled for."""
        return self._target or host()

    def targets_of(self, P: Problem) -> tuple[Target, ...]:
        """Return the targets of a problem; the second computes key heads that the first skips."""
        found = bf16_host() if self._target is None and _uses_bf16_matmuls(P) else None
        return (self.target,) if found is None else (found, self.target)

    def few_queries(self, P: Problem) -> int:
        """Return the most queries per sequence that the decoding kernel takes.

        The two kernels add up in other orders, so invariant calls run in one of them.
        """
        if self._kernel is None:
            return 0 if P.is_invariant else few_queries(P.group)
        return _LONGEST if self._kernel == "decode" else 0

    def owns(self, x: Any) -> bool:
        """Return True for a NumPy array that is neither a masked array nor a matrix."""
        return is_array(x)

    def unavailable(self) -> str | None:
        """Return why the backend cannot run here: no llvmlite, or an old CPU."""
        return _unavailable()

    def why_not(self, problem: Problem) -> str | None:
        """Return why a problem is not supported."""
        for name in ("Nq", "Nk"):
            n = getattr(problem, name)
            if n > _LONGEST:
                return f"{name} is {n:,}; the kernels take at most {_LONGEST:,} queries and keys"
        return None

    def call_of(self, problem: Problem) -> PreparedCall:
        """Return a prepared call, which remembers its parameters."""
        return LlvmCall(self, problem)

    def explain(self, problem: Problem, operands: Operands) -> Explanation:
        """Describe what would run; reads only the option arrays."""
        P, target = problem, self.targets_of(problem)[0]
        batch = Lengths.of(P, operands).batch(P)
        kernel = "decode" if batch.Nq <= self.few_queries(P) else "forward"
        width = target.width(P.accum_dtype.itemsize)
        forward, backward, heads = (width, target.keys), (ROWS, width), 1
        if kernel == "decode":
            forward = min(DECODE_ROWS, max(1, P.group * batch.Nq)), DECODE_KEYS
            heads = max(1, min(P.group, forward[0]))
        queries = forward[0] // heads, forward[1]
        tiles, moved, traffic = explained(P, operands, queries, backward, heads)
        parallel = is_parallel(forward_work(batch, kernel))
        more: dict[str, Any] = {
            "learned": len(layouts(batch, operands)),
            "paged": P.is_paged,
            "quantised": P.is_quantised,
        }
        rows = P.group * batch.Nq
        choice = f"decode kernel: only {rows} query row{'s' * (rows > 1)} per KV head"
        if kernel != "decode":
            choice = f"forward kernel: {rows} query rows per KV head fill vector lanes"
            if P.is_invariant and self._kernel is None:
                choice = "forward kernel: invariant=True computes any number of queries with it"
        return Explanation(
            backend=self.name,
            kernel=f"tileattn.kernels.llvm.{kernel}, {target.name}",
            forward_tile=forward,
            backward_tile=backward,
            workers=threads.worker_count() if parallel else 1,
            scratch_bytes=max(
                scratch_bytes(name, target, P.dtype, P.accum_dtype, P.D, P.Dv, **more)
                for name in (kernel, "backward")
            ),
            tiles=tiles,
            bytes_moved=moved,
            traffic=traffic,
            reasons=(
                "q, k and v are NumPy arrays, and llvmlite is installed",
                choice,
                threads.REASONS[parallel],
            ),
        )


def _uses_bf16_matmuls(P: Problem) -> bool:
    """Return True if a CPU with bfloat16 instructions uses them for a problem.

    Invariant calls do not: neither pages, packed sequences nor few queries have these matmuls.
    """
    if P.dtype != NAMED["bfloat16"] or P.is_quantised or P.is_invariant:
        return False
    if P.group * P.Nq < _MIN_BF16_ROWS:
        return False
    return all(x is None for x in (P.score_mod, P.mask_mod, P.sequences, P.page))


@functools.cache
def _unavailable() -> str | None:
    return threads.uninterrupted(_what_is_missing)


def _what_is_missing() -> str | None:
    """Return why llvmlite cannot compile kernels for this CPU; None if it can."""
    if importlib.util.find_spec("llvmlite") is None:
        return "llvmlite is not installed: pip install llvmlite"
    from llvmlite import __version__ as version

    oldest = ".".join(map(str, OLDEST))
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        return f"llvmlite {version} is older than {oldest}: pip install --upgrade llvmlite"
    try:
        half = host().half
    except (ImportError, OSError) as error:
        return f"llvmlite does not load ({error}): pip install --force-reinstall llvmlite"
    return None if half else "this CPU has neither AVX2 nor NEON; use backend='numpy'"
