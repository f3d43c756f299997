"""The backend for CuPy arrays: it plans, allocates, and launches on CuPy's current stream."""

import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any
from weakref import ref

import numpy as np

from tileattn.backends.cupy import describe, merged_rows, shared_pages, token_rows
from tileattn.backends.cupy.cached_passes import ArrayPass, Pass
from tileattn.backends.cupy.describe import addresses_of, inputs_of, layout_of
from tileattn.backends.cupy.executable import Executable, KindKernels
from tileattn.backends.cupy.external_memory import CupyMemory
from tileattn.backends.cupy.improvement import Improvement
from tileattn.backends.cupy.numbers import LONGEST, Direction
from tileattn.backends.cupy.program import OwnMemory, Programs
from tileattn.backends.cupy.streams import Uploaded
from tileattn.backends.protocol import Explanation, PreparingBackend
from tileattn.call.block_mask import BlockMask
from tileattn.call.parse import CallKind
from tileattn.call.prepared import DeviceMemory, PreparedCall
from tileattn.call.problem import ARRAY_OPTIONS, Operands, Problem
from tileattn.errors import UnsupportedError
from tileattn.kernels.cuda.families.pages import why_not_cache
from tileattn.kernels.cuda.plan.aux_gradient import daux_name, why_not_learned
from tileattn.kernels.cuda.plan.block_sparse import once, partial_blocks
from tileattn.kernels.cuda.plan.kind_plan import KindPlan, backward_kind, forward_kind, kind_key
from tileattn.kernels.cuda.plan.layout import ROWS, CallLayout, Constant
from tileattn.kernels.cuda.plan.plan import LaunchPlan, evaluated, launch_plan
from tileattn.kernels.cuda.plan.tile_lists import TileLists
from tileattn.lru import Lru
from tileattn.results import Attention, Gradients

_REMEDY = (
    "where there is one, it needs a driver from 580 on, or for older ones "
    "pip install 'cupy-cuda12x[ctk]'; backend='numpy' needs none"
)

# Options that programs read.
_READ = {
    *("causal", "window", "scale", "softcap", "dropout_p", "seed", "score_mod", "mask_mod", "aux"),
    "invariant",
    *("kv_lengths", "q_offset", "cu_seqlens_q", "cu_seqlens_k"),
    *("alibi_slopes", "sinks", "bias", "mask"),
}
_OWN = OwnMemory()

MAX_KINDS = 96  # plans of kinds that calls of equal options share: by sizes, alignments, GPUs
_OF_MASK = ("block_kinds", "block_bits", "tile_list")  # addresses of a block mask

# Arrays that the caller provides, besides integers on the device.
_BROUGHT = ROWS | {"lse", "dlse", *ARRAY_OPTIONS}


class CupyBackend(PreparingBackend):
    """Attention on CuPy arrays, for up to `LONGEST` queries and keys.

    Gradients of q, k and v are always computed together.

    After the first call of a signature nothing waits for the GPU: results are complete when the
    current stream reaches them.
    """

    name = "cupy"
    append_kv = staticmethod(token_rows.append_kv)
    rope = staticmethod(token_rows.rope)
    merge = staticmethod(merged_rows.merge)
    cascade_tables = staticmethod(shared_pages.cascade_tables)
    external_memory = MappingProxyType({"cuda": CupyMemory})

    def owns(self, x: Any) -> bool:
        """Return True if ``x`` is a CuPy array, without importing CuPy."""
        cupy = sys.modules.get("cupy")
        return cupy is not None and isinstance(x, cupy.ndarray)

    def unavailable(self) -> str | None:
        return _unavailable()

    def why_not(self, problem: Problem) -> str | None:
        """Return why a problem is not supported: its cache or its lengths; None if it is."""
        cached = problem.is_paged or problem.is_quantised
        if cached and (why := why_not_cache(problem)):
            return why
        for name in ("Nq", "Nk"):
            n = getattr(problem, name)
            if n > LONGEST:
                return f"{name} is {n:,}, and the kernels take up to {LONGEST:,} queries and keys"
        return None

    def call_of(self, problem: Problem) -> PreparedCall:
        """Return a prepared call, which remembers its plans."""
        return CupyCall(self, problem)

    def explain(self, problem: Problem, operands: Operands) -> Explanation:
        """Describe what would run; this compiles and loads the kernels."""
        from tileattn.backends.cupy.explain import explain

        return explain(problem, operands)


class CupyCall(PreparedCall):
    """The calls of one signature on CuPy arrays.

    Shapes, dtypes and strides are the same in all of them; addresses and the device may differ.
    """

    def __init__(self, backend: CupyBackend, problem: Problem) -> None:
        super().__init__(backend, problem)
        self.passes: dict[Any, Pass] = {}  # by ``deterministic``, None forward, and the results
        # What calls of one kind share: plans and kernels, and what starts them for new numbers.
        self._kinds, self._programs = Lru(MAX_KINDS), Programs()

    def at(self, problem: Problem) -> PreparedCall:
        call = CupyCall(self.backend, problem)
        call._kinds, call._programs = self._kinds, self._programs
        return call

    def first(
        self,
        kind: CallKind,
        rows: Sequence[Any],
        options: Mapping[str, Any],
        deterministic: bool | None,
        memory: DeviceMemory | None = None,
        gradients: tuple[str, ...] | None = None,
        /,
    ) -> Any:
        """Run a pass by the program of its kind; None if there is none yet."""
        if not _READ.issuperset(options):
            return None
        aux = options.get("aux") or ()
        # Arrays on the host are uploaded, and gradients of arrays are wanted.
        host = any(type(x) is np.ndarray for x in aux)
        if host or (deterministic is not None and any(x.dtype.kind not in "biu" for x in aux)):
            return None
        if gradients is None:
            gradients = tuple([name for name, x in options.items() if x is not None])
        direction = Direction.of(deterministic, gradients)
        return self._programs.run(kind, rows, options, direction, memory or _OWN)

    def address_pass(self, deterministic: bool | None, results: Sequence[str]) -> Pass | None:
        known = self.passes.get((deterministic, *results))
        return known if known is not None and known.is_direct else None

    def forward(self, operands: Operands, out: Any | None) -> Attention:
        import cupy

        P = self.problem
        result = out if out is not None else cupy.ndarray((P.B, P.Hq, P.Nq, P.Dv), P.dtype)
        lse = cupy.ndarray((P.B, P.Hq, P.Nq), P.accum_dtype)
        inputs, results = inputs_of(operands), {"out": result, "lse": lse}
        known = self._run(None, operands, inputs, results)
        if known.is_direct and None not in self.cached:
            self.cached[None] = ArrayPass(known, inputs, results, P.ndim, Attention)
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

        P, x = self.problem, operands
        daux = _aux_gradients(P, x)
        inputs = {"q": x.q, "k": x.k, "v": x.v}
        inputs |= {"dout": dout, "out": attention.out, "lse": attention.lse}
        if dlse is not None:
            inputs["dlse"] = dlse
        inputs |= inputs_of(x)
        results: dict[str, Any] = {}
        if any(map(x.wants, "qkv")):  # one kernel computes all three
            results["dq"] = cupy.ndarray((P.B, P.Hq, P.Nq, P.D), P.dtype)
            results["dk"] = cupy.ndarray((P.B, P.Hkv, P.Nk, P.D), P.dtype)
            results["dv"] = cupy.ndarray((P.B, P.Hkv, P.Nk, P.Dv), P.dtype)
        if x.bias is not None and x.wants("bias"):
            # Empty tiles are not written.
            results["dbias"] = cupy.zeros(x.bias.shape, x.bias.dtype)
        if x.sinks is not None and x.wants("sinks"):
            results["dsinks"] = cupy.ndarray((P.Hq,), x.sinks.dtype)
        own = {daux_name(n): grad for n, grad in enumerate(daux or ()) if grad is not None}
        known = self._run(deterministic, x, inputs, results | own, workspace)
        of_rows = x.wrt is None and [*results] == ["dq", "dk", "dv"]
        if known.is_direct and of_rows and deterministic not in self.cached:
            self.cached[deterministic] = ArrayPass(known, inputs, results, P.ndim, Gradients)
        return Gradients(**{name: results.get(name) for name in Gradients._fields}, daux=daux)

    def _run(
        self,
        deterministic: bool | None,
        operands: Operands,
        inputs: Mapping[str, Any],
        results: Mapping[str, Any],
        workspace: Any | None = None,
    ) -> Pass:
        """Run a pass: backward, or forward if ``deterministic`` is None."""
        import cupy

        device: int = cupy.cuda.runtime.getDevice()
        arrays = {**inputs, **results}
        addresses = addresses_of(arrays, device)
        name = deterministic, *results
        known = self.passes.get(name)
        if known is None:
            known = self.passes.setdefault(name, Pass([*inputs], [*results]))
        key = known.key(tuple(addresses.values()), device)
        executable = known.executables.get(key)
        if executable is None:
            executable = self._executable(name, layout_of(arrays, operands), device, arrays)
            plan = executable.plan
            copied = plan.copies_in or plan.copies_out or operands.block_mask is not None
            brought = _BROUGHT.union(self.on_device, self.descales)
            known.is_direct = not copied and brought.issuperset(inputs)
            known.keep(key, executable)
        else:
            executable = executable.latest(cupy.cuda.get_current_stream())
        plan = executable.plan
        uploads: dict[tuple[str, ...], Uploaded] = {}
        if plan.block_mask and operands.block_mask is not None:
            uploads = _mask_uploads(operands.block_mask, device, plan.tile_lists)
        for names, there in uploads.items():
            addresses |= {n: x.data.ptr for n, x in zip(names, there.arrays, strict=True)}
        # Memory is allocated and kernels are loaded before the first byte of out is written.
        try:
            known.run(executable, addresses, arrays, device, workspace)
        finally:
            for there in uploads.values():
                there.was_read()
        return known

    def _executable(
        self, name: tuple[Any, ...], layout: CallLayout, device: int, arrays: Iterable[str]
    ) -> Executable:
        """Plan a pass without tables; a plan with tables may follow when it repeats."""
        gpu = describe.device_of(device)
        problem, layout = evaluated(self.problem, layout)
        key = name, device, *kind_key(problem, layout, gpu)
        found = self._kinds.get(key)
        if found is None:
            deterministic = name[0]
            if deterministic is None:
                kind = forward_kind(problem, layout, gpu)
            else:
                kind = backward_kind(problem, layout, gpu, deterministic=deterministic)
            found = kind, KindKernels()
            self._kinds.keep(key, found)
        kind, kernels = found
        plan = launch_plan(kind, problem, layout, tables=False)
        names = tuple(arrays)
        if plan.block_mask:
            names += _OF_MASK[: 2 if plan.tile_lists is None else 3]
        executable = Executable(plan, names, kernels)
        self._programs.keep(
            Direction.of(name[0], [x[1:] for x in name[1:]]), device, layout, plan, kernels
        )
        if plan.is_provisional:
            executable.improvement = Improvement(
                partial(_plan_with_tables, kind, problem, *_released(layout)),
                lambda plan, upload: Executable(plan, names, kernels, upload),
            )
        return executable


def _released(layout: CallLayout) -> tuple[CallLayout, list[Any]]:
    """Replace the caller's block masks in a layout by weak references."""
    masks = layout.block_mask, layout.evaluated_mask
    held = [None if mask is None else ref(mask) for mask in masks]
    return layout._replace(block_mask=None, evaluated_mask=None), held


def _plan_with_tables(
    kind: KindPlan, problem: Problem, layout: CallLayout, held: list[Any]
) -> LaunchPlan:
    masks = [find and find() for find in held]
    layout = layout._replace(block_mask=masks[0], evaluated_mask=masks[1])
    return launch_plan(kind, problem, layout)


def _mask_uploads(
    mask: BlockMask, device: int, lists: TileLists | None
) -> dict[tuple[str, ...], Uploaded]:
    """Upload a block mask to CuPy's current device, once; return the arrays by parameter names.

    ``lists`` are the lists that kernels read, None if they read none.
    """
    found: dict[tuple[str, ...], Uploaded] = {
        ("block_kinds", "block_bits"): once(mask, device, lambda: Uploaded(partial_blocks(mask)))
    }
    if lists is not None:
        own = once(mask, (device, lists), lambda: Uploaded((lists.lists(mask),)))
        found["tile_list",] = own
    return found


def _aux_gradients(P: Problem, x: Operands) -> tuple[Any, ...] | None:
    """Allocate the gradients of the caller's arrays: zeros for elements that no score reads."""
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
    from tileattn.kernels.cuda.jit.load import arch_of

    try:
        arch_of(cupy.cuda.runtime.getDevice())
    except BackendUnavailableError as error:
        return str(error)
    return None
