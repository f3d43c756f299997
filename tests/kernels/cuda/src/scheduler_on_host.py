"""Compile the tile scheduler of the Hopper kernels for the CPU."""

from dataclasses import replace

from tests.kernels.cuda.src.on_host import kernel_texts
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit.compile import SOURCES

_SCHEDULER = """
#define __forceinline__ inline
constexpr int WARPS_M = 1, WARPS_N = 1;
constexpr bool HAS_TILE_LIST = HAS_MASK_MOD, ONLY_FLAGGED = false;
inline struct { int x; } gridDim;
inline int work_index() { return blockIdx.x; }
inline int __ffs(u32 x) { return __builtin_ffs(int(x)); }
template <class T> T __shfl_sync(u32, T x, int) { return x; }
template <class T> T uniform(T x, u32) { return x; }
template <class T> T __shfl_up_sync(u32, T x, int) { return x; }
template <class T> T atomicAdd(T* x, int n) { return (*x += n) - n; }
"""


def scheduler_texts(key: KernelKey) -> dict[str, str]:
    """Give the texts of Hopper's tile scheduler, and its configuration."""
    texts = kernel_texts(replace(key, kernel="scheduler"), 1, "float32")
    texts["config.cuh"] += _SCHEDULER + f"constexpr int GROUPS = {key.groups};\n"
    texts["config.cuh"] += f"constexpr bool HEAD_MAJOR = {int(key.head_major)};\n"
    texts["splits.cuh"] = "#pragma once\n"
    for name in ("tile_scheduler.cuh", "tile_scheduler_sm90.cuh"):
        texts[name] = (SOURCES / name).read_text(encoding="utf-8")
    return texts
