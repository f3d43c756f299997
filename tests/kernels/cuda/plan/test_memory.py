"""Memory of kernels: copies, the parts of the workspace, and shared memory; no GPU."""

from dataclasses import replace
from itertools import product
from typing import Any

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
)
from tests.kernels.cuda.src.samples import TILED
from tileattn.kernels.cuda.families.shared_memory import generic_bytes, generic_static_bytes
from tileattn.kernels.cuda.families.tiles import bucket
from tileattn.kernels.cuda.plan.device import Device, device_of_arch
from tileattn.kernels.cuda.plan.layout import ArrayLayout, contiguous
from tileattn.kernels.cuda.tuning import TileSize

Fields = dict[str, Any]
DTYPES = ("float16", "bfloat16", "float32", "float64")


def test_only_what_kernels_cannot_address_is_copied() -> None:
    problem = asked(enabled_options=("sinks", "alibi_slopes"))

    def turned(heads: int, rows: int, columns: int) -> ArrayLayout:
        strides = (heads * rows * columns * 2, rows * columns * 2, 2, rows * 2)
        return ArrayLayout((B, heads, rows, columns), strides, "float16")

    sizes = {"q": (HQ, NQ, D), "k": (HKV, NK, D), "v": (HKV, NK, DV)}
    sizes |= {"out": (HQ, NQ, DV), "dout": (HQ, NQ, DV)}
    given: Fields = {name: turned(*shape) for name, shape in sizes.items()}
    given |= {
        "lse": ArrayLayout((B, HQ, NQ), (4, 4 * B * NQ, 4 * B), "float32"),
        "sinks": contiguous((HQ,), "bfloat16"),
        "alibi_slopes": contiguous((1, HQ), "float64"),
        "kv_lengths": ArrayLayout((B,), (16,), "int64"),
        "q_offset": ArrayLayout((B,), (16,), "int64"),
    }
    copied = {name: contiguous(x.shape, x.dtype) for name, x in given.items()}
    copied |= {name: contiguous(given[name].shape, "float32") for name in ("sinks", "alibi_slopes")}
    plan = backward(problem, **given)
    assert plan.copies_in == copied
    assert plan.copies_out == {"dsinks": contiguous((HQ,), "float32")}
    assert plan.fields["k_at"] == (HKV * NK * D, NK * D, D)
    assert plan.launches[0].key.alignment_bytes == 16
    assert plan.launches[0].grid == 24  # rows as kernels see them
    extents = {name: x.nbytes for name, x in (copied | plan.copies_out).items()}
    starts, past = plan.workspace.starts, sorted([*plan.workspace.starts.values(), 1 << 60])
    for name, nbytes in extents.items():
        assert past[past.index(starts[name]) + 1] - starts[name] >= nbytes
    plan = forward(problem, out=given["out"])
    assert plan.copies_out.keys() == {"out"}
    assert plan.workspace.zeros == plan.workspace.nbytes >= given["out"].nbytes
    plain: Fields = {
        "k": ArrayLayout((B, HKV, 0, D), (0, 0, 0, 0), "float16"),
        "q": ArrayLayout((B, HQ, NQ, 1), (HQ * NQ * 2, NQ * 2, 2, 6), "float16"),
        "sinks": ArrayLayout((1,), (99,), "float32"),
    }
    assert forward(asked(Nk=0, D=1), **plain).copies_in == {}


# Bytes of each part, those of zeros last; three numbers of each padded query.
SIZES: Fields = {"Nq": 300, "Nk": 530, "D": 72, "Dv": 40}
ROWS = dict.fromkeys(("delta", "lse_log2", "row_max"), 12 * 384 * 4)
FLAGS = {"head_flags": 4 * 4}
SUMS = 12 * 300 * 4


def counters(tiles: int) -> dict[str, int]:
    counts = {"row_counter": 4, "tile_counter": 2, "dq_semaphore": 12 * tiles, "dq_counter": 4}
    return {name: count * 4 for name, count in counts.items()}


PARTS: list[tuple[Device, Fields, bool | None, dict[str, int], dict[str, int]]] = [
    (A100, {}, None, {}, {}),
    (H200, {}, None, {}, {}),
    (A100, {}, True, ROWS, FLAGS),
    (A100, {}, False, ROWS, FLAGS | {"dq_accum": SUMS * 96}),
    (H200, {}, False, ROWS | {"dq_accum": SUMS * 96}, FLAGS | counters(5)),
    (H200, {}, True, ROWS | {"dq_accum": SUMS * 96}, FLAGS | counters(5)),
    (H200, {"D": 64}, True, ROWS | {"dq_accum": SUMS * 64}, FLAGS | counters(3)),
    (H200, {"D": 200}, False, ROWS, FLAGS | {"tile_counter": 2 * 4, "row_counter": 4 * 4}),
    (A100, {"D": 300}, False, ROWS, FLAGS),
    (A100, {"Nk": 0}, False, ROWS, FLAGS),
    (A100, {"B": 0}, False, {}, {}),
    (A100, {"Nq": 0, "D": 300}, False, dict.fromkeys(ROWS, 0), FLAGS),
]


@pytest.mark.parametrize(("device", "changed", "deterministic", "parts", "zeros"), PARTS)
def test_parts_of_the_workspace(
    device: Device,
    changed: Fields,
    deterministic: bool | None,
    parts: dict[str, int],
    zeros: dict[str, int],
) -> None:
    problem = asked(**SIZES | changed)
    if deterministic is None:
        found = forward(problem, device).workspace
    else:
        found = backward(problem, device, deterministic=deterministic).workspace
    starts, end = {}, 0
    for name, nbytes in (parts | zeros).items():
        starts[name] = -(-end // 256) * 256
        end = starts[name] + nbytes
    assert (found.starts, found.nbytes) == (starts, end)
    assert found.zeros == min((starts[name] for name in zeros), default=end)


def test_numbers_of_64_bits_take_twice_the_workspace() -> None:
    """And have copies of their slopes in as many."""
    halves, doubles = (
        backward(asked(dtype, ("alibi_slopes",), **SIZES), alibi_slopes=contiguous((B, HQ), kind))
        for dtype, kind in (("float32", "float64"), ("float64", "float32"))
    )
    sizes = {"alibi_slopes": 12 * 8, "delta": 12 * 384 * 8, "dq_accum": SUMS * 96 * 2}
    for plan, share in ((halves, 2), (doubles, 1)):
        starts = {**plan.workspace.starts, "": plan.workspace.nbytes}
        ends = dict(zip(starts, [*starts.values()][1:], strict=False))
        for name, nbytes in sizes.items():
            assert -255 <= nbytes // share - (ends[name] - starts[name]) <= 0


# Kernel, element sizes of rows and bias, and bytes: one swizzled row is 64 or a multiple of 128.
GENERIC: list[tuple[str, TileSize, tuple[int, int], int, int, int]] = [
    ("forward", TileSize(128, 48, 4, 1, 2, 3), (64, 64), 2, 0, 128 * 128 + 4 * 48 * 128),
    ("forward", TileSize(64, 32, 4), (32, 96), 2, 0, 64 * 256 + 32 * (64 + 256)),
    ("forward", TileSize(32, 32, 2, 2), (64, 64), 4, 0, 32 * 256 + 64 * 256 + 32 * 128),
    ("forward", TileSize(64, 32, 4), (64, 64), 2, 2, 64 * 128 + 64 * 128 + 64 * 64),
    ("forward", TileSize(64, 32, 4), (64, 64), 2, 8, 64 * 128 + 64 * 128 + 64 * 256),
    ("backward_dkdv", TileSize(64, 128, 4, 2, 2), (128, 64), 2, 0, 128 * 640 + 2 * 64 * 384),
    ("backward_dkdv", TileSize(64, 64, 2, 2), (64, 64), 2, 4, 64 * (512 + 256 + 256)),
    ("forward", TileSize(32, 32, 2, 2), (64, 64), 2, 2, 32 * (128 + 256 + 64 + 2 * 64)),
    ("backward_dkdv", TileSize(64, 64, 4, 2), (64, 64), 2, 2, 64 * (512 + 256 + 4 * 64)),
    ("backward_dq", TileSize(64, 32, 4, 1, 2), (64, 128), 4, 0, 64 * 768 + 2 * 32 * 768),
    ("backward_large_scores", TileSize(64, 32, 4, 1, 2), (64, 128), 4, 0, 64 * 256 + 64 * 256),
    ("backward_dbias", TileSize(64, 32, 4), (64, 128), 2, 0, 96 * 256 + 2 * 64 * 4),
    ("backward_dbias", TileSize(64, 32, 4, 1, 2), (64, 128), 8, 0, 96 * 1536 + 2 * 64 * 8),
]


@pytest.mark.parametrize(("kernel", "tile", "dims", "size", "bias", "nbytes"), GENERIC)
def test_shared_memory_of_generic_kernels(
    kernel: str, tile: TileSize, dims: tuple[int, int], size: int, bias: int, nbytes: int
) -> None:
    assert generic_bytes(kernel, tile, *dims, size, bias) == nbytes


@pytest.mark.parametrize(
    ("kernel", "sizes", "bias", "tile"),
    [
        ("forward", {"D": 64, "Dv": 64}, "float32", (128, 48)),
        ("forward", {"D": 64, "Dv": 64}, "float64", (128, 64)),  # three blocks have no room
        ("backward_dkdv", {"D": 256, "Dv": 256}, "", (64, 64)),
        ("backward_dkdv", {"D": 32, "Dv": 256}, "", (32, 64)),  # four warps share 32 columns
    ],
)
def test_the_first_tiles_that_fit(
    kernel: str, sizes: Fields, bias: str, tile: tuple[int, int]
) -> None:
    more: Fields = {"bias": contiguous((1, HQ, 1, 64), bias)} if bias else {}
    problem = asked(enabled_options=more, Nk=64, **sizes)
    device = replace(H200, arch="sm_90")
    launches = (*forward(problem, device, **more).launches, *backward(problem, device).launches)
    assert next(x.key.tile for x in launches if x.key.kernel == kernel) == tile


@pytest.mark.parametrize(
    ("kernel", "tile", "size", "kilobytes"),
    [
        ("forward", TileSize(128, 64, 4), 2, 1),
        ("forward", TileSize(64, 64, 2, 4), 2, 3),
        ("forward", TileSize(32, 32, 2, 2), 8, 2),
        ("backward_dkdv", TileSize(64, 128, 4, 2, 2), 2, 3),
        ("backward_dkdv", TileSize(64, 128, 4, 2, 1), 8, 3),
        ("backward_dbias", TileSize(64, 64, 4, 2), 8, 0),
    ],
)
def test_static_shared_memory(kernel: str, tile: TileSize, size: int, kilobytes: int) -> None:
    assert generic_static_bytes(kernel, tile, size) == kilobytes * 1024


def test_buckets_are_the_next_ones() -> None:
    assert [bucket(n) for n in (0, 32, 33, 64, 96, 97, 128, 192, 256)] == [
        *(32, 32, 64, 64, 96, 128, 128, 192, 256)
    ]


# --- devices that are not there -----------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_103", "sm_120"])
def test_launches_fit_every_gpu(arch: str) -> None:
    device, bias = device_of_arch(arch), contiguous((1, 1, NQ, 64), "float64")
    options: list[Fields] = [{}, {"bias": bias}]
    for dim, dtype, more in product((20, 64, 128, 256, 512), DTYPES, options):
        problem = asked(dtype, more, D=dim, Dv=dim, Nk=64)
        for plan in (forward(problem, device, **more), backward(problem, device, **more)):
            for launch in plan.launches:
                key, static = launch.key, 0
                if key.kernel in TILED:
                    tile = TileSize(*key.tile, key.warps_m, key.warps_n, key.stages)
                    static = generic_static_bytes(key.kernel, tile, problem.dtype.itemsize)
                assert launch.shared_bytes + static <= device.shared_limit
                assert key.threads <= 1024


def test_the_next_older_gpu_stands_for_one_that_is_not_known() -> None:
    assert replace(device_of_arch("sm_121"), arch="sm_120") == device_of_arch("sm_120")
    assert device_of_arch("compute_80").name == "A100"
    for name in ("sm_70", "hopper", "sm_"):
        with pytest.raises(ValueError, match=f"arch is '{name}'; sm_75, .* are accepted"):
            device_of_arch(name)
