"""Passes of calls like earlier ones, launched from the addresses of their arrays.

Nearly all that a short call costs the host is Python; this is the least of it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial, reduce
from operator import itemgetter, or_
from typing import Any

import numpy as np

from tileattn.backends.addresses import Overlap
from tileattn.backends.cupy.execute import Executable
from tileattn.kernels.launch.layout import MAX_ALIGNMENT, ROWS, alignment_of
from tileattn.lengths import given_for
from tileattn.problem import Options

_PAIRS = ("mask", "bias")
_PART = "_init"  # of the constructor of a CuPy array


class Pass:
    """One pass of the calls of one signature: its executables, by all that may yet differ.

    Parameters
    ----------
    inputs, results : sequence of str
        The arrays that it reads, q, k and v first, and those that it writes. Their addresses are
        given in this order.
    """

    # Whether addresses are enough: the caller brings all arrays, and none is copied.
    is_direct = False

    def __init__(self, inputs: Sequence[str], results: Sequence[str]) -> None:
        self.inputs = inputs
        names = list(enumerate((*inputs, *results)))
        self._rows = itemgetter(*(n for n, name in names if name in ROWS))
        self._pairs = [n for n, name in names if name in _PAIRS]
        self.executables: dict[Any, Executable] = {}  # by `key`

    def key(self, addresses: Sequence[int], device: int) -> tuple[int, ...]:
        """Give what a plan depends on: alignments, and whether v may be a view of k."""
        bits = reduce(or_, self._rows(addresses), MAX_ALIGNMENT)
        key = device, addresses[1] == addresses[2], bits & -bits
        if self._pairs:
            return *key, *(alignment_of(addresses[n]) for n in self._pairs)
        return key


class ArrayPass:
    """A pass on CuPy's arrays, in memory of CuPy's allocator.

    Parameters
    ----------
    known : Pass
        What runs it; it is direct.
    inputs, results : mapping of str to array
        Those of an earlier call.
    ndim : int
        How many axes the caller's q has.
    returned : callable
        Makes what the call returns of the results.
    """

    def __init__(
        self,
        known: Pass,
        inputs: Mapping[str, Any],
        results: Mapping[str, Any],
        ndim: int,
        returned: Callable[..., Any],
    ) -> None:
        import cupy

        self._known, self._key, self._returned = known.executables.get, known.key, returned
        self._others = [n for n in inputs if n not in ROWS and n not in ("lse", "dlse")]
        self._new = [maker(x.shape[4 - ndim :], x.dtype) for x in results.values()]
        self._overlaps = Overlap(next(iter(results.values())), inputs.values())
        self._device, self._alloc = cupy.cuda.runtime.getDevice, cupy.cuda.alloc

    def __call__(self, rows: Sequence[Any], options: Options, out: Any | None = None) -> Any:
        """Run it on CuPy's current stream; None where no earlier call was like it.

        ``out`` takes the place of the first result.
        """
        if self._others:
            rows = (*rows, *(given_for(name, options) for name in self._others))
        device, addresses = self._device(), []
        for x in rows if out is None else (*rows, out):
            memory = x.data
            if memory.device_id != device:
                return None
            addresses.append(memory.ptr)
        results = []
        if out is not None:
            *others, at = addresses
            if self._overlaps(at, others):
                return None
            results.append(out)
        for new in self._new[len(results) :]:
            x = new()
            results.append(x)
            addresses.append(x.data.ptr)
        executable = self._known(self._key(addresses, device))
        if executable is None:
            return None
        # Freed in the order of the stream.
        memory = self._alloc(executable.nbytes) if executable.nbytes else None
        executable.launch(addresses, memory.ptr if memory is not None else 0)
        return self._returned(*results)


def maker(shape: Sequence[int], dtype: Any) -> Callable[[], Any]:
    """Give what makes contiguous arrays, whatever they hold.

    It is the constructor of CuPy's class without what that does in Python, a third of its time; of
    a CuPy without such a part, all of it. ``cupy.empty`` takes longer.
    """
    import cupy

    kind, init = cupy.ndarray, _own_part()
    if init is None:
        return partial(kind, shape, dtype)
    new = kind.__base__.__new__

    def make() -> Any:
        x = new(kind)
        init(x, shape, dtype)
        return x

    return make


@cache
def _own_part() -> Callable[..., None] | None:
    """Find the part of CuPy's constructor that is not Python, and see that it is what it was."""
    import cupy

    kind, init = cupy.ndarray, getattr(cupy.ndarray, _PART, None)
    if init is None:
        return None
    try:
        x = kind.__base__.__new__(kind)
        init(x, (2, 3), np.dtype(np.float32))
        found = x.shape, x.strides, x.dtype
    except (TypeError, AttributeError):
        return None
    made: Callable[..., None] = init
    return made if found == ((2, 3), (12, 4), np.float32) else None
