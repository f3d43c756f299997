"""One call on the GPU: its arrays as kernels read them, and the plan that fits them."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tileattn.kernels.build.load import arch_of
from tileattn.kernels.config.hopper import HOPPER
from tileattn.kernels.config.select import Facts, folds, padded_rows
from tileattn.kernels.launch.block_sparse import cells_of, visits_of
from tileattn.kernels.launch.plan import Plan
from tileattn.kernels.launch.schedule import Order, order_of
from tileattn.kernels.launch.steps import Step
from tileattn.kernels.launch.streams import current_stream, is_capturing
from tileattn.kernels.launch.tma import has_boxes
from tileattn.kernels.launch.workspace import Layout, layout
from tileattn.problem import Operands, Problem

WIDEST = 16  # bytes of the widest copy
NARROWEST = 4  # and of the narrowest that need not go through registers
_ROWS = frozenset({"q", "k", "v", "out", "dout", "dq", "dk", "dv"})
_BOXED = frozenset({"q", "k", "v", "dout"})
_PAIRS = frozenset({"bias", "dbias", "mask", "kinds", "visits"})
_ARGUMENTS = {"slopes": "alibi_slopes", "lengths": "kv_lengths", "offsets": "q_offset"}
"""Fields of the parameter block that callers know by other names."""


class Call:
    """The arrays of one call, by the names of the parameter block.

    What the arrays' shapes, dtypes and strides decide is the same for all calls that share the
    memo of the operands; addresses and the device are looked at in each.

    Parameters
    ----------
    problem : Problem
        What is asked.
    operands : Operands
        The arrays.

    Attributes
    ----------
    device : int
        CuPy's current device, on which all arrays are.
    addresses : dict of str to int
        What a plan is run with.
    plain : bool
        Whether all that is passed of the operands is q, k and v, with four axes and as they are.
    memo : dict
        Where what was worked out is kept for later calls: that of the operands, or one that nobody
        looks at again.
    """

    def __init__(self, problem: Problem, operands: Operands) -> None:
        import cupy

        self.problem = problem
        self.device: int = cupy.cuda.runtime.getDevice()
        self.addresses: dict[str, int] = {}
        self.plain = problem.ndim == 4
        self.memo = operands.memo
        self._operands = operands
        self._arrays: dict[str, Any] = {}
        self._copied: dict[str, tuple[Any, bool]] = {}  # the caller's, and whether it is a result
        self._bits = WIDEST  # the lowest one that is set divides every row's address
        self.add_rows("q", operands.q)
        self.add_rows("k", operands.k)
        self.add_rows("v", operands.v)
        if type(operands.kv_lengths) is not np.ndarray:
            self.add("lengths", operands.kv_lengths)
        if type(operands.q_offset) is not np.ndarray:
            self.add("offsets", operands.q_offset)
        if problem.uses:
            self._add_options()

    def _add_options(self) -> None:
        _, _, _, _, _, _, bias, mask, block_mask, slopes, sinks = self._operands
        for name, x in (("slopes", slopes), ("sinks", sinks)):
            if x is not None:
                self.add(name, x, self.problem.accum_dtype)
        for name, x in (("mask", mask), ("bias", bias)):
            if x is not None:
                self.add_strided(name, x)
        if block_mask is not None:
            kinds, bits = cells_of(block_mask, self.device)
            self.add_strided("kinds", kinds)
            self.add_strided("bits", bits)

    def add_rows(self, name: str, x: Any, *, result: bool = False) -> None:
        """Pass an array of rows of any strides, or a copy where a row is not contiguous."""
        if x.strides[-1] != self.problem.dtype.itemsize and x.shape[-1] > 1:
            self._add_copy(name, x, x.dtype, result)
            return
        memory = x.data
        if memory.device_id != self.device:
            self._refuse(name, memory.device_id)
        self._arrays[name] = x
        self.addresses[name] = address = memory.ptr
        self._bits |= address

    def add(self, name: str, x: Any, dtype: Any = None, *, result: bool = False) -> None:
        """Pass an array that kernels take as contiguous; where it is not, or of another type, copy.

        Its dtype is kept where none is given.
        """
        dtype = x.dtype if dtype is None else dtype
        if x.flags.c_contiguous and x.dtype == dtype:
            self.add_strided(name, x)
        else:
            self._add_copy(name, x, dtype, result)

    def add_strided(self, name: str, x: Any) -> None:
        """Pass an array of any strides."""
        self.plain = False
        memory = x.data
        if memory.device_id != self.device:
            self._refuse(name, memory.device_id)
        self._arrays[name] = x
        self.addresses[name] = memory.ptr

    def _add_copy(self, name: str, x: Any, dtype: Any, result: bool) -> None:
        """Describe a contiguous array in the place of the caller's; it has no memory before `run`.

        A result is copied from there after the kernels, anything else to there before them.
        """
        import cupy

        self.add_strided(name, x)
        self._copied[name] = x, result
        self._arrays[name] = cupy.ndarray(x.shape, dtype, x.data)  # whose address nobody looks at

    def _refuse(self, name: str, there: int) -> None:
        raise ValueError(
            f"{_ARGUMENTS.get(name, name)} is on device {there}; arrays on CuPy's current device, "
            f"{self.device}, are accepted (call within `with cupy.cuda.Device({there}):`, or copy "
            "it)"
        )

    def plan(self, steps: Callable[[Problem, Facts], tuple[Step, ...]], more: Any = None) -> Plan:
        """Find the plan of an earlier call like this one, or make it.

        Parameters
        ----------
        steps : callable
            Lists what is started, given the problem and the facts about its arrays.
        more : hashable
            What else decides about the steps.

        Returns
        -------
        Plan
            For ``addresses``.
        """
        aligned = self._bits & -self._bits
        key = (more, self.device, aligned, self._row_vector("mask"), self._row_vector("bias"))
        known: tuple[Plan, tuple[int, int] | None] | None = self.memo.get(key)
        if known is not None:
            plan, listed = known
            self._add_visits(listed)
        else:
            made = steps(self.problem, self.facts())
            keys = (step.key for step in made if step.key.kernel == HOPPER and step.key.block_mask)
            listed = next(((key.block_q, key.block_k) for key in keys), None)
            self._add_visits(listed)
            values, fixed = self._values(self.order(made))
            plan = Plan(
                values, self.addresses, fixed, made, aligned, self._arrays, self.layout(made)
            )
            self.memo[key] = plan, listed
        return plan

    def _add_visits(self, tile: tuple[int, int] | None) -> None:
        """Pass the lists of tiles of this size, if any, that the block mask lets visit."""
        mask = self._operands.block_mask
        if tile is not None and mask is not None:
            self.add_strided("visits", visits_of(mask, self.device, tile))

    def layout(self, steps: tuple[Step, ...]) -> Layout:
        """Lay out the memory that these steps take besides the arrays that were passed."""
        return layout(
            self.problem, steps, {name: self._arrays[name].nbytes for name in self._copied}
        )

    def run(self, plan: Plan, workspace: Any = None) -> None:
        """Start the kernels on CuPy's current stream, with all that they need.

        Parameters
        ----------
        plan : Plan
            Of this call.
        workspace : cupy array of uint8, shape (n,), or None
            What memory is taken from in the place of CuPy's pool; starts at a multiple of
            `tileattn.kernels.launch.workspace.ALIGNED` bytes.

        Raises
        ------
        ValueError
            Where the workspace is too small, or on another device.
        """
        starts, zeros, nbytes = plan.layout
        if workspace is None and not nbytes:
            plan.run(self.addresses | dict.fromkeys(starts, 0))
            return
        import cupy

        memory = self._lent(workspace, nbytes) if workspace is not None else cupy.cuda.alloc(nbytes)
        for name, start in starts.items():
            self.addresses[name] = memory.ptr + start
        copies = []
        for name, (x, result) in self._copied.items():
            like = self._arrays[name]
            copies.append((cupy.ndarray(like.shape, like.dtype, memory + starts[name]), x, result))
        for copy, x, result in copies:
            if not result:
                cupy.copyto(copy, x, casting="unsafe")
        if zeros < nbytes:
            stream = current_stream().ptr
            cupy.cuda.runtime.memsetAsync(memory.ptr + zeros, 0, nbytes - zeros, stream)
        plan.run(self.addresses)
        for copy, x, result in copies:
            if result:
                cupy.copyto(x, copy, casting="unsafe")

    def _lent(self, workspace: Any, nbytes: int) -> Any:
        """Give the memory of a workspace that has room."""
        memory = workspace.data
        if memory.device_id != self.device:
            self._refuse("workspace", memory.device_id)
        if workspace.nbytes < nbytes:
            raise ValueError(
                f"workspace has {workspace.nbytes:,} bytes; this call needs {nbytes:,} or more "
                "(explain(q, k, v, **options).workspace_bytes are enough where lse, and the rows "
                "of dout and out, are contiguous)"
            )
        return memory

    def order(self, steps: tuple[Step, ...]) -> Order:
        """Decide in what order a pass takes its blocks."""
        cache = attribute("L2CacheSize", self.device)
        return order_of(self.problem, self._operands, steps, cache)

    def facts(self) -> Facts:
        """Say what decides about kernels besides the problem."""
        block_mask = self._operands.block_mask
        vector = self._bits & -self._bits
        for name in _ROWS & self._arrays.keys():
            x = self._arrays[name]
            steps = (s for n, s in zip(x.shape[:-1], x.strides, strict=False) if n > 1)
            vector = math.gcd(vector, *steps)
        bytes_of_mask, bytes_of_bias = self._row_vector("mask"), self._row_vector("bias")
        facts = Facts(
            vector,
            attribute("MaxSharedMemoryPerBlockOptin", self.device),
            span=16 if bytes_of_mask == 16 else 2 if bytes_of_mask > 1 else 1,
            arch=arch_of(self.device),
            boxes=all(has_boxes(self._arrays[name]) for name in _BOXED & self._arrays.keys()),
            processors=attribute("MultiProcessorCount", self.device),
            mask_block=block_mask.block_size[1] if block_mask is not None else 0,
        )
        bias = self._arrays.get("bias")
        if bias is None:
            return facts
        staged = bytes_of_bias >= max(NARROWEST, bias.itemsize)
        bias_vector = bytes_of_bias if staged else 0
        return facts._replace(bias=bias.dtype.name, bias_shape=bias.shape, bias_vector=bias_vector)

    def _row_vector(self, name: str) -> int:
        """Bytes at whose multiples all rows start and end; 0 where keys are not neighbours."""
        x = self._arrays.get(name)
        if x is None or x.shape[-1] < 2 or x.strides[-1] != x.itemsize:
            return 0
        steps = (s for n, s in zip(x.shape[:-1], x.strides, strict=False) if n > 1)
        return math.gcd(WIDEST, x.data.ptr, x.shape[-1] * x.itemsize, *steps)

    def _values(self, order: Order) -> tuple[dict[str, Any], dict[str, Any]]:
        """List the fields of the parameter block, and the arrays that the plan owns."""
        fixed: dict[str, Any] = {}
        values = _facts(self.problem) | {"parts": order.parts, "in_order": order.in_order}
        for name, x in self._arrays.items():
            if name in _ROWS or name == "dlse":
                values[f"{name}_at"] = _strides(x)[:3]
            elif name in _PAIRS:
                values[f"{name}_at"] = _strides(x)
        _, _, _, lengths, offsets, _, bias, _, block_mask, slopes, _ = self._operands
        for name, one, x in (("lengths", "length", lengths), ("offsets", "offset", offsets)):
            if type(x) is np.ndarray and (x == x[:1]).all():
                values[one] = int(x[0]) if x.size else 0
            elif type(x) is np.ndarray:
                fixed[name] = _uploaded(x)
        if order.table is not None:
            if is_capturing():
                # Nobody can wait for a copy now. Without the table results are the same, only
                # later; and calls after the capture are to have it, so this plan is not kept.
                self.memo = {}
            else:
                fixed["schedule"] = _uploaded(order.table)
        if slopes is not None:
            values["slopes_b"] = slopes.shape[1] if slopes.shape[0] > 1 else 0
        if bias is not None:
            sizes = zip(("B", "H", "Nq", "Nk"), bias.shape, strict=True)
            values |= {f"bias_{axis}": n for axis, n in sizes}
        if block_mask is not None:
            block_q, block_k = block_mask.block_size
            values |= {"mask_block_q": block_q, "mask_block_k": block_k}
        return values, fixed


def _facts(P: Problem) -> dict[str, Any]:
    left, right = (-1 if side is None else side for side in P.window)
    return {
        **{name: getattr(P, name) for name in ("B", "Hq", "Hkv", "Nq", "Nk", "D", "Dv")},
        "group": P.group,
        "rows": padded_rows(P.Nq),
        "left": left,
        "right": right,
        "scale": P.scale,
        "softcap": _cap(P),
        "natural": P.scale if folds(P) else 1.0,
        "gain": 1.0 / (1.0 - P.dropout_p),
        "seed": P.seed,
        "threshold": int(P.dropout_p * 2**32),
    }


def _cap(P: Problem) -> float:
    """Softcap, within what kernels can divide by: scores tell no smaller one from 0, or larger."""
    farthest = 2.0 ** (np.finfo(P.accum_dtype).maxexp - 28)
    return min(max(P.softcap, 1 / farthest), farthest) if P.softcap else 0.0


def _uploaded(x: Any) -> Any:
    """Copy to the GPU: complete before any stream may read it, for the plan serves all of them."""
    import cupy

    return cupy.asarray(x, blocking=True)


def _strides(x: Any) -> tuple[int, ...]:
    """Strides in elements, 0 along axes of length 1."""
    return tuple(s // x.itemsize if n > 1 else 0 for n, s in zip(x.shape, x.strides, strict=True))


@functools.cache
def attribute(name: str, device: int) -> int:
    """Ask a device for a number, by the end of its name in ``cudaDeviceAttr``."""
    from cupy.cuda import runtime

    value: int = runtime.deviceGetAttribute(getattr(runtime, f"cudaDevAttr{name}"), device)
    return value
