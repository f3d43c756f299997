"""Plans of both passes: what is launched, with which fields; nothing here needs a GPU or CuPy."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.kernels.cuda.plan.planning import (
    A100,
    DV,
    H200,
    HKV,
    HQ,
    NK,
    NQ,
    B,
    D,
    asked,
    backward,
    forward,
    kernels,
)
from tileattn import BlockMask
from tileattn.kernels.cuda.plan.device import Device
from tileattn.kernels.cuda.plan.layout import (
    ArrayLayout,
    alignment_of,
    contiguous,
    contiguous_inputs,
)
from tileattn.kernels.cuda.plan.params import PAIRS, PARAMS, template

Fields = dict[str, Any]
DTYPES = ("float16", "bfloat16", "float32", "float64")
BEFORE = ("backward_preprocess", "backward_large_scores")
WRITTEN = ("backward_dkdv", "backward_dq")  # dq by the kernel over keys, then repairs
DBIAS = ("backward_dbias", "backward_dbias_sum")
SUMMED = ("backward_dkdv", "backward_dq_convert", "backward_dq")  # dq in memory, then repairs
NAIVE = ("naive_large_scores", "naive_dkdv", "naive_dq")
LONG: Fields = {"D": 64, "Dv": 64, "Nq": 3000, "Nk": 3000}


# --- a value ------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [H200, A100])
def test_a_plan_is_a_value(device: Device) -> None:
    problem, again = (asked(**LONG, window=(None, 0)) for _ in range(2))
    assert forward(problem, device) == forward(again, device)
    assert backward(problem, device) == backward(again, device)
    assert forward(problem, device) != forward(replace(problem, scale=0.5), device)
    assert hash(contiguous_inputs(problem)) == hash(contiguous_inputs(again))


@pytest.mark.parametrize(("address", "expected"), [(0, 16), (7, 1), (12, 4), (24, 8), (4096, 16)])
def test_the_alignment_of_an_address(address: int, expected: int) -> None:
    assert alignment_of(address) == expected


# --- the parameter block ------------------------------------------------------------------------

STEP = NK + 5  # entries of a row of the bias, of which NK are used
FIELDS: dict[str, tuple[Fields, Fields, Fields]] = {
    "sizes": (
        {"scale": 0.5},
        {},
        {"B": B, "Hq": HQ, "Hkv": HKV, "Nq": NQ, "Nk": NK, "D": D, "Dv": DV, "group": 3}
        | {"rows": 128, "scale": 0.5, "softcap": 0.0, "dropout_scale": 1.0, "threshold": 0},
    ),
    "full": ({}, {}, {"left": -1, "right": -1, "length": NK, "offset": NK - NQ}),
    "results": (
        {},
        {},
        {"dq_at": (HQ * NQ * D, NQ * D, D), "dk_at": (HKV * NK * D, NK * D, D)}
        | {"dv_at": (HKV * NK * DV, NK * DV, DV), "dout_at": (HQ * NQ * DV, NQ * DV, DV)},
    ),
    "window": ({"window": (7, None)}, {}, {"left": 7, "right": -1}),
    "causal": ({"window": (None, 0)}, {}, {"left": -1, "right": 0}),
    "empty": ({"B": 0}, {}, {"length": 0, "offset": 0}),
    "dropout": (
        {"dropout_p": 0.25, "seed": 7},
        {},
        {"dropout_scale": 4 / 3, "seed": 7, "threshold": 1 << 30},
    ),
    "strides of any sign": (
        {},
        {
            "q": ArrayLayout((B, HQ, NQ, D), (HQ * NQ * D * 2, NQ * D * 2, -D * 2, 2), "float16"),
            "k": ArrayLayout((B, 1, NK, D), (NK * D * 2, 1 << 50, D * 2, 2), "float16"),
            "dlse": ArrayLayout((B, HQ, NQ), (4 * NQ * HQ, 4, 4 * HQ), "float32", 4),
        },
        {"q_at": (HQ * NQ * D, NQ * D, -D), "k_at": (NK * D, 0, D), "dlse_at": (NQ * HQ, 1, HQ)},
    ),
    "bias": (
        {"enabled_options": {"bias"}},
        {"bias": ArrayLayout((1, HQ, 1, NK), (0, 2 * STEP, 0, 2), "float16", 4)},
        {"bias_at": (0, STEP, 0, 1), "dbias_at": (0, NK, 0, 1)}
        | {"bias_B": 1, "bias_H": HQ, "bias_Nq": 1, "bias_Nk": NK},
    ),
    "mask": (
        {"enabled_options": {"mask"}},
        {"mask": contiguous((B, 1, NQ, 1), "bool")},
        {"mask_at": (NQ, 0, 1, 0)},
    ),
    "slopes": (
        {"enabled_options": {"alibi_slopes"}},
        {"alibi_slopes": contiguous((B, HQ), "float32")},
        {"alibi_slopes_b": HQ},
    ),
    "slopes of all": (
        {"enabled_options": {"alibi_slopes"}},
        {"alibi_slopes": contiguous((1, HQ), "float32")},
        {"alibi_slopes_b": 0},
    ),
    # Softcaps that kernels can divide by.
    "softcap": ({"enabled_options": {"softcap"}, "softcap": 30.0}, {}, {"softcap": 30.0}),
    "tiny softcap": (
        {"enabled_options": {"softcap"}, "softcap": 1e-45},
        {},
        {"softcap": 2.0**-100},
    ),
    "huge softcap": ({"enabled_options": {"softcap"}, "softcap": 1e39}, {}, {"softcap": 2.0**100}),
}


@pytest.mark.parametrize(("changed", "arrays", "expected"), FIELDS.values(), ids=FIELDS)
def test_fields(changed: Fields, arrays: Fields, expected: Fields) -> None:
    plan = backward(replace(asked(), **changed), **arrays)
    assert {name: plan.fields[name] for name in expected} == expected
    assert plan.fields.keys() <= set(PARAMS.names or ())


@pytest.mark.parametrize(
    ("device", "dim", "kv_tile"),
    [(A100, 128, None), (H200, 128, (128, 128)), (H200, 256, (128, 64))],
)
def test_fields_of_a_block_mask(device: Device, dim: int, kv_tile: tuple[int, int] | None) -> None:
    """A generic kernel reads no lists of key tiles: those have one entry more, which ends them."""
    problem = asked(enabled_options=("block_mask",), Nq=600, Nk=800, D=dim, Dv=dim)
    mask = BlockMask(np.ones((B, 1, 10, 8), np.bool_), (64, 100))
    layout = contiguous_inputs(problem)._replace(block_mask=mask)
    plan = forward(problem, device, layout)
    expected: Fields = {"mask_block_q": 64, "mask_block_k": 100, "block_kinds_at": (80, 0, 8, 1)}
    if kv_tile:
        entries = -(-800 // kv_tile[1]) + 1
        expected["tile_list_at"] = (5 * entries, 0, entries, 1)
    names = {name for name in plan.fields if "mask_block" in name or name[:-3] in PAIRED}
    assert {name: plan.fields[name] for name in names} == expected
    assert (plan.tile_lists and plan.tile_lists.of.tile) == kv_tile


PAIRED = {name[:-3] for name in PARAMS.names or () if PARAMS[name] == PAIRS}


def test_a_block_has_each_field_in_its_place() -> None:
    """And nothing but zeros elsewhere; three strides of rows, and four of scores."""
    given: Fields = {"q_at": (7, 0, -3), "mask_at": (1, 2, 3, 4), "Nk": 5, "scale": 0.5, "out": 9}
    block = np.frombuffer(template(given), PARAMS)[0]
    found = {name: block[name].tolist() for name in PARAMS.names or ()}
    assert {name: x for name, x in found.items() if np.any(x)} == given


def test_lengths_that_differ_are_constants() -> None:
    problem = asked()
    layout = contiguous_inputs(problem)._replace(kv_lengths=(50, 9), q_offset=(3, 3))
    plan = forward(problem, layout=layout)
    assert {name: x.array().tolist() for name, x in plan.constants.items()} == {
        "kv_lengths": [50, 9]
    }
    assert "length" not in plan.fields
    assert plan.fields["offset"] == 3
    there = contiguous((B,), "int64")
    on_gpu = layout._replace(kv_lengths=None, q_offset=None)
    plan = forward(problem, layout=on_gpu, kv_lengths=there, q_offset=there)
    assert plan.constants == {}
    assert {"length", "offset"}.isdisjoint(plan.fields)


@pytest.mark.parametrize(
    ("changed", "arrays", "natural"),
    [
        ({"scale": 0.25}, {}, 0.25),
        ({"scale": -0.25}, {}, 1.0),
        ({"scale": 0.0}, {}, 1.0),
        ({"softcap": 9.0, "enabled_options": ("softcap",)}, {}, 1.0),
        (
            {"enabled_options": ("alibi_slopes",)},
            {"alibi_slopes": contiguous((1, HQ), "float32")},
            1.0,
        ),
        ({"enabled_options": ("bias",)}, {"bias": contiguous((1, 1, NQ, NK), "float16")}, 1.0),
    ],
    ids=str,
)
def test_the_unit_of_a_score(changed: Fields, arrays: Fields, natural: float) -> None:
    """The scale where it is in the exponent, which the key of backward_dsinks does not tell."""
    given: Fields = {"scale": 0.25, **changed}
    plan = backward(asked(**given), H200, **arrays)
    assert plan.fields["softmax_scale"] == natural
    folds = {x.key.fold_scale for x in plan.launches if x.key.kernel == "backward_dkdv"}
    assert folds == {natural != 1}


# --- keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "width", "alignment"), [(64, 16, 16), (56, 2, 16), (60, 2, 8), (54, 2, 4), (53, 1, 0)]
)
def test_rows_of_masks_and_biases_are_read_as_wide_as_they_lie(
    keys: int, width: int, alignment: int
) -> None:
    problem = asked(enabled_options=("mask", "bias"), Nk=keys)
    mask, bias = contiguous((1, 1, NQ, keys), "bool"), contiguous((1, HQ, 1, keys), "float16")
    ends = 2 * (keys + 1)  # rows start where others end
    for given, expected in (
        ((mask, bias), (width, alignment)),
        ((mask._replace(shape=(1, 1, NQ, 1)), bias._replace(shape=(1, HQ, 1, 1))), (1, 0)),
        ((mask._replace(alignment=1), bias._replace(alignment=2)), (1, 0)),
        ((mask._replace(strides=(0, 0, keys, 2)), bias._replace(strides=(0, 2, 2, 4))), (1, 0)),
        ((mask, bias._replace(strides=(0, ends, ends, 2))), (width, 0)),
    ):
        key = forward(problem, mask=given[0], bias=given[1]).launches[0].key
        assert (key.mask_vector_width, key.bias_alignment_bytes) == expected


@pytest.mark.parametrize(("keys", "alignment"), [(54, 16), (53, 8)])
def test_elements_of_a_bias_are_copied_whole(keys: int, alignment: int) -> None:
    bias = contiguous((1, 1, NQ, keys), "float64")
    for given, expected in (
        (bias, alignment),
        (bias._replace(alignment=4), 0),
        (contiguous((1, 1, NQ, 1), "float64"), 0),
    ):
        key = forward(asked(enabled_options=("bias",), Nk=keys), H200, bias=given).launches[0].key
        assert (key.bias, key.bias_alignment_bytes) == ("float64", expected)


@pytest.mark.parametrize("alignment", [2, 4, 8, 16])
@pytest.mark.parametrize("name", ["q", "k", "v", "out", "dout", "dq", "dk", "dv"])
def test_copies_are_as_wide_as_all_rows_allow(name: str, alignment: int) -> None:
    problem = asked(D=64, Dv=64)
    x = contiguous((B, HQ if "q" in name or "o" in name else HKV, 61, 64), "float16")
    batch, *strides = x.strides
    apart = x._replace(strides=(batch + alignment, *strides))
    for plan in (backward,) if name.startswith("d") else (forward, backward):
        for changed in (x._replace(alignment=alignment), apart):
            given: Fields = {name: changed}
            found = plan(problem, **given)
            widths = {
                x.key.alignment_bytes for x in found.launches if "convert" not in x.key.kernel
            }
            assert widths == {alignment}


# --- launches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_backward_pass_launches(dtype: str) -> None:
    keys = 70  # a small tile has 64
    more: Fields = {
        "sinks": contiguous((HQ,), "float64"),
        "bias": contiguous((1, 1, NQ, keys), "float32"),
    }
    plan = backward(asked(dtype, ("bias", "sinks"), Nk=keys), **more)
    assert kernels(plan) == [*BEFORE, *SUMMED, *DBIAS, "backward_dsinks"]
    assert (plan.launches[-1].grid, plan.launches[-1].key.threads) == (HQ, 128)
    assert plan.launches[-1].key.dtype == dtype
    plan = backward(asked(dtype, Nk=keys), deterministic=True)
    assert kernels(plan) == [*BEFORE, "backward_dkdv", "backward_dq"]
    # A bias of every pair has its gradient from the kernel over keys.
    bias = contiguous((B, HQ, NQ, keys), "float32")
    plan = backward(asked(dtype, ("bias",), Nk=keys), bias=bias)
    assert kernels(plan) == [*BEFORE, *SUMMED]
    writes = [launch.key.kernel for launch in plan.launches if launch.key.write_dbias]
    assert writes == ["backward_dkdv"]


def test_a_gradient_of_lse_does_not_slow_the_copies() -> None:
    dlse = ArrayLayout((B, HQ, NQ), (4 * NQ * HQ, 4, 4 * HQ), "float32", 4)
    plan = backward(asked(), dlse=dlse)
    assert {x.key.alignment_bytes for x in plan.launches if x.key.kernel == "backward_dkdv"} == {16}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((0, 2, 2, 5, 5, 8, 8), []),
        ((1, 2, 2, 0, 5, 8, 8), ["backward_dkdv"]),
        ((1, 2, 2, 5, 0, 8, 8), ["backward_preprocess", "backward_dq"]),
        ((1, 0, 0, 5, 5, 8, 8), []),
        ((1, 2, 1, 5, 5, 0, 8), [*BEFORE, *WRITTEN]),
        ((1, 2, 1, 5, 5, 8, 256), [*BEFORE, *SUMMED]),
        ((1, 2, 1, 5, 5, 8, 300), ["backward_preprocess", *NAIVE]),
        ((1, 2, 1, 5, 5, 8, 520), ["backward_preprocess", *NAIVE]),
    ],
)
def test_sizes_of_zero_and_beyond_the_tiles(sizes: Any, expected: list[str]) -> None:
    names = ("B", "Hq", "Hkv", "Nq", "Nk", "D", "Dv")
    problem = asked("float32", ("sinks", "bias"), **dict(zip(names, sizes, strict=True)))
    more: Fields = {
        "sinks": contiguous((problem.Hq,), "float32"),
        "bias": contiguous((1,) * 4, "float32"),
    }
    first = "naive_forward" if problem.Dv > 512 else "forward"
    queries = problem.B * problem.Hq * problem.Nq
    assert kernels(forward(problem, **more)) == ([first] if queries else [])
    if queries * problem.Nk:
        expected = [*expected, *(["naive_dbias"] if problem.Dv > 256 else DBIAS)]
    plan = backward(problem, **more)
    assert kernels(plan) == [*expected, *["backward_dsinks"] * (problem.Hq > 0)]
    assert all(launch.grid > 0 for launch in plan.launches)
    adds = expected[2:] in ([*SUMMED, *DBIAS], [*WRITTEN, *DBIAS])
    assert {x.key.add_dq for x in plan.launches if "dkdv" in x.key.kernel} <= {adds}
