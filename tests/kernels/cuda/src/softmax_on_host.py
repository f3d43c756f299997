"""Run ``softmax.cuh``, ``gradient.cuh``, ``forward_combine.cu`` and ``forward_fold.cu`` on the CPU.

Warps have one lane, which has two rows and the columns of some atoms.
"""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.kernels.cuda.src.on_host import (
    LAUNCH,
    STAND_INS,
    built,
    parameter_block,
    pointer,
    sources,
)
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit.compile import SOURCES
from tileattn.kernels.cuda.plan.plan import LaunchPlan

Array = NDArray[Any]

# In place of fragment.cuh, without tensor cores.
_FRAGMENT = """\
#pragma once
#include "types.cuh"
struct Lane {
    int g = 0, t = 0;
    int row(int e) const { return e / 2; }
    int column(int e) const { return e % 2; }
};
template <class S, int MT, int NT>
struct Fragment {
    S x[MT][NT][4];
    void clear() { memset(x, 0, sizeof x); }
    void scale_rows(const S (&factors)[MT][2]) {
        for (int m = 0; m < MT; ++m)
            for (int n = 0; n < NT; ++n)
                for (int e = 0; e < 4; ++e) x[m][n][e] *= factors[m][e / 2];
    }
};
"""

# In place of score_tile.cuh and nonfinite.cuh: names in templates that are never instantiated here.
_SCORE_TILE = """\
#pragma once
#include "mask.cuh"
#include "philox.cuh"
#include "score_mod.cuh"
template <bool TRANSPOSED, int MT, int NT> struct Scores;
template <bool TRANSPOSED, int MT, int NT> struct DenseMask;
template <bool TRANSPOSED, int MT, int NT> struct WarpBias;
template <int MT, int NT> struct Attended;
"""

_ROWS = """\
#include "softmax.cuh"

constexpr int NT = BLOCK_K / 8, COLUMNS = 2 * NT;

// Two rows of scores over `tiles` tiles of a lane's columns, in one of the ways of the forward
// kernels: out, lse, and the largest P that was rounded.
template <int THRESHOLD, RowMaxMode MODE, bool SHIFT_FROM_SUMS, bool FIRST_PASS>
void attend(const float* s, int tiles, int Dv, const float* v, float scale_log2, float scale,
            float sink, bool all_large, float* out, float* lse, float* most) {
    const int n_keys = tiles * COLUMNS;
    RowState<1> state(all_large);
    for (int d = 0; d < 2 * Dv; ++d) out[d] = 0;
    *most = 0;
    for (int t = 0; t < tiles; ++t) {
        Fragment<Accum, 1, NT> x;
        auto key = [&](int n, int e) { return t * COLUMNS + 2 * n + e % 2; };
        for (int n = 0; n < NT; ++n)
            for (int e = 0; e < 4; ++e) x.x[0][n][e] = s[e / 2 * n_keys + key(n, e)];
        Accum rescale[1][2] = {{1, 1}}, sums[1][2];
        if constexpr (FIRST_PASS) {
            if (state.template update_by_sums<THRESHOLD>(x, scale_log2, LoneWarp(), sums))
                state.template raise_shifts<THRESHOLD>(x, LoneWarp(), sums, rescale);
            else
                state.add_sums(sums);
        } else {
            state.template update<THRESHOLD, MODE, SHIFT_FROM_SUMS>(x, scale_log2, LoneWarp(),
                                                                    rescale);
        }
        for (int half = 0; half < 2; ++half) {
            for (int d = 0; d < Dv; ++d) out[half * Dv + d] *= rescale[0][half];
            for (int n = 0; n < NT; ++n)
                for (int e = 2 * half; e < 2 * half + 2; ++e) {
                    const float p = widen(narrow<Element>(x.x[0][n][e]));
                    *most = fmaxf(*most, p);
                    for (int d = 0; d < Dv; ++d) out[half * Dv + d] += p * v[key(n, e) * Dv + d];
                }
        }
    }
    for (int half = 0; half < 2; ++half) {
        const float weight = state.finalize(0, half, sink, Accum(1), scale, lse[half]);
        for (int d = 0; d < Dv; ++d) out[half * Dv + d] *= weight;
    }
}

extern "C" void rows(int way, int pairs, int tiles, int Dv, const float* s, const float* v,
                     float scale_log2, float scale, float sink, float* out, float* lse,
                     float* most) {
    for (int n = 0; n < pairs; ++n) {
        auto with = [&](auto attend, bool all_large = false) {
            attend(s, tiles, Dv, v, scale_log2, scale, sink, all_large, out, lse, most + n);
        };
        if (way == 0) with(attend<RESCALE_THRESHOLD, RowMaxMode::BOUNDED, true, true>);
        if (way == 1) with(attend<RESCALE_THRESHOLD, RowMaxMode::DETECT_LATE, true, false>);
        if (way == 2) with(attend<RESCALE_THRESHOLD, RowMaxMode::DETECT_LATE, false, false>, true);
        if (way == 3) with(attend<0, RowMaxMode::DETECT, false, false>);
        if (way == 4) with(attend<0, RowMaxMode::DETECT, false, false>, true);
        s += 2 * tiles * COLUMNS, out += 2 * Dv, lse += 2;
    }
}
"""

WAYS = {
    "first pass of Hopper's kernel": 0,
    "its second pass": 1,
    "its third pass": 2,
    "other kernels": 3,
    "other kernels, any scores": 4,
}


def key_texts(key: KernelKey) -> dict[str, str]:
    """Return the sources without those that have GPU instructions, and the defines of a key."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in SOURCES.glob("*.cuh")}
    defines = (define.removeprefix("-D").split("=") for define in key.defines())
    lines = [f"#define {name} {value}" for name, value in defines]
    return texts | {
        "types.cuh": "\n".join([*lines, STAND_INS]),
        "fragment.cuh": _FRAGMENT,
        "score_tile.cuh": _SCORE_TILE,
        "ptxas.cuh": "#pragma once",
        "nonfinite.cuh": "#pragma once",
    }


def attended(
    folder: Path, way: str, dtype: str, scores: Array, v: Array, scale: float, sink: float
) -> tuple[Array, Array, Array]:
    """Attend like the kernels of a dtype, which round P to it. Returns out, lse and the largest P.

    Parameters
    ----------
    way : str
        One of `WAYS`.
    scores : array of float32, shape (rows, keys)
        Products, as yet without the scale. The rows are even, and the keys fill tiles of 32.
    """
    key = KernelKey("softmax", dtype, block_q=16, block_k=128, warps_m=1, fold_scale=True)
    library = built(folder, key_texts(key) | {"rows.cpp": _ROWS}, "rows.cpp")
    rows, keys = scores.shape
    given = [np.ascontiguousarray(x, np.float32) for x in (scores, v)]
    out, lse, most = (
        np.empty(shape, np.float32) for shape in ((rows, v.shape[1]), (rows,), (rows // 2,))
    )
    scales: tuple[float, ...] = (float(np.float32(scale) * np.float32(np.log2(np.e))), scale, sink)
    library.rows(
        *map(ctypes.c_int, (WAYS[way], rows // 2, keys // 32, v.shape[1])),
        *map(pointer, given),
        *map(ctypes.c_float, scales),
        *map(pointer, (out, lse, most)),
    )
    return out, lse, most


_PAIRS = """\
#include "gradient.cuh"

extern "C" float pairs(int rows, int keys, const float* s, const float* lse, const float* dp,
                       const float* delta, float scale_log2, bool rounds, float* p, float* ds) {
    for (int n = 0; n < rows * keys; ++n) {
        const float lse_log2 = stored_lse(lse[n / keys] * LOG2_E);
        const float own = exp2_of(exponent(s[n], scale_log2, lse_log2));
        p[n] = widen(narrow<Element>(own));
        const float x = score_gradient(rounds ? p[n] : own, dp[n], stored_delta(delta[n / keys]));
        ds[n] = widen(narrow<Element>(x));
    }
    return dv_scale(Params{});
}
"""


def gradients(
    folder: Path,
    dtype: str,
    given: dict[str, Array],
    out: Array,
    lse: Array,
    scale: float,
    *,
    rounds: bool,
) -> dict[str, Array]:
    """Compute dq, dk and dv of a head like the kernels of a dtype, which round P and dS to it.

    ``given`` has q, k, v and dout. With ``rounds`` dS is computed from the rounded P, too.
    """
    key = KernelKey("pairs", dtype, fold_scale=True)
    library = built(folder, key_texts(key) | {"pairs.cpp": _PAIRS}, "pairs.cpp")
    library.pairs.restype = ctypes.c_float
    q, k, v, dout = (given[name].astype(np.float32) for name in ("q", "k", "v", "dout"))
    s, dp, delta = q @ k.T, dout @ v.T, np.sum(dout * out.astype(np.float32), 1)
    p, ds = np.empty_like(s), np.empty_like(s)
    arrays = [np.ascontiguousarray(x, np.float32) for x in (s, lse, dp, delta)]
    dv_scale = library.pairs(
        *map(ctypes.c_int, s.shape),
        *map(pointer, arrays),
        ctypes.c_float(float(np.float32(scale) * np.float32(np.log2(np.e)))),
        ctypes.c_bool(rounds),
        *map(pointer, (p, ds)),
    )
    return {"dq": ds @ k * scale, "dk": ds.T @ q * scale, "dv": p.T @ dout * dv_scale}


def combined(folder: Path, plan: LaunchPlan, sums: Array, acc: Array) -> tuple[Array, Array]:
    """Combine the sums of splits as the last kernel of a plan does, with a warp for each row.

    Parameters
    ----------
    sums, acc : array, shapes (rows, splits, 2) and (rows, splits, value_dim)
        What ``RowSum.store`` writes, and the unnormalised outputs.
    """
    P, (*_, last) = plan.problem, plan.launches
    kernel = last.key.kernel
    texts = sources(f"{kernel}.cu") | key_texts(last.key)
    library = built(folder, texts | {"combine.cpp": LAUNCH.format(kernel=kernel)}, "combine.cpp")
    rows = P.B * P.Hq * P.Nq
    arrays = {
        "partial_sums": np.ascontiguousarray(sums, np.float32),
        "partial_out": np.ascontiguousarray(acc, np.float32),
        "out": np.empty((rows, P.Dv), P.dtype),
        "lse": np.empty(rows, np.float32),
    }
    library.launch(pointer(parameter_block(plan.fields, arrays)), last.grid)
    out, lse = arrays["out"].astype(float), arrays["lse"].astype(float)
    # Rows that share keys are consecutive in the sums: for each query, all its heads.
    order = np.arange(rows).reshape(P.B, P.Hkv, P.group, P.Nq).swapaxes(2, 3).ravel()
    return out[order], lse[order]
