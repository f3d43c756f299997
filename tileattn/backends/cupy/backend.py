"""CuPy arrays: plans, allocates, and launches on CuPy's current stream and device."""

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tileattn.backends.cupy import describe, token_rows
from tileattn.backends.cupy.block_sparse import mask_addresses
from tileattn.backends.cupy.cached import CachedBackward, CachedForward
from tileattn.backends.cupy.describe import addresses_of, inputs_of, layout_of
from tileattn.backends.cupy.execute import Executable
from tileattn.backends.protocol import Explanation, takes_workspace
from tileattn.call_cache import PreparedCall
from tileattn.errors import UnsupportedError
from tileattn.kernels.config import latent
from tileattn.kernels.launch.aux_gradient import daux_name, why_not_learned
from tileattn.kernels.launch.layout import MAX_ALIGNMENT, ROWS, Constant, alignment_of
from tileattn.kernels.launch.plan import plan_backward, plan_forward
from tileattn.problem import Operands, Problem
from tileattn.results import Attention, Gradients

_REMEDY = (
    "where there is one, it needs a driver from 580 on, or for older ones "
    "pip install 'cupy-cuda12x[ctk]'; backend='numpy' needs none"
)

# Kernels add positions, FAR of src/mask.cuh and the sides of a tile in 32 bits.
LONGEST = (1 << 30) - (1 << 16)


class CupyBackend:
    """Attention on CuPy arrays; supports every problem of up to `LONGEST` queries and keys.

    Gradients of q, k and v are computed whichever are asked for.

    After the first call of a signature nothing waits for the GPU: results are complete when the
    current stream reaches them.
    """

    name = "cupy"
    append_kv = staticmethod(token_rows.append_kv)
    rope = staticmethod(token_rows.rope)

    def owns(self, x: Any) -> bool:
        """Whether ``x`` is a CuPy array, found without importing CuPy."""
        cupy = sys.modules.get("cupy")
        return cupy is not None and isinstance(x, cupy.ndarray)

    def unavailable(self) -> str | None:
        return _unavailable()

    def why_not(self, problem: Problem) -> str | None:
        """Why a problem is not supported: for its sequences and their lengths."""
        if problem.page is not None and (why := latent.why_not_paged(problem)):
            return why
        for name in ("Nq", "Nk"):
            n = getattr(problem, name)
            if n > LONGEST:
                return f"{name} is {n:,}, and the kernels take up to {LONGEST:,} queries and keys"
        return None

    def prepare(self, problem: Problem) -> PreparedCall:
        """Give what runs the calls of one signature, and remembers their plans."""
        # Of a subclass, the methods may be others than those below.
        return (CupyCall if type(self) is CupyBackend else PreparedCall)(self, problem)

    def forward(self, problem: Problem, operands: Operands, out: Any | None) -> Attention:
        """Compute attention on CuPy's current device; raise ValueError for arrays on another.

        Not on the path of ``tileattn.forward``, which calls `CupyCall.forward`.
        """
        return CupyCall(self, problem).forward(operands, out)

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
        """Compute the gradients; raise ValueError as `forward`, or for too small a workspace.

        UnsupportedError where that of an array cannot be summed in bounded memory.
        """
        call = CupyCall(self, problem)
        return call.backward(operands, dout, attention, dlse, deterministic, workspace)

    def explain(self, problem: Problem, operands: Operands) -> Explanation:
        """Say what would run; the kernels are compiled for it, and loaded."""
        from tileattn.backends.cupy.explain import explain

        return explain(problem, operands)


class CupyCall(PreparedCall):
    """The calls of one signature on CuPy arrays.

    What the arrays' shapes, dtypes and strides decide is the same for all of them; addresses and
    the device are looked at in each.
    """

    def __init__(self, backend: CupyBackend, problem: Problem) -> None:
        super().__init__(backend, problem)
        self._executables: dict[Any, Executable] = {}

    def forward(self, operands: Operands, out: Any | None) -> Attention:
        import cupy

        P = self.problem
        # cupy.empty makes the same array, in a microsecond more.
        result = out if out is not None else cupy.ndarray((P.B, P.Hq, P.Nq, P.Dv), P.dtype)
        lse = cupy.ndarray((P.B, P.Hq, P.Nq), P.accum_dtype)
        arrays = inputs_of(P, operands) | {"out": result, "lse": lse}
        # All memory is there and all kernels are loaded before the first byte of out is written.
        executable, addresses, device = self._executable(arrays, operands)
        executable.run(addresses, arrays, device)
        if CachedForward.serves(executable, operands, arrays, self.on_device):
            self.cached_launch = CachedForward(executable, P, device, arrays)
        return Attention(result, lse)

    def backward(
        self,
        operands: Operands,
        dout: Any,
        attention: Attention,
        dlse: Any | None,
        deterministic: bool,
        workspace: Any | None,
    ) -> Gradients:
        import cupy

        P = self.problem
        daux = _aux_gradients(P, operands)
        dq = dk = dv = None
        bias, dbias, sinks, dsinks = operands.bias, None, operands.sinks, None
        arrays = inputs_of(P, operands)
        arrays |= {"out": attention.out, "dout": dout, "lse": attention.lse}
        if dlse is not None:
            arrays["dlse"] = dlse
        if any(map(operands.wants, "qkv")):  # one kernel computes all three
            dq = cupy.ndarray((P.B, P.Hq, P.Nq, P.D), P.dtype)
            dk = cupy.ndarray((P.B, P.Hkv, P.Nk, P.D), P.dtype)
            dv = cupy.ndarray((P.B, P.Hkv, P.Nk, P.Dv), P.dtype)
            arrays |= {"dq": dq, "dk": dk, "dv": dv}
        if bias is not None and operands.wants("bias"):
            # Empty tiles are not written.
            arrays["dbias"] = dbias = cupy.zeros(bias.shape, bias.dtype)
        for n, grad in enumerate(daux or ()):
            if grad is not None:
                arrays[daux_name(n)] = grad
        if sinks is not None and operands.wants("sinks"):
            arrays["dsinks"] = dsinks = cupy.ndarray((P.Hq,), sinks.dtype)
        executable, addresses, device = self._executable(arrays, operands, deterministic)
        executable.run(addresses, arrays, device, workspace)
        if CachedBackward.serves(executable, operands, arrays, self.on_device):
            self.cached_backward[deterministic] = CachedBackward(executable, device, arrays)
        return Gradients(dq, dk, dv, dbias, dsinks, daux)

    def known(
        self, deterministic: bool | None, addresses: Sequence[int], device: int
    ) -> Executable | None:
        """Find what an earlier call has made for a pass that brings q, k, v and their like alone.

        The pass is backward, or forward if ``deterministic`` is None. The addresses are those of
        the arrays that it reads, q, k and v first; what it writes is aligned as kernels wish. None
        where no call has been like this one, or arrays are copied for it.
        """
        bits = MAX_ALIGNMENT
        for address in addresses:
            bits |= address
        wanted = (deterministic is not None, False, False, False)
        key = deterministic, device, wanted, addresses[1] == addresses[2], bits & -bits
        executable = self._executables.get(key)
        return executable if executable is not None and executable.brings_rows_alone else None

    def _executable(
        self, arrays: Mapping[str, Any], operands: Operands, deterministic: bool | None = None
    ) -> tuple[Executable, dict[str, int], int]:
        """Find or make what runs a pass: backward, or forward if ``deterministic`` is None.

        Returns it with the addresses of the arrays and the device.
        """
        import cupy

        device: int = cupy.cuda.runtime.getDevice()
        addresses = addresses_of(arrays, device)
        learned = bool(operands.aux) and operands.wants("aux")
        wanted = (*(x in arrays for x in ("dq", "dbias", "dsinks")), learned)
        # Addresses decide about the alignment of rows, and whether v may be a view of k.
        joint = addresses["k"] == addresses["v"]
        key = deterministic, device, wanted, joint, *_alignments(addresses)
        executable = self._executables.get(key)
        if executable is None:
            layout = layout_of(arrays, operands)
            gpu = describe.device_of(device)
            if deterministic is None:
                plan = plan_forward(self.problem, layout, gpu)
            else:
                plan = plan_backward(self.problem, layout, gpu, deterministic=deterministic)
        else:
            plan = executable.plan
        if plan.block_mask and operands.block_mask is not None:
            addresses |= mask_addresses(operands.block_mask, device, plan.tile_lists)
        if executable is None:
            executable = Executable(plan, tuple(addresses))
            if executable.is_complete:
                self._executables[key] = executable
        return executable, addresses, device


def _aux_gradients(P: Problem, x: Operands) -> tuple[Any, ...] | None:
    """Make the gradients of the caller's arrays: zeros, where no score depends on an element."""
    if not x.aux or not x.wants("aux"):
        return None
    origin = None if x.origin is None else Constant.of(x.origin)
    refusal = why_not_learned(P, tuple(y.shape for y in x.aux), origin)
    if refusal is not None:
        raise UnsupportedError(
            f"backend 'cupy' does not support this: {refusal}; the other gradients are computed "
            "with wrt=('q', 'k', 'v'), and backend='numpy' computes all"
        )
    import cupy

    return tuple(None if y.dtype.kind in "biu" else cupy.zeros(y.shape, y.dtype) for y in x.aux)


def _alignments(addresses: Mapping[str, int]) -> tuple[int, ...]:
    """Give what a plan depends on of the addresses: the alignment of rows, mask and bias."""
    rows = 0
    for name, address in addresses.items():
        if name in ROWS:
            rows |= address
    others = (addresses[name] for name in ("mask", "bias") if name in addresses)
    return alignment_of(rows), *map(alignment_of, others)


@functools.cache
def _unavailable() -> str | None:
    try:
        import cupy
    except ImportError:
        return (
            "CuPy is not installed: pip install 'cupy-cuda13x[ctk]' (or 'cupy-cuda12x[ctk]' for "
            "drivers before 580)"
        )
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CuPy finds no GPU ({error}); {_REMEDY}"
    if not count:
        return f"CuPy finds no GPU; {_REMEDY}"
    from tileattn.errors import BackendUnavailableError
    from tileattn.kernels.jit.load import arch_of

    try:
        arch_of(cupy.cuda.runtime.getDevice())
    except BackendUnavailableError as error:
        return str(error)
    return None
