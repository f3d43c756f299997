"""NumPy arrays: machine code that llvmlite makes for this CPU, on threads without the GIL."""

import functools
import importlib.util
from dataclasses import replace
from typing import Any

import numpy as np

from tileattn.algorithm import spec
from tileattn.algorithm.residuals import Residuals, rounding_of_lse, row_norms
from tileattn.backends import threads
from tileattn.backends.buffers import placed
from tileattn.backends.llvm import dot
from tileattn.backends.llvm.arrays import (
    Array,
    as_inputs,
    bias_gradient,
    bias_sums,
    block_sizes,
    contiguous,
    splits,
)
from tileattn.backends.llvm.execute import forward_work, is_parallel, multiply_adds, run
from tileattn.backends.numpy.backend import is_array
from tileattn.backends.protocol import Explanation, takes_workspace, why_no_functions
from tileattn.kernels.llvm.compile import host, host_of_bfloat16
from tileattn.kernels.llvm.target import (
    DECODE_KEYS,
    DECODE_ROWS,
    ROWS,
    SPLIT,
    Target,
    forward_kernel,
    padded,
    scratch_bytes,
    state_bytes,
)
from tileattn.problem import Operands, Problem
from tileattn.results import Attention, Gradients
from tileattn.traffic import explained

OLDEST = (0, 47)
"""Release of llvmlite that the kernels need, as the extra ``cpu`` says."""

_LONGEST = (1 << 31) - 1  # indices in a tile have the width of float32


class LlvmBackend:
    """Attention on NumPy arrays, by kernels that LLVM compiles.

    All gradients are computed, whichever are asked for.

    Parameters
    ----------
    target : Target or None
        What kernels are compiled for; None is this CPU.
    kernel : str or None
        The forward kernel that runs every problem; None chooses one for each.
    split_keys : int
        Keys of a split of the decoding kernel; bits of results depend on it.
    """

    name = "llvm"

    def __init__(
        self, target: Target | None = None, kernel: str | None = None, split_keys: int = SPLIT
    ) -> None:
        self._target, self._kernel, self._split_keys = target, kernel, split_keys

    @property
    def target(self) -> Target:
        """What kernels are compiled for."""
        return self._target or host()

    def targets_of(self, P: Problem) -> tuple[Target, ...]:
        """Choose what the kernels of a problem are compiled for; later ones if that has to be."""
        found = host_of_bfloat16() if self._target is None and dot.serves(P) else None
        return (self.target,) if found is None else (found, self.target)

    def forward_kernel(self, P: Problem) -> str:
        """Name the forward kernel of a problem."""
        return self._kernel or forward_kernel(P.group * P.Nq)

    def owns(self, x: Any) -> bool:
        """Whether ``x`` is a NumPy array, and no masked array or matrix."""
        return is_array(x)

    def unavailable(self) -> str | None:
        """Why the backend cannot run here: without llvmlite, or on an old CPU."""
        return _unavailable()

    def why_not(self, problem: Problem) -> str | None:
        """Why a problem is not supported."""
        for name in ("Nq", "Nk"):
            n = getattr(problem, name)
            if n > _LONGEST:
                return f"{name} is {n:,}, and the kernels take up to {_LONGEST:,} queries and keys"
        return why_no_functions(problem)

    def forward(self, problem: Problem, operands: Operands, out: Array | None) -> Attention:
        """Compute attention; ``out`` is written in one go, after everything else has succeeded."""
        P = problem
        result = Attention(
            np.empty((P.B, P.Hq, P.Nq, P.Dv), P.dtype), np.empty((P.B, P.Hq, P.Nq), P.accum_dtype)
        )
        run_forward = self._decode if self.forward_kernel(P) == "decode" else self._forward
        run_forward(P, operands, {"out": result.out, "lse": result.lse})
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
        """Compute the gradients; the workspace is left as it is."""
        P, x, targets = problem, operands, self.targets_of(problem)
        saved = Residuals.saved(P, dout, attention.lse)
        if saved.large.any():
            self._split_large_rows(P, x, saved)
            targets = (self.target,)  # sums in the order of those of the split
        columns = padded(self.target, P.accum_dtype.itemsize, P.D)
        dq = np.empty((P.B, P.Hq, P.Nq, P.D), P.dtype)
        in_place = columns == P.D and P.dtype == P.accum_dtype
        arrays = {
            "dout": contiguous(dout),
            "out": contiguous(attention.out),
            "lse": saved.lse,
            "log_l": saved.log_l,
            "delta": saved.delta,
            "dq_accum": dq if in_place else np.empty((*dq.shape[:3], columns), P.accum_dtype),
            "dq": dq,
            "dk": np.empty((P.B, P.Hkv, P.Nk, P.D), P.dtype),
            "dv": np.empty((P.B, P.Hkv, P.Nk, P.Dv), P.dtype),
        }
        dbias, values = bias_sums(P, x.bias)
        others = {"dlse": None if dlse is None else contiguous(dlse), "dbias": dbias}
        arrays |= {name: given for name, given in others.items() if given is not None}
        arrays |= as_inputs(P, x)
        values |= {"dq_columns": columns, **block_sizes(x)}
        rows = P.B * P.Hq * -(-P.Nq // ROWS), P.B * P.Hq * P.Nq * (P.D + P.Dv)
        for target in targets:
            blocks = values["blocks"] = -(-P.Nk // target.width(P.accum_dtype.itemsize))
            tasks = P.B * P.Hkv * blocks
            arrays["semaphore"] = np.zeros(max(1, tasks), np.int64)
            grids = rows, (tasks // max(1, values["sharing"]), multiply_adds(P)), rows
            if run("backward", target, P, arrays, values, grids):
                break
        with np.errstate(all="ignore"):
            return Gradients(
                dq,
                arrays["dk"],
                arrays["dv"],
                None if dbias is None else bias_gradient(x.bias, dbias),
                None if x.sinks is None else spec.sink_gradient(x.sinks, saved),
            )

    def explain(self, problem: Problem, operands: Operands) -> Explanation:
        """Say what would run; of the arrays only the options are looked at."""
        P, target, kernel = problem, self.targets_of(problem)[0], self.forward_kernel(problem)
        width = target.width(P.accum_dtype.itemsize)
        forward, backward = (width, target.keys), (ROWS, width)
        if kernel == "decode":
            forward = min(DECODE_ROWS, P.group * P.Nq), DECODE_KEYS
        tiles, moved, traffic = explained(P, operands, forward, backward)
        parallel = is_parallel(forward_work(P, kernel))
        many = "few" if kernel == "decode" else "enough for vectors"
        return Explanation(
            backend=self.name,
            kernel=f"tileattn.kernels.llvm.{kernel}, {target.name}",
            forward_tile=forward,
            backward_tile=backward,
            workers=threads.worker_count() if parallel else 1,
            scratch_bytes=max(
                scratch_bytes(name, target, P.dtype, P.accum_dtype, P.D, P.Dv)
                for name in (kernel, "backward")
            ),
            tiles=tiles,
            bytes_moved=moved,
            traffic=traffic,
            reasons=(
                "q, k and v are NumPy arrays, and llvmlite is installed",
                f"{P.group * P.Nq} rows of a key head are {many}",
                "there is enough work for threads" if parallel else "threads would cost more",
            ),
        )

    def _forward(self, P: Problem, x: Operands, results: dict[str, Array]) -> None:
        arrays = as_inputs(P, x) | results
        for target in self.targets_of(P):
            blocks = -(-P.group * P.Nq // target.width(P.accum_dtype.itemsize))
            grids = ((P.B * P.Hkv * blocks, forward_work(P)),)
            if run("forward", target, P, arrays, {"blocks": blocks, **block_sizes(x)}, grids):
                break

    def _decode(self, P: Problem, x: Operands, results: dict[str, Array]) -> None:
        rows, count = P.group * P.Nq, splits(P, x, self._split_keys)
        values = {"splits": count, "split_keys": self._split_keys, **block_sizes(x)}
        values["blocks"] = -(-rows // DECODE_ROWS)
        groups = P.B * P.Hkv * values["blocks"]
        size = state_bytes(self.target, P.accum_dtype.itemsize, P.Dv)
        arrays: dict[str, Array] = {
            "partials": np.empty((groups, count, min(rows, DECODE_ROWS), size), np.uint8),
            "ended": np.zeros(groups, np.int64),
        }
        grids = ((groups * count, forward_work(P, "decode")),)
        run("decode", self.target, P, as_inputs(P, x) | results | arrays, values, grids)

    def _split_large_rows(self, P: Problem, x: Operands, saved: Residuals) -> None:
        """Split the logsumexp of large rows, as ``spec.renormalise``: its text on whole arrays.

        Values are the norms of the keys. Scores are those of both passes to the bit, for each of
        their sums has one order.
        """
        with np.errstate(all="ignore"):
            q, k = (np.asarray(a, P.accum_dtype) for a in (x.q, x.k))
            plain = replace(P, dropout_p=0.0, Dv=1, dtype=P.accum_dtype)
            key_norm = np.empty((P.B, P.Hq, P.Nq, 1), P.accum_dtype)
            m, own_log_l = np.empty_like(saved.lse), np.empty_like(saved.lse)
            results = {"out": key_norm, "row_max": m, "log_l": own_log_l}
            self._forward(plain, x._replace(q=q, k=k, v=row_norms(k)[..., None]), results)
            q_norm = abs(P.scale) * row_norms(q)
            explained = rounding_of_lse(saved.lse, P.D, q_norm, key_norm[..., 0])
            ours = saved.large & (saved.lse - m - own_log_l <= explained)
            np.copyto(saved.log_l, own_log_l, where=ours)
            np.copyto(saved.lse, m, where=ours)


@functools.cache
def _unavailable() -> str | None:
    return threads.uninterrupted(_what_is_missing)


def _what_is_missing() -> str | None:
    """Say why llvmlite does not compile kernels for this CPU."""
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
