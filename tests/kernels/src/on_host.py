"""Run the text of functions.cuh on the CPU: a C++ compiler takes it with a few stand-ins."""

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tileattn.expressions.nodes import Node
from tileattn.kernels.config.functions import functions_text
from tileattn.kernels.jit.compile import SOURCES
from tileattn.kernels.launch.layout import array_layout
from tileattn.kernels.launch.params import PARAMS, aux_name, slots, template

Array = NDArray[Any]

_TYPES = """\
#pragma once
#include <math.h>
#include <algorithm>
#include <limits>
#define __device__
using std::max, std::min;
using i64 = long long;
using u32 = unsigned;
using u64 = unsigned long long;
using float32 = float;
using float64 = double;
inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline double __dadd_rn(double x, double y) { return x + y; }
template <class T> T difference(T x, T y) { return x - y; }
template <class T> T rounded_product(T x, T y) { return x * y; }
inline float reciprocal_of(float x) { return 1 / x; }
inline float exp2_of(float x) { return exp2f(x); }
inline bool is_finite(float x) { return isfinite(x); }
template <class T> T infinity() { return std::numeric_limits<T>::infinity(); }
"""

_PAIRS = """\
#include "functions.cuh"

extern "C" void pairs(const AuxArrays* aux, i64 count, const Accum* s, const i64* places,
                      Accum* scores, Accum* grads, bool* visible) {
    for (i64 n = 0; n < count; ++n) {
        const i64 *b = places + n, *h = b + count, *i = h + count, *j = i + count;
        scores[n] = ScoreFunction(*aux, *b, *h).score(s[n], *i, *j, grads[n]);
        visible[n] = MaskFunction(*aux, *b, *h).visible(*i, *j);
    }
}
"""


def run(
    folder: Path,
    score_mod: Node | None,
    mask_mod: Node | None,
    aux: Sequence[Array],
    s: Array,
    places: Sequence[Array],
) -> tuple[Array, Array, Array]:
    """Give scores, their derivatives by s, and what is visible, for pairs b, h, i, j."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("a C++ compiler runs what a GPU would: apt-get install g++")
    kinds = tuple((x.dtype.name, x.ndim) for x in aux)
    texts = {
        "types.cuh": _TYPES,
        "config.cuh": f'#pragma once\n#include "types.cuh"\nusing Accum = {s.dtype.name};\n'
        "constexpr bool IS_16_BIT = false;\n",
        "quick.cuh": (SOURCES / "quick.cuh").read_text(encoding="utf-8"),
        "numpy.cuh": (SOURCES / "numpy.cuh").read_text(encoding="utf-8"),
        "functions.cuh": functions_text(score_mod, mask_mod, kinds, s.dtype),
        "pairs.cpp": _PAIRS,
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    library = folder / f"pairs{len(list(folder.glob('*.so')))}.so"
    # Functions of the C library are called, and not worked out by the compiler.
    exact = ("-std=c++17", "-O1", "-ffp-contract=off", "-fno-builtin", "-shared", "-fPIC")
    source = str(folder / "pairs.cpp")
    subprocess.run([compiler, *exact, source, "-o", str(library), "-lm"], check=True)

    whole = np.broadcast_arrays(s, *places)
    given = np.ascontiguousarray(whole[0])
    at = np.ascontiguousarray(np.stack(whole[1:])).astype(np.int64)
    scores, grads, visible = np.empty_like(given), np.empty_like(given), np.empty(given.shape, bool)
    arrays = (given, at, scores, grads, visible)
    block = _block_of(aux)
    first, *others = (ctypes.c_void_p(x.ctypes.data) for x in (block, *arrays))
    ctypes.CDLL(str(library)).pairs(first, ctypes.c_longlong(given.size), *others)
    return scores, grads, visible


def _block_of(aux: Sequence[Array]) -> Array:
    """Write what the parameter block has of the arrays."""
    kinds = np.ones((1, 1, 1, 1), np.int8)
    layouts = [array_layout(x, x.ctypes.data) for x in (*aux, kinds)]
    block = np.frombuffer(template({}, layouts), np.uint64).copy()
    for n, x in enumerate(aux):
        block[slots(layouts)[aux_name(n)]] = x.ctypes.data
    return block[PARAMS.itemsize // 8 :]
