"""Run the text of functions.cuh on the CPU: a C++ compiler takes it with a few stand-ins."""

import ctypes
import shutil
import subprocess
from collections.abc import Mapping, Sequence
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


_QUICK = """\
#include "quick.cuh"

extern "C" void quick(i64 count, const float* x, const float* y, float* quotients, float* tanhs) {
    for (i64 n = 0; n < count; ++n) {
        quotients[n] = quick_quotient(x[n], y[n]);
        tanhs[n] = quick_tanh(x[n]);
    }
}
"""


def quick(folder: Path, x: Array, y: Array) -> tuple[Array, Array]:
    """Give the quotients and the hyperbolic tangents of quick.cuh."""
    texts = {
        "types.cuh": _TYPES,
        "quick.cuh": (SOURCES / "quick.cuh").read_text(encoding="utf-8"),
        "quick.cpp": _QUICK,
    }
    library = _built(folder, texts, "quick.cpp")
    found = np.empty_like(x), np.empty_like(x)
    pointers = (ctypes.c_void_p(each.ctypes.data) for each in (x, y, *found))
    library.quick(ctypes.c_longlong(x.size), *pointers)
    return found


def _built(folder: Path, texts: Mapping[str, str], name: str) -> ctypes.CDLL:
    """Compile one of some texts for the CPU, and load it."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("a C++ compiler runs what a GPU would: apt-get install g++")
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    library = folder / f"{name}{len(list(folder.glob('*.so')))}.so"
    # Functions of the C library are called, and not worked out by the compiler.
    exact = ("-std=c++17", "-O1", "-ffp-contract=off", "-fno-builtin", "-shared", "-fPIC")
    source = str(folder / name)
    subprocess.run([compiler, *exact, source, "-o", str(library), "-lm"], check=True)
    return ctypes.CDLL(str(library))


def run(
    folder: Path,
    score_mod: Node | None,
    mask_mod: Node | None,
    aux: Sequence[Array],
    s: Array,
    places: Sequence[Array],
) -> tuple[Array, Array, Array]:
    """Give scores, their derivatives by s, and what is visible, for pairs b, h, i, j."""
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
    library = _built(folder, texts, "pairs.cpp")
    whole = np.broadcast_arrays(s, *places)
    given = np.ascontiguousarray(whole[0])
    at = np.ascontiguousarray(np.stack(whole[1:])).astype(np.int64)
    scores, grads, visible = np.empty_like(given), np.empty_like(given), np.empty(given.shape, bool)
    arrays = (given, at, scores, grads, visible)
    block = _block_of(aux)
    first, *others = (ctypes.c_void_p(x.ctypes.data) for x in (block, *arrays))
    library.pairs(first, ctypes.c_longlong(given.size), *others)
    return scores, grads, visible


def _block_of(aux: Sequence[Array]) -> Array:
    """Write what the parameter block has of the arrays."""
    kinds = np.ones((1, 1, 1, 1), np.int8)
    layouts = [array_layout(x, x.ctypes.data) for x in (*aux, kinds)]
    block = np.frombuffer(template({}, layouts), np.uint64).copy()
    for n, x in enumerate(aux):
        block[slots(layouts)[aux_name(n)]] = x.ctypes.data
    return block[PARAMS.itemsize // 8 :]
