"""Which float32 calls run on Hopper's tensor cores, and what they launch; no GPU."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.kernels.cuda.plan.planning import A100, H200, ON_HOPPER, asked, forward, kernels
from tileattn.backends.cupy.explain import explain_on
from tileattn.call.parse import parse
from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families import float32
from tileattn.kernels.cuda.families.context import COUNT, FAILED
from tileattn.kernels.cuda.families.families import (
    forward_launches,
    gradient_launches,
)
from tileattn.kernels.cuda.families.float32 import (
    FLOAT32_BACKWARD,
    FLOAT32_DQ,
    FLOAT32_FORWARD,
    SPLIT_KEYS,
)
from tileattn.kernels.cuda.families.shared_memory import (
    HOPPER_LIMIT,
    HOPPER_STATIC,
    float32_forward_bytes,
)
from tileattn.kernels.cuda.plan.device import Device
from tileattn.kernels.cuda.plan.layout import contiguous, contiguous_inputs
from tileattn.kernels.cuda.tile_sizes import TileSize

FEW, FEW_KEYS = H200.tuning.plane_rows, H200.tuning.plane_keys
NARROW_HEADS = {"D": 32, "Dv": 32}
SPLIT = [SPLIT_KEYS, FLOAT32_FORWARD, "forward"]


def problem_of(options: Any = (), **changed: Any) -> Problem:
    return asked("float32", options, **{"Nq": 300, "Nk": 530, "D": 72, "Dv": 40} | changed)


Refusal = tuple[str, dict[str, Any], dict[str, Any]]
"""A reason, what a problem has that brings it, and what the call has."""

REFUSED_BY_BOTH: list[Refusal] = [
    ("dtype is not float32", {"dtype": asked("float64").dtype}, {}),
    ("the GPU does not have compute capability 9.0", {}, {"arch": "sm_90"}),
    *(("an array is empty", {name: 0}, {}) for name in ("B", "Hq", "Hkv", "Nk", "D", "Dv")),
    ("an array has nearly 2**31 rows or more", {"Nk": 1 << 31}, {}),
    ("a head dimension is above 256", {"D": 260}, {}),
    ("a head dimension is above 256", {"Dv": 260}, {}),
    ("queries or keys are few", {"Nq": FEW - 1}, {}),
    ("queries or keys are few", {"Nk": FEW_KEYS - 1}, {}),
    ("queries or keys are few", {"Nk": FEW - 1, **NARROW_HEADS}, {}),
    ("queries or keys are few", {"window": (FEW_KEYS // 2, FEW_KEYS // 2 - 1)}, {}),
]
BIAS = frozenset({"bias"})
REFUSED = [
    *REFUSED_BY_BOTH,
    (
        "no tile has room for the bias",
        {"D": 128, "Dv": 128, "enabled_options": BIAS},
        {"bias": "float64", "bias_alignment_bytes": 16},
    ),
]
NARROW = {"D": 32, "Dv": 20, "enabled_options": BIAS}
DBIAS = {"bias": "float32", "dbias": True}
REFUSED_BACKWARD = [
    *REFUSED_BY_BOTH,
    ("the gradient of a bias of narrow heads is wanted", NARROW, DBIAS),
]


@pytest.mark.parametrize(("reason", "changed", "where"), REFUSED, ids=str)
def test_what_is_left_to_other_kernels_and_why(
    reason: str, changed: dict[str, Any], where: dict[str, Any]
) -> None:
    problem, context = replace(problem_of(), **changed), ON_HOPPER._replace(**where)
    assert float32._why_not(problem, context) == reason
    launches = forward_launches(problem, context)
    assert FLOAT32_FORWARD not in [launch.key.kernel for launch in launches]


@pytest.mark.parametrize(("reason", "changed", "where"), REFUSED_BACKWARD, ids=str)
def test_what_the_backward_pass_leaves_to_other_kernels_and_why(
    reason: str, changed: dict[str, Any], where: dict[str, Any]
) -> None:
    problem, context = replace(problem_of(), **changed), ON_HOPPER._replace(**where)
    assert float32._why_not_backward(problem, context) == reason
    launches = gradient_launches(problem, context)
    assert not {FLOAT32_BACKWARD, FLOAT32_DQ} & {launch.key.kernel for launch in launches}


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        ({}, {}),
        ({"Nq": FEW, "Nk": FEW}, {}),
        ({"window": (FEW // 2, FEW // 2 - 1)}, {}),
        (NARROW, DBIAS | {"dbias": False}),
        (NARROW | {"D": 33}, DBIAS),
        (NARROW | {"Dv": 33}, DBIAS),
        ({"D": 128, "Dv": 128, "enabled_options": BIAS}, {"bias": "float64"}),
    ],
    ids=str,
)
def test_what_the_backward_pass_takes(changed: dict[str, Any], where: dict[str, Any]) -> None:
    problem, context = replace(problem_of(), **changed), ON_HOPPER._replace(**where)
    assert float32._why_not_backward(problem, context) is None
    kernels = [launch.key.kernel for launch in gradient_launches(problem, context)]
    assert {FLOAT32_BACKWARD, FLOAT32_DQ} < {*kernels}


def test_every_clause_is_tried() -> None:
    assert {why for why, _ in float32._UNSUPPORTED_FORWARD} == {reason for reason, *_ in REFUSED}
    backward = {why for why, _ in float32._UNSUPPORTED_BACKWARD}
    assert backward == {reason for reason, *_ in REFUSED_BACKWARD}


@pytest.mark.parametrize(
    ("reason", "changed", "options"),
    [
        ("a head dimension is above 256", {"D": 260}, {}),
        ("queries or keys are few", {"Nq": FEW - 1}, {}),
        ("queries or keys are few", {"Nk": FEW_KEYS - 1}, {}),
        (
            "the gradient of a bias of narrow heads is wanted",
            {"D": 32, "Dv": 20},
            {"bias": np.zeros((1, 1, 300, 530), np.float32)},
        ),
    ],
)
def test_an_explanation_says_why(
    reason: str, changed: dict[str, Any], options: dict[str, Any]
) -> None:
    P = replace(problem_of(), **changed)
    shapes = (P.B, P.Hq, P.Nq, P.D), (P.B, P.Hkv, P.Nk, P.D), (P.B, P.Hkv, P.Nk, P.Dv)
    q, k, v = (np.zeros(shape, np.float32) for shape in shapes)
    problem, operands = parse(q, k, v, options)
    arrays = {name: contiguous(x.shape, x.dtype.name) for name, x in options.items()}
    inputs = contiguous_inputs(problem).with_arrays(**arrays)
    said = str(explain_on(H200, problem, inputs, operands))
    expected = f"not the Hopper kernel for float32, because {reason}; "
    # The forward pass can take narrow heads with a bias.
    assert said.count(expected) == 2 - len(options)


@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.arch)
def test_the_launches(device: Device) -> None:
    """The last one computes the heads that failed."""
    plan = forward(problem_of(), device)
    assert kernels(plan) == (SPLIT if device is H200 else ["forward"])
    if device is H200:
        assert [launch.key.head_flags for launch in plan.launches] == [0, 0, FAILED]
        assert [launch.traits.main for launch in plan.launches] == [False, True, False]


@pytest.mark.parametrize("Nq", [FEW, 1000])
@pytest.mark.parametrize("window", [(None, None), (None, 0), (FEW - 1, 0)])
def test_neither_batch_nor_heads_decide(Nq: int, window: Any) -> None:
    """So a row has the same bits in any batch."""
    found = {
        tuple((launch.key, launch.tile) for launch in plan.launches)
        for B, Hq, Hkv in ((1, 1, 1), (1, 16, 4), (64, 32, 32))
        for plan in [forward(problem_of(B=B, Hq=Hq, Hkv=Hkv, Nq=Nq, Nk=Nq, window=window), H200)]
    }
    assert len(found) == 1


@pytest.mark.parametrize("window", [(None, None), (None, 0), (FEW, 0), (FEW_KEYS // 2, 0)])
def test_lengths_of_packed_sequences_do_not_decide(window: Any) -> None:
    """They are known only on the device, and a window has the same bits in any call."""
    found = set()
    for Nq, Nk in ((3, 3), (3, 5000), (5000, 70), (5000, 5000)):
        packed = problem_of({"cu_seqlens_q", "cu_seqlens_k"}, B=1, Nq=Nq, Nk=Nk, window=window)
        found.add(tuple(launch.key for launch in forward(packed, H200).launches))
    (keys,) = found
    assert (FLOAT32_FORWARD in [key.kernel for key in keys]) == (window != (FEW_KEYS // 2, 0))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("dim", [16, 64, 72, 128, 192, 256])
def test_a_bias_of_any_dtype(dim: int, dtype: str) -> None:
    problem = problem_of({"bias"}, D=dim, Dv=dim, Nk=528)
    bias = contiguous((1, problem.Hq, problem.Nq, problem.Nk), dtype)
    first, *_ = launches = forward(problem, H200, bias=bias).launches
    if FLOAT32_FORWARD not in [launch.key.kernel for launch in launches]:
        assert dtype == "float64"
        assert "no tile has room for the bias" in first.why
        return
    key = launches[1].key
    assert key.bias == dtype
    assert key.smem_bytes == launches[1].shared_bytes <= HOPPER_LIMIT - HOPPER_STATIC
    tile = TileSize(*key.tile, key.warps_m, stages=key.stages)
    pairs = key.block_q * key.block_k * bias.itemsize
    assert key.smem_bytes == float32_forward_bytes(tile, dim, dim) + pairs


@pytest.mark.parametrize("alignment", [4, 8, 16])
def test_rows_of_any_alignment(alignment: int) -> None:
    """They are read element by element; the kernel's tensor maps describe planes alone."""
    problem = problem_of(D=64, Dv=64)
    inputs = contiguous_inputs(problem).with_contiguous_results(problem, "forward")
    for name in ("q", "k", "v", "out"):
        x = inputs.get(name)
        assert x is not None
        given: dict[str, Any] = {name: x._replace(alignment=alignment)}
        plan = forward(problem, H200, inputs, **given)
        assert kernels(plan) == SPLIT
        assert {launch.key.alignment_bytes for launch in plan.launches} == {alignment}


@pytest.mark.parametrize(("D", "alignment"), [(62, 16), (63, 4)])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_two_elements_are_not_read_at_once_if_columns_are_odd(
    arch: str, D: int, alignment: int
) -> None:
    """Rows of a wider array may be aligned to 16 bytes, and the element past the last is there."""
    context = ON_HOPPER._replace(arch=arch, alignment_bytes=16)
    launches = forward_launches(problem_of(D=D, Dv=64, Nq=1000, Nk=1000), context)
    split = [x for x in launches if x.key.split_floats]
    assert [x.key.alignment_bytes for x in split] == [alignment]


def test_broadcast_and_reversed_axes() -> None:
    problem = problem_of()
    for name in ("q", "k", "v"):
        x = contiguous_inputs(problem).get(name)
        assert x is not None
        for axis, step in ((0, 0), (1, 0), (2, 0), (2, -1)):
            strides = tuple(s * step if n == axis else s for n, s in enumerate(x.strides))
            given: dict[str, Any] = {name: x._replace(strides=strides)}
            plan = forward(problem, H200, **given)
            assert kernels(plan) == SPLIT


def test_the_workspace_has_two_numbers_for_each_element() -> None:
    """Their columns are rounded up to a multiple of 64."""
    P = problem_of()
    plan = forward(P, H200)
    starts = {**plan.workspace.starts}
    keys, tiles = P.B * P.Hkv * P.Nk, P.B * P.Hkv * -(-P.Nk // 64)
    least = {
        **{"k_planes": keys * 128 * 4, "v_planes": keys * 64 * 4},
        **{"k_factors": tiles * 4, "v_factors": tiles * 4},
        "head_flags": (2 + P.B * P.Hq) * COUNT,
    }
    assert starts.keys() >= least.keys()
    ends = sorted([*starts.values(), plan.workspace.nbytes])
    for name, nbytes in least.items():
        assert min(end for end in ends if end > starts[name]) - starts[name] >= nbytes


def test_tensor_maps_describe_the_planes() -> None:
    P = problem_of()
    ((k, v),) = forward(P, H200).tensor_maps.values()
    assert [(x.name, x.dtype) for x in (k, v)] == [("k_planes", "float16"), ("v_planes", "float16")]
    for x, columns in ((k, 256), (v, 128)):
        assert x.sizes == (columns, P.Nk, P.Hkv, P.B)
        assert x.strides == (2 * columns, 2 * columns * P.Nk, 2 * columns * P.Nk * P.Hkv)
        assert x.box == (64, 64, 1, 1)


@pytest.mark.parametrize("options", [(), {"mask"}, {"softcap"}, {"dropout_p"}, {"alibi_slopes"}])
def test_tiles_of_192_queries_leave_no_registers_for_options(options: Any) -> None:
    keys = [x.key for x in forward(problem_of(options, D=64, Dv=64), H200).launches]
    assert keys[1].block_q == (128 if options else 192)
    assert forward(problem_of(options), H200).launches[1].key.block_q == 128
