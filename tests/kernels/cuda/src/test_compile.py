"""Every kernel compiles without complaints for every GPU generation; tuned ones do not spill."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import combinations, product
from typing import Any

import pytest

from tests.kernels.cuda.src.samples import TILED, is_tuned, representative_keys
from tileattn.dtypes import DTYPES
from tileattn.errors import KernelCompileError
from tileattn.kernels.cuda.families.block_order import COUNTS
from tileattn.kernels.cuda.families.decode import DECODE
from tileattn.kernels.cuda.families.float32 import (
    FLOAT32_BACKWARD,
    FLOAT32_DQ,
    FLOAT32_FORWARD,
    SPLIT_KEYS,
    SPLIT_QUERIES,
)
from tileattn.kernels.cuda.families.generic import NAIVE
from tileattn.kernels.cuda.families.hopper import (
    HOPPER,
    HOPPER_BACKWARD,
    HOPPER_BACKWARDS,
    HOPPER_DQ_CONVERT,
    HOPPER_DS,
    HOPPER_HALVES,
    HOPPER_WIDE_DQ,
)
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.latent import LATENT
from tileattn.kernels.cuda.families.split import FOLD
from tileattn.kernels.cuda.families.wide import WIDE
from tileattn.kernels.cuda.jit.compile import SOURCES, Compiled, compiled
from tileattn.kernels.cuda.plan.catalog import common_keys
from tileattn.kernels.cuda.plan.tile_lists import LISTS

pytestmark = pytest.mark.usefixtures("nvrtc")

Case = tuple[str, KernelKey]

ARCHS = ("sm_89", "sm_86", "sm_75", "sm_80", "sm_90a", "sm_120", "sm_100")
# Both GPUs of a pair get the same text from the preprocessor, so each compiles half of the kernels.
# The length of a kernel's name decides: a new kernel does not move others to the other GPU.
PAIRS = (("sm_86", "sm_89"), ("sm_100", "sm_120"))
NAMES = sorted(source.stem for source in SOURCES.glob("*.cu"))


def has_turn(arch: str, key: KernelKey) -> bool:
    pair = next((pair for pair in PAIRS if arch in pair), (arch, arch))
    is_tiled = key.kernel in TILED and not key.head_flags
    return is_tiled or pair[len(key.kernel) % 2 - 1] == arch


MIXED = [
    (arch, key)
    for n, arch in enumerate(ARCHS)
    for key in representative_keys(arch, n)
    if has_turn(arch, key)
]
# Kernels of calls without options, on the GPU for which tiles were tuned, and some of them on the
# oldest GPU with the same instructions.
WITHOUT_OPTIONS = {
    "sm_80": [("bfloat16", 128), ("float32", 64), ("float64", 128)],
    "sm_90a": list(product(("bfloat16", "float32", "float64"), (64, 128))),
}
PLAIN = [
    (arch, key)
    for arch, calls in WITHOUT_OPTIONS.items()
    for dtype, dim in calls
    for key in common_keys(arch, (dtype,), (dim,))
    if key.kernel in {"forward", HOPPER} or key.add_dq or is_tuned(key, arch)
]
# Clusters of two CTAs: wide heads in float64, on GPUs with clusters and enough shared memory.
CLUSTERS = [
    (arch, key)
    for arch in ("sm_90a", "sm_100")
    for key in common_keys(arch, ("float64",), (192, 256))
    if key.pair
]


# Fields that follow from the GPU, the dtype, the columns and the options.
TILES = {
    *("block_q", "block_k", "warps_m", "warps_n", "stages", "min_blocks_per_sm", "groups"),
    *("bias_alignment_bytes", "producer_warps", "smem_bytes", "functions"),
}
FIELDS = [(x.name, x.default) for x in fields(KernelKey) if x.name != "kernel"]


def covered_by(case: Case) -> set[Any]:
    """List what a case compiles: each value of a field, and each pair of values but of tiles.

    A pair of which one is the default is no pair: the kernel has no code for it. A kernel of
    flagged heads counts as another kernel.
    """
    arch, key = case
    kernel = key.kernel, key.head_flags > 0
    values = [("arch", arch), *((name, getattr(key, name)) for name, _ in FIELDS)]
    defaults = {*FIELDS}
    added = [x for x in values if x not in defaults and x[0] not in TILES]
    return {(kernel, *x) for x in (*values, *combinations(added, 2))}


def covering(cases: list[Case]) -> list[Case]:
    """Leave out cases of which others compile everything, unless their tiles are tuned."""
    counts = Counter(x for case in cases for x in covered_by(case))
    kept = []
    for case in cases:
        found = covered_by(case)
        if is_tuned(case[1], case[0]) or any(counts[x] == 1 for x in found):
            kept.append(case)
        else:
            counts.subtract(found)
    return kept


CASES = covering([*dict.fromkeys(MIXED + PLAIN + CLUSTERS)])

# ptxas only says "info" when it serialises wgmma or ignores setmaxnreg, which makes a kernel slow.
# These notes have numbers from 7500 on.
COMPLAINT = re.compile(r"warning|error|performance loss|\(C75\d\d\)", re.IGNORECASE)


def name_of(case: Case) -> str:
    arch, key = case
    return "-".join([arch, key.kernel, *(d.partition("=")[2] for d in key.defines()[1:])])


# The quick tests compile each kernel once, for the GPU that has all kernels, and not for flagged
# heads if there is another key. `test_griddep.py` reads the same machine code.
_PLAIN_LAST = sorted(
    (key for arch, key in reversed(CASES) if arch == "sm_90a"), key=lambda key: not key.head_flags
)
FIRST = {key.kernel: key for key in _PLAIN_LAST}
# The first case of each kernel on each GPU, and all that are tuned, are compiled as for a call.
_FIRSTS = {(arch, key.kernel, key.head_flags > 0): (arch, key) for arch, key in reversed(CASES)}
AS_LAUNCHED = {*_FIRSTS.values(), *(case for case in CASES if is_tuned(case[1], case[0]))}


def most_spilled(key: KernelKey) -> int:
    """Return the bytes that a kernel may spill."""
    if key.kernel == HOPPER:
        return 128  # in its NaN-safe passes, which rarely run
    is_split = key.kernel == FLOAT32_FORWARD and max(key.head_dim, key.value_dim) > 64
    masks = key.mask or key.block_mask or key.mask_mod or key.packed
    return 192 if is_split and (masks or key.dropout) else 0


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(x, marks=[pytest.mark.slow] * (x != ("sm_90a", FIRST[x[1].kernel])))
        for x in CASES
    ],
    ids=name_of,
)
def test_a_kernel_compiles(case: Case, compiled_quickly: Callable[..., Compiled]) -> None:
    arch, key = case
    made = (compiled if case in AS_LAUNCHED else compiled_quickly)(key, arch)
    assert made.image.startswith(b"\x7fELF")
    assert made.registers is not None, f"the log names no kernel {key.kernel}:\n{made.log}"
    assert COMPLAINT.search(made.log) is None, made.log
    if key.kernel in {LATENT, FLOAT32_FORWARD} or is_tuned(key, arch):
        assert made.spill_bytes is not None
        assert made.spill_bytes <= most_spilled(key), made.log


@pytest.mark.parametrize(
    "kernel", [HOPPER, *HOPPER_BACKWARDS, HOPPER_WIDE_DQ, LATENT, WIDE, FLOAT32_FORWARD]
)
def test_shared_memory_that_differs_from_the_launch(kernel: str) -> None:
    key = next(key for _, key in CASES if key.kernel == kernel)
    with pytest.raises(KernelCompileError, match="what a launch brings"):
        compiled(replace(key, smem_bytes=key.smem_bytes + 1024), "sm_90a")


# --- which keys are compiled ---------------------------------------------------------------------


@pytest.mark.parametrize("archs", [("sm_75",), ("sm_80",), ("sm_90a",), *PAIRS], ids="-".join)
def test_every_source(archs: tuple[str, ...]) -> None:
    of_hopper = {
        HOPPER,
        *HOPPER_BACKWARDS,
        HOPPER_WIDE_DQ,
        HOPPER_DQ_CONVERT,
        *HOPPER_DS,
        DECODE,
        FOLD,
        LATENT,
        WIDE,
        SPLIT_QUERIES,
        FLOAT32_FORWARD,
        FLOAT32_BACKWARD,
        FLOAT32_DQ,
        *COUNTS,
        *COUNTS.values(),
        *LISTS["forward"],
        *LISTS["backward"],
    }
    others = set() if "sm_90a" in archs else of_hopper
    others |= {SPLIT_KEYS} if "sm_75" in archs else set()
    assert {key.kernel for arch, key in CASES if arch in archs} == set(NAMES) - others


@pytest.mark.parametrize("kernel", TILED)
def test_every_dtype_and_option_of_a_tiled_kernel(kernel: str) -> None:
    keys = [key for _, key in CASES if key.kernel == kernel and not key.head_flags]
    assert {key.dtype for key in keys} == {dtype.name for dtype in DTYPES}
    assert {key.head_dim for key in keys} >= {32, 64, 128, 256}
    assert {key.alignment_bytes for key in keys} >= {2, 16}
    for option in ("softcap", "alibi", "mask", "block_mask", "dropout", "origin"):
        assert {getattr(key, option) for key in keys} == {False, True}, option
    assert {key.mask_vector_width for _, key in CASES} == {1, 2, 16}
    assert all(key.bias for key in keys) == (kernel == "backward_dbias")
    assert any(key.bias not in {"", key.dtype} for key in keys)
    assert {key.bias_alignment_bytes for key in keys} >= {0, 16}
    assert any(key.fold_scale for key in keys) == (kernel != "backward_dbias")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100"])
def test_pairs_of_thread_blocks(arch: str) -> None:
    found = {(key.kernel, key.head_dim) for a, key in CLUSTERS if a == arch}
    assert found == set(product(("forward", "backward_dkdv", "backward_dq"), (192, 256)))


def test_every_dtype_and_gradient_of_the_other_kernels() -> None:
    for kernel in ("backward_preprocess", "backward_dq_convert", "backward_dsinks"):
        assert {key.dtype for _, key in CASES if key.kernel == kernel} == {d.name for d in DTYPES}
    keys = [key for _, key in CASES if key.kernel == "backward_dkdv"]
    for gradient in ("add_dq", "write_dq", "write_dbias"):
        assert {getattr(key, gradient) for key in keys} == {False, True}


@pytest.mark.parametrize("kernel", [HOPPER, *HOPPER_BACKWARDS, HOPPER_WIDE_DQ])
def test_every_option_of_a_hopper_kernel(kernel: str) -> None:
    keys = [key for _, key in CASES if key.kernel == kernel]
    assert {arch for arch, key in CASES if key.kernel == kernel} == {"sm_90a"}
    assert {key.dtype for key in keys} == {"float16", "bfloat16"}
    assert len({key.head_dim for key in keys}) >= (1 if kernel == HOPPER_HALVES else 2)
    assert {key.head_major for key in keys} == {False, kernel in HOPPER_BACKWARDS}
    for option in ("softcap", "alibi", "fold_scale"):
        used = {False} if kernel == HOPPER_HALVES and option != "fold_scale" else {False, True}
        assert {getattr(key, option) for key in keys} == used, option


def test_kernels_of_flagged_heads_on_hopper() -> None:
    repairs = {key.kernel for arch, key in CASES if key.head_flags and arch == "sm_90a"}
    generic = {"backward_large_scores", "backward_dkdv", "backward_dq"}
    generic |= {NAIVE[kernel] for kernel in generic}  # of wide heads
    assert repairs == generic | {"forward", HOPPER_BACKWARD, HOPPER_HALVES, HOPPER_DQ_CONVERT}


@pytest.mark.parametrize(
    ("line", "complains"),
    [
        ("ptxas info    : Used 40 registers, used 1 barriers", False),
        ("a.cuh(2): warning #177-D: variable was declared but never referenced", True),
        ("ptxas info : (C7508) 'setmaxnreg' ignored to maintain minimum registers", True),
        ("ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions", True),
    ],
)
def test_the_pattern_for_complaints(line: str, complains: bool) -> None:
    assert (COMPLAINT.search(line) is not None) is complains
