"""Which float32 calls the generic kernels take as two float16 numbers; no GPU."""

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from tests.kernels.cuda.plan.planning import (
    A100,
    B200,
    ON_HOPPER,
    asked,
    backward,
    forward,
    kernels,
)
from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families import float32_generic
from tileattn.kernels.cuda.families.context import (
    COUNT,
    FAILED,
    LARGE_SCORES,
    NON_FINITE,
)
from tileattn.kernels.cuda.families.families import forward_launches, gradient_launches
from tileattn.kernels.cuda.families.float32 import NARROW_DBIAS, SPLIT_KEYS, SPLIT_QUERIES
from tileattn.kernels.cuda.families.float32_generic import SPLIT_BACKWARD, SPLIT_DQ
from tileattn.kernels.cuda.families.size_class import size_class
from tileattn.kernels.cuda.families.tiles import tuned_tiles
from tileattn.kernels.cuda.jit.compile import compiled
from tileattn.kernels.cuda.plan.device import Device, device_of_arch
from tileattn.kernels.cuda.plan.layout import contiguous

FEW = A100.tuning.generic_plane_rows
SPLIT = [SPLIT_KEYS, "forward", "forward"]
SPLITS = [SPLIT_KEYS, SPLIT_QUERIES]
SPLIT_BACKWARDS = [*SPLITS, SPLIT_BACKWARD, SPLIT_DQ, "backward_dq", "backward_dkdv"]
ON_AMPERE = ON_HOPPER._replace(
    arch=A100.arch, shared_limit=A100.shared_limit, tuning=A100.tuning, sm_count=A100.sm_count
)
DEVICES = [A100, B200, *map(device_of_arch, ("sm_86", "sm_89", "sm_120"))]


def problem_of(options: Any = (), **changed: Any) -> Problem:
    return asked("float32", options, **{"Nq": 600, "Nk": 730, "D": 72, "Dv": 40} | changed)


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dtype is not float32", {"dtype": asked("float64").dtype}, {}),
    ("the GPU has a compute capability below 8.0", {}, {"arch": "sm_75"}),
    *(("an array is empty", {name: 0}, {}) for name in ("B", "Hq", "Hkv", "Nk", "D", "Dv")),
    ("an array has nearly 2**31 rows or more", {"Nk": 1 << 31}, {}),
    ("a head dimension is above 128", {"D": 132}, {}),
    ("a head dimension is above 128", {"Dv": 132}, {}),
    ("queries or keys are few", {"Nq": FEW - 1}, {}),
    ("queries or keys are few", {"Nk": FEW - 1}, {}),
    ("queries or keys are few", {"window": (FEW // 2, FEW // 2 - 2)}, {}),
    ("no tile fits in shared memory", {}, {"shared_limit": 16 << 10}),
]


@pytest.mark.parametrize(("reason", "changed", "where"), REFUSED, ids=str)
def test_what_is_left_to_other_kernels_and_why(
    reason: str, changed: dict[str, Any], where: dict[str, Any]
) -> None:
    problem, context = replace(problem_of(), **changed), ON_AMPERE._replace(**where)
    assert float32_generic._why_not(problem, context) == reason
    assert float32_generic._why_not_backward(problem, context) == reason
    launches = forward_launches(problem, context), gradient_launches(problem, context)
    assert not any(launch.key.split_floats for launch in chain(*launches))


def test_the_gradient_of_a_bias_of_narrow_heads_is_left_to_other_kernels() -> None:
    for dim, refused in ((32, True), (33, False)):
        problem = problem_of({"bias"}, D=dim, Dv=dim)
        reason = float32_generic._why_not_backward(problem, ON_AMPERE._replace(dbias=True))
        assert reason == (NARROW_DBIAS[0] if refused else None)


def test_every_clause_is_tried() -> None:
    reasons = {why for why, _ in float32_generic._UNSUPPORTED} | {float32_generic._NO_TILE}
    assert reasons == {reason for reason, *_ in REFUSED}


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
@pytest.mark.parametrize("dim", [16, 64, 72, 128])
def test_the_launches(device: Device, dim: int) -> None:
    """The last one computes the heads that failed, without splits."""
    plan = forward(problem_of(D=dim, Dv=dim), device)
    assert kernels(plan) == SPLIT
    split, main, _ = plan.launches
    assert [x.key.split_floats for x in plan.launches] == [False, True, False]
    assert [x.key.head_flags for x in plan.launches] == [0, 0, FAILED]
    assert [x.traits.main for x in plan.launches] == [False, True, False]
    assert main.shared_bytes <= device.shared_limit
    assert (split.key.head_dim, split.key.value_dim) == (main.key.head_dim, main.key.value_dim)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
@pytest.mark.parametrize("dim", [16, 64, 72, 128])
def test_the_launches_of_the_backward_pass(device: Device, dim: int) -> None:
    """The last two compute the heads that failed or were flagged, without splits."""
    plan = backward(problem_of(D=dim, Dv=dim), device)
    assert kernels(plan)[2:] == SPLIT_BACKWARDS
    *splits, main, dq, of_dq, of_keys = plan.launches[2:]
    assert [x.key.split_floats for x in plan.launches[4:]] == [True, True, False, False]
    assert {of_dq.key.head_flags, of_keys.key.head_flags} == {NON_FINITE | LARGE_SCORES | FAILED}
    for launch in (main, dq):
        assert launch.shared_bytes <= device.shared_limit
        for split in splits:
            sizes = split.key.head_dim, split.key.value_dim
            assert sizes == (launch.key.head_dim, launch.key.value_dim)


def test_deterministic_calls_run_the_same_kernels() -> None:
    found = [backward(problem_of(), A100, deterministic=x).launches for x in (False, True)]
    assert found[0] == found[1]


def test_heads_that_share_few_keys_split_the_queries() -> None:
    """But for so many queries that the sums of a split would need a total."""
    found, sizes = [], set()
    for Hq, Nq, Nk in ((16, 1 << 15, 600), (2, 1400, 515), (16, 1 << 16, 600)):
        problem = problem_of(Hq=Hq, Hkv=1, Nq=Nq, Nk=Nk)
        plan = backward(problem, A100)
        found.append(plan.launches[kernels(plan).index(SPLIT_BACKWARD)].key.split_q)
        sizes.add(size_class(problem, A100.tuning, A100.sm_count))
    assert found == [True, False, False]
    assert len(sizes) == 3


OPTIONS = ("bias", "mask", "block_mask", "softcap", "alibi_slopes", "dropout_p", "sinks")


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_the_generic_kernel(option: str, dim: int, device: Device) -> None:
    problem = problem_of({option}, Nk=736, D=dim, Dv=dim)
    arrays: dict[str, Any] = {}
    if option == "bias":
        shape = problem.B, problem.Hq, problem.Nq, problem.Nk
        arrays[option] = contiguous(shape, "float64")
    first, main, _ = forward(problem, device, **arrays).launches
    assert main.key.split_floats, first.why
    assert main.key.bias == ("float64" if option == "bias" else "")
    if option == "bias" and dim == 32:
        return  # its gradient is left to other kernels
    own = [x.key for x in backward(problem, device, **arrays).launches if x.key.split_floats]
    assert [key.kernel for key in own] == [SPLIT_BACKWARD, SPLIT_DQ]
    assert [key.write_dbias for key in own] == [option == "bias", False]


@pytest.mark.parametrize("Nq", [FEW, 1000])
def test_neither_batch_nor_heads_decide(Nq: int) -> None:
    """So a row has the same bits in any batch."""
    found = {
        tuple((launch.key, launch.tile) for launch in plan.launches)
        for B, Hq, Hkv in ((1, 1, 1), (1, 16, 4), (64, 32, 32))
        for plan in [forward(problem_of(B=B, Hq=Hq, Hkv=Hkv, Nq=Nq, Nk=Nq), A100)]
    }
    assert len(found) == 1


def test_lengths_of_packed_sequences_do_not_decide() -> None:
    found = set()
    for Nq, Nk in ((3, 3), (3, 5000), (5000, 70), (5000, 5000)):
        packed = problem_of({"cu_seqlens_q", "cu_seqlens_k"}, B=1, Nq=Nq, Nk=Nk)
        found.add(tuple(launch.key for launch in forward(packed, A100).launches))
    (keys,) = found
    assert [key.split_floats for key in keys if key.kernel == "forward"] == [True, False]


def test_other_calls_of_the_same_problem_are_not_split() -> None:
    assert kernels(forward(problem_of({"invariant"}), A100)) == ["forward"]


def test_the_workspace_has_two_numbers_for_each_element() -> None:
    P = problem_of()
    plan = forward(P, A100)
    keys, tiles = P.B * P.Hkv * P.Nk, P.B * P.Hkv * -(-P.Nk // 64)
    least = {
        **{"k_planes": keys * 128 * 4, "v_planes": keys * 64 * 4},
        **{"k_factors": tiles * 4, "v_factors": tiles * 4},
        "head_flags": (2 + P.B * P.Hq) * COUNT,
    }
    starts = {**plan.workspace.starts}
    ends = sorted([*starts.values(), plan.workspace.nbytes])
    for name, nbytes in least.items():
        assert min(end for end in ends if end > starts[name]) - starts[name] >= nbytes


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    "arch", ["sm_80", *(pytest.param(x, marks=pytest.mark.slow) for x in ("sm_89", "sm_90"))]
)
@pytest.mark.parametrize("dim", [64, 128])
def test_kernels_do_not_spill(arch: str, dim: int) -> None:
    device = device_of_arch("sm_90a" if arch == "sm_90" else arch)
    problem, device = problem_of(D=dim, Dv=dim), replace(device, arch=arch)
    launches = *forward(problem, device).launches, *backward(problem, device).launches
    own = [launch.key for launch in launches if launch.key.split_floats]
    assert len(own) == 3
    for key in own:
        made = compiled(key, arch)
        assert made.spill_bytes is not None
        # At D = 128 registers spill where totals are added: a store and a load for each tile in
        # the forward pass. Compute capability 9.0 has other kernels.
        most = {64: 0, 128: 32 if arch == "sm_90" else 8}[dim]
        assert made.spill_bytes <= most, made.log


def test_tiles_have_one_factor() -> None:
    for dim in (64, 128):
        for tile in tuned_tiles(float32_generic.SPLIT_FORWARD, 4, dim):
            assert 64 % tile.block_k == 0
        for tile in tuned_tiles(SPLIT_BACKWARD, 4, dim):
            assert 64 % tile.block_q == 0
        for tile in tuned_tiles(SPLIT_DQ, 4, dim):
            assert 64 % tile.block_k == 0
