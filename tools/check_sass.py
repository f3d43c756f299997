"""Check in the machine code of Hopper's kernels that no stage is given back while it is read.

A thread that has read a stage arrives on a barrier; after that TMA overwrites the stage. A
load that is still under way at the arrival may then find the numbers of the next tile: the compiler
waits for loads where their numbers are used, not at barriers. So the numbers are to be used before
the arrival, and this shows whether they are. Needs NVRTC and nvdisasm, and no GPU.

    python -m tools.check_sass                    # all pairs of head dimensions
    python -m tools.check_sass --pairs 128x128    # of q and k, and of v
"""

import argparse
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, product
from pathlib import Path

from tileattn.call.problem import problem_of
from tileattn.kernels.cuda.families.backward_pass import backward_launches
from tileattn.kernels.cuda.families.decode import DECODE
from tileattn.kernels.cuda.families.families import forward_launches
from tileattn.kernels.cuda.families.float32 import (
    FLOAT32_BACKWARD,
    FLOAT32_DQ,
    FLOAT32_FORWARD,
)
from tileattn.kernels.cuda.families.hopper import (
    HOPPER,
    HOPPER_BACKWARD,
    HOPPER_BACKWARDS,
    HOPPER_WIDE,
    HOPPER_WIDE_DQ,
)
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.tiles import HEAD_DIM_BUCKETS
from tileattn.kernels.cuda.families.wide import WIDE
from tileattn.kernels.cuda.jit.compile import SOURCES, compiled, sources_in
from tileattn.kernels.cuda.plan import catalog
from tools.sass import Instruction, disassembled, nvdisasm, parsed

ARCH = "sm_90a"
LINES = ("-lineinfo",)  # the machine code is the same
DTYPES = ("float16", "bfloat16", "float32")
_FLOAT32 = (FLOAT32_FORWARD, FLOAT32_BACKWARD, FLOAT32_DQ)
_KERNELS = (HOPPER, DECODE, WIDE, *HOPPER_BACKWARDS, HOPPER_WIDE_DQ, *_FLOAT32)
_MANY = 1 << 13  # queries and keys: float32 is split
_ROWS = (128, 4, 24)  # that share a key head, of calls over splits of the keys
PAIRS = (
    *product(HEAD_DIM_BUCKETS, HEAD_DIM_BUCKETS),
    *((48, 112), (80, 80), (112, 48), (320, 320), (384, 512), (512, 512)),
)
OPTIONS: tuple[tuple[str, ...], ...] = (
    *((), ("softcap",), ("alibi_slopes",), ("block_mask",)),
    *(("cu_seqlens_q",), ("kv_lengths",)),  # the latter over splits of the keys
)

_BY_STORES = "threads write it, for whom an arrival releases what came before, loads included"
_WITH_K = "work tiles are freed by k_empty"
_NO_STAGE = "the count of unfinished work tiles is in no stage: only threads write it"

# Kernel, barrier and what is read: loads that may be under way at an arrival, and why.
ALLOWED = {
    **{(HOPPER, f"{x}_empty", "work_tiles"): "work tiles are freed by q_empty" for x in "kv"},
    **{
        (x, "q_empty", "work_tiles"): _BY_STORES + "; q is read by GEMMs alone"
        for x in (HOPPER, FLOAT32_FORWARD, HOPPER_WIDE_DQ)
    },
    **{(x, "pass_done", "work_tiles"): _BY_STORES for x in (HOPPER, FLOAT32_FORWARD)},
    **{(HOPPER, f"{x}_empty", "any_redo"): _NO_STAGE for x in "qkv"},
    **{(x, "k_empty", "work_tile"): _BY_STORES for x in (*HOPPER_BACKWARDS, FLOAT32_BACKWARD)},
    **{(HOPPER_BACKWARD, x, "work_tile"): _WITH_K for x in ("ds_empty", "dq_full")},
    (HOPPER_BACKWARD, "q_empty", "lse_log2"): "of the next tile; q_empty frees the stage of dK",
    (HOPPER_WIDE, "dout_empty", "p"): "frees dout and delta; " + _BY_STORES,
    **{(x, "p_empty", "p"): _BY_STORES for x in (HOPPER_WIDE, FLOAT32_BACKWARD)},
    (FLOAT32_BACKWARD, "p_empty", "delta"): "delta is freed by dout_empty",
}

_BUFFER = re.compile(r"\bsmem\.(?:storage\.)?(\w+)")
_DECLARED = re.compile(r"__device__ Barrier (\w+)\(")


def keys(
    pairs: Iterable[tuple[int, int]] = PAIRS,
    dtypes: Iterable[str] = DTYPES,
    options: Iterable[Collection[str]] = OPTIONS,
) -> list[KernelKey]:
    """List the Hopper kernels of both passes, of calls with and without a right limit."""
    context = catalog.context_of(ARCH)
    found: dict[KernelKey, None] = {}
    for (dim, value), dtype, uses, window in product(pairs, dtypes, list(options), catalog.WINDOWS):
        asked = replace(problem_of(dtype, dim, uses), Dv=value, window=window)
        if dtype == "float32":
            asked = replace(asked, Nq=_MANY, Nk=_MANY)
        over_splits = (replace(asked, Hq=rows, Nk=1 << 16) for rows in _ROWS)
        for problem in over_splits if "kv_lengths" in uses else (asked,):
            launches = (
                *forward_launches(problem, context),
                *backward_launches(problem, context, deterministic=True, sinks=False),
            )
            found |= dict.fromkeys(x.key for x in launches if x.key.kernel in _KERNELS)
    halves = [dtype for dtype in dtypes if dtype != "float32"]
    split = (_split_keys(*pair, dtype) for pair, dtype in product(pairs, halves))
    return [*found, *chain.from_iterable(split), *(_latent_key(dtype) for dtype in halves)]


def _split_keys(dim: int, value: int, dtype: str) -> list[KernelKey]:
    """List the kernels whose thread blocks share a key block: of many queries over few keys."""
    problem = replace(problem_of(dtype, dim), Dv=value, Nq=1 << 13, Nk=64)
    context = catalog.context_of(ARCH)
    launches = backward_launches(problem, context, deterministic=False, sinks=False)
    return [x.key for x in launches if x.key.split_q]


def _latent_key(dtype: str) -> KernelKey:
    """Return the kernel of latent attention, which has head dimensions of its own."""
    problem = replace(problem_of(dtype, 128, ("kv_lengths",)), Hkv=1, D=576, Dv=512)
    return forward_launches(problem, catalog.context_of(ARCH)._replace(v_is_k=True))[0].key


def findings(key: KernelKey, program: str, folders: tuple[Path, ...] = (SOURCES,)) -> list[str]:
    """Say which barriers of a kernel are arrived on before which loads have ended."""
    texts = sources_in(folders)
    lines = {name: text.splitlines() for name, text in texts.items()}
    barriers = {name for text in texts.values() for name in _DECLARED.findall(text)}
    barrier = re.compile(rf"\b({'|'.join(sorted(barriers))})\(")

    def named(x: Instruction, pattern: re.Pattern[str]) -> str:
        """Return what the source calls it, in the innermost line that does."""
        said = [lines[file][line - 1] for file, line in x.places]
        found = next(filter(None, map(pattern.search, said)), None)
        return found[1] if found else f"`{said[-1].strip()}`"

    found: dict[tuple[str, str], str] = {}
    for section in parsed(disassembled(compiled(key, ARCH, folders, options=LINES).image, program)):
        for arrival, load in section.lasting():
            at, what = named(arrival, barrier), named(load, _BUFFER)
            found.setdefault(
                (at, what),
                f"{key.kernel} {key.dtype} {key.head_dim}x{key.value_dim}: arrives on {at} at "
                f"{arrival.address:#x} while {what} is read at {load.address:#x}",
            )
    return [said for names, said in found.items() if (key.kernel, *names) not in ALLOWED]


def pair(text: str) -> tuple[int, int]:
    """Read a pair of head dimensions, as in 128x64."""
    dim, _, value = text.partition("x")
    return int(dim), int(value)


def main(arguments: Sequence[str]) -> int:
    """Print what is found; the exit status is 1 where that is anything."""
    parser = argparse.ArgumentParser(prog="check_sass")
    parser.add_argument("--pairs", nargs="*", type=pair, metavar="DxDV", help="default: all")
    parser.add_argument("--jobs", type=int, default=2, help="kernels at a time (default: 2)")
    chosen = parser.parse_args(arguments)
    program = nvdisasm()
    if program is None:
        print("nvdisasm is missing: pip install nvidia-cuda-nvdisasm")
        return 2
    looked_at = keys(chosen.pairs or PAIRS)
    count = 0
    with ThreadPoolExecutor(chosen.jobs) as pool:
        for found in pool.map(lambda key: findings(key, program), looked_at):
            count += len(found)
            print(*found, sep="\n", end="\n" if found else "", flush=True)
    print(f"{len(looked_at)} kernels, {count} findings")
    return bool(count)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
