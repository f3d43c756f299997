"""Which kernels are worth compiling ahead of time, and which ones the wheel brings."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from tileattn.call.problem import Problem, problem_of
from tileattn.kernels.cuda.families.context import LaunchContext
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.plan.device import device_of_arch
from tileattn.kernels.cuda.plan.layout import MAX_ALIGNMENT, contiguous, contiguous_inputs
from tileattn.kernels.cuda.plan.merged_rows import plan_merge
from tileattn.kernels.cuda.plan.plan import STORE, plans_of
from tileattn.kernels.cuda.plan.shared_pages import KEY as CASCADE_TABLES
from tileattn.kernels.cuda.plan.token_rows import plan_append, plan_rope

ARCHS = ("sm_80", "sm_89", "sm_90a")
"""Architectures for which the wheel brings kernels."""

WINDOWS: tuple[tuple[int | None, int | None], ...] = ((None, None), (None, 0))
"""Without and with a right limit, which decides about the tiles of the Hopper kernels."""

DTYPES, HEAD_DIMS = ("bfloat16", "float16", "float32"), (64, 96, 128, 256)

_16_BIT, _USUAL = DTYPES[:2], (64, 128)
_LENGTHS = ((128, 128), (280, 280), (640, 640), (1024, 1024), (8192, 8192))
_FEW_QUERIES = tuple(product((1, 4), (16, 256, 1500, 6000, 40000)))
_SLIDING = ((255, 0), (4095, 0), (128, 128))
_PACKED = ("cu_seqlens_q", "cu_seqlens_k")
_HEADS = ((1, 1, 1), (1, 8, 1), (16, 16, 16), (16, 32, 8))  # B, Hq and Hkv
_PAGE = 64  # keys


class Calls(NamedTuple):
    """Calls with the same options and other sizes, and where the wheel brings their kernels.

    Parameters
    ----------
    options : tuple of str
        Options in use.
    windows : tuple of pairs
        Keys to the left and right; a side may be None.
    lengths : tuple of pairs
        Queries and keys. Few queries are for decoding, which has no backward pass.
    dtypes, head_dims : tuple
        What the wheel brings.
    """

    options: tuple[str, ...] = ()
    windows: tuple[tuple[int | None, int | None], ...] = WINDOWS
    lengths: tuple[tuple[int, int], ...] = _LENGTHS
    dtypes: tuple[str, ...] = _16_BIT
    head_dims: tuple[int, ...] = _USUAL

    def problems(self, dtype: str, dim: int) -> Iterator[Problem]:
        """Yield problems that differ in what decides about kernels."""
        plain = problem_of(dtype, dim, self.options)
        if "block_table" in self.options:
            plain = replace(plain, page=_PAGE)
        for window, (Nq, Nk), (B, Hq, Hkv) in product(self.windows, self.lengths, _HEADS):
            batch = 1 if plain.is_packed else B
            yield replace(plain, window=window, Nq=Nq, Nk=Nk, B=batch, Hq=Hq, Hkv=Hkv)


PLAIN = (
    Calls(dtypes=DTYPES, head_dims=HEAD_DIMS),
    Calls(lengths=_FEW_QUERIES, dtypes=DTYPES, head_dims=HEAD_DIMS),
)
"""Calls without options."""

COMMON = (
    *PLAIN,
    Calls(windows=_SLIDING),
    Calls(("kv_lengths",), lengths=_FEW_QUERIES),
    Calls(_PACKED, head_dims=HEAD_DIMS[:3]),
    Calls((*_PACKED, "dropout_p")),
    Calls(("dropout_p",), (*WINDOWS, _SLIDING[0]), head_dims=HEAD_DIMS[:3]),
    Calls(("softcap",), (*WINDOWS, *_SLIDING)),
    Calls(("softcap",), lengths=_FEW_QUERIES),
    Calls(("alibi_slopes",)),
    Calls(("alibi_slopes",), lengths=_FEW_QUERIES),
    Calls(("block_table", "kv_lengths"), lengths=_FEW_QUERIES),
)
"""Calls whose kernels the wheel brings."""


def common_keys(
    arch: str, dtypes: Iterable[str], head_dims: Iterable[int], calls: Iterable[Calls] = PLAIN
) -> list[KernelKey]:
    """List the kernels of calls on contiguous arrays: of both passes, or forward for decoding."""
    device = device_of_arch(arch)
    found: dict[KernelKey, None] = {STORE: None}
    for each, dtype, dim in product(calls, dtypes, list(head_dims)):
        passes = 1 if each.lengths is _FEW_QUERIES else 3
        for problem in each.problems(dtype, dim):
            plans = plans_of(problem, contiguous_inputs(problem), device, tables=False)
            found |= {launch.key: None for plan in plans[:passes] for launch in plan.launches}
    return list(found)


def shipped_keys(
    arch: str, dtypes: Iterable[str] = DTYPES, head_dims: Iterable[int] = HEAD_DIMS
) -> list[KernelKey]:
    """List the kernels that the wheel brings for an architecture."""
    found: dict[KernelKey, None] = {}
    for dtype, dim in product(dtypes, list(head_dims)):
        found |= dict.fromkeys(_single_launches(dtype, dim))
        calls = [each for each in COMMON if dtype in each.dtypes and dim in each.head_dims]
        found |= dict.fromkeys(common_keys(arch, (dtype,), (dim,), calls))
    return list(found)


def _single_launches(dtype: str, dim: int) -> Iterator[KernelKey]:
    """Yield the kernels of ``rope``, ``append_kv``, ``merge`` and ``cascade``."""
    rows = contiguous((1, 8, 16, dim), dtype)
    caches = {"k": rows, "v": rows, "k_cache": rows, "v_cache": rows}
    tables = dict.fromkeys(("cos", "sin"), contiguous((16, dim // 2), "float32"))
    yield plan_rope(tuple((caches | tables).items()), interleaved=False, inverse=False).key
    sums = contiguous(rows.shape[:-1], "float32")
    yield plan_merge((("outs[0]", rows), ("lses[0]", sums), ("out", rows), ("lse", sums))).key
    yield CASCADE_TABLES
    for more in ({}, tables):
        yield plan_append(tuple((caches | more).items()), 1, None, interleaved=False).key


def context_of(arch: str, alignment_bytes: int = MAX_ALIGNMENT) -> LaunchContext:
    """Return the context of contiguous arrays on one SM of a GPU of an architecture."""
    device = device_of_arch(arch)
    return LaunchContext(alignment_bytes, device.shared_limit, arch=arch, tuning=device.tuning)
