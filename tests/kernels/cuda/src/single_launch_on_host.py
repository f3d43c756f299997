"""Run kernels that belong to no attention call on the CPU, as a C++ compiler takes them."""

import ctypes
from collections.abc import Callable
from pathlib import Path

from tests.kernels.cuda.src.on_host import built, sources
from tileattn.kernels.cuda.families.key import KernelKey

_LAUNCH = """\
#include "KERNEL.cu"

extern "C" i64 launch(const PARAMS* p, int x, int y, int z) {
    gridDim.x = x, gridDim.y = y, gridDim.z = z;
    for (blockIdx.z = 0; blockIdx.z < z; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x)
                for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) KERNEL(*p);
    return sizeof(PARAMS);
}
"""

_ROWS = "integers.cuh", "token_rows.cuh", "new_tokens.cuh"
_NEEDS: dict[str, tuple[str, ...]] = {  # the parameter block, and headers
    "append_kv": ("TokenParams", *_ROWS),
    "rope": ("TokenParams", *_ROWS),
    "merge_rows": ("MergeParams", "partial_rows.cuh"),
    "cascade_tables": ("CascadeParams", "integers.cuh"),
}


def kernel_on_host(folder: Path, key: KernelKey) -> Callable[[int, tuple[int, int, int]], int]:
    """Return a function that runs a kernel, given the address of its parameters and a grid.

    That function returns the bytes of the parameters.
    """
    accum = "double" if key.dtype == "float64" else "float"
    own = [
        '#pragma once\n#include "types.cuh"',
        f"using Element = {key.dtype};",
        f"using Accum = {accum};",
        f"constexpr int ALIGNMENT_BYTES = {key.alignment_bytes}, THREADS = {key.threads};",
    ]
    params, *headers = _NEEDS[key.kernel]
    texts = sources(*headers, f"{key.kernel}.cu") | {
        "config.cuh": "\n".join(own),
        f"{key.kernel}.cpp": _LAUNCH.replace("KERNEL", key.kernel).replace("PARAMS", params),
    }
    library = built(folder, texts, f"{key.kernel}.cpp")

    def start(address: int, grid: tuple[int, int, int]) -> int:
        nbytes: int = library.launch(ctypes.c_void_p(address), *map(ctypes.c_int, grid))
        return nbytes

    return start
