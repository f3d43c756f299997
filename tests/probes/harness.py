"""Compile a probe, and call its functions on NumPy arrays."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tileattn
from tileattn.kernels.key import KernelKey

PROBES = Path(__file__).parent
HEADERS = Path(tileattn.__file__).parent / "kernels" / "src"


def require_nvrtc() -> None:
    """Skip where the compiler cannot be loaded."""
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", exc_type=ImportError)
    try:
        nvrtc.getVersion()
    except Exception as error:  # noqa: BLE001 - whatever the loader raises, it is the reason
        pytest.skip(f"NVRTC: {error}")


def require_gpu() -> None:
    """Skip where no kernel can be launched."""
    cupy = pytest.importorskip("cupy", exc_type=ImportError)
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no GPU: {error}")


def compiled(key: KernelKey, arch: str, as_arch: str = "", extra: str = "") -> bytes:
    """Compile a probe with the headers as they are now.

    Parameters
    ----------
    key : KernelKey
        Its ``kernel`` is the stem of a source beside this file.
    arch : str
        ``sm_90a`` and the like.
    as_arch : str
        What the headers take for ``__CUDA_ARCH__``, say ``750``: a new GPU runs the instructions
        of the older ones, so their branches are tested on it too. Empty: the true one.
    extra : str
        Text after the source.

    Returns
    -------
    bytes
        The cubin.

    Raises
    ------
    RuntimeError
        With the compiler's log.
    """
    from cupy_backends.cuda.libs import nvrtc

    def text(path: Path) -> str:
        source = path.read_text(encoding="utf-8")
        return source.replace("__CUDA_ARCH__", as_arch) if as_arch else source

    headers = sorted(HEADERS.glob("*.cuh"))
    program = nvrtc.createProgram(
        text(PROBES / f"{key.kernel}.cu") + extra,
        f"{key.kernel}.cu",
        [text(path).encode() for path in headers],
        [path.name.encode() for path in headers],
    )
    try:
        nvrtc.compileProgram(program, ["-std=c++17", f"-arch={arch}", *key.defines()])
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{key}\n{nvrtc.getProgramLog(program)}") from error
    else:
        return bytes(nvrtc.getCUBIN(program))
    finally:
        nvrtc.destroyProgram(program)


class Probe:
    """The functions of a probe, on the current GPU.

    Parameters
    ----------
    key : KernelKey
        As for ``compiled``.
    as_arch : str
        As for ``compiled``.
    """

    def __init__(self, key: KernelKey, as_arch: str = "") -> None:
        import cupy

        capability = cupy.cuda.Device().compute_capability
        arch = f"sm_{capability}a" if capability == "90" else f"sm_{capability}"
        self.key = key
        self._module = cupy.cuda.function.Module()
        self._module.load(compiled(key, arch, as_arch))

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
            Blocks of threads along each axis.
        """
        import cupy

        sent = [_sent(x) for x in arguments]
        self._module.get_function(name)(grid, (self.key.threads,), sent)
        cupy.cuda.get_current_stream().synchronize()
        for x, there in zip(arguments, sent, strict=True):
            if isinstance(x, np.ndarray):
                x[...] = there.get().view(x.dtype).reshape(x.shape)


def _sent(x: Any) -> Any:
    """Copy an array to the GPU byte by byte, since not every element type has a CuPy twin."""
    import cupy

    if isinstance(x, np.ndarray):
        return cupy.asarray(np.frombuffer(x.tobytes(), np.uint8))
    return np.uint64(0) if x is None else x


def params(**fields: Any) -> np.void:
    """Fill the fields of the parameter block that are named; the others are zero."""
    from tileattn.kernels.params import PARAMS

    block = np.zeros(1, PARAMS)
    for name, value in fields.items():
        block[name] = value
    scalar: np.void = block[0]
    return scalar


def strides_of(x: NDArray[Any]) -> tuple[int, ...]:
    """Distances in elements, as headers want them; 0 along an axis of length 1."""
    steps = zip(x.shape, x.strides, strict=True)
    return tuple(0 if n == 1 else step // x.itemsize for n, step in steps)
