"""Tensor maps: what the driver is asked, how often, and what launches are given; no GPU."""

import ctypes
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tests.backends.cupy.fake_cupy import Machine, launch_together
from tileattn.backends.cupy import tensor_maps
from tileattn.backends.cupy.tensor_maps import EncodedMaps
from tileattn.kernels.cuda.plan.layout import array_layout, contiguous
from tileattn.kernels.cuda.plan.params import POINTERS
from tileattn.kernels.cuda.plan.tensor_map import tensor_map

B, HQ, HKV, NQ, NK, D, DV = 2, 6, 2, 300, 530, 72, 40
BOXES = {"q": 64, "k": 128, "v": 128, "dout": 64}


def arrays(gpu: Machine, dtype: Any = np.float16) -> dict[str, Any]:
    """Give q, k and v; k has its heads beside the columns, v is half of wider rows."""
    k, v = gpu.array((B, NK, HKV, D), dtype), gpu.array((B, HKV, NK, 2 * DV), dtype)
    return {"q": gpu.array((B, HQ, NQ, D), dtype), "k": k.swapaxes(1, 2), "v": v[..., DV:]}


def residuals(gpu: Machine, dtype: Any = np.float16) -> dict[str, Any]:
    made = {name: gpu.array((B, HQ, NQ, DV), dtype) for name in ("dout", "out")}
    return {**made, "lse": gpu.array((B, HQ, NQ))}


@pytest.mark.parametrize(("dtype", "kind"), [(np.float16, 6), (ml_dtypes.bfloat16, 9)])
@pytest.mark.parametrize("backward", [False, True])
def test_maps_say_where_the_arrays_lie(
    h200: Machine, dtype: Any, kind: int, backward: bool
) -> None:
    """Of the backward pass two kernels are given the same ones."""
    given = arrays(h200, dtype)
    if backward:
        tileattn.backward(**given, **(more := residuals(h200, dtype)))
        given["dout"] = more["dout"]
    else:
        tileattn.forward(**given)
    first, *others = h200.maps
    assert others == [first] * backward
    assert h200.bound == [h200.device]
    for made, (name, x) in zip(first, given.items(), strict=True):
        one = tensor_map(name, array_layout(x, x.data.ptr), BOXES[name])
        assert made == (x.data.ptr, kind, one.sizes, one.strides, one.box, (0, 3, 3, 0))


@pytest.mark.parametrize("with_sinks", [False, True])
def test_maps_of_the_same_arrays_are_not_encoded_again(h200: Machine, with_sinks: bool) -> None:
    """A call without options is repeated in a shorter way than others."""
    options = {"sinks": h200.array((HQ,))} if with_sinks else {}
    one, other = arrays(h200), arrays(h200)
    turns = (one, one, other, one, other, other | {"v": one["v"]}, one | {"k": other["k"]})
    for given in turns:
        tileattn.forward(**given, **options)
    assert len(h200.encoded) == 3 * 4
    expected = [tuple(x.data.ptr for x in given.values()) for given in turns]
    assert [tuple(made.address for made in maps) for maps in h200.maps] == expected


def test_maps_are_made_again_for_another_dout_alone(h200: Machine) -> None:
    given = arrays(h200) | residuals(h200)
    for _ in range(3):
        tileattn.backward(**given)
    assert len(h200.encoded) == 4
    given["dout"] = h200.array(given["dout"].shape, np.float16)
    tileattn.backward(**given)
    *_, before, safe, own = (made[3].address for made in h200.maps)
    assert safe == own == given["dout"].data.ptr != before
    assert len(h200.encoded) == 8


def test_maps_that_are_kept_are_bounded(h200: Machine) -> None:
    x = contiguous((2, 2, 64, 64), "float16")
    maps = EncodedMaps([tensor_map(name, x, 64) for name in ("q", "k", "dout")])
    others = [16 * n for n in range(1, len(POINTERS))]
    for n in range(1, 3 * tensor_maps.MAX_ENTRIES + 1):
        addresses = maps.pick([16 * n, *others])
        assert addresses == (16 * n, 16, 16 * POINTERS.index("dout"))
        memory, start = maps[addresses]
        first = ctypes.addressof(memory)
        assert first <= start <= first + len(memory) - 3 * tensor_maps.MAP_BYTES
        assert maps[addresses][1] is start
        assert len(maps) <= tensor_maps.MAX_ENTRIES
    assert len(h200.encoded) == 3 * 3 * tensor_maps.MAX_ENTRIES


def test_threads_launch_with_the_maps_of_their_arrays(
    h200: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All launches wait for one another; each compares its maps with its parameter block."""
    sets = [tuple(arrays(h200).values()) for _ in range(6)]
    tileattn.forward(*sets[0])
    h200.maps.clear()
    launch_together(monkeypatch, sets)
    seen = {tuple(made.address for made in maps) for maps in h200.maps}
    assert seen == {tuple(x.data.ptr for x in given) for given in sets}


@pytest.mark.usefixtures("h200")
def test_a_refusal_of_the_driver_names_the_array() -> None:
    x = contiguous((2, 2, 9, 24), "float16")
    narrow = replace(x, shape=(2, 2, 9, 20), strides=(720, 360, 40, 2))
    maps = EncodedMaps([tensor_map("k", x, 64), tensor_map("v", narrow, 128)])
    told = r"a tensor map of v of shape \(2, 2, 9, 20\).* at 0x200: .*returned 1;"
    with pytest.raises(RuntimeError, match=told):
        _ = maps[0x100, 0x200]
    assert maps == {}
