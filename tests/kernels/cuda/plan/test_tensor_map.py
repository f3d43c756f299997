"""Tensor maps: which arrays they describe, and how."""

from itertools import product
from typing import Any

import pytest

from tests.kernels.cuda.plan.planning import H200, asked, backward, forward, kernels
from tileattn.kernels.cuda.plan.layout import ArrayLayout, contiguous_inputs
from tileattn.kernels.cuda.plan.tensor_map import can_map, tensor_map


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_arrays_that_no_map_describes(name: str) -> None:
    """An axis is broadcast or reversed, a stride too long, or rows not aligned."""
    problem = asked(Nk=70, D=64, Dv=64)
    layout = contiguous_inputs(problem).with_contiguous_results(problem, "backward")
    x = layout.get(name)
    assert x is not None
    changes = [
        x._replace(strides=tuple(s * step if n == axis else s for n, s in enumerate(x.strides)))
        for axis, step in product(range(3), (0, -1, 1 << 40))
    ]
    plans = (backward,) if name == "dout" else (forward, backward)
    for changed in (x, *changes, x._replace(alignment=8)):
        assert can_map(changed) == (changed not in changes)
        given: dict[str, Any] = {name: changed}
        for plan in (plan(problem, H200, **given) for plan in plans):
            mapped = any("sm90" in kernel for kernel in kernels(plan))
            assert mapped == bool(plan.tensor_maps) == (changed == x)


def test_maps_say_where_the_arrays_lie() -> None:
    """From the innermost axis on: k has its heads beside the columns, v is half of wider rows."""
    B, HQ, HKV, NQ, NK, D, DV = 2, 6, 2, 300, 530, 72, 40
    problem = asked(B=B, Hq=HQ, Hkv=HKV, Nq=NQ, Nk=NK, D=D, Dv=DV, window=(None, 0))
    steps = (2 * NK * HKV * D, 2 * D, 2 * HKV * D, 2)
    k = ArrayLayout((B, HKV, NK, D), steps, "float16")
    steps = (4 * HKV * NK * DV, 4 * NK * DV, 4 * DV, 2)
    v = ArrayLayout((B, HKV, NK, DV), steps, "float16")
    maps = {
        "q": ((D, NQ, HQ, B), (2 * D, 2 * NQ * D, 2 * HQ * NQ * D)),
        "k": ((D, NK, HKV, B), (2 * HKV * D, 2 * D, 2 * NK * HKV * D)),
        "v": ((DV, NK, HKV, B), (4 * DV, 4 * NK * DV, 4 * HKV * NK * DV)),
        "dout": ((DV, NQ, HQ, B), (2 * DV, 2 * NQ * DV, 2 * HQ * NQ * DV)),
    }
    for plan, names in ((forward, "q k v"), (backward, "q k v dout")):
        (made,) = plan(problem, H200, k=k, v=v).tensor_maps.values()
        assert [one.name for one in made] == names.split()
        for one in made:
            assert (one.sizes, one.strides, one.dtype) == (*maps[one.name], "float16")
            columns, rows, *others = one.box
            assert (columns, rows % 8, others) == (64, 0, [1, 1])


@pytest.mark.parametrize("strides", [(0, 6, -2, 2), (1 << 50, 1 << 50, 1 << 50, 2)])
def test_an_axis_of_length_one_has_a_stride_that_the_driver_takes(strides: Any) -> None:
    x = ArrayLayout((1, 1, 1, 20), strides, "float16")
    assert can_map(x)
    assert tensor_map("q", x, 64).strides == (48, 48, 48)


def test_the_longest_stride() -> None:
    x = ArrayLayout((2, 3, 5, 8), ((1 << 40) - 16, 96, 16, 2), "float16")
    assert can_map(x)
    assert not can_map(x._replace(strides=(1 << 40, 96, 16, 2)))
