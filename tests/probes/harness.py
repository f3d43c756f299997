"""Compile a probe, and call its functions on NumPy arrays."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit.compile import SOURCES, Compiled, compiled
from tileattn.kernels.cuda.jit.load import arch_of
from tileattn.kernels.cuda.plan.params import PARAMS, template

PROBES = Path(__file__).parent


def compile_probe(key: KernelKey, arch: str, as_arch: str = "") -> Compiled:
    """Compile a probe.

    Parameters
    ----------
    key : KernelKey
        Its ``kernel`` is the stem of a source beside this file.
    arch : str
        ``sm_90a`` and the like.
    as_arch : str
        What the sources take for ``__CUDA_ARCH__``, say ``750``: a new GPU runs the instructions
        of the older ones, so branches for those are tested on it too. Empty: the true one.

    Returns
    -------
    Compiled
        The code, and what the compiler said.
    """
    if not as_arch:
        return compiled(key, arch, (SOURCES, PROBES))
    with tempfile.TemporaryDirectory() as name:
        for path in (*SOURCES.glob("*.cuh"), PROBES / f"{key.kernel}.cu"):
            text = path.read_text(encoding="utf-8").replace("__CUDA_ARCH__", as_arch)
            Path(name, path.name).write_text(text, encoding="utf-8")
        return compiled(key, arch, (Path(name),))


class Probe:
    """The functions of a probe, on CuPy's current device.

    Parameters
    ----------
    key : KernelKey
        As for ``compile_probe``.
    as_arch : str
        As for ``compile_probe``.
    """

    def __init__(self, key: KernelKey, as_arch: str = "") -> None:
        import cupy

        arch = arch_of(int(cupy.cuda.runtime.getDevice()))
        self.key = key
        self._module = cupy.cuda.function.Module()
        self._module.load(compile_probe(key, arch, as_arch).image)

    def __call__(self, name: str, *arguments: Any, grid: tuple[int, ...] = (1,)) -> None:
        """Call a function with the threads of the key.

        Parameters
        ----------
        name : str
            An ``extern "C"`` function of the probe.
        *arguments : array, NumPy scalar, int or None
            Arrays are copied to the GPU, and back after the call; scalars pass by value, integers
            as 64-bit ones; None is a null pointer.
        grid : tuple of int
            Thread blocks along each axis.
        """
        import cupy

        sent = [_sent(x) for x in arguments]
        self._module.get_function(name)(grid, (self.key.threads,), tuple(sent))
        cupy.cuda.get_current_stream().synchronize()
        for x, there in zip(arguments, sent, strict=True):
            if isinstance(x, np.ndarray):
                x[...] = there.get().view(x.dtype).reshape(x.shape)


def _sent(x: Any) -> Any:
    """Copy an array to the GPU byte by byte, since CuPy lacks some element types."""
    import cupy

    if isinstance(x, np.ndarray):
        return cupy.asarray(np.frombuffer(x.tobytes(), np.uint8))
    return np.uint64(0) if x is None else x


def params(**fields: Any) -> np.void:
    """Fill the fields of the parameter block that are named; the others are zero."""
    scalar: np.void = np.frombuffer(template(fields), PARAMS)[0]
    return scalar


def strides_of(x: NDArray[Any]) -> tuple[int, ...]:
    """Distances in elements between entries; 0 along an axis that is broadcast."""
    steps = zip(x.shape, x.strides, strict=True)
    return tuple(0 if n == 1 else step // x.itemsize for n, step in steps)
