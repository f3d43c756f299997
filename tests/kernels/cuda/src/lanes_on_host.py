"""Run kernels with ``ldmatrix`` and ``mma`` of float16 on the CPU: each thread is a fiber."""

import ctypes
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels.cuda.src.on_host import STAND_INS, built, parameter_block, pointer
from tileattn.kernels.cuda.families.context import KernelLaunch
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit.compile import SOURCES, sources_in
from tileattn.kernels.cuda.plan.plan import LaunchPlan

Array = NDArray[Any]

_LANES = Path(__file__).with_name("lanes.h").read_text(encoding="utf-8")
_ALIGNMENT = 256  # bytes

_ATOM = """\
struct Atom<float16> : HalfAtom<float16> {
    template <bool MIRRORED = false, bool NAN_SAFE = false>
    static void mma(float (&c)[4], const A& a, const B& b) { multiply_float16(c, a, b); }
};
"""

# By source: text that only a CUDA compiler accepts, and its replacement.
_REPLACED = {
    "mma.cuh": [(r"struct Atom<float16> : HalfAtom<float16> \{.*?\n\};\n", _ATOM)],
    "split_operand.cuh": [
        (r'asm\("max\.NaN.*?\)\);', "largest = x != x || y != y ? NAN : fmaxf(x, y);")
    ],
    "score_tile.cuh": [(r'asm\("shl\.b32.*?\)\);', "beyond = count >= 32 ? 0 : ~0u << count;")],
    "tma_sm90.cuh": [(r'asm volatile\("red\.release.*?"memory"\);', "*place += value;")],
    "head.cuh": [(r'asm volatile\(""[^;]*;', "")],
    "softmax.cuh": [(r'asm volatile\("bar\.sync.*?"memory"\);', "")],
}
for _kernel in ("forward.cu", "backward_float32.cu", "backward_float32_dq.cu"):
    _REPLACED[_kernel] = [
        (r"extern __shared__.*?memory\[\];", "char* const memory = shared_memory();")
    ]

_RUN = """\
{defines}
#include "{kernel}.cu"

extern "C" __attribute__((visibility("default"))) void launch(const Params* p, int grid) {{
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
        run_block({threads}, [&] {{ {kernel}(*p); }});
}}
"""


def _texts(key: KernelKey, constants: Mapping[str, int]) -> dict[str, str]:
    texts = dict(sources_in((SOURCES,)))
    for name, value in constants.items():
        declared = rf"constexpr int {name} = \d+;"
        (file,) = (file for file, text in texts.items() if re.search(declared, text))
        texts[file] = re.sub(declared, f"constexpr int {name} = {value};", texts[file])
    for name, pairs in _REPLACED.items():
        for pattern, text in pairs:
            (found,) = re.findall(pattern, texts[name], re.DOTALL)
            texts[name] = texts[name].replace(found, text)
    one_lane, _, _ = STAND_INS.partition("// --- other lanes and threads")
    one_lane = one_lane.replace("constexpr int WARP = 1;", "constexpr int WARP = 32;")
    one_lane = one_lane.replace("template <class T> void hide(T&) {}", "")
    macros = (define.removeprefix("-D").split("=", 1) for define in key.defines())
    defines = "\n".join(f"#define {name} {value}" for name, value in macros)
    run = _RUN.format(defines=defines, kernel=key.kernel, threads=key.threads)
    return texts | {"types.cuh": one_lane + _LANES, "copy.cuh": "#pragma once\n", "run.cpp": run}


def run(
    folder: Path,
    plan: LaunchPlan,
    launches: list[KernelLaunch],
    arrays: Mapping[str, Array],
    **constants: int,
) -> dict[str, Array]:
    """Run launches of a plan; return the parts of the workspace, in bytes.

    Those that no launch needs to be zero start as NaN. ``constants`` replace values in the sources.
    """
    if sys.platform != "linux":
        pytest.skip("fibers need ucontext.h")
    memory = np.full(plan.workspace.nbytes + _ALIGNMENT, 0xFF, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    memory[begin + plan.workspace.zeros :] = 0
    parts = {name: memory[begin + at :] for name, at in plan.workspace.starts.items()}
    sizes = {f"{name}_bytes": x.itemsize for name, x in arrays.items() if x.dtype.kind == "i"}
    block = parameter_block(plan.fields | sizes, {**arrays, **parts})
    for n, launch in enumerate(launches):
        place = folder / str(n)
        place.mkdir()
        library = built(place, _texts(launch.key, constants), "run.cpp")
        library.launch(pointer(block), ctypes.c_int(launch.grid))
    return parts
