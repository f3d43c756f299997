"""Run ``join_rows.cu``, ``add_halves.cu`` and ``add_rows.cu`` on the CPU, as C++ takes them."""

import ctypes
import threading
from pathlib import Path
from typing import Any

import numpy as np

from tests.kernels.cuda.src.on_host import built, sources
from tileattn.kernels.cuda.families.key import KernelKey

_LAUNCH = """\
#include "KERNEL.cu"

extern "C" void launch(int x, int y, void** arrays, const i64* n) {
    gridDim.x = x, gridDim.y = y;
    for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x)
            for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) KERNEL(ARGUMENTS);
}
"""

_ARGUMENTS = {  # types of the arrays, and how many numbers follow
    "join_rows": (("Element", "u16", "Accum", "Element", "Accum", "Accum"), 10),
    "add_halves": (("Element", "u16", "Element"), 10),
    "add_rows": (("Accum", "Element"), 5),
}


class KernelOnHost:
    """A kernel for ``tileattn.backends.cupy.partial_rows`` that takes NumPy arrays."""

    def __init__(self, folder: Path, key: KernelKey) -> None:
        types, numbers = _ARGUMENTS[key.kernel]
        given = [f"static_cast<{name}*>(arrays[{n}])" for n, name in enumerate(types)]
        given += [f"n[{n}]" for n in range(numbers)]
        config = [
            '#pragma once\n#include "types.cuh"',
            f"using Element = {key.dtype};",
            f"using Accum = {'double' if key.dtype == 'float64' else 'float'};",
            "using u16 = unsigned short;",
            f"constexpr int THREADS = {key.threads // 32};",
        ]
        self._lock = threading.Lock()
        folder = folder / f"{key.kernel}_{key.dtype}"
        folder.mkdir(exist_ok=True)
        texts = sources("partial_rows.cuh", f"{key.kernel}.cu")
        launch = _LAUNCH.replace("KERNEL", key.kernel).replace("ARGUMENTS", ", ".join(given))
        texts |= {"config.cuh": "\n".join(config), f"{key.kernel}.cpp": launch}
        self._launch, self._arrays = built(folder, texts, f"{key.kernel}.cpp").launch, len(types)

    def function(self, grid: tuple[int, ...], _block: Any, arguments: tuple[Any, ...]) -> None:
        """Run it, as CuPy launches a kernel."""
        addresses = (ctypes.c_void_p * self._arrays)(*map(int, arguments[: self._arrays]))
        numbers = np.array([int(x) for x in arguments[self._arrays :]], np.int64)
        x, y = (*grid, 1)[:2]
        at = ctypes.c_void_p(numbers.ctypes.data)
        with self._lock:  # which thread and block runs is one variable
            self._launch(ctypes.c_int(x), ctypes.c_int(y), addresses, at)
