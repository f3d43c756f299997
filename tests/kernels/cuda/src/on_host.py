"""Run the text of functions.cuh, and what classifies tiles by it, on the CPU.

A C++ compiler takes it with a few stand-ins.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from tileattn.expressions.nodes import Node
from tileattn.kernels.cuda.families.block_order import (
    COUNTS,
    ORDERS_QUERIES,
    order_bytes,
    ordered_blocks,
)
from tileattn.kernels.cuda.families.functions import functions_text
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.tile_lists import KERNELS
from tileattn.kernels.cuda.jit.compile import SOURCES
from tileattn.kernels.cuda.plan.layout import array_layout
from tileattn.kernels.cuda.plan.params import PARAMS, aux_name, slots, template
from tileattn.kernels.cuda.plan.plan import LaunchPlan

Array = NDArray[Any]

_HEADERS = "quick.cuh", "numpy.cuh", "intervals.cuh"  # that run as they are

_TYPES = """\
#pragma once
#include <math.h>
#include <algorithm>
#include <limits>
#define __device__
#define __shared__ static
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
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

// Warps of one lane.
constexpr int WARP = 1;
struct int2 { int x, y; };
inline struct { int x; } threadIdx, blockIdx;
inline u32 __ballot_sync(u32, bool x) { return x; }
inline int __popc(u32 x) { return __builtin_popcount(x); }
template <class T> T __shfl_xor_sync(u32, T x, int) { return x; }
inline void __syncthreads() {}
inline int __syncthreads_count(bool x) { return x; }
inline void sync_threads() {}
inline void overlap_launches() {}
struct float16;
struct bfloat16;
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

_KERNEL = """\
#include "{kernel}.cu"

extern "C" void launch(const Params* p, int grid) {{
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) {kernel}(*p);
}}
"""


_ELEMENT_SUMS = """\
#include "element_sums.cuh"

// Visit pairs of a tile; where their distance decides, sums of its diagonals.
template <class Visit>
void visit_tile(const Params* p, const Accum* ds, int q0, int k0, Visit visit) {
    const int q1 = min(q0 + BLOCK_Q, int(p->Nq)), k1 = min(k0 + BLOCK_K, int(p->Nk));
    auto diagonal = [&](int i, int j) {
        Accum total = 0;
        for (int n = 0; i + n < q1 && j + n < k1; ++n) total += ds[(i + n) * p->Nk + j + n];
        visit(total, i, j);
    };
    if (!LearnedElement::OF_DISTANCE) {
        for (int i = q0; i < q1; ++i)
            for (int j = k0; j < k1; ++j) visit(ds[i * p->Nk + j], i, j);
        return;
    }
    for (int i = q1 - 1; i > q0; --i) diagonal(i, k0);
    for (int j = k0; j < k1; ++j) diagonal(q0, j);
}

extern "C" void add_up(const Params* p, const Accum* ds) {
    static Accum memory[WINDOW];
    const i64 shares = LearnedElement::sums(*p).sizes[0];
    for (i64 bh = 0; bh < p->B * p->Hq; ++bh)
        for (int q0 = 0; q0 < p->Nq; q0 += BLOCK_Q) {
            ElementSums<WINDOW> sums(*p, int((bh + q0 / BLOCK_Q) % shares), memory);
            for (int k0 = 0; k0 < p->Nk; k0 += BLOCK_K) {
                const i64 b = bh / p->Hq, h = bh % p->Hq;
                const Accum* const own = ds + bh * p->Nq * p->Nk;
                auto pairs = [&](auto visit) { visit_tile(p, own, q0, k0, visit); };
                if (sums.begin_tile(b, h, q0, k0))
                    sums.add_to_one(pairs);
                else
                    sums.add_to_each(b, h, pairs);
            }
            sums.finish();
        }
}
"""


_SEQUENCES = """\
#include "sequence.cuh"

extern "C" void find(const Params* p, int count, i64* found) {
    for (int n = 0; n < count; ++n, found += 9) {
        const HeadBlock<BLOCK_Q> at(*p, p->query_ends(), int(p->Hq), 0, n);
        const Sequence s(*p, at.b);
        const i64 all[] = {at.b, at.block, s.q_start, s.Nq, s.k_start, s.Nk, s.length(*p),
                           s.offset(*p), s.padded_row(*p, 1)};
        std::copy(all, all + 9, found);
    }
}
"""


_DROPOUT = """\
#include "philox.cuh"

template <bool TRANSPOSED>
void visit(const Dropout& dropout, int row, int column, bool* kept) {
    for (threadIdx.x = 0; threadIdx.x < 32; ++threadIdx.x) {
        const Lane lane;
        dropout.for_each<TRANSPOSED, MT, NT>(row, column, [&](int m, int n, int e, bool keeps) {
            kept[(16 * m + lane.row(e)) * 8 * NT + 8 * n + lane.column(e)] = keeps;
        });
    }
}

extern "C" void drop(const Params* p, i64 b, i64 h, int row, int column, bool* pairs, bool* rows,
                     bool* transposed) {
    const Dropout dropout(*p, b, h);
    for (int n = 0; n < 16 * MT * 8 * NT; ++n)
        pairs[n] = dropout.keeps(row + n / (8 * NT), column + n % (8 * NT));
    visit<false>(dropout, row, column, rows);
    visit<true>(dropout, row, column, transposed);
}
"""

_DROPOUT_CONFIG = """\
#pragma once
#include "types.cuh"
using Accum = float;
constexpr int FUNCTIONS = 0, MT = {m}, NT = {n};
constexpr bool IS_16_BIT = false, HAS_ORIGIN = {origin};
struct Lane {{
    int g = threadIdx.x / 4, t = threadIdx.x % 4;
    int row(int e) const {{ return g + e / 2 * 8; }}
    int column(int e) const {{ return 2 * t + e % 2; }}
}};
inline void hide(u32&) {{}}
inline u32 __umulhi(u32 x, u32 y) {{ return u32(u64(x) * y >> 32); }}
"""


def dropped(
    folder: Path,
    fields: Mapping[str, Any],
    origin: Array | None,
    head: tuple[int, int],
    place: tuple[int, int],
    atoms: tuple[int, int],
) -> list[Array]:
    """Find what dropout keeps of a head, from a place on: pair by pair, and in fragments.

    Of so many atoms along rows and columns; the last has keys as rows.
    """
    block = np.frombuffer(template(fields), np.uint64).copy()
    if origin is not None:
        block[slots({})["origin"]] = origin.ctypes.data
    names = "philox.cuh", "params.cuh", "integers.cuh", "functions.cuh", "numpy.cuh", "quick.cuh"
    texts = {name: (SOURCES / name).read_text(encoding="utf-8") for name in names}
    config = _DROPOUT_CONFIG.format(m=atoms[0], n=atoms[1], origin=int(origin is not None))
    texts |= {"types.cuh": _TYPES, "config.cuh": config, "dropout.cpp": _DROPOUT}
    library = built(folder, texts, "dropout.cpp")
    found = [np.empty((16 * atoms[0], 8 * atoms[1]), bool) for _ in range(3)]
    library.drop(
        ctypes.c_void_p(block.ctypes.data),
        *map(ctypes.c_longlong, head),
        *map(ctypes.c_int, place),
        *(ctypes.c_void_p(x.ctypes.data) for x in found),
    )
    return found


class Found(NamedTuple):
    """What a number stands for: a block of a sequence, and where that is."""

    b: int
    block: int
    q_start: int
    Nq: int
    k_start: int
    Nk: int
    length: int
    offset: int
    padded_row: int  # of its first query, of the second head


def sequence_blocks(
    folder: Path, plan: LaunchPlan, key: KernelKey, count: int, **integers: Array
) -> list[Found]:
    """Find the blocks of queries of some first numbers; integers are those of the call."""
    block = block_with(plan, integers)
    texts = kernel_texts(replace(key, kernel="sequences"), 1, "float32")
    library = built(folder, texts | {"sequences.cpp": _SEQUENCES}, "sequences.cpp")
    found = np.empty((count, len(Found._fields)), np.int64)
    library.find(ctypes.c_void_p(block.ctypes.data), count, ctypes.c_void_p(found.ctypes.data))
    return [Found(*row) for row in found.tolist()]


def ordered(folder: Path, plan: LaunchPlan, **integers: Array) -> Array:
    """Put the work tiles of a plan in order: a row of integers for each `PackedBlock`."""
    key = next(x.key for x in plan.launches if x.key.kernel in COUNTS)
    count = ordered_blocks(plan.problem, key)
    found = np.full(order_bytes(plan.problem, key) // 4, -1, np.int32)
    counter = np.ones(1, np.uint32)
    block, places = block_with(plan, integers), slots({})
    for name, x in (("block_order", found), ("tile_counter", counter)):
        block[places[name]] = x.ctypes.data
    counting = [x for x in plan.launches if x.key.kernel == COUNTS[key.kernel]]
    for each, grid in (*((x.key, x.grid) for x in counting), (key, count)):
        library = built(folder, kernel_texts(each, 1, "float32"), f"{each.kernel}.cpp")
        library.launch(ctypes.c_void_p(block.ctypes.data), ctypes.c_int(grid))
    assert counter[0] == (key.kernel != ORDERS_QUERIES)  # a forward pass finds zero
    return found[: 12 * count].reshape(count, 12)


def block_with(plan: LaunchPlan, integers: Mapping[str, Array]) -> Array:
    """Fill the parameter block of a plan with the integers of a call, of 4 or 8 bytes each."""
    sizes = {f"{name}_bytes": x.itemsize for name, x in integers.items()}
    block = np.frombuffer(template(plan.fields | sizes), np.uint64).copy()
    for name, x in integers.items():
        block[slots({})[name]] = x.ctypes.data
    return block


def element_sums(
    folder: Path, plan: LaunchPlan, key: KernelKey, aux: Sequence[Array], ds: Array, window: int
) -> dict[str, Array]:
    """Sum what each pair of ``ds`` adds to an element, as a kernel does; give the copies."""
    sums = {
        name: np.zeros(x.shape, x.dtype) for name, x in plan.aux.items() if name.startswith("sums")
    }
    block = np.frombuffer(template(plan.fields, plan.aux), np.uint64).copy()
    places = slots(plan.aux)
    for name, x in (*sums.items(), *((aux_name(n), x) for n, x in enumerate(aux))):
        block[places[name]] = x.ctypes.data
    accum = plan.problem.accum_dtype.name
    texts = kernel_texts(replace(key, kernel="element_sums"), 1, accum)
    texts["config.cuh"] += f"\nconstexpr int WINDOW = {window};\n"
    library = built(folder, texts | {"element_sums.cpp": _ELEMENT_SUMS}, "element_sums.cpp")
    given = np.ascontiguousarray(ds, accum)
    library.add_up(ctypes.c_void_p(block.ctypes.data), ctypes.c_void_p(given.ctypes.data))
    return sums


def launched(folder: Path, plan: LaunchPlan, aux: Sequence[Array]) -> dict[str, Array]:
    """Run what a plan classifies tiles with; give the parts of its workspace, in bytes.

    They begin poisoned.
    """
    memory = np.full(plan.workspace.nbytes, 0xAB, np.uint8)
    starts = dict(sorted(plan.workspace.starts.items(), key=lambda part: part[1]))
    ends = [*list(starts.values())[1:], len(memory)]
    parts = {name: memory[a:b] for (name, a), b in zip(starts.items(), ends, strict=True)}
    block = np.frombuffer(template(plan.fields, plan.aux), np.uint64).copy()
    places = slots(plan.aux)
    for name, x in (*parts.items(), *((aux_name(n), x) for n, x in enumerate(aux))):
        block[places[name]] = x.ctypes.data
    for launch in plan.launches:
        if launch.key.kernel not in KERNELS:
            continue
        texts = kernel_texts(launch.key, launch.key.threads // 32, "float32")
        library = built(folder, texts, f"{launch.key.kernel}.cpp")
        library.launch(ctypes.c_void_p(block.ctypes.data), ctypes.c_int(launch.grid))
    return parts


def kernel_texts(key: KernelKey, threads: int, accum: str) -> dict[str, str]:
    """Give the texts of a kernel whose warps have one lane, and its configuration."""
    own = (
        "tile_lists.cuh",
        "block_order.cuh",
        "params.cuh",
        "integers.cuh",
        "sequence.cuh",
        "mask.cuh",
        "element_sums.cuh",
    )
    names = (*own, *_HEADERS)
    texts = {name: (SOURCES / name).read_text(encoding="utf-8") for name in names}
    source = SOURCES / f"{key.kernel}.cu"
    if source.exists():
        texts[source.name] = source.read_text(encoding="utf-8")
    config = [
        f"using Accum = {accum};",
        "constexpr bool IS_16_BIT = false, HAS_MASK = false, HAS_BLOCK_MASK = false;",
        f"constexpr bool HAS_MASK_MOD = {int(key.mask_mod)};",
        f"constexpr bool PACKED = {int(key.packed)}, PAGED = {int(key.paged)}, SPLIT_KV = false;",
        f"constexpr int BLOCK_Q = {key.block_q}, BLOCK_K = {key.block_k};",
        f"constexpr int THREADS = {threads};",
        f"constexpr int FUNCTIONS = {len(key.functions)};",
    ]
    functions = key.functions or (SOURCES / "functions.cuh").read_text(encoding="utf-8")
    return texts | {
        "types.cuh": _TYPES,
        "config.cuh": "\n".join(["#pragma once", '#include "types.cuh"', *config]),
        "functions.cuh": functions,
        f"{key.kernel}.cpp": _KERNEL.format(kernel=key.kernel),
    }


def quick(folder: Path, x: Array, y: Array) -> tuple[Array, Array]:
    """Give the quotients and the hyperbolic tangents of quick.cuh."""
    texts = {
        "types.cuh": _TYPES,
        "quick.cuh": (SOURCES / "quick.cuh").read_text(encoding="utf-8"),
        "quick.cpp": _QUICK,
    }
    library = built(folder, texts, "quick.cpp")
    found = np.empty_like(x), np.empty_like(x)
    pointers = (ctypes.c_void_p(each.ctypes.data) for each in (x, y, *found))
    library.quick(ctypes.c_longlong(x.size), *pointers)
    return found


_libraries: dict[tuple[object, ...], ctypes.CDLL] = {}


def built(folder: Path, texts: Mapping[str, str], name: str) -> ctypes.CDLL:
    """Compile one of some texts for the CPU, and load it; the same texts once."""
    made_from = name, *sorted(texts.items())
    if made_from not in _libraries:
        _libraries[made_from] = _built(folder, texts, name)
    return _libraries[made_from]


def _built(folder: Path, texts: Mapping[str, str], name: str) -> ctypes.CDLL:
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
    near: int | None = None,
) -> tuple[Array, Array, Array]:
    """Give scores, their derivatives by s, and what is visible, for pairs b, h, i, j.

    ``near`` is the number of the array that has a near origin.
    """
    kinds = tuple((x.dtype.name, x.ndim) for x in aux)
    texts = {
        "types.cuh": _TYPES,
        "config.cuh": f'#pragma once\n#include "types.cuh"\nusing Accum = {s.dtype.name};\n'
        "constexpr bool IS_16_BIT = false;\n",
        **{name: (SOURCES / name).read_text(encoding="utf-8") for name in _HEADERS},
        "functions.cuh": functions_text(score_mod, mask_mod, kinds, s.dtype, near=near),
        "pairs.cpp": _PAIRS,
    }
    library = built(folder, texts, "pairs.cpp")
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
    layouts = {aux_name(n): array_layout(x, x.ctypes.data) for n, x in enumerate(aux)}
    block = np.frombuffer(template({}, layouts), np.uint64).copy()
    for n, x in enumerate(aux):
        block[slots(layouts)[aux_name(n)]] = x.ctypes.data
    return block[PARAMS.itemsize // 8 :]
