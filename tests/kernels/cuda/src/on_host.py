"""Run sources of the kernels on the CPU: a C++ compiler takes them with the few stand-ins here."""

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
from tileattn.expressions.parameters import kernel_cells
from tileattn.kernels.cuda.families.block_order import (
    COUNTS,
    ORDERS_QUERIES,
    order_bytes,
    ordered_blocks,
)
from tileattn.kernels.cuda.families.cuda_text import functions_text
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit.compile import SOURCES
from tileattn.kernels.cuda.plan.layout import ArrayLayout, array_layout
from tileattn.kernels.cuda.plan.params import PARAMS, aux_name, slots, template
from tileattn.kernels.cuda.plan.plan import LaunchPlan
from tileattn.kernels.cuda.plan.tile_lists import KERNELS

Array = NDArray[Any]

STAND_INS = Path(__file__).with_name("stand_ins.h").read_text(encoding="utf-8")
"""The text that takes the place of types.cuh."""

_HEADERS = "griddep.cuh", "quick.cuh", "numpy.cuh", "intervals.cuh"


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

LAUNCH = """\
#include "{kernel}.cu"

extern "C" void launch(const Params* p, int grid) {{
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) {kernel}(*p);
}}
"""
"""The text of a program that runs all threads of a kernel, one after another."""


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
"""


def dropped(
    folder: Path,
    fields: Mapping[str, Any],
    origin: Array | None,
    head: tuple[int, int],
    place: tuple[int, int],
    atoms: tuple[int, int],
) -> list[Array]:
    """Return which pairs dropout keeps from a place on: one by one, in a fragment, and transposed.

    A fragment has ``atoms`` atoms along rows and columns.
    """
    block = parameter_block(fields, {} if origin is None else {"origin": origin})
    names = "philox.cuh", "params.cuh", "integers.cuh", "functions.cuh", "numpy.cuh", "quick.cuh"
    config = _DROPOUT_CONFIG.format(m=atoms[0], n=atoms[1], origin=int(origin is not None))
    texts = sources(*names) | {"config.cuh": config, "dropout.cpp": _DROPOUT}
    library = built(folder, texts, "dropout.cpp")
    found = [np.empty((16 * atoms[0], 8 * atoms[1]), bool) for _ in range(3)]
    numbers = (*map(ctypes.c_longlong, head), *map(ctypes.c_int, place))
    library.drop(pointer(block), *numbers, *map(pointer, found))
    return found


class Found(NamedTuple):
    """The block of a number: its sequence, and where that is."""

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
    """Find the blocks of the first ``count`` numbers, for the integer arrays of a call."""
    block = block_with(plan, integers)
    texts = kernel_texts(replace(key, kernel="sequences"), 1, "float32")
    library = built(folder, texts | {"sequences.cpp": _SEQUENCES}, "sequences.cpp")
    found = np.empty((count, len(Found._fields)), np.int64)
    library.find(pointer(block), count, pointer(found))
    return [Found(*row) for row in found.tolist()]


def ordered(folder: Path, plan: LaunchPlan, **integers: Array) -> Array:
    """Order the work tiles of a plan: a row of integers for each `PackedBlock`."""
    key = next(x.key for x in plan.launches if x.key.kernel in COUNTS)
    count = ordered_blocks(plan.problem, key)
    found = np.full(order_bytes(plan.problem, key) // 4, -1, np.int32)
    counter = np.ones(1, np.uint32)
    block = block_with(plan, integers, block_order=found, tile_counter=counter)
    counting = [x for x in plan.launches if x.key.kernel == COUNTS[key.kernel]]
    for each, grid in (*((x.key, x.grid) for x in counting), (key, count)):
        library = built(folder, kernel_texts(each, 1, "float32"), f"{each.kernel}.cpp")
        library.launch(pointer(block), ctypes.c_int(grid))
    assert counter[0] == (key.kernel != ORDERS_QUERIES)  # the forward pass needs 0
    return found[: 12 * count].reshape(count, 12)


def pointer(x: Array) -> ctypes.c_void_p:
    """Return the address of an array, for a C function. It keeps the array alive."""
    return x.ctypes.data_as(ctypes.c_void_p)


def parameter_block(
    fields: Mapping[str, Any],
    arrays: Mapping[str, Array],
    aux: Mapping[str, ArrayLayout] | None = None,
    cells: Sequence[int] = (),
) -> Array:
    """Fill a parameter block with fields, cells and the addresses of arrays."""
    block = np.frombuffer(template(fields, aux or {}, cells), np.uint64).copy()
    places = slots(aux or {}, len(cells))
    for name, x in arrays.items():
        block[places[name]] = x.ctypes.data
    return block


def block_with(plan: LaunchPlan, integers: Mapping[str, Array], **arrays: Array) -> Array:
    """Fill the parameter block of a plan with the integers of a call, of 4 or 8 bytes each."""
    sizes = {f"{name}_bytes": x.itemsize for name, x in integers.items()}
    return parameter_block(plan.fields | sizes, {**integers, **arrays}, cells=plan.cells)


def element_sums(
    folder: Path, plan: LaunchPlan, key: KernelKey, aux: Sequence[Array], ds: Array, window: int
) -> dict[str, Array]:
    """Sum what each pair of ``ds`` adds to an element, as a kernel does, and return the copies."""
    sums = {
        name: np.zeros(x.shape, x.dtype) for name, x in plan.aux.items() if name.startswith("sums")
    }
    block = parameter_block(plan.fields, sums | named(aux), plan.aux, plan.cells)
    accum = plan.problem.accum_dtype.name
    texts = kernel_texts(replace(key, kernel="element_sums"), 1, accum)
    texts["config.cuh"] += f"\nconstexpr int WINDOW = {window};\n"
    library = built(folder, texts | {"element_sums.cpp": _ELEMENT_SUMS}, "element_sums.cpp")
    given = np.ascontiguousarray(ds, accum)
    library.add_up(pointer(block), pointer(given))
    return sums


def launched(folder: Path, plan: LaunchPlan, aux: Sequence[Array]) -> dict[str, Array]:
    """Run the kernels of a plan that classify and list tiles.

    Returns the parts of its workspace, in bytes, which start poisoned.
    """
    memory = np.full(plan.workspace.nbytes, 0xAB, np.uint8)
    starts = dict(sorted(plan.workspace.starts.items(), key=lambda part: part[1]))
    ends = [*list(starts.values())[1:], len(memory)]
    parts = {name: memory[a:b] for (name, a), b in zip(starts.items(), ends, strict=True)}
    block = parameter_block(plan.fields, parts | named(aux), plan.aux, plan.cells)
    for launch in plan.launches:
        if launch.key.kernel not in KERNELS:
            continue
        texts = kernel_texts(launch.key, launch.key.threads // 32, "float32")
        library = built(folder, texts, f"{launch.key.kernel}.cpp")
        library.launch(pointer(block), ctypes.c_int(launch.grid))
    return parts


def named(aux: Sequence[Array]) -> dict[str, Array]:
    """Return the caller's arrays by the names of their fields."""
    return {aux_name(n): x for n, x in enumerate(aux)}


def sources(*names: str) -> dict[str, str]:
    """Return the texts of sources, and the stand-ins."""
    texts = {name: (SOURCES / name).read_text(encoding="utf-8") for name in names}
    return texts | {"types.cuh": STAND_INS}


def kernel_texts(key: KernelKey, threads: int, accum: str) -> dict[str, str]:
    """Return the texts of a kernel, and its configuration."""
    own = "tile_lists", "block_order", "params", "integers", "sequence", "mask", "element_sums"
    names = [*(f"{name}.cuh" for name in own), *_HEADERS]
    if (SOURCES / f"{key.kernel}.cu").exists():
        names.append(f"{key.kernel}.cu")
    config = [
        f"using Accum = {accum};",
        "constexpr bool IS_16_BIT = false, HAS_MASK = false, HAS_BLOCK_MASK = false;",
        f"constexpr bool HAS_MASK_MOD = {int(key.mask_mod)};",
        f"constexpr bool PACKED = {int(key.packed)}, PAGED = {int(key.paged)}, SPLIT_KV = false;",
        f"constexpr int BLOCK_Q = {key.block_q}, BLOCK_K = {key.block_k};",
        f"constexpr int THREADS = {threads};",
        f"constexpr int FUNCTIONS = {len(key.functions)};",
        "inline void sync_threads() {}",
    ]
    included = [f'#include "{name}.cuh"' for name in ("types", "griddep")]
    functions = key.functions or (SOURCES / "functions.cuh").read_text(encoding="utf-8")
    return sources(*names) | {
        "config.cuh": "\n".join(["#pragma once", *included, *config]),
        "functions.cuh": functions,
        f"{key.kernel}.cpp": LAUNCH.format(kernel=key.kernel),
    }


def quick(folder: Path, x: Array, y: Array) -> tuple[Array, Array]:
    """Return the quotients and the hyperbolic tangents of quick.cuh."""
    library = built(folder, sources("quick.cuh") | {"quick.cpp": _QUICK}, "quick.cpp")
    found = np.empty_like(x), np.empty_like(x)
    library.quick(ctypes.c_longlong(x.size), *map(pointer, (x, y, *found)))
    return found


_libraries: dict[tuple[object, ...], ctypes.CDLL] = {}


def built(folder: Path, texts: Mapping[str, str], name: str) -> ctypes.CDLL:
    """Compile one of some texts for the CPU, and load it. The same texts are compiled once."""
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
    # The compiler must call functions of the C library, not evaluate them itself.
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
    constants: Sequence[int] = (),
) -> tuple[Array, Array, Array]:
    """Return scores, their derivatives with respect to s, and visibility of pairs b, h, i, j.

    ``near`` is the number of the array with a near origin, ``constants`` are the cells of the
    parameters.
    """
    kinds = tuple((x.dtype.name, x.ndim) for x in aux)
    texts = sources(*_HEADERS) | {
        "config.cuh": f'#pragma once\n#include "types.cuh"\nusing Accum = {s.dtype.name};\n'
        "constexpr bool IS_16_BIT = false;\n",
        "functions.cuh": functions_text(score_mod, mask_mod, kinds, s.dtype, near=near),
        "pairs.cpp": _PAIRS,
    }
    library = built(folder, texts, "pairs.cpp")
    whole = np.broadcast_arrays(s, *places)
    given = np.ascontiguousarray(whole[0])
    at = np.ascontiguousarray(np.stack(whole[1:])).astype(np.int64)
    scores, grads, visible = np.empty_like(given), np.empty_like(given), np.empty(given.shape, bool)
    layouts = {name: array_layout(x, x.ctypes.data) for name, x in named(aux).items()}
    cells = kernel_cells(score_mod, mask_mod).cells(constants)
    block = parameter_block({}, named(aux), layouts, cells)[PARAMS.itemsize // 8 :]
    arrays = (given, at, scores, grads, visible)
    library.pairs(pointer(block), ctypes.c_longlong(given.size), *map(pointer, arrays))
    return scores, grads, visible
