"""Run ``append_kv.cu`` and ``rope.cu`` on the CPU, as a C++ compiler takes them."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.kernels.cuda.src.on_host import built
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit.compile import SOURCES

_CONFIG = """\
#pragma once
#include <string.h>
#include <algorithm>
#define __device__
#define __global__
#define __restrict__ __restrict
#define __grid_constant__
#define __launch_bounds__(...)
using std::max, std::min;
using i64 = long long;
using u64 = unsigned long long;
using u32 = unsigned;
using float32 = float;
using float64 = double;
struct float16 { unsigned short bits; };
struct bfloat16 { unsigned short bits; };
inline struct { int x, y, z; } threadIdx, blockIdx, gridDim;

inline float widen(float16 x) { return 0; }  // not rotated here
inline float widen(bfloat16 x) {
    const u32 bits = u32(x.bits) << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}
inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
template <class T> T narrow(double x) { return T(x); }
template <> float16 narrow<float16>(double x) { return {0}; }
template <> bfloat16 narrow<bfloat16>(double x) {
    const float y = float(x);
    u32 bits;
    memcpy(&bits, &y, 4);
    return {(unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline float difference(float x, float y) { return x - y; }
inline double difference(double x, double y) { return x - y; }
inline float rounded_product(float x, float y) { return x * y; }
inline double rounded_product(double x, double y) { return x * y; }
"""

_LAUNCH = """\
#include "KERNEL.cu"

extern "C" i64 launch(const TokenParams* p, int x, int y, int z) {
    gridDim.x = x, gridDim.y = y, gridDim.z = z;
    for (blockIdx.z = 0; blockIdx.z < z; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x)
                for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) KERNEL(*p);
    return sizeof(TokenParams);
}
"""


def kernel_on_host(folder: Path, key: KernelKey) -> Callable[[int, tuple[int, int, int]], int]:
    """Give a function that runs a kernel, given the address of its parameters and a grid.

    It returns the bytes of the parameters.
    """
    accum = "double" if key.dtype == "float64" else "float"
    own = [
        f"using Element = {key.dtype};",
        f"using Accum = {accum};",
        f"constexpr int ALIGNMENT_BYTES = {key.alignment_bytes}, THREADS = {key.threads};",
    ]
    texts: dict[str, Any] = {
        name: (SOURCES / name).read_text(encoding="utf-8")
        for name in ("integers.cuh", "token_rows.cuh", f"{key.kernel}.cu")
    }
    texts |= {
        "config.cuh": _CONFIG + "\n".join(own),
        f"{key.kernel}.cpp": _LAUNCH.replace("KERNEL", key.kernel),
    }
    library = built(folder, texts, f"{key.kernel}.cpp")

    def start(address: int, grid: tuple[int, int, int]) -> int:
        nbytes: int = library.launch(ctypes.c_void_p(address), *map(ctypes.c_int, grid))
        return nbytes

    return start
