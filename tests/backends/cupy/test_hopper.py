"""The Hopper forward kernel: which calls it supports, and what it is launched with; no GPU."""

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tests.backends.cupy import fake_cupy
from tests.backends.cupy.fake_cupy import Machine, launch_together
from tileattn.backends.cupy import tensor_maps
from tileattn.backends.cupy.tensor_maps import EncodedMaps
from tileattn.kernels.config import hopper
from tileattn.kernels.config.families import forward_launches
from tileattn.kernels.config.hopper import HOPPER, forward_tile
from tileattn.kernels.config.shared_memory import HOPPER_STATIC, hopper_forward_bytes
from tileattn.kernels.config.tiles import MAX_HEAD_DIM, TileSize
from tileattn.kernels.launch.catalog import context_of, problem_of
from tileattn.kernels.launch.device import device_of_arch
from tileattn.kernels.launch.layout import ArrayLayout, contiguous, contiguous_inputs
from tileattn.kernels.launch.plan import plan_forward
from tileattn.kernels.launch.tensor_map import can_map, tensor_map
from tileattn.problem import Problem

B, HQ, HKV, NQ, NK, D, DV = 2, 6, 2, 300, 530, 72, 40
CONTEXT = context_of("sm_90a")
SUPPORTED = problem_of("float16", 64)
H200 = device_of_arch("sm_90a")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with fake_cupy.machine(monkeypatch) as made:
        made.arch = "sm_90a"
        yield made


def arrays(gpu: Machine, dtype: Any = np.float16) -> tuple[Any, Any, Any]:
    shapes = ((B, HQ, NQ, D), (B, HKV, NK, D), (B, HKV, NK, DV))
    q, k, v = (gpu.array(shape, dtype) for shape in shapes)
    return q, k, v


def kernels(gpu: Machine) -> list[str]:
    return [key.kernel for key, *_ in gpu.launches]


# --- the rule -----------------------------------------------------------------------------------

REFUSED: list[tuple[str, Problem, dict[str, Any]]] = [
    ("the GPU is not of compute capability 9.0", SUPPORTED, {"arch": "sm_90"}),
    ("dtype is neither float16 nor bfloat16", problem_of("float32", 64), {}),
    ("a head dimension is above 256", replace(SUPPORTED, D=264), {}),
    ("a head dimension is above 256", replace(SUPPORTED, Dv=264), {}),
    ("bias is in use", problem_of("float16", 64, ["bias"]), {}),
    ("mask is in use", problem_of("float16", 64, ["mask"]), {}),
    ("dropout is in use", problem_of("float16", 64, ["dropout_p"]), {}),
    ("an array is empty", replace(SUPPORTED, Nk=0), {}),
    ("an array is empty", replace(SUPPORTED, D=0), {}),
    ("an array is empty", replace(SUPPORTED, Dv=0), {}),
    (
        "an array has nearly 2**31 rows or more",
        replace(SUPPORTED, B=1 << 10, Hq=1 << 10, Nq=1 << 11),
        {},
    ),
    ("an array has nearly 2**31 rows or more", replace(SUPPORTED, Nk=1 << 31), {}),
    ("the head dimension of v is no multiple of 8", replace(SUPPORTED, Dv=60), {}),
    ("a row is not aligned to 16 bytes", SUPPORTED, {"alignment_bytes": 8}),
    ("an array has an axis that is broadcast, reversed or of", SUPPORTED, {"tensor_maps": False}),
]


@pytest.mark.parametrize(("reason", "problem", "changed"), REFUSED, ids=str)
def test_what_it_does_not_support_and_why(
    reason: str, problem: Problem, changed: dict[str, Any]
) -> None:
    (launch,) = forward_launches(problem, CONTEXT._replace(**changed))
    assert launch.key.kernel in {"forward", "naive_forward"}
    assert launch.why.startswith(f"the generic kernel, because {reason}")


def test_every_clause_of_the_rule_is_tried() -> None:
    tried = {reason for reason, *_ in REFUSED}
    assert [
        why for why, _ in hopper._UNSUPPORTED if not any(why.startswith(t) for t in tried)
    ] == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "uses", [(), ("softcap",), ("alibi_slopes",), ("sinks", "kv_lengths", "q_offset")]
)
def test_what_it_supports(dtype: str, uses: tuple[str, ...]) -> None:
    problem = replace(problem_of(dtype, 72, uses), Dv=40, window=(7, 0))
    ((key, _, _, why, *_),) = forward_launches(problem, CONTEXT)
    assert (key.kernel, key.dtype, key.head_dim, key.value_dim) == (HOPPER, dtype, 96, 64)
    assert (key.softcap, key.alibi) == ("softcap" in uses, "alibi_slopes" in uses)
    assert key.fold_scale is not (key.softcap or key.alibi)
    assert why == "wgmma and tensor maps, tiles from measurements"


@pytest.mark.parametrize(
    ("dim", "keys"), [(32, 128), (64, 128), (96, 128), (128, 128), (192, 96), (256, 64)]
)
def test_tiles_under_a_block_mask_are_low(dim: int, keys: int) -> None:
    """Whatever the keys and the diagonal, which decide about tiles elsewhere."""
    problem = problem_of("float16", dim, ["block_mask"])
    for window, Nk in product([(None, None), (None, 0)], [2, 176, 4096]):
        ((key, *_),) = forward_launches(replace(problem, window=window, Nk=Nk), CONTEXT)
        assert (key.kernel, key.block_q, key.block_k) == (HOPPER, 128, keys)
        assert key.block_mask


@pytest.mark.parametrize("dim", range(8, MAX_HEAD_DIM + 1, 8))
def test_its_tiles_fit_and_divide(dim: int) -> None:
    for problem in (problem_of("float16", dim), replace(problem_of("float16", 8), Dv=dim)):
        ((key, _, shared, *_),) = forward_launches(problem, CONTEXT)
        assert (key.warps_m, key.warps_n, key.producer_warps) == (key.block_q // 16, 1, 4)
        assert key.threads == 2 * key.block_q + 128
        assert key.block_q % 64 == 0
        assert shared + HOPPER_STATIC <= CONTEXT.shared_limit


@pytest.mark.parametrize(
    ("tile", "dim", "value", "expected"),
    [
        (TileSize(192, 128, 12, stages=2), 64, 64, 6 * 8 + 2 * 32),
        (TileSize(192, 128, 12, stages=2), 32, 64, 6 * 8 + 2 * 32),  # boxes of 64 columns
        (TileSize(128, 128, 8, stages=2), 128, 128, 4 * 16 + 2 * 64),
        (TileSize(128, 176, 8, stages=2), 128, 128, 3 * 16 + 2 * 88),
        (TileSize(128, 96, 8, stages=2), 192, 128, 4 * 24 + 2 * 60),
        (TileSize(128, 128, 8, stages=2), 192, 128, 2 * 24 + 2 * 80),
        (TileSize(128, 96, 8, stages=2), 192, 192, 3 * 24 + 2 * 72),
        (TileSize(128, 80, 8, stages=2), 256, 256, 2 * 32 + 2 * 80),
        (TileSize(128, 64, 8, stages=2), 256, 256, 3 * 32 + 2 * 64),
    ],
)
def test_shared_memory_for_the_next_queries_where_there_is_room(
    tile: TileSize, dim: int, value: int, expected: int
) -> None:
    assert hopper_forward_bytes(tile, dim, value) == expected * 1024


def test_tiles_go_by_the_larger_head_dimension() -> None:
    def size(dim: int, value: int) -> tuple[int, ...]:
        return forward_tile(replace(problem_of("float16", dim), Dv=value))[:2]

    assert size(8, 64) == size(64, 8) == size(64, 64)
    assert size(64, 72) == size(128, 128) != size(64, 64)
    assert size(192, 128) == size(136, 8) == size(8, 136) != size(256, 8)
    assert size(192, 192)[1] < size(192, 128)[1]  # what fits


@pytest.mark.parametrize(
    ("keys", "changed", "block_k"),
    [
        (16384, {}, 176),
        (176, {}, 176),
        (2048, {}, 128),  # the last of twelve would be two thirds empty
        (16384, {"window": (None, 0)}, 128),
        (16384, {"window": (1024, None)}, 128),
        (16384, {"uses": frozenset({"softcap"})}, 128),
    ],
)
def test_wide_tiles_where_keys_fill_them(keys: int, changed: dict[str, Any], block_k: int) -> None:
    assert forward_tile(replace(problem_of("float16", 128), Nk=keys, **changed)).block_k == block_k


@pytest.mark.parametrize(("queries", "blocks"), [(100, 6), (24 * 128, 132)])
def test_no_more_blocks_than_sms(queries: int, blocks: int) -> None:
    problem = replace(SUPPORTED, D=128, Hq=6, Nq=queries)
    (launch,) = forward_launches(problem, CONTEXT._replace(sm_count=132))
    assert launch.key.block_q == 128
    assert launch.grid == blocks
    assert launch.tensor_maps == (("q", 64), ("k", launch.key.block_k), ("v", launch.key.block_k))
    assert forward_launches(replace(problem, Nq=0), CONTEXT) == ()


# --- what it is started with --------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "kind"), [(np.float16, 6), (ml_dtypes.bfloat16, 9)])
def test_maps_say_where_the_arrays_lie(gpu: Machine, dtype: Any, kind: int) -> None:
    k, v = gpu.array((B, NK, HKV, D), dtype), gpu.array((B, HKV, NK, 2 * DV), dtype)
    q, k, v = gpu.array((B, HQ, NQ, D), dtype), k.swapaxes(1, 2), v[..., DV:]
    tileattn.forward(q, k, v, causal=True)
    ((key, blocks, shared, params),) = gpu.launches
    assert (key.kernel, key.head_dim, key.value_dim) == (HOPPER, 96, 64)
    assert gpu.allowed == [(key, shared)]
    assert blocks == min(132, B * HQ * -(-NQ // key.block_q))
    assert (params["k_at"].tolist(), params["Nk"]) == ((NK * HKV * D, D, HKV * D), NK)
    (maps,) = gpu.maps
    expected = [
        (q, (D, NQ, HQ, B), (2 * D, 2 * NQ * D, 2 * HQ * NQ * D), 64),
        (k, (D, NK, HKV, B), (2 * HKV * D, 2 * D, 2 * NK * HKV * D), key.block_k),
        (v, (DV, NK, HKV, B), (4 * DV, 4 * NK * DV, 4 * HKV * NK * DV), key.block_k),
    ]
    assert gpu.bound == [gpu.device]
    for made, (x, sizes, strides, rows) in zip(maps, expected, strict=True):
        assert made == (x.data.ptr, kind, sizes, strides, (64, rows, 1, 1), (0, 3, 3, 0))


@pytest.mark.parametrize("strides", [(0, 6, -2, 2), (1 << 50, 1 << 50, 1 << 50, 2)])
def test_an_axis_of_length_one_has_a_stride_that_the_driver_takes(strides: Any) -> None:
    x = ArrayLayout((1, 1, 1, 20), strides, "float16")
    assert can_map(x)
    assert tensor_map("q", x, 64).strides == (48, 48, 48)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("step", [0, -1])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_axis_that_a_map_cannot_express(name: str, axis: int, step: int) -> None:
    problem = replace(SUPPORTED, B=B, Hq=HQ, Hkv=HKV, Nq=NQ, Nk=NK)
    layout = contiguous_inputs(problem).with_contiguous_results(problem, "forward")
    x = layout.get(name)
    assert x is not None
    strides = tuple(s * step if n == axis else s for n, s in enumerate(x.strides))
    for changed, kernel in ((x, HOPPER), (replace(x, strides=strides), "forward")):
        plan = plan_forward(problem, layout.with_arrays(**{name: changed}), H200)
        assert [launch.key.kernel for launch in plan.launches] == [kernel]
        assert can_map(changed) == bool(plan.tensor_maps) == (kernel == HOPPER)


def test_strides_that_are_too_long_for_a_map() -> None:
    x = ArrayLayout((2, 3, 5, 8), (1 << 40, 96, 16, 2), "float16")
    assert not can_map(x)
    assert can_map(replace(x, shape=(1, 3, 5, 8)))


@pytest.mark.parametrize(("alignment", "kernel"), [(16, HOPPER), (8, "forward"), (2, "forward")])
def test_a_row_that_is_not_aligned_goes_to_the_generic_kernel(alignment: int, kernel: str) -> None:
    problem = replace(SUPPORTED, B=B, Hq=HQ, Hkv=HKV, Nq=NQ, Nk=NK)
    layout = contiguous_inputs(problem).with_contiguous_results(problem, "forward")
    out = layout.get("out")
    assert out is not None
    layout = layout.with_arrays(out=replace(out, alignment=alignment))
    assert plan_forward(problem, layout, H200).launches[0].key.kernel == kernel


# --- what is done once --------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"causal": True, "sinks": True}])
def test_maps_of_the_same_arrays_are_not_encoded_again(
    gpu: Machine, options: dict[str, Any]
) -> None:
    if "sinks" in options:
        options = {**options, "sinks": gpu.array((HQ,))}
    one, other = arrays(gpu), arrays(gpu)
    for given in (one, one, other, one, other):
        tileattn.forward(*given, **options)
    assert len(gpu.encoded) == 6
    expected = [tuple(x.data.ptr for x in given) for given in (one, one, other, one, other)]
    assert [tuple(made.address for made in maps) for maps in gpu.maps] == expected


def test_one_array_at_a_new_place_makes_new_maps(gpu: Machine) -> None:
    q, k, v = arrays(gpu)
    tileattn.forward(q, k, v)
    tileattn.forward(q, k, gpu.array(v.shape, v.dtype))
    tileattn.forward(q, v_like := gpu.array(k.shape, k.dtype), v)
    assert gpu.maps[-1][1].address == v_like.data.ptr
    assert len({tuple(made.address for made in maps) for maps in gpu.maps}) == 3


def test_maps_that_are_kept_are_bounded(gpu: Machine) -> None:
    x = contiguous((2, 2, 64, 64), "float16")
    maps = EncodedMaps([tensor_map(name, x, 64) for name in "qkv"])
    for n in range(1, 3 * tensor_maps.MAX_ENTRIES + 1):
        addresses = maps.pick([16 * n, 16, 32, 48, 64])
        assert addresses == (16 * n, 16, 32)
        memory, argument = maps[addresses]
        start = ctypes.addressof(memory)
        assert start <= argument.address <= start + len(memory) - 3 * tensor_maps.MAP_BYTES
        assert maps[addresses][1] is argument
        assert len(maps) <= tensor_maps.MAX_ENTRIES
    assert len(gpu.encoded) == 3 * 3 * tensor_maps.MAX_ENTRIES


def test_threads_launch_with_the_maps_of_their_arrays(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All launches wait for one another; each compares its maps with its parameter block."""
    sets = [arrays(gpu) for _ in range(6)]
    tileattn.forward(*sets[0])
    gpu.maps.clear()
    launch_together(monkeypatch, sets)
    seen = {tuple(made.address for made in maps) for maps in gpu.maps}
    assert seen == {tuple(x.data.ptr for x in given) for given in sets}


# --- the driver ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("gpu")
def test_a_refusal_of_the_driver_names_the_array() -> None:
    x = contiguous((2, 2, 9, 20), "float16")  # rows of 40 bytes
    maps = EncodedMaps([tensor_map("k", x, 64), tensor_map("v", x, 128)])
    with pytest.raises(
        RuntimeError, match=r"no tensor map of k of shape \(2, 2, 9, 20\).* at 0x100: .*returned 1;"
    ):
        _ = maps[0x100, 0x200]
    assert maps == {}


@pytest.mark.parametrize(("system", "library"), [("posix", "libcuda.so.1"), ("nt", "nvcuda.dll")])
def test_the_function_of_the_driver_is_found_once(
    monkeypatch: pytest.MonkeyPatch, system: str, library: str
) -> None:
    asked: list[str] = []
    function = SimpleNamespace()

    def load(name: str) -> Any:
        asked.append(name)
        return SimpleNamespace(cuTensorMapEncodeTiled=function)

    monkeypatch.setattr(ctypes, "PyDLL", load)
    monkeypatch.setattr(tensor_maps, "os", SimpleNamespace(name=system))
    tensor_maps._driver_function.cache_clear()
    try:
        assert tensor_maps._driver_function() is tensor_maps._driver_function() is function
    finally:
        tensor_maps._driver_function.cache_clear()
    assert asked == [library]
