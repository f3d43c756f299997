"""Every kernel compiles without complaints for every GPU generation; tuned ones do not spill."""

import re
from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import fields, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.cuda.src.samples import (
    READ_BY_SASS,
    READ_BY_SASS_PAIRS,
    TILED,
    is_tuned,
    representative_keys,
)
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
from tileattn.kernels.cuda.families.float32_generic import SPLIT_BACKWARD, SPLIT_DQ
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
from tileattn.kernels.cuda.jit.compile import SOURCES, Compiled, compiled, sources_of
from tileattn.kernels.cuda.plan.catalog import common_keys
from tileattn.kernels.cuda.plan.tile_lists import LISTS
from tools.check_sass import LINES

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
# Numbers of columns select no code of their own. They decide about registers: with Hopper kernels,
# whose wgmma the compiler may serialise, they are paired like other fields.
SIZES = {"head_dim", "value_dim"}
FIELDS = [(x.name, x.default) for x in fields(KernelKey) if x.name != "kernel"]
CODE_PATH = re.compile(r"#if __CUDA_ARCH__ >= (\d+)$", re.MULTILINE)


def is_hopper(key: KernelKey) -> bool:
    return key.kernel.endswith("_sm90")


def as_launched(key: KernelKey, arch: str, folders: tuple[Path, ...] = (SOURCES,)) -> Compiled:
    """Compile a kernel as for a call.

    Hopper kernels get the lines of their sources, so that all tests read the same entry of the disk
    cache: `tools.check_sass` needs the lines. The machine code is the same.
    """
    return compiled(key, arch, folders, options=LINES if is_hopper(key) else ())


@cache
def code_path(arch: str, kernel: str) -> int:
    """Number the texts that the preprocessor makes of a kernel; return that of a GPU."""
    texts = sources_of(KernelKey(kernel, "float32"), arch, (SOURCES,)).values()
    limits = {int(limit) for text in texts for limit in CODE_PATH.findall(text)}
    number = int("".join(x for x in arch if x.isdigit()))
    return sum(10 * number >= limit for limit in limits)


def covered_by(case: Case) -> set[Any]:
    """List what a case compiles: each value of a field, and each pair of values but of sizes.

    A pair of which one is the default is no pair: the kernel has no code for it. A kernel of
    flagged heads counts as another kernel. Options are paired with the text that a GPU gets, not
    with the GPU.
    """
    arch, key = case
    kernel = key.kernel, key.head_flags > 0
    path = "code path", code_path(arch, key.kernel)
    values = [(name, getattr(key, name)) for name, _ in FIELDS]
    without = {*FIELDS}
    sizes = TILES if is_hopper(key) else TILES | SIZES
    added = [x for x in values if x not in without and x[0] not in sizes]
    return {(kernel, *x) for x in (("arch", arch), *values, *combinations([path, *added], 2))}


def size_of(case: Case) -> tuple[int, int]:
    """Return the columns and the pairs of a tile, on which the time of a compilation depends."""
    key = case[1]
    return key.head_dim + key.value_dim, key.block_q * key.block_k


def covering(cases: Iterable[Case], needed: Container[Case]) -> list[Case]:
    """Leave out cases of which others compile everything, unless they are needed.

    Large tiles, which take long to compile, are left out first.
    """
    covered = {case: covered_by(case) for case in cases}
    counts = Counter(x for found in covered.values() for x in found)
    left_out = set()
    for case in sorted(covered, key=size_of, reverse=True):
        if case not in needed and all(counts[x] > 1 for x in covered[case]):
            left_out.add(case)
            counts.subtract(covered[case])
    return [case for case in covered if case not in left_out]


def limits_spills(case: Case) -> bool:
    arch, key = case
    return key.kernel in {LATENT, FLOAT32_FORWARD} or is_tuned(key, arch)


READ = dict.fromkeys(("sm_90a", key) for key in (*READ_BY_SASS, *READ_BY_SASS_PAIRS))
CANDIDATES = dict.fromkeys([*MIXED, *PLAIN, *CLUSTERS, *READ])
SPILLS = {case for case in CANDIDATES if limits_spills(case)}
CASES = covering(CANDIDATES, READ.keys() | SPILLS)

# ptxas only says "info" when it serialises wgmma or ignores setmaxnreg, which makes a kernel slow.
# These notes have numbers from 7500 on.
COMPLAINT = re.compile(r"warning|error|performance loss|\(C75\d\d\)", re.IGNORECASE)


def name_of(case: Case) -> str:
    arch, key = case
    return "-".join([arch, key.kernel, *(d.partition("=")[2] for d in key.defines()[1:])])


def first_of(cases: Iterable[Case]) -> dict[str, Case]:
    """Return the smallest case of each kernel, for the GPU that has nearly all kernels.

    Splits of the keys come last: `test_griddep.py` expects the launches of a plain call.
    """
    order = sorted(cases, key=lambda x: (x[0] != "sm_90a", x[1].split_kv, *size_of(x)))
    return {case[1].kernel: case for case in reversed(order)}


# The quick tests compile each kernel once, and not for flagged heads if there is another key.
# `test_griddep.py` reads the same machine code.
_FLAGGED = first_of(x for x in CASES if x[1].head_flags)
_FIRST = _FLAGGED | first_of(x for x in CASES if not x[1].head_flags)
FIRST, FIRST_FLAGGED = ({name: case[1] for name, case in x.items()} for x in (_FIRST, _FLAGGED))
# Compiled as for a call: a case of each kernel for each text that it has, and where spills count.
_OLDER = {
    (code_path(arch, key.kernel), key.kernel, key.head_flags > 0): (arch, key)
    for arch, key in sorted(CASES, key=size_of, reverse=True)
    if code_path(arch, key.kernel) < code_path("sm_90a", key.kernel)
}
AS_LAUNCHED = {
    *_OLDER.values(),
    *_FIRST.values(),
    *_FLAGGED.values(),
    *(case for case in CASES if case in READ or case in SPILLS),
}


def most_spilled(key: KernelKey) -> int:
    """Return the bytes that a kernel may spill."""
    if key.kernel == HOPPER:
        return 128  # in its NaN-safe passes, which rarely run
    if key.kernel == FLOAT32_BACKWARD:
        return 8  # where totals are added, outside the loops over tiles
    is_split = key.kernel == FLOAT32_FORWARD and max(key.head_dim, key.value_dim) > 64
    masks = key.mask or key.block_mask or key.mask_mod or key.packed
    return 192 if is_split and (masks or key.dropout) else 0


def marks_of(case: Case) -> list[pytest.MarkDecorator]:
    """Mark all but the first case of a kernel as slow; tests of one case have the same turn."""
    if case == _FIRST[case[1].kernel]:
        return []
    return [pytest.mark.slow(name_of(case))]


@pytest.mark.parametrize("case", [pytest.param(x, marks=marks_of(x)) for x in CASES], ids=name_of)
def test_a_kernel_compiles(case: Case, compiled_quickly: Callable[..., Compiled]) -> None:
    arch, key = case
    full = case in AS_LAUNCHED or is_hopper(key)
    made = (as_launched if full else compiled_quickly)(key, arch)
    assert made.image.startswith(b"\x7fELF")
    assert made.registers is not None, f"the log names no kernel {key.kernel}:\n{made.log}"
    assert COMPLAINT.search(made.log) is None, made.log
    if case in SPILLS:
        assert made.spill_bytes is not None
        assert made.spill_bytes <= most_spilled(key), made.log


@pytest.mark.parametrize(
    "kernel", [HOPPER, *HOPPER_BACKWARDS, HOPPER_WIDE_DQ, LATENT, WIDE, FLOAT32_FORWARD]
)
def test_shared_memory_that_differs_from_the_launch(kernel: str) -> None:
    key = next(key for _, key in CASES if key.kernel == kernel)
    with pytest.raises(KernelCompileError, match="what a launch brings"):
        compiled(replace(key, smem_bytes=key.smem_bytes + 1024), "sm_90a")


def test_code_depends_on_the_gpu_only_by_lower_limits() -> None:
    """Other conditions would select texts that `code_path` takes for the same."""
    for source in SOURCES.iterdir():
        text = source.read_text(encoding="utf-8")
        assert text.count("__CUDA_ARCH__") == len(CODE_PATH.findall(text)), source.name


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
        FLOAT32_FORWARD,
        FLOAT32_BACKWARD,
        FLOAT32_DQ,
        *COUNTS,
        *COUNTS.values(),
        *LISTS["forward"],
        *LISTS["backward"],
    }
    of_others = {SPLIT_BACKWARD, SPLIT_DQ}
    others = of_others if "sm_90a" in archs else of_hopper
    others |= {SPLIT_KEYS, SPLIT_QUERIES} | of_others if "sm_75" in archs else set()
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
