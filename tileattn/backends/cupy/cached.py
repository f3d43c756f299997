"""Passes of calls like earlier ones, of whose arrays the addresses are enough.

Nearly all that a short call costs the host is Python; this is the least of it. Only the layout of
the arrays of an earlier call is kept.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tileattn.backends.addresses import Overlap
from tileattn.backends.cupy.execute import Executable
from tileattn.kernels.launch.layout import MAX_ALIGNMENT, ROWS
from tileattn.lengths import given_for
from tileattn.problem import Operands, Options, Problem
from tileattn.results import Attention, Gradients


class CachedPass:
    """What both passes have in common.

    Parameters
    ----------
    executable : Executable
        What an earlier call has run.
    device : int
        Where.
    arrays : mapping of str to array
        Those of that call, as the executable takes their addresses: q, k, v, others that options
        bring, and those that `ARRAYS` names.
    """

    ARRAYS: tuple[str, ...]
    OPTIONS: frozenset[str]  # that may bring others, besides integers

    def __init__(self, executable: Executable, device: int, arrays: Mapping[str, Any]) -> None:
        import cupy

        self._launch, self._nbytes = executable.launch, executable.plan.workspace.nbytes
        self._alignment, self._device = executable.plan.alignment, device
        self._array, self._alloc = cupy.ndarray, cupy.cuda.alloc
        self._current_device = cupy.cuda.runtime.getDevice
        self._others = tuple(arrays)[3 : -len(self.ARRAYS)]
        self._joint = arrays["k"].data.ptr == arrays["v"].data.ptr

    @classmethod
    def serves(
        cls,
        executable: Executable,
        operands: Operands,
        arrays: Collection[str],
        integers: Collection[str],
    ) -> bool:
        """Whether it runs calls of these arrays, of which options bring integers on the device."""
        plan = executable.plan
        known = cls.OPTIONS.union("qkv", cls.ARRAYS, integers)
        plain = known.issuperset(arrays) and set(cls.ARRAYS).issubset(arrays)
        copied = plan.copies_in or plan.copies_out
        return plain and executable.is_complete and operands.block_mask is None and not copied

    def _run(self, addresses: Sequence[int]) -> None:
        memory = self._alloc(self._nbytes) if self._nbytes else None  # freed in stream order
        self._launch(addresses, memory.ptr if memory is not None else 0)


class CachedForward(CachedPass):
    """The forward pass."""

    ARRAYS = ("out", "lse")
    OPTIONS = frozenset({"alibi_slopes", "sinks"})

    def __init__(
        self, executable: Executable, problem: Problem, device: int, arrays: Mapping[str, Any]
    ) -> None:
        super().__init__(executable, device, arrays)
        P = problem
        self._out, self._lse = (P.out_shape, P.dtype), (P.out_shape[:-1], P.accum_dtype)
        *inputs, out, _ = arrays.values()
        self._overlaps = Overlap(out, inputs)

    def __call__(
        self, q: Any, k: Any, v: Any, out: Any | None, options: Options
    ) -> Attention | None:
        """Run it; None where an array, or the current device, is not where the plan needs it."""
        device, of_q, of_k, of_v = self._device, q.data, k.data, v.data
        there = of_q.device_id == of_k.device_id == of_v.device_id == device
        if not there or self._current_device() != device:
            return None
        at_q, at_k, at_v = addresses = [of_q.ptr, of_k.ptr, of_v.ptr]
        for name in self._others:
            memory = given_for(name, options).data
            if memory.device_id != device:
                return None
            addresses.append(memory.ptr)
        if out is None:
            out = self._array(*self._out)
        elif out.data.device_id != device or self._overlaps(out.data.ptr, addresses):
            return None
        at_out = out.data.ptr
        bits = at_q | at_k | at_v | at_out | MAX_ALIGNMENT
        if bits & -bits != self._alignment or (at_k == at_v) != self._joint:
            return None
        lse = self._array(*self._lse)
        addresses += at_out, lse.data.ptr
        self._run(addresses)
        return Attention(out, lse)


class CachedBackward(CachedPass):
    """The backward pass of calls that have no gradients but those of q, k and v."""

    ARRAYS = ("out", "dout", "lse", "dq", "dk", "dv")
    OPTIONS = frozenset({"alibi_slopes"})

    def __init__(self, executable: Executable, device: int, arrays: Mapping[str, Any]) -> None:
        super().__init__(executable, device, arrays)
        self._rows = tuple(n for n, name in enumerate(arrays) if name in ROWS)

    def __call__(
        self, q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, options: Options
    ) -> Gradients | None:
        """Run it; None where an array, or the current device, is not where the plan needs it."""
        device = self._device
        if self._current_device() != device:
            return None
        others = [given_for(name, options) for name in self._others]
        addresses = []
        for x in (q, k, v, *others, out, dout, lse):
            memory = x.data
            if memory.device_id != device:
                return None
            addresses.append(memory.ptr)
        dq, dk, dv = grads = [self._array(x.shape, x.dtype) for x in (q, k, v)]
        addresses += [x.data.ptr for x in grads]
        bits = MAX_ALIGNMENT
        for n in self._rows:
            bits |= addresses[n]
        joint = addresses[1] == addresses[2]
        if bits & -bits != self._alignment or joint != self._joint:
            return None
        self._run(addresses)
        return Gradients(dq, dk, dv, None, None, None)
