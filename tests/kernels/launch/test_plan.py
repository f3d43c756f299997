"""Plans of both passes: what is launched, with which fields; nothing here needs a GPU or CuPy."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tileattn import BlockMask
from tileattn.kernels.config.hopper import HOPPER
from tileattn.kernels.launch.catalog import problem_of
from tileattn.kernels.launch.device import Device, device_of_arch
from tileattn.kernels.launch.layout import (
    ArrayLayout,
    CallLayout,
    alignment_of,
    contiguous,
    contiguous_inputs,
)
from tileattn.kernels.launch.params import PARAMS
from tileattn.kernels.launch.plan import LaunchPlan, plan_backward, plan_forward
from tileattn.problem import Problem

B, HQ, HKV, NQ, NK, D, DV = 2, 6, 2, 37, 53, 24, 40
H200, A100, B200 = map(device_of_arch, ("sm_90a", "sm_80", "sm_100"))
DTYPES = ("float16", "bfloat16", "float32", "float64")
BEFORE = ("backward_preprocess", "backward_large_scores")
SUMMED = ("backward_dkdv", "backward_dq_convert", "backward_dq")  # dq in memory, then repairs
NAIVE = ("naive_large_scores", "naive_dkdv", "naive_dq")


def asked(dtype: str = "float16", uses: Any = (), **changed: Any) -> Problem:
    sizes = {"B": B, "Hq": HQ, "Hkv": HKV, "Nq": NQ, "Nk": NK, "D": D, "Dv": DV}
    return replace(problem_of(dtype, D, uses), **sizes | changed)


def forward(
    problem: Problem, device: Device = B200, layout: CallLayout | None = None, **more: ArrayLayout
) -> LaunchPlan:
    inputs = (layout or contiguous_inputs(problem)).with_contiguous_results(problem, "forward")
    return plan_forward(problem, inputs.with_arrays(**more), device)


def backward(
    problem: Problem, device: Device = B200, *, deterministic: bool = False, **more: ArrayLayout
) -> LaunchPlan:
    inputs = contiguous_inputs(problem).with_arrays(**more)
    layout = inputs.with_contiguous_results(problem, "backward").with_arrays(**more)
    return plan_backward(problem, layout, device, deterministic=deterministic)


def kernels(plan: LaunchPlan) -> list[str]:
    return [launch.key.kernel for launch in plan.launches]


# --- a value ------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [H200, A100])
def test_a_plan_is_a_value(device: Device) -> None:
    problem = asked(D=64, Dv=64, Nq=3000, Nk=3000, window=(None, 0))
    again = replace(asked(D=64, Dv=64, Nq=3000, Nk=3000), window=(None, 0))
    assert forward(problem, device) == forward(again, device)
    assert backward(problem, device) == backward(again, device)
    assert forward(problem, device) != forward(replace(problem, scale=0.5), device)
    layout = contiguous_inputs(problem)
    assert hash(layout) == hash(contiguous_inputs(again))


def test_a_plan_can_be_printed() -> None:
    problem = asked(D=64, Dv=64, Nq=3000, Nk=3000, window=(None, 0))
    report = str(forward(problem, H200))
    for line in (
        "problem    float16, B 2, Hq 6, Hkv 2, Nq 3000, Nk 3000, D 64, Dv 64",
        "device     H200, sm_90a, 132 SMs",
        "launch     forward_sm90 192 x 128, 64/64 columns, 4 stages: 132 blocks of 512 threads",
        "           because wgmma and tensor maps, tiles from measurements",
        "upload     schedule int32 (3, 132)",
        "TMA        q of shape (2, 6, 3000, 64), strides (2304000, 384000, 128) bytes, in boxes of "
        "64 rows",
    ):
        assert line in report.splitlines()
    report = str(backward(problem, A100))
    assert "workspace" in report
    assert report.count("launch") == 5


def test_every_field_is_one_of_the_parameter_block() -> None:
    mask = BlockMask(np.ones((1, 1), np.bool_), (64, 64))
    uses = ("bias", "mask", "block_mask", "alibi_slopes", "sinks")
    options: dict[str, Any] = {
        "bias": contiguous((1, 1, NQ, NK), "float32"),
        "mask": contiguous((1, 1, NQ, NK), "bool"),
        "alibi_slopes": contiguous((B, HQ), "float32"),
        "sinks": contiguous((HQ,), "float32"),
    }
    layout = replace(contiguous_inputs(asked(uses=uses)), block_mask=mask)
    plan = forward(asked(uses=uses), layout=layout, **options)
    assert plan.fields.keys() <= set(PARAMS.names or ())


@pytest.mark.parametrize(("address", "expected"), [(0, 16), (7, 1), (12, 4), (24, 8), (4096, 16)])
def test_the_alignment_of_an_address(address: int, expected: int) -> None:
    assert alignment_of(address) == expected


# --- the parameter block ------------------------------------------------------------------------


def test_strides_are_in_elements_of_any_sign() -> None:
    q = ArrayLayout((B, HQ, NQ, D), (HQ * NQ * D * 2, NQ * D * 2, -D * 2, 2), "float16")
    one = ArrayLayout((B, 1, NK, D), (NK * D * 2, 1 << 50, D * 2, 2), "float16")
    plan = forward(asked(window=(7, None)), q=q, k=one)
    assert plan.fields["q_at"] == (HQ * NQ * D, NQ * D, -D)
    assert plan.fields["k_at"] == (NK * D, 0, D)
    assert (plan.fields["left"], plan.fields["right"]) == (7, -1)
    assert (plan.fields["length"], plan.fields["offset"]) == (NK, NK - NQ)


def test_lengths_that_differ_are_constants() -> None:
    problem = asked()
    layout = replace(contiguous_inputs(problem), kv_lengths=(50, 9), q_offset=(3, 3))
    plan = forward(problem, layout=layout)
    assert plan.constants["kv_lengths"].array().tolist() == [50, 9]
    assert "length" not in plan.fields
    assert plan.fields["offset"] == 3
    on_gpu = replace(layout, kv_lengths=None, q_offset=None)
    there = contiguous((B,), "int64")
    plan = forward(problem, layout=on_gpu, lengths=there, offsets=there)
    assert plan.constants == {}
    assert {"length", "offset"}.isdisjoint(plan.fields)


def test_what_a_score_is_of_what_kernels_hold() -> None:
    """The scale where it is in the exponent, which the key of backward_dsinks does not tell."""
    bias = {"bias": contiguous((1, 1, NQ, NK), "float16")}
    choices: list[tuple[dict[str, Any], dict[str, Any], float]] = [
        ({}, {}, 0.25),
        ({"scale": -0.25}, {}, 1.0),
        ({"softcap": 9.0, "uses": ("softcap",)}, {}, 1.0),
        ({"uses": ("alibi_slopes",)}, {"alibi_slopes": contiguous((1, HQ), "float32")}, 1.0),
        ({"uses": ("bias",)}, bias, 1.0),
    ]
    for changed, arrays, natural in choices:
        plan = backward(asked(**{"scale": 0.25} | changed), H200, **arrays)
        assert plan.fields["softmax_scale"] == natural
        folds = {x.key.fold_scale for x in plan.launches if x.key.kernel == "backward_dkdv"}
        assert folds == {natural != 1}


@pytest.mark.parametrize(("cap", "told"), [(1e-45, 2.0**-100), (30.0, 30.0), (1e39, 2.0**100)])
def test_softcaps_that_kernels_can_divide_by(cap: float, told: float) -> None:
    assert backward(asked(uses=("softcap",), softcap=cap)).fields["softcap"] == told


# --- keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "width", "alignment"), [(64, 16, 16), (60, 2, 8), (54, 2, 4), (53, 1, 0)]
)
def test_rows_of_masks_and_biases_are_read_as_wide_as_they_lie(
    keys: int, width: int, alignment: int
) -> None:
    problem = asked(uses=("mask", "bias"), Nk=keys)
    mask, bias = contiguous((1, 1, NQ, keys), "bool"), contiguous((1, HQ, 1, keys), "float16")
    (wide,) = forward(problem, mask=mask, bias=bias).launches
    assert (wide.key.mask_vector_width, wide.key.bias_alignment_bytes) == (width, alignment)
    single = replace(mask, shape=(1, 1, NQ, 1)), replace(bias, shape=(1, HQ, 1, 1))
    (launch,) = forward(problem, mask=single[0], bias=single[1]).launches
    assert (launch.key.mask_vector_width, launch.key.bias_alignment_bytes) == (1, 0)
    (launch,) = forward(problem, mask=mask, bias=replace(bias, alignment=2)).launches
    assert launch.key.bias_alignment_bytes == 0


@pytest.mark.parametrize("alignment", [2, 4, 8, 16])
def test_copies_are_as_wide_as_all_rows_allow(alignment: int) -> None:
    problem = asked(D=64, Dv=64)
    x = contiguous((B, HKV, NK, 64), "float16")
    assert forward(problem).launches[0].key.alignment_bytes == 16
    plan = forward(problem, v=replace(x, alignment=alignment))
    assert (plan.alignment, plan.launches[0].key.alignment_bytes) == (alignment, alignment)
    strides = (HKV * NK * 128 + 2 * alignment, *x.strides[1:])
    plan = forward(problem, v=replace(x, strides=strides))
    assert (plan.alignment, plan.launches[0].key.alignment_bytes) == (16, min(2 * alignment, 16))


@pytest.mark.parametrize(("block", "keys"), [(128, 64), (64, 64), (48, 48), (100, 48)])
def test_tiles_lie_along_the_blocks_of_a_mask(block: int, keys: int) -> None:
    """With 64 columns the fastest tiles have 48 keys, of which 128 are no multiple."""
    problem = asked(uses=("block_mask",), D=64, Dv=64)
    mask = BlockMask(np.ones((1, -(-NK // block)), bool), (128, block))
    plan = forward(problem, A100, replace(contiguous_inputs(problem), block_mask=mask))
    assert plan.launches[0].key.tile == (128, keys)
    assert plan.kv_tile is None  # a generic kernel reads no lists
    assert "kv_indices_at" not in plan.fields
    assert forward(asked(D=64, Dv=64), A100).launches[0].key.tile == (128, 48)


# --- launches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_backward_pass_launches(dtype: str) -> None:
    sinks = contiguous((HQ,), "float64")
    plan = backward(
        asked(dtype, ("bias", "sinks")), bias=contiguous((1, 1, NQ, NK), "float32"), sinks=sinks
    )
    assert kernels(plan) == [*BEFORE, *SUMMED, "backward_dbias", "backward_dsinks"]
    assert "dq_accum" in plan.workspace.starts
    plan = backward(asked(dtype), deterministic=True)
    assert kernels(plan) == [*BEFORE, "backward_dkdv", "backward_dq"]
    assert "dq_accum" not in plan.workspace.starts


@pytest.mark.parametrize(
    ("dtype", "rows", "finish"), [("float16", 96, 14), ("float32", 192, 28), ("float64", 384, 56)]
)
def test_every_row_has_its_lanes(dtype: str, rows: int, finish: int) -> None:
    """Blocks of 128 threads, as many lanes for a row as it has pieces of 16 bytes.

    Heads are padded to 128 rows of 64 columns before the pass over keys; what follows takes 32
    columns of 444 rows.
    """
    plan = backward(asked(dtype))
    grids = {launch.key.kernel: (launch.key.threads, launch.grid) for launch in plan.launches}
    assert grids["backward_preprocess"] == (128, rows)
    assert grids["backward_dq_convert"] == (128, finish)


def test_a_gradient_of_lse_does_not_slow_the_copies() -> None:
    dlse = ArrayLayout((B, HQ, NQ), (4 * NQ * HQ, 4, 4 * HQ), "float32", 4)
    plan = backward(asked(), dlse=dlse)
    assert {x.key.alignment_bytes for x in plan.launches if x.key.kernel == "backward_dkdv"} == {16}
    assert plan.fields["dlse_at"] == (NQ * HQ, 1, HQ)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((0, 2, 2, 5, 5, 8, 8), []),
        ((1, 2, 2, 0, 5, 8, 8), ["backward_dkdv"]),
        ((1, 2, 2, 5, 0, 8, 8), ["backward_preprocess", "backward_dq"]),
        ((1, 0, 0, 5, 5, 8, 8), []),
        ((1, 2, 1, 5, 5, 0, 8), [*BEFORE, *SUMMED]),
        ((1, 2, 1, 5, 5, 8, 300), ["backward_preprocess", *NAIVE]),
    ],
)
def test_sizes_of_zero_and_beyond_the_tiles(sizes: Any, expected: list[str]) -> None:
    names = ("B", "Hq", "Hkv", "Nq", "Nk", "D", "Dv")
    problem = asked("float32", ("sinks",), **dict(zip(names, sizes, strict=True)))
    sinks = contiguous((problem.Hq,), "float32")
    first = "naive_forward" if problem.Dv > 256 else "forward"
    queries = problem.B * problem.Hq * problem.Nq
    assert kernels(forward(problem, sinks=sinks)) == ([first] if queries else [])
    plan = backward(problem, sinks=sinks)
    assert kernels(plan) == [*expected, *["backward_dsinks"] * (problem.Hq > 0)]
    assert all(launch.grid > 0 for launch in plan.launches)


@pytest.mark.parametrize("device", [H200, A100])
def test_who_has_an_assignment(device: Device) -> None:
    sizes: dict[str, Any] = {"B": 1, "Hq": 12, "Hkv": 2, "Nq": 2200, "Nk": 2200, "D": 8, "Dv": 8}
    causal = asked(window=(None, 0), **sizes)
    assert ("schedule" in forward(causal, device).constants) == (device is H200)
    assert forward(asked(**sizes), device).constants == {}
    assert backward(causal, device).constants == {}
    assert (kernels(forward(causal, device)) == [HOPPER]) == (device is H200)


# --- memory -------------------------------------------------------------------------------------


def test_only_what_kernels_cannot_address_is_copied() -> None:
    problem = asked(uses=("sinks", "alibi_slopes"))
    turned = ArrayLayout((B, HKV, NK, D), (HKV * NK * D * 2, NK * D * 2, 2, NK * 2), "float16")
    sinks = contiguous((HQ,), "bfloat16")
    plan = backward(problem, k=turned, sinks=sinks, slopes=contiguous((1, HQ), "float32"))
    assert plan.copies_in == {
        "k": contiguous(turned.shape, "float16"),
        "sinks": contiguous((HQ,), "float32"),
    }
    assert plan.copies_out == {"dsinks": contiguous((HQ,), "float32")}
    assert plan.fields["k_at"] == (HKV * NK * D, NK * D, D)
    starts = plan.workspace.starts
    assert all(start % 256 == 0 for start in starts.values())
    assert starts["head_flags"] == plan.workspace.zeros
    assert plan.workspace.nbytes >= 2 * math.prod(turned.shape)
    out = replace(turned, shape=(B, HQ, NQ, DV), strides=(HQ * NQ * DV * 2, NQ * DV * 2, 2, NQ * 2))
    assert forward(problem, out=out).copies_out.keys() == {"out"}
    empty = asked(Nk=0)
    assert forward(empty, k=ArrayLayout((B, HKV, 0, D), (0, 0, 0, 0), "float16")).copies_in == {}


# --- devices that are not there -----------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_103", "sm_120"])
@pytest.mark.parametrize("dim", [20, 64, 128, 256, 512])
def test_launches_fit_every_gpu(arch: str, dim: int) -> None:
    device, problem = device_of_arch(arch), asked(D=dim, Dv=dim)
    for plan in (forward(problem, device), backward(problem, device)):
        for launch in plan.launches:
            assert launch.shared_bytes <= device.shared_limit
            assert launch.key.threads <= 1024


def test_the_next_older_gpu_stands_for_one_that_is_not_known() -> None:
    assert replace(device_of_arch("sm_121"), arch="sm_120") == device_of_arch("sm_120")
    assert device_of_arch("compute_80").name == "A100"
    for name in ("sm_70", "hopper", "sm_"):
        with pytest.raises(ValueError, match=f"arch is '{name}'; sm_75, .* are accepted"):
            device_of_arch(name)
