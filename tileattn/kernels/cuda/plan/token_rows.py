"""Plans of the kernels that write rows of tokens: ``append_kv`` and ``rope``.

They belong to no attention call, and have a parameter block of their own: counterpart of
``src/token_rows.cuh``.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from tileattn.kernels.cuda.families.context import WARP
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.plan.layout import ArrayLayout
from tileattn.kernels.cuda.plan.single_launch import Layouts, SingleLaunch

APPEND, QUANTISE, ROPE = "append_kv", "append_quantised", "rope"

POINTERS = (
    *("k", "v", "k_cache", "v_cache", "cos", "sin"),
    *("positions", "cu_seqlens", "block_table", "new_lengths", "k_descale", "v_descale"),
)
"""Arrays, in the order of their addresses. One number follows: ``position``."""

_MANY_BLOCKS = 2048  # enough thread blocks to fill any GPU
_WARPS = 4
_STRIDES = ("b", "h", "n", "d")
_ARRAYS = {
    **dict.fromkeys(("k_rows", "v_rows"), (*_STRIDES, *_STRIDES, "columns", "pairs", "threads")),
    **dict.fromkeys(("k_descale_at", "v_descale_at"), ("b", "h", "n", "by_row")),
    **dict.fromkeys(("cos_at", "sin_at"), ("bytes", "n", "c")),
    **dict.fromkeys(("positions_at", "cu_seqlens_at", "block_table_at"), ("bytes", "i", "j")),
}
_SIZES = (
    *("B", "heads", "tokens", "N", "capacity", "page", "pages", "table_rows"),
    *("interleaved", "inverse"),
)
CELLS = len(POINTERS) + 1 + sum(map(len, _ARRAYS.values())) + len(_SIZES)
"""Fields of eight bytes of the parameter block."""


def plan_append(
    layouts: Layouts,
    sequences: int,
    table_width: int | None,
    interleaved: bool,
    of_tokens: frozenset[str] = frozenset(),
) -> SingleLaunch:
    """Plan ``append_kv``; arrays have their names in the parameter block.

    New tokens are packed if ``k`` has three axes. ``table_width`` is the largest number of pages of
    a sequence, None without pages. With descales, of three axes, the cache has 8 bits; the
    descales ``of_tokens`` are written.
    """
    x = dict(layouts)
    k, cache = x["k"], x["k_cache"]
    lead = {"page": 0, "capacity": cache.shape[2]}
    if table_width is not None:
        page = cache.shape[2]
        lead = {"page": page, "pages": cache.shape[0], "capacity": page * table_width}
    tokens = {"tokens": k.shape[1]}
    if len(k.shape) == 4:
        tokens = {"tokens": k.shape[0] * k.shape[2], "N": k.shape[2]}
    sizes = {"B": sequences, "heads": k.shape[-3], "interleaved": interleaved}
    kernel = QUANTISE if "k_descale" in x else APPEND
    written = ("k", "k_cache"), ("v", "v_cache")
    return _plan(kernel, x, written, sizes | lead | tokens, of_tokens)


def plan_rope(layouts: Layouts, interleaved: bool, inverse: bool) -> SingleLaunch:
    """Plan ``rope`` of ``k``, of four axes, to ``k_cache``."""
    x = dict(layouts)
    B, heads, N, _ = x["k"].shape
    sizes = {"B": B, "heads": heads, "N": N, "tokens": B * N}
    sizes |= {"interleaved": interleaved, "inverse": inverse}
    return _plan(ROPE, x, (("k", "k_cache"),), sizes)


def _plan(
    kernel: str,
    x: Mapping[str, ArrayLayout],
    written: tuple[tuple[str, str], ...],
    sizes: Mapping[str, int],
    of_tokens: frozenset[str] = frozenset(),
) -> SingleLaunch:
    pairs = x["cos"].shape[1] if "cos" in x and x["cos"].shape[0] else 0
    itemsize = x["k"].itemsize
    key = KernelKey(kernel, x["k"].dtype, warps_m=_WARPS)
    if kernel == QUANTISE:
        key = replace(key, kv_dtype=x["k_cache"].dtype)
    else:
        rows = [max(x[name].row_alignment, itemsize) for names in written for name in names]
        key = replace(key, alignment_bytes=math.gcd(*rows, pairs * itemsize))
    width = key.alignment_bytes // itemsize
    values: dict[str, Iterable[int]] = {name: (0,) * len(each) for name, each in _ARRAYS.items()}
    blocks = 1
    for source, target in written:
        own = pairs if source == "k" else 0
        columns = x[source].shape[-1]
        threads = min(max((columns - own) // width, 1), key.threads)
        if kernel == QUANTISE:
            threads, name = WARP, f"{source}_descale"
            values[f"{name}_at"] = (*x[name].elements, name in of_tokens)
        strides = (*_strides(x[source]), *_strides(x[target]))
        values[f"{source}_rows"] = (*strides, columns, own, threads)
        blocks = max(blocks, -(-sizes["tokens"] // (key.threads // threads)))
    for name in ("cos", "sin"):
        if name in x:
            size = 0 if x[name].dtype == "bfloat16" else x[name].itemsize
            values[f"{name}_at"] = (size, *x[name].elements)
    for name in ("positions", "cu_seqlens", "block_table"):
        if name in x:
            i, j = (*x[name].elements, 0)[:2]
            values[f"{name}_at"] = (x[name].itemsize, i, j)
    known = {"table_rows": x["cos"].shape[0]} if pairs else {}
    cells = [cell for each in values.values() for cell in each]
    cells += [int({**sizes, **known}.get(name, 0)) for name in _SIZES]
    heads = max(1, min(sizes["heads"], _MANY_BLOCKS // (blocks * len(written))))
    return SingleLaunch(key, (blocks, heads, len(written)), tuple(cells))


def _strides(x: ArrayLayout) -> tuple[int, ...]:
    """Return strides of entries, heads, rows and columns in elements; packed rows start with 0."""
    return (0,) * (4 - len(x.shape)) + x.elements
