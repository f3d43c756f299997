"""Compile the tile scheduler of the Hopper kernels for the CPU."""

from dataclasses import replace

from tests.kernels.cuda.src.on_host import kernel_texts, sources
from tileattn.kernels.cuda.families.key import KernelKey

_SCHEDULER = """
constexpr int WARPS_M = 1, WARPS_N = 1;
constexpr bool HAS_TILE_LIST = HAS_MASK_MOD, ONLY_FLAGGED = false, TOTALS = false;
inline int work_index() { return blockIdx.x; }
template <class T> T uniform(T x, u32) { return x; }
"""


def scheduler_texts(key: KernelKey) -> dict[str, str]:
    """Return the texts of Hopper's tile scheduler, and its configuration."""
    texts = kernel_texts(replace(key, kernel="scheduler"), 1, "float32")
    texts["config.cuh"] += _SCHEDULER + f"constexpr int GROUPS = {key.groups};\n"
    texts["config.cuh"] += f"constexpr bool HEAD_MAJOR = {int(key.head_major)}, PAIR = false;\n"
    texts["config.cuh"] += f"constexpr bool SPLIT_Q = {int(key.split_q)};\n"
    texts["splits.cuh"] = "#pragma once\ntemplate <bool> struct WorkPart {};\n"
    own = "tile_scheduler.cuh", "tile_scheduler_sm90.cuh", "work_order_sm90.cuh"
    return texts | sources("query_split.cuh", *own)
