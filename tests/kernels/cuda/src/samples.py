"""Representative kernels for the tests that compile, and the kernels with tuned tiles."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from tileattn.backends.cupy import partial_rows
from tileattn.call.problem import Problem, problem_of
from tileattn.dtypes import DTYPES, FLOAT8_E4M3FN, INT8, NAMED, QUERY_DTYPES
from tileattn.expressions.functions import mask_expression, score_expression
from tileattn.kernels.cuda.families.backward_pass import backward_launches
from tileattn.kernels.cuda.families.block_order import COUNTS, ORDERS_KEYS, ORDERS_QUERIES
from tileattn.kernels.cuda.families.context import LaunchContext
from tileattn.kernels.cuda.families.families import forward_launches
from tileattn.kernels.cuda.families.float32 import (
    FLOAT32_BACKWARD,
    FLOAT32_DQ,
    FLOAT32_FORWARD,
    SPLIT_KEYS,
    SPLIT_QUERIES,
)
from tileattn.kernels.cuda.families.hopper import (
    HOPPER,
    HOPPER_BACKWARDS,
    HOPPER_DQ_CONVERT,
    HOPPER_DS,
    HOPPER_WIDE_DQ,
)
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.latent import LATENT_FAMILY
from tileattn.kernels.cuda.families.tiles import HEAD_DIM_BUCKETS, tuned_tiles
from tileattn.kernels.cuda.families.wide import WIDE
from tileattn.kernels.cuda.plan import shared_pages
from tileattn.kernels.cuda.plan.catalog import WINDOWS, context_of
from tileattn.kernels.cuda.plan.device import device_of_arch
from tileattn.kernels.cuda.plan.layout import MAX_ALIGNMENT, contiguous, contiguous_inputs
from tileattn.kernels.cuda.plan.merged_rows import plan_merge
from tileattn.kernels.cuda.plan.plan import plans_of
from tileattn.kernels.cuda.plan.tile_lists import KERNELS as TILE_LISTS
from tileattn.kernels.cuda.plan.token_rows import plan_append, plan_rope
from tools.check_sass import keys

# Options that are part of a key. All others are parameters of every kernel, though the right window
# bound may decide about tiles.
_OPTIONS = ({"softcap", "mask"}, {"alibi_slopes", "bias"}, {"block_mask", "dropout_p"})

_HEAD_DIMS = (20, 64, 128, 256)
_KEYS = 65  # more than one small key block has
_MASK_BLOCK = 128  # keys, as a block mask has them by default

_MEASURED = "sm_90a"  # an H200

TILED = ("forward", "backward_dkdv", "backward_dq", "backward_dbias")
"""The generic kernels with tiles of their own."""

# Every kernel once. The kernels of a set are compiled for the same problem.
_SETS = (
    {"forward", "naive_forward"},
    {"backward_preprocess", "backward_dkdv", "backward_dq_convert", "naive_dkdv"},
    {"backward_dq", "naive_dq", "backward_large_scores", "naive_large_scores"},
    {"backward_dbias", "backward_dbias_sum", "backward_dsinks", "naive_dbias"},
)

_HOPPERS = (HOPPER, *HOPPER_BACKWARDS, HOPPER_WIDE_DQ)
_SPLIT_FLOATS = (SPLIT_KEYS, SPLIT_QUERIES, FLOAT32_FORWARD, FLOAT32_BACKWARD, FLOAT32_DQ)
_OF_HOPPER = (*_HOPPERS, WIDE, HOPPER_DQ_CONVERT, *HOPPER_DS, *_SPLIT_FLOATS)
_ORDERS = ORDERS_QUERIES, ORDERS_KEYS, *COUNTS.values()
_OF_AUX = (*TILE_LISTS, "backward_daux", "backward_daux_sm90", "backward_daux_sum")

# For the Hopper kernels: options, and head dimensions that the calls without options do not have.
_HOPPER_CASES = (
    ("float16", (32, 32), {"softcap"}),
    ("bfloat16", (96, 96), {"alibi_slopes"}),
    ("float16", (192, 192), {"softcap", "alibi_slopes"}),
    ("bfloat16", (192, 128), {"sinks"}),
    ("float16", (192, 128), {"block_mask"}),
    ("bfloat16", (256, 256), {"sinks"}),
    ("float16", (64, 64), {"block_mask"}),
    ("bfloat16", (128, 128), {"block_mask", "softcap"}),
    ("float16", (64, 64), {"mask"}),
    ("bfloat16", (256, 256), {"mask", "alibi_slopes"}),
    ("float16", (128, 128), {"bias", "dropout_p"}),
    ("bfloat16", (192, 192), {"dropout_p", "origin"}),
    ("bfloat16", (64, 64), {"bias", "mask", "softcap"}),
    ("bfloat16", (192, 128), {"negative scale"}),
    ("float16", (128, 128), {"80 queries"}),
    ("bfloat16", (128, 64), {"80 queries"}),
    ("float16", (64, 64), {"many keys"}),
    ("bfloat16", (80, 80), {"80 queries"}),
    ("float16", (48, 112), {"dropout_p"}),
    ("float16", (128, 128), {"shared keys"}),
    ("bfloat16", (192, 128), {"shared keys"}),
    ("float16", (256, 256), {"shared keys"}),
    ("bfloat16", (128, 128), {"many queries"}),
    ("float16", (96, 96), {"many queries"}),
    ("bfloat16", (512, 512), {"sinks"}),
    ("float16", (384, 320), {"block_mask", "softcap"}),
    ("float16", (384, 320), {"softcap"}),
    ("float32", (64, 64), {"many queries"}),
    ("float32", (112, 48), {"many queries", "softcap", "dropout_p"}),
    ("float32", (128, 128), {"many queries", "bias"}),
    ("float32", (20, 28), {"many queries", "mask", "alibi_slopes"}),
    ("float32", (64, 128), {"many queries", "block_mask", "origin", "dropout_p"}),
    ("float32", (192, 192), {"many queries"}),
    ("float32", (256, 256), {"many queries", "softcap", "mask"}),
    ("float32", (200, 256), {"many queries", "block_mask"}),
    ("float32", (256, 180), {"many queries", "bias", "dropout_p"}),
    ("float32", (80, 96), {"many queries", "negative scale", "alignment of 4"}),
    ("float32", (128, 64), {"many queries", "sinks", "alignment of 8"}),
)


def representative_keys(arch: str, combination: int) -> list[KernelKey]:
    """List a few kernels of every source; seven combinations in a row are enough."""
    found: dict[KernelKey, None] = {}
    adds = combination % 2 == 0
    for n, kernels in enumerate(_SETS, combination):
        dtype, bias = DTYPES[n % len(DTYPES)], DTYPES[n % len(DTYPES) - 1]
        enabled_options = _OPTIONS[n % len(_OPTIONS)] | {"sinks"}
        if combination % 2:
            enabled_options |= {"origin"}
        # A bias as large as the scores has its gradient from the kernel over keys.
        full = "backward_dbias" not in kernels
        if not full:
            enabled_options |= {"bias"}
        context = context_of(arch, MAX_ALIGNMENT if combination % 3 else dtype.itemsize)
        if "bias" in enabled_options:
            staged = MAX_ALIGNMENT if combination % 2 else 0
            context = context._replace(
                bias=bias.name, full_bias=full, bias_alignment_bytes=staged, dbias=True
            )
        if "block_mask" in enabled_options:
            context = context._replace(mask_block_k=_MASK_BLOCK)
        if "mask" in enabled_options:
            context = context._replace(mask_vector_width=(1, 2, 16)[combination % 3])
        # No tile fits 520 columns, so naive kernels run.
        for dim in (_HEAD_DIMS[combination % len(_HEAD_DIMS)], 512, 520):
            problem = replace(problem_of(dtype.name, dim, enabled_options), Nk=_KEYS)
            keys = _keys(problem, context)
            found |= dict.fromkeys(key for key in keys if key.kernel in kernels)
    # Kernels of flagged heads: for a few calls on each GPU, for all in four combinations in a row.
    for n, (name, (dim, value), options) in enumerate(_HOPPER_CASES):
        takes_over = n % 3 == 1 if arch == _MEASURED else n % 4 == combination % 4
        for window in WINDOWS if takes_over or arch == _MEASURED else ():
            problem = replace(problem_of(name, dim, options), Dv=value, window=window, Nk=_KEYS)
            if "negative scale" in options:
                problem = replace(problem, scale=-1.0)
            if "80 queries" in options:
                problem = replace(problem, Nq=80)
            if "many keys" in options:
                problem = replace(problem, Nk=1 << 15)
            if "many queries" in options:
                problem = replace(problem, Nq=1 << 13, Nk=1 << 13)
            if "shared keys" in options:
                problem = replace(problem, Hq=2, window=(1, 0))
            context = context_of(arch)
            for nbytes in (4, 8):
                if f"alignment of {nbytes}" in options:
                    context = context._replace(alignment_bytes=nbytes)
            if "bias" in options:
                context = context._replace(
                    bias="float32", full_bias=True, bias_alignment_bytes=16, dbias=True
                )
            keys = _keys(problem, context)
            for key in keys:
                special = key.kernel in _OF_HOPPER or key.split_floats
                if takes_over if key.head_flags else special:
                    found[key] = None
    # One block has the only key, and writes dq.
    few_keys = _keys(problem_of("float32", 32), context_of(arch))
    found |= dict.fromkeys(x for x in few_keys if x.write_dq)
    found |= dict.fromkeys(_function_keys(arch, DTYPES[combination % len(DTYPES)].name))
    found |= dict.fromkeys(_packed_keys(arch, combination))
    found |= dict.fromkeys(partial_rows.keys(DTYPES[combination % len(DTYPES)].name))
    found |= dict.fromkeys(_split_keys(arch, combination))
    found |= dict.fromkeys(_row_keys(combination))
    found |= dict.fromkeys(_latent_keys(arch))
    found |= dict.fromkeys(_invariant_keys(arch, combination))
    return [
        key
        for key in found
        if key.kernel != "backward_dkdv" or key.head_flags or key.add_dq == adds
    ]


def _function_keys(arch: str, dtype: str) -> Iterator[KernelKey]:
    """List kernels that only calls with arrays launch, and wide Hopper kernels with functions.

    The mask reads one of the arrays, and the other has a gradient.
    """
    ids, table = np.zeros((1, 4), np.int32), np.ones((1, 9), np.float32)
    aux = ids, table
    score = score_expression(lambda s, _b, h, i, j, _ids, t: s + t[h, i - j + 4], aux)
    mask = mask_expression(lambda b, _h, i, j, ids, _t: ids[b, i] == ids[b, j], aux)
    of_measured = (("bfloat16", 64), ("float32", 64), ("bfloat16", 256), ("float32", 256))
    for name, dim in ((dtype, 64), *(of_measured if arch == _MEASURED else ())):
        plain = problem_of(name, dim, {"score_mod", "mask_mod"})
        problem = replace(plain, score_mod=score, mask_mod=mask)
        arrays = {f"aux[{n}]": contiguous(x.shape, x.dtype.name) for n, x in enumerate(aux)}
        layout = contiguous_inputs(problem).with_arrays(**arrays)
        for plan in plans_of(problem, layout, device_of_arch(arch)):
            for launch in plan.launches:
                wide = (*_HOPPERS, *_SPLIT_FLOATS)
                if launch.key.kernel in (_OF_AUX if dim == 64 else wide):
                    yield launch.key


def _packed_keys(arch: str, combination: int) -> Iterator[KernelKey]:
    """List kernels of packed sequences: of one dtype, and the Hopper kernels."""
    asked = [(DTYPES[combination % len(DTYPES)].name, (64, 520)[combination % 2])]
    others = (
        ("float16", 64),
        ("bfloat16", 128),
        ("bfloat16", 256),
        ("bfloat16", 512),
        ("float32", 64),
        ("float32", 256),
    )
    for dtype, dim in (*asked, *others):
        for key in _keys(problem_of(dtype, dim, {"cu_seqlens_q", "sinks"}), context_of(arch)):
            of_asked = (dtype, dim) == asked[0] and not key.head_flags
            if of_asked or key.kernel in (*_OF_HOPPER, *_ORDERS):
                yield key


def _split_keys(arch: str, combination: int) -> Iterator[KernelKey]:
    """List split-KV kernels: for few and many rows, with pages and without."""
    dtype, dim = DTYPES[combination % len(DTYPES)].name, (64, 20, 128)[combination % 3]
    options = ({"softcap", "mask"}, {"alibi_slopes"}, set[str]())[combination % 3]

    def keys(
        dtype: str, dim: int, options: set[str], alignment: int, **sizes: Any
    ) -> Iterator[KernelKey]:
        asked = problem_of(dtype, dim, options | {"kv_lengths", "sinks"})
        problem = replace(asked, Nk=1 << 16, **sizes)
        yield from (x.key for x in forward_launches(problem, context_of(arch, alignment)))

    alignment = MAX_ALIGNMENT if combination % 2 else NAMED[dtype].itemsize
    for rows, page in ((1, None), (40, 16), (128, None))[combination % 3 :: 2]:
        yield from keys(dtype, dim, options, alignment, Hq=rows, page=page)
    kind, rows, page = ((INT8, 40, 16), (FLOAT8_E4M3FN, 1, None))[combination % 2]
    if NAMED[dtype] in QUERY_DTYPES:
        yield from keys(dtype, dim, options, alignment, Hq=rows, page=page, kv_dtype=kind)
    if arch == _MEASURED:
        for n, dim in enumerate(HEAD_DIM_BUCKETS):
            softcap = {"softcap"} if n % 3 == 2 else set[str]()
            name = ("float16", "bfloat16")[n % 2]
            value = dim if n % 2 else max(64, dim // 2)
            yield from keys(name, dim, softcap, MAX_ALIGNMENT, Hq=128, Dv=value)
            page, rows = (None, 16, 8)[n % 3], (4, 24)[n % 2]
            yield from keys(name, dim, softcap, MAX_ALIGNMENT, Hq=rows, Dv=value, page=page)
            cache = {"kv_dtype": (INT8, FLOAT8_E4M3FN)[n % 2], "page": (None, 16)[n // 2 % 2]}
            yield from keys(name, dim, softcap, MAX_ALIGNMENT, Hq=16, Dv=value, **cache)


def _invariant_keys(arch: str, combination: int) -> Iterator[KernelKey]:
    """List the kernels of invariant calls, of one query and of many; all on the measured GPU."""
    dims = (
        HEAD_DIM_BUCKETS[1:] if arch == _MEASURED else HEAD_DIM_BUCKETS[combination % 4 + 1 :][:1]
    )
    for n, dim in enumerate(dims):
        options = {"kv_lengths", "sinks", "invariant"} | ({"softcap"} if n % 3 == 2 else set())
        asked = replace(problem_of(("float16", "bfloat16")[n % 2], dim, options), Nk=1 << 14)
        for queries in (1, 1 << 13):
            problem = replace(asked, Nq=queries)
            yield from (x.key for x in forward_launches(problem, context_of(arch)))


def _row_keys(combination: int) -> Iterator[KernelKey]:
    """List the kernels that write rows of tokens or merge rows, for one dtype, and integers."""
    yield KernelKey("store_values", "float32")
    yield shared_pages.KEY
    dtype = DTYPES[combination % len(DTYPES)].name
    columns = (128, 15)[combination % 2]  # in vectors of 16 bytes, and element by element
    x = contiguous((2, 3, 4, columns), dtype)
    table = contiguous((9, columns // 4), "float32")
    arrays = {"k": x, "v": x, "k_cache": x, "v_cache": x, "cos": table, "sin": table}
    layouts = tuple(arrays.items())
    yield plan_append(layouts, 2, None, interleaved=False).key
    new = contiguous(x.shape, dtype if NAMED[dtype] in QUERY_DTYPES else "float32")
    cache, factors = contiguous((2, 2, 9, columns), "int8"), contiguous((2, 2, 9), "float32")
    quantised = {"k_cache": cache, "v_cache": cache, "k_descale": factors, "v_descale": factors}
    quantised_layouts = tuple((arrays | {"k": new, "v": new} | quantised).items())
    yield plan_append(quantised_layouts, 2, None, interleaved=False).key
    yield plan_rope(layouts, interleaved=True, inverse=False).key
    sums = contiguous(x.shape[:-1], "float64" if dtype == "float64" else "float32")
    merged = {"outs[0]": x, "lses[0]": sums, "out": x, "lse": sums}
    yield plan_merge(tuple(merged.items())).key


def is_tuned(key: KernelKey, arch: str) -> bool:
    """True if the tiles of a kernel are tuned and must not spill.

    Tiles are tuned on one GPU, for calls without options. A forward kernel of flagged heads has
    another loop around them, and rarely runs.
    """
    if key.kernel == "forward" and key.head_flags:
        return False
    masks = (key.mask, key.block_mask, key.mask_mod)
    options = (key.bias, key.softcap, key.alibi, key.score_mod, *masks, key.dropout, key.packed)
    tuned = {*TILED, *_HOPPERS, FLOAT32_BACKWARD, FLOAT32_DQ}
    if key.kernel not in tuned or arch != _MEASURED or any(options):
        return False
    rows = tuned_tiles(key.kernel, NAMED[key.dtype].itemsize, max(key.head_dim, key.value_dim))
    # A kernel of flagged heads has another number of stages than its row.
    rows += tuple(x.lowered() for x in rows) if key.kernel == HOPPER else ()
    own = (x for x in rows if x[:2] == key.tile and (key.head_flags or x.stages == key.stages))
    return any(row.tuned and not row.spills for row in own)


def _keys(problem: Problem, context: LaunchContext) -> Iterator[KernelKey]:
    """List the kernels of both passes, with and without deterministic sums."""
    sinks = "sinks" in problem.enabled_options
    for launch in forward_launches(problem, context):
        yield launch.key
    for deterministic in (False, True):
        for launch in backward_launches(problem, context, deterministic=deterministic, sinks=sinks):
            yield launch.key


def _latent_keys(arch: str) -> Iterator[KernelKey]:
    """List the kernels of latent attention: with pages and without, with one split and several."""
    context = context_of(arch)._replace(v_is_k=True)
    for dtype, options, page, Nk in (
        ("bfloat16", set[str](), None, 1 << 16),
        ("bfloat16", {"sinks"}, 64, 256),
        ("float16", {"softcap", "alibi_slopes"}, 64, 1 << 16),
    ):
        problem = replace(
            problem_of(dtype, 576, options | {"kv_lengths"}), Hq=16, Dv=512, Nk=Nk, page=page
        )
        if LATENT_FAMILY.why_not(problem, context) is None:
            yield from (launch.key for launch in forward_launches(problem, context))


READ_BY_SASS = [
    *keys([(128, 128)], ["bfloat16"], [()])[:2],
    *keys([(192, 128)], ["bfloat16"], [()])[1:2],
    *keys([(192, 128)], ["float16"], [("softcap",)])[1:3],
    *keys([(256, 256)], ["bfloat16"], [()])[1:3],
    *keys([(256, 256)], ["float16"], [("block_mask",)])[2:3],
    *keys([(64, 64)], ["float16"], [("block_mask",)])[:1],
    *keys([(64, 64)], ["bfloat16"], [()])[1:2],
    *keys([(128, 128)], ["bfloat16"], [("cu_seqlens_q",)])[:2],
    *keys([(192, 128)], ["float16"], [("cu_seqlens_q",)])[1:2],
    *keys([(256, 256)], ["float16"], [("cu_seqlens_q",)])[1:3],
    *(x for x in keys([(128, 128)], ["bfloat16"], [("kv_lengths",)]) if x.split_kv),
    *keys([(512, 512)], ["bfloat16"], [()])[:3],
    *keys([(128, 128)], ["float32"], [()])[:3],
    *keys([(256, 256)], ["float32"], [("block_mask",)])[:1],
    *keys([(256, 256)], ["float32"], [()])[1:3],
    *keys([(192, 192)], ["float32"], [("cu_seqlens_q",)])[1:3],
    *keys([(64, 64)], ["float32"], [("cu_seqlens_q",)])[:3],
    *keys([], ["bfloat16"]),  # latent attention
]
"""Each Hopper kernel, the wide ones with either number of stages, and code of options.

Their machine code is read by ``test_sass.py``.
"""
READ_BY_SASS_PAIRS = [
    *dict.fromkeys(x for x in _keys(problem_of("float64", 256), context_of(_MEASURED)) if x.pair)
]
"""The kernels of wide heads in float64, with and without the sums of dq."""
