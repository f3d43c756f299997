"""Tensor maps: what the driver is asked, how often, and what launches are given; no GPU."""

import ctypes
from functools import partial
from itertools import chain
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tests.backends.cupy.fake_cupy import Machine, launch_together
from tileattn.backends.cupy import tensor_maps
from tileattn.backends.cupy.tensor_maps import EncodedMaps
from tileattn.kernels.cuda.plan.layout import ArrayLayout, array_layout, contiguous
from tileattn.kernels.cuda.plan.params import PARAMS, POINTERS
from tileattn.kernels.cuda.plan.tensor_map import tensor_map

B, HQ, HKV, NQ, NK, D, DV = 2, 6, 2, 300, 530, 72, 40
FORWARD_BOXES = {"q": 64, "k": 96, "v": 96}
BACKWARD_BOXES = {"q": 64, "k": 128, "v": 128, "dout": 64}


def arrays(gpu: Machine, dtype: Any = np.float16) -> dict[str, Any]:
    """Give q, k and v; k has its heads beside the columns, v is half of wider rows."""
    k, v = gpu.array((B, NK, HKV, D), dtype), gpu.array((B, HKV, NK, 2 * DV), dtype)
    return {"q": gpu.array((B, HQ, NQ, D), dtype), "k": k.swapaxes(1, 2), "v": v[..., DV:]}


def numbers(name: str, x: ArrayLayout) -> tuple[int, ...]:
    described = tensor_map(name, x, BACKWARD_BOXES[name])
    return *described.sizes, *described.strides


def residuals(gpu: Machine, dtype: Any = np.float16) -> dict[str, Any]:
    made = {name: gpu.array((B, HQ, NQ, DV), dtype) for name in ("dout", "out")}
    return {**made, "lse": gpu.array((B, HQ, NQ))}


@pytest.mark.parametrize(("dtype", "kind"), [(np.float16, 6), (ml_dtypes.bfloat16, 9)])
@pytest.mark.parametrize("backward", [False, True])
def test_maps_say_where_the_arrays_lie(
    h200: Machine, dtype: Any, kind: int, backward: bool
) -> None:
    """Two kernels of the backward pass get the same maps."""
    given, boxes = arrays(h200, dtype), BACKWARD_BOXES if backward else FORWARD_BOXES
    if backward:
        tileattn.backward(**given, **(more := residuals(h200, dtype)))
        given["dout"] = more["dout"]
    else:
        tileattn.forward(**given)
    first, *others = h200.maps
    assert others == [first] * backward
    assert len(h200.encoded) == len(first)
    for made, (name, x) in zip(first, given.items(), strict=True):
        one = tensor_map(name, array_layout(x, x.data.ptr), boxes[name])
        assert made == (x.data.ptr, kind, one.sizes, one.strides, one.box, (0, 3, 2, 0))


@pytest.mark.parametrize("with_sinks", [False, True])
def test_maps_are_those_of_each_call_until_its_addresses_come_back(
    h200: Machine, with_sinks: bool
) -> None:
    """A call without options is repeated in a shorter way than others."""
    options = {"sinks": h200.array((HQ,))} if with_sinks else {}
    one, other = arrays(h200), arrays(h200)
    sets = one, other, other | {"v": one["v"]}, one | {"k": other["k"]}
    tileattn.forward(**one, **options)  # the first call allocates its memory differently
    calls = [h200.reusing(partial(tileattn.forward, **given, **options)) for given in sets]
    h200.maps.clear()
    h200.encoded.clear()
    for n in range(4):
        for call in calls:
            call()
        assert len(h200.encoded) == 3 * len(sets) * min(n + 1, 2)
    expected = [tuple(x.data.ptr for x in given.values()) for given in sets * 4]
    assert [tuple(made.address for made in maps) for maps in h200.maps] == expected


def test_maps_are_made_again_for_another_dout_alone(h200: Machine) -> None:
    given = arrays(h200) | residuals(h200)
    for n in range(3):
        tileattn.backward(**given)
        assert len(h200.encoded) == 4 * (n + 1)  # once for both kernels
    given["dout"] = h200.array(given["dout"].shape, np.float16)
    tileattn.backward(**given)
    *_, before, safe, own = (made[3].address for made in h200.maps)
    assert safe == own == given["dout"].data.ptr != before


def test_maps_lie_one_after_the_other(h200: Machine) -> None:
    """The place of each is aligned, and its address is in the parameter block."""
    x = contiguous((2, 2, 64, 64), "float16")
    boxes = [("q", 64), ("k", 64), ("dout", 64)]
    maps = EncodedMaps(boxes, x.dtype)
    assert maps.start % tensor_maps.MAP_BYTES == 0
    for n in range(2):
        cells = [16 * (n + 1) * slot for slot in range(1, PARAMS.itemsize // 8)]
        maps.encode([*chain.from_iterable(numbers(name, x) for name, _ in boxes)], cells)
        found = [made.address for made in h200.encoded[3 * n :]]
        assert found == [cells[POINTERS.index(name)] for name, _ in boxes]
        for k in range(3):  # maps are numbers here
            place = ctypes.c_uint64.from_address(maps.start + k * tensor_maps.MAP_BYTES)
            assert place.value == 3 * n + k


def test_a_thread_without_a_context_gets_one(
    h200: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = tensor_maps._driver_function()
    monkeypatch.setattr(
        *(tensor_maps, "_driver_function"),
        lambda: lambda *given: encode(*given) if h200.bound else 201,
    )
    tileattn.forward(**arrays(h200))
    assert h200.bound == [h200.device]
    assert len(h200.encoded) == 3


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
    narrow = x._replace(shape=(2, 2, 9, 20), strides=(720, 360, 40, 2))
    maps = EncodedMaps([("k", 64), ("v", 128)], x.dtype)
    cells = dict.fromkeys(range(len(POINTERS)), 0x100) | {POINTERS.index("v"): 0x200}
    told = r"a tensor map of v of shape \(2, 2, 9, 20\).* at 0x200: .*returned 1;"
    with pytest.raises(RuntimeError, match=told):
        maps.encode([*numbers("k", x), *numbers("v", narrow)], cells)
