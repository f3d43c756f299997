"""Load compiled kernels on a device: each one once, the kernels of a call in parallel."""

import functools
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tileattn.errors import BackendUnavailableError
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit.compile import (
    INSTALL,
    SOURCES,
    Compiled,
    best_arch,
    compiled,
    compiler_name,
    known_archs,
)

_KNOWN_TO_ALL = (75, 80, 86, 87, 89, 90)  # compute capabilities times ten; NVRTC 12.0 to 13.5

NOTICE_SECONDS = 1.0  # of compiling before a terminal is told

# CUDA_ERROR_INVALID_IMAGE, NO_BINARY_FOR_GPU, INVALID_PTX and UNSUPPORTED_PTX_VERSION.
_REFUSED = (200, 209, 218, 222)

# A kernel stays loaded: the driver does not say when no stream and no captured graph needs it.
_loaded: dict[tuple[object, ...], "Kernel"] = {}
_locks: dict[tuple[object, ...], threading.Lock] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A kernel loaded on a device."""

    key: KernelKey
    arch: str  # the target that it was compiled for
    function: Any  # cupy.cuda.function.Function
    registers: int  # per thread, as the driver reports them
    local_bytes: int  # per thread
    shared_bytes: int  # static

    def allow_shared(self, nbytes: int) -> None:
        """Allow launches with this much dynamic shared memory; required above 48 KiB."""
        from cupy_backends.cuda.api import driver

        attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.funcSetAttribute(self.function.ptr, attribute, nbytes)

    def occupancy(self, threads: int, shared: int) -> int:
        """Return the number of thread blocks of this size that one SM runs at a time.

        This allows launches with the shared memory: otherwise the driver returns 0 above 48 KiB.
        """
        from cupy_backends.cuda.api import driver

        self.allow_shared(shared)
        blocks: int = driver.occupancyMaxActiveBlocksPerMultiprocessor(
            self.function.ptr, threads, shared
        )
        return blocks


def load(
    key: KernelKey,
    device: int | None = None,
    arch: str | None = None,
    folders: tuple[Path, ...] = (SOURCES,),
) -> Kernel:
    """Return a kernel; compile and load it at its first use on the device.

    Equal arguments return the same object in all threads. By default the device is CuPy's current
    one, and ``arch`` the best target for it. Tests pass ``compute_75``, which runs on any newer
    GPU, to try the code for older ones.
    """
    if device is None:
        device = int(_runtime().getDevice())
    name = (key, device, arch, folders)
    kernel = _loaded.get(name)
    if kernel is None:
        # One lock per kernel: several compile at the same time.
        with _locks.setdefault(name, threading.Lock()):
            kernel = _loaded.get(name)
            if kernel is None:
                arch = arch or arch_of(device)
                try:
                    kernel = _placed(key, arch, compiled(key, arch, folders), device)
                except BackendUnavailableError:
                    # The compiler of the wheel's kernels may be newer than the driver.
                    made = compiled(key, arch, folders, ship=False)
                    kernel = _placed(key, arch, made, device)
                _loaded[name] = kernel
                _locks.pop(name, None)
    return kernel


def load_all(keys: Sequence[KernelKey], folders: tuple[Path, ...] = (SOURCES,)) -> list[Kernel]:
    """Return the kernels of a call on CuPy's current device; compile new ones in parallel.

    NVRTC releases the GIL, so with one thread per kernel the first call takes as long as its
    slowest kernel. The error of the first key that fails is raised, with notes about the others.
    All threads have ended by then.
    """
    device = int(_runtime().getDevice())
    new = [key for key in dict.fromkeys(keys) if (key, device, None, folders) not in _loaded]
    if new:
        failed = _failures(new, device, folders)
        if failed:
            for other in failed[1:]:
                failed[0].add_note(f"Another kernel of the call: {other}")
            raise failed[0]
    return [load(key, device, None, folders) for key in keys]


def _failures(
    keys: Sequence[KernelKey], device: int, folders: tuple[Path, ...]
) -> list[BaseException]:
    """Load each kernel in a thread of its own, and return the errors.

    Load nothing if no thread can be started, for example while the interpreter exits.
    """
    try:
        from concurrent.futures import ThreadPoolExecutor, wait  # fails while Python exits

        with ThreadPoolExecutor(len(keys), "tileattn-compile") as pool:
            asked = [pool.submit(load, key, device, None, folders) for key in keys]
            late = wait(asked, NOTICE_SECONDS).not_done
            if late and sys.stderr.isatty():
                names = f"{len(late)} CUDA kernel{'s' * (len(late) > 1)}"
                sys.stderr.write(f"tileattn: compiling {names} for {arch_of(device)}\n")
            wait(asked)  # inside `with`: an interrupt is raised after the threads have ended
    except RuntimeError:
        return []
    return [error for future in asked if (error := future.exception())]


@functools.cache
def arch_of(device: int) -> str:
    """Choose the target to compile for on a device; see `best_arch`."""
    _runtime()  # raises if there is no GPU
    import cupy

    digits = cupy.cuda.Device(device).compute_capability
    capability = int(digits[:-1]), int(digits[-1])
    number = 10 * capability[0] + capability[1]
    # Loading NVRTC takes longer than a call that needs no compiler.
    return best_arch(capability, (number,) if number in _KNOWN_TO_ALL else known_archs())


@functools.cache
def _runtime() -> Any:
    """Return CuPy's runtime, after one check that there is a GPU."""
    try:
        import cupy
    except ImportError as error:
        raise BackendUnavailableError(f"CuPy is not installed; {INSTALL}") from error
    try:
        cupy.cuda.runtime.getDevice()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise BackendUnavailableError(
            f"the GPU cannot be used ({error}); nvidia-smi shows what the driver sees, and "
            "backend='numpy' needs no GPU"
        ) from error
    return cupy.cuda.runtime


def _placed(key: KernelKey, arch: str, made: Compiled, device: int) -> Kernel:
    """Load a kernel on a device."""
    import cupy
    from cupy_backends.cuda.api import driver

    module = cupy.cuda.function.Module()
    with cupy.cuda.Device(device):
        try:
            module.load(made.image)
        except driver.CUDADriverError as error:
            if error.status not in _REFUSED:
                raise
            raise BackendUnavailableError(
                f"the driver of GPU {device} rejects what {compiler_name()} compiled for {arch} "
                f"({error}); install a newer driver, or CuPy for the CUDA version of this one: "
                "pip install 'cupy-cuda12x[ctk]'"
            ) from error
        function = module.get_function(key.kernel)
        resources = (
            driver.funcGetAttribute(attribute, function.ptr)
            for attribute in (
                driver.CU_FUNC_ATTRIBUTE_NUM_REGS,
                driver.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
                driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
            )
        )
    return Kernel(key, arch, function, *resources)
