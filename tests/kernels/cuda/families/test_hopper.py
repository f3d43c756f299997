"""The Hopper kernels: which calls they support, and what is true of all that they launch."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tests.kernels.cuda.plan.planning import (
    H200,
    ON_HOPPER,
    asked,
    forward,
    hopper_launches,
    kernels,
)
from tileattn.call.problem import problem_of
from tileattn.dtypes import NAMED
from tileattn.kernels.cuda.families import hopper
from tileattn.kernels.cuda.families.backward_pass import backward_launches
from tileattn.kernels.cuda.families.context import FAILED, LARGE_SCORES, NON_FINITE, main_of
from tileattn.kernels.cuda.families.families import forward_launches
from tileattn.kernels.cuda.families.grid import GridSizes
from tileattn.kernels.cuda.families.hopper import (
    HOPPER,
    HOPPER_BACKWARDS,
    HOPPER_DQ_CONVERT,
    HOPPER_WIDE,
    HOPPER_WIDE_DQ,
)
from tileattn.kernels.cuda.families.shared_memory import HOPPER_STATIC
from tileattn.kernels.cuda.families.tiles import MAX_HEAD_DIM
from tileattn.kernels.cuda.plan.layout import contiguous_inputs
from tileattn.kernels.cuda.plan.plan import with_grids
from tileattn.kernels.cuda.tuning import DEFAULT

SUPPORTED = replace(problem_of("float16", 64), Nq=65)  # more than split the keys
ROWS, MAXIMA = "backward_preprocess", "backward_large_scores"
REPAIRS = ["backward_dq", "backward_dkdv"]
GENERIC = [ROWS, MAXIMA, "backward_dkdv", "backward_dq_convert", "backward_dq"]


# --- the rule -----------------------------------------------------------------------------------

EMPTY = "an array is empty"
LONG = "an array has nearly 2**31 rows or more"
MANY = (1 << 31) - (1 << 16)
BIAS: dict[str, Any] = {"enabled_options": frozenset({"bias"})}
STAGED = {"bias": "float32", "bias_alignment_bytes": 16}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("the GPU does not have compute capability 9.0", {}, {"arch": "sm_90"}),
    ("dtype is neither float16 nor bfloat16", {"dtype": NAMED["float32"]}, {}),
    ("a head dimension is above 256", {"D": 520}, {}),
    ("a head dimension is above 256", {"Dv": 520}, {}),
    *((EMPTY, {name: 0}, {}) for name in ("B", "Hq", "Hkv", "Nq", "Nk", "D", "Dv")),
    (LONG, {"B": 1 << 10, "Hq": 1 << 10, "Nq": 1 << 11}, {}),
    (LONG, {"Nk": MANY}, {}),
    (LONG, {"B": 2, "Nq": MANY // 2}, {}),
    ("the head dimension of v is not a multiple of 8", {"Dv": 60}, {}),
    ("a row is not aligned to 16 bytes", {}, {"alignment_bytes": 8}),
    ("an array has a broadcast or reversed axis", {}, {"tensor_maps": False}),
    ("no tile has room for the bias", {"D": 192, "Dv": 192, **BIAS}, STAGED),
    ("bias is in use, and a head dimension is above 128", {"D": 256, **BIAS}, STAGED),
    ("the head dimension of q and k is not a multiple of 8", {"D": 60}, {}),
]
BACKWARD_ALONE = [reason for reason, *_ in REFUSED[-2:]]


@pytest.mark.parametrize(("reason", "changed", "where"), REFUSED, ids=str)
def test_what_they_do_not_support_and_why(
    reason: str, changed: dict[str, Any], where: dict[str, Any]
) -> None:
    problem, context = replace(SUPPORTED, **changed), ON_HOPPER._replace(**where)
    both = {"deterministic": False, "sinks": False}
    forwards = forward_launches(problem, context)
    for why_not, launches in (
        (hopper.why_not_forward, forwards),
        (hopper.why_not_backward, backward_launches(problem, context, **both)),
    ):
        why = why_not(problem, context)
        if launches is forwards and reason in BACKWARD_ALONE:
            assert why is None
            assert [launch.key.kernel for launch in forwards] == [HOPPER]
            continue
        assert why is not None
        assert why.startswith(reason)
        parts = [part for x in launches for part in x.why.split("; ")]
        told = [part for part in parts if part.startswith("not the Hopper kernel,")]
        assert told == [f"not the Hopper kernel, because {why}"] or (reason == EMPTY and not told)
        used = {launch.key.kernel for launch in launches}
        assert used.isdisjoint({HOPPER, *HOPPER_BACKWARDS})


def test_every_clause_of_the_rule_is_tried() -> None:
    tried = tuple(reason for reason, *_ in REFUSED)
    assert [why for why, _ in hopper._UNSUPPORTED_BACKWARD if not why.startswith(tried)] == []
    assert set(hopper._UNSUPPORTED) < set(hopper._UNSUPPORTED_BACKWARD)
    assert hopper.why_not_backward(replace(SUPPORTED, Nk=MANY - 1), ON_HOPPER) is None


def test_results_whose_rows_are_not_aligned() -> None:
    problem = asked(D=64, Dv=64)
    out = contiguous_inputs(problem).with_contiguous_results(problem, "forward").get("out")
    assert out is not None
    strides = (0, -64, 1 << 41, 2)  # out has no tensor map
    assert kernels(forward(problem, H200, out=out._replace(strides=strides))) == [HOPPER]
    assert kernels(forward(problem, H200, out=out._replace(alignment=8))) == ["forward"]


# --- the launches -------------------------------------------------------------------------------

DIMS = [(8, 64), (72, 40), (128, 128), (136, 8), (192, 128), (64, 192), (200, 64), (256, 256)]
OPTIONS = [(), ("softcap",), ("alibi_slopes",), ("mask",), ("sinks", "kv_lengths", "q_offset")]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_the_main_kernels(dims: tuple[int, int], options: tuple[str, ...]) -> None:
    """Each has columns for both head dimensions, the call's options, and at most a wave."""
    D, Dv = dims
    sizes: dict[str, Any] = {"B": 30, "Hq": 6, "Hkv": 3, "Nq": 300, "Nk": 3100, "Dv": Dv}
    problem = replace(problem_of("bfloat16", D, options), **sizes)
    (launch,) = with_grids(forward_launches(problem, ON_HOPPER), GridSizes(problem))
    own = main_of(hopper_launches(problem))
    assert own is not None
    for each in (launch, own):
        key = each.key
        assert key.head_dim >= D
        assert key.value_dim >= Dv
        enabled = (key.softcap, key.alibi, key.mask)
        assert enabled == tuple(name in options for name in ("softcap", "alibi_slopes", "mask"))
        assert key.fold_scale is not (key.softcap or key.alibi)
        assert each.grid == ON_HOPPER.sm_count
        assert (each.shared_bytes, key.producer_warps) == (key.smem_bytes, 4)
        assert each.why.startswith("wgmma and tensor maps, tiles")
        rows = dict(each.tensor_maps)
        assert rows["k"] == rows["v"] == key.block_k
        assert key.block_q % rows["q"] == 0
        assert each.tensor_maps[3:] == ((("dout", rows["q"]),) if each == own else ())
    assert launch.key.warps_m * 16 == launch.key.block_q


@pytest.mark.parametrize("dim", range(8, MAX_HEAD_DIM + 1, 8))
def test_shared_memory_of_every_head_dimension_fits(dim: int) -> None:
    for problem in (problem_of("float16", dim), replace(problem_of("float16", 8), Dv=dim)):
        for launch in (*forward_launches(problem, ON_HOPPER), *hopper_launches(problem)):
            assert launch.shared_bytes + HOPPER_STATIC <= ON_HOPPER.shared_limit
            assert launch.key.threads <= 1024
            assert launch.key.block_q % 64 == 0 or not launch.tensor_maps or launch.key.split_kv


@pytest.mark.parametrize(
    ("lengths", "D", "options", "tile"),
    [
        ((49, 49), 32, (), (64, 64, 4)),
        ((49, 49), 32, ("bias",), (64, 64, 3)),
        ((144, 144), 64, ("mask",), (64, 64, 3)),
        ((257, 257), 64, (), (64, 64, 4)),
        ((197, 197), 64, (), (128, 64, 2)),  # four blocks of 64 queries
        ((4096, 77), 64, (), (128, 64, 2)),
        ((577, 577), 64, ("bias",), (192, 128, 1)),
        ((65, 65), 80, (), (128, 96, 1)),
        ((197, 197), 80, (), (128, 128, 1)),
    ],
    ids=str,
)
def test_few_queries_and_keys_have_tiles_that_pad_them_little(
    lengths: tuple[int, int], D: int, options: tuple[str, ...], tile: tuple[int, int, int]
) -> None:
    """They are the same for any number of heads, and three groups leave registers to options."""
    for heads in (1, 600):
        Nq, Nk = lengths
        problem = replace(problem_of("bfloat16", D, options), B=heads, Hq=8, Nq=Nq, Nk=Nk)
        key = forward_launches(problem, ON_HOPPER)[0].key
        assert (key.block_q, key.block_k, key.groups) == tile


@pytest.mark.parametrize(
    ("Nq", "D", "options", "few", "many"),
    [
        (2048, 128, (), (128, 64), (192, 64)),
        (257, 80, (), (128, 96), (192, 96)),
        (577, 96, (), (128, 128), (128, 128)),  # three blocks of 192 queries would pad them more
        (2048, 128, ("bias",), (128, 64), (192, 64)),
        (2048, 128, ("mask",), (128, 128), (128, 128)),
        (8192, 192, (), (128, 96), (128, 96)),
    ],
    ids=str,
)
def test_tiles_that_stand_in_for_tall_ones_have_as_many_keys(
    Nq: int, D: int, options: tuple[str, ...], few: tuple[int, int], many: tuple[int, int]
) -> None:
    """A warpgroup has the same scores in both, so the number of heads changes no bits."""
    problem = replace(problem_of("bfloat16", D, options), Nq=Nq, Nk=Nq)
    context = ON_HOPPER._replace(sm_count=132)
    for heads, tile in ((1, few), (1000, many)):
        key = forward_launches(replace(problem, B=1, Hq=heads, Hkv=heads), context)[0].key
        assert (key.block_q, key.block_k) == tile


@pytest.mark.parametrize(
    ("Nk", "keys"), [(64, 64), (77, 96), (120, 64), (200, 64), (257, 96), (700, 64), (1100, 96)]
)
def test_tall_tiles_pad_few_keys_little(Nk: int, keys: int) -> None:
    """With a causal mask only the last queries would reach the padding."""
    for D, heads, right in product((72, 96), (1, 1000), (None, 0)):
        problem = replace(problem_of("bfloat16", D, ()), B=1, Hq=heads, Hkv=heads, Nq=4096, Nk=Nk)
        problem = replace(problem, window=(None, right))
        key = forward_launches(problem, ON_HOPPER._replace(sm_count=132))[0].key
        low = right is not None and Nk <= DEFAULT.small_tile_keys
        assert key.block_k == (128 if low else 96 if right is not None else keys)


def test_packed_sequences_have_the_same_tiles_at_any_length() -> None:
    problem = replace(problem_of("bfloat16", 64, ("cu_seqlens_q", "cu_seqlens_k")), Nq=49, Nk=49)
    key = forward_launches(problem, ON_HOPPER)[0].key
    assert key == forward_launches(replace(problem, Nq=4900, Nk=4900), ON_HOPPER)[0].key


ALL_FLAGS = NON_FINITE | LARGE_SCORES | FAILED


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_flagged_heads_are_computed_again(dims: tuple[int, int], options: tuple[str, ...]) -> None:
    """Each flag has kernels that write dk and dv, and dq; their order does not depend on it."""
    D, Dv = dims
    problem = replace(problem_of("float16", D, options), Hq=6, Hkv=3, Nq=300, Nk=530, Dv=Dv)
    launches = hopper_launches(problem)
    repairs = [x for x in launches if x.key.head_flags and x.key.kernel != MAXIMA]
    for kernels_of in (("backward_dkdv", *HOPPER_BACKWARDS), ("backward_dq", HOPPER_DQ_CONVERT)):
        flags = [x.key.head_flags for x in repairs if x.key.kernel in kernels_of]
        assert sum(flags) == ALL_FLAGS
    assert not any(x.key.add_dq for x in repairs if x.key.kernel in REPAIRS)
    # A fixed order of the sums is the same kernels in another order.
    fixed = hopper_launches(problem, deterministic=True)
    assert all(x.key.add_dq for x in fixed if x.in_order)
    assert tuple(x._replace(in_order=False) for x in fixed) == launches


def test_the_nan_safe_kernel_is_the_main_one_with_one_stage() -> None:
    problem = replace(SUPPORTED, Hq=6, Hkv=3, Nq=300, Nk=530, D=72, Dv=40)
    _, own, finish, *_, safe, finish_safe = hopper_launches(problem)
    key = replace(own.key, head_flags=NON_FINITE, stages=1, smem_bytes=safe.shared_bytes)
    assert safe == own._replace(key=key, shared_bytes=safe.shared_bytes, why=safe.why)
    assert finish_safe.key == replace(finish.key, head_flags=NON_FINITE)
    assert finish.key.tile == own.key.tile  # the layout of its sums


def test_wide_heads_have_a_kernel_for_dq() -> None:
    """Nothing is added to dq, so its order is fixed; generic kernels compute all flagged heads."""
    problem = replace(SUPPORTED, B=2, Hq=6, Hkv=3, Nq=300, Nk=100, D=200, Dv=40)
    launches = hopper_launches(problem)
    names = [ROWS, HOPPER_WIDE, HOPPER_WIDE_DQ, MAXIMA, *REPAIRS]
    assert [launch.key.kernel for launch in launches] == names
    assert not any(launch.key.add_dq for launch in launches)


def test_what_repairs_elsewhere() -> None:
    """Sums in memory lack the special heads; dq in a fixed order comes from one kernel for all."""
    for arch in ("sm_80", "sm_90", "sm_100"):
        context = ON_HOPPER._replace(arch=arch)
        for fixed, flags in ((False, {"backward_dq": 3}), (True, {})):
            problem = replace(SUPPORTED, Nk=65)  # more keys than a small tile has
            launches = backward_launches(problem, context, deterministic=fixed, sinks=False)
            found = [x.key.kernel for x in launches]
            assert found == [x for x in GENERIC if not (fixed and "convert" in x)]
            flagged = {x.key.kernel: x.key.head_flags for x in launches if x.key.head_flags}
            assert flagged == {"backward_large_scores": LARGE_SCORES, **flags}
