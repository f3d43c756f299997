"""From compiled code to a kernel on a device: each is loaded once, those of a call together."""

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tileattn.errors import BackendUnavailableError
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit.compile import (
    SOURCES,
    Compiled,
    best_arch,
    compiled,
    compiler_name,
    known_archs,
    nvrtc_version,
)

# CUDA_ERROR_INVALID_IMAGE, NO_BINARY_FOR_GPU, INVALID_PTX and UNSUPPORTED_PTX_VERSION.
_REFUSED = (200, 209, 218, 222)

_loaded: dict[tuple[object, ...], "Kernel"] = {}
_locks: dict[tuple[object, ...], threading.Lock] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A kernel that is loaded on a device."""

    key: KernelKey
    arch: str  # what it was compiled for
    function: Any  # cupy.cuda.function.Function
    registers: int  # of a thread, as the driver reports them
    local_bytes: int  # of a thread
    shared_bytes: int  # of fixed size

    def allow_shared(self, nbytes: int) -> None:
        """Let a launch ask for this much shared memory of variable size: over 48 KiB needs it."""
        from cupy_backends.cuda.api import driver

        attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.funcSetAttribute(self.function.ptr, attribute, nbytes)

    def occupancy(self, threads: int, shared: int) -> int:
        """Count the thread blocks of this size that an SM of the device runs at a time."""
        from cupy_backends.cuda.api import driver

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
    """Find a kernel, compiling and loading it where this is its first use on the device.

    All arguments equal, the object is the same, whichever thread asks. By default the device is
    CuPy's current one, and ``arch`` the best for it. A ``compute_75`` runs on any newer GPU, which
    is how the code for older ones is tried.
    """
    if device is None:
        device = int(_runtime().getDevice())
    name = (key, device, arch, folders)
    kernel = _loaded.get(name)
    if kernel is None:
        # A lock of its own for each kernel: several compile at the same time.
        with _locks.setdefault(name, threading.Lock()):
            kernel = _loaded.get(name)
            if kernel is None:
                arch = arch or arch_of(device)
                kernel = _placed(key, arch, compiled(key, arch, folders), device)
                _loaded[name] = kernel
    return kernel


def load_all(keys: Sequence[KernelKey], folders: tuple[Path, ...] = (SOURCES,)) -> list[Kernel]:
    """Find the kernels of a call on CuPy's current device; those that are new are made together.

    The compiler holds no lock while it works, so a thread for each makes the time of the first call
    that of its slowest kernel. The error raised is that of the first key that fails; notes tell of
    the others. No thread goes on behind it.
    """
    device = int(_runtime().getDevice())
    new = [key for key in dict.fromkeys(keys) if (key, device, None, folders) not in _loaded]
    if len(new) > 1:
        failed = _failures(new, device, folders)
        if failed:
            for other in failed[1:]:
                failed[0].add_note(f"Another kernel of the call: {other}")
            raise failed[0]
    return [load(key, device, None, folders) for key in keys]


def _failures(
    keys: Sequence[KernelKey], device: int, folders: tuple[Path, ...]
) -> list[BaseException]:
    """Load kernels in a thread each, and return what was raised.

    Nothing is loaded where no thread can be started, as while the interpreter exits.
    """
    try:
        from concurrent.futures import ThreadPoolExecutor, wait  # which fails while it exits

        with ThreadPoolExecutor(len(keys), "tileattn-compile") as pool:
            asked = [pool.submit(load, key, device, None, folders) for key in keys]
            wait(asked)  # in here, so that an interrupt is raised when the threads have ended
    except RuntimeError:
        return []
    return [error for future in asked if (error := future.exception())]


@functools.cache
def arch_of(device: int) -> str:
    """Choose what to compile for on a device; see `best_arch`."""
    _runtime()  # where there is no GPU, this says so
    import cupy

    digits = cupy.cuda.Device(device).compute_capability
    return best_arch((int(digits[:-1]), int(digits[-1])), known_archs())


@functools.cache
def _runtime() -> Any:
    """Give CuPy's runtime, once it has found a GPU: a loaded kernel is then found in a moment."""
    nvrtc_version()  # where CuPy is missing, this says what to install
    import cupy

    try:
        cupy.cuda.runtime.getDevice()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise BackendUnavailableError(
            f"the GPU cannot be used ({error}); nvidia-smi shows what the driver sees, and "
            "backend='numpy' needs none"
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
                f"the driver of GPU {device} does not take what {compiler_name()} made for {arch} "
                f"({error}); install a newer driver, or CuPy for the CUDA of this one: "
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
