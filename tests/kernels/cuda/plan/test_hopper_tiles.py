"""The Hopper kernels: which tiles they take, and the shared memory that these need."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tests.kernels.cuda.plan.planning import (
    ON_HOPPER,
    hopper_launches,
)
from tileattn.call.problem import problem_of
from tileattn.kernels.cuda.families.families import forward_launches
from tileattn.kernels.cuda.families.hopper import (
    HOPPER,
    HOPPER_BACKWARD,
    HOPPER_HALVES,
    HOPPER_WIDE,
)
from tileattn.kernels.cuda.families.shared_memory import (
    HOPPER_STATIC,
    hopper_backward_bytes,
    hopper_forward_bytes,
    hopper_wide_dq_bytes,
)
from tileattn.kernels.cuda.families.tiles import MAX_HEAD_DIM
from tileattn.kernels.cuda.tuning import TileSize

CAUSAL = (None, 0)


# D and Dv: of each pass the head-dimension buckets and the tile; the stages of the backward one.
BUCKETS: dict[tuple[int, int], Any] = {
    (8, 64): ((32, 64), (128, 64), (32, 64), (128, 128), 3),
    (64, 32): ((64, 32), (128, 64), (64, 32), (128, 128), 3),
    (72, 40): ((80, 48), (128, 128), (80, 48), (64, 128), 2),
    (40, 96): ((48, 96), (128, 128), (48, 96), (64, 128), 2),
    (112, 104): ((112, 112), (128, 128), (112, 112), (64, 128), 2),
    (128, 128): ((128, 128), (128, 128), (128, 128), (64, 128), 2),
    (136, 8): ((192, 32), (128, 128), (192, 128), (64, 128), 2),
    (192, 128): ((192, 128), (128, 128), (192, 128), (64, 128), 2),
    (192, 192): ((192, 192), (128, 96), (192, 192), (64, 64), 3),
    (64, 192): ((64, 192), (128, 128), (128, 192), (64, 64), 3),
    (200, 64): ((256, 64), (128, 64), (256, 128), (64, 64), 3),
    (40, 256): ((48, 256), (128, 64), (128, 256), (64, 64), 3),
    (256, 256): ((256, 256), (128, 64), (256, 256), (64, 64), 2),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "enabled_options", [(), ("softcap",), ("alibi_slopes",), ("sinks", "kv_lengths", "q_offset")]
)
@pytest.mark.parametrize("dims", BUCKETS, ids=str)
def test_tiles_go_by_both_head_dimensions(
    dtype: str, enabled_options: tuple[str, ...], dims: tuple[int, int]
) -> None:
    """A score modifier needs registers, which short query blocks of the backward pass leave."""
    bucket, tile, back_bucket, back_tile, stages = BUCKETS[dims]
    modified = "softcap" in enabled_options or "alibi_slopes" in enabled_options
    kernel = HOPPER_WIDE if back_tile == (64, 64) else HOPPER_BACKWARD
    if back_bucket == (192, 128):
        kernel = HOPPER_WIDE if modified else HOPPER_HALVES
        back_tile, stages = ((64, 64), 3) if modified else (back_tile, stages)
    elif modified and back_tile == (128, 128):
        back_tile, stages = (64, 128), 2
    D, Dv = dims
    problem = replace(problem_of(dtype, D, enabled_options), Dv=Dv, window=(7, 0), Nq=200, Nk=4096)
    (launch,) = forward_launches(problem, ON_HOPPER)
    own = next(x for x in hopper_launches(problem) if x.tensor_maps and not x.key.head_flags)
    for each in (launch.key, own.key):
        assert (each.dtype, each.warps_n, each.producer_warps) == (dtype, 1, 4)
        assert (each.softcap, each.alibi) == (
            "softcap" in enabled_options,
            "alibi_slopes" in enabled_options,
        )
        assert each.fold_scale is not modified
    key = launch.key
    groups = 2 if max(bucket) <= 64 and not modified else 1
    tile = (192, 128) if max(bucket) <= 64 and modified else tile
    assert (key.kernel, key.head_dim, key.value_dim, key.tile) == (HOPPER, *bucket, tile)
    assert (key.warps_m, key.groups) == (key.block_q // 16, groups)
    assert key.threads == groups * 2 * key.block_q + 128
    assert launch.why.startswith("wgmma and tensor maps, tiles")
    key = own.key
    assert (key.kernel, key.head_dim, key.value_dim) == (kernel, *back_bucket)
    assert key.tile == back_tile
    assert (key.stages, key.warps_m, key.threads) == (stages, 8, 384)
    assert own.why.startswith("wgmma and tensor maps, tiles")


@pytest.mark.parametrize("dim", range(8, MAX_HEAD_DIM + 1, 8))
def test_shared_memory_of_every_head_dimension_fits(dim: int) -> None:
    for problem in (problem_of("float16", dim), replace(problem_of("float16", 8), Dv=dim)):
        for launch in (*forward_launches(problem, ON_HOPPER), *hopper_launches(problem)):
            assert launch.shared_bytes + HOPPER_STATIC <= ON_HOPPER.shared_limit
            assert launch.key.block_q % 64 == 0 or not launch.tensor_maps


TILES: list[tuple[int, dict[str, Any], tuple[int, int]]] = [
    (128, {"Nk": 16384}, (128, 128)),
    (128, {"Nk": 16384, "enabled_options": {"softcap"}}, (128, 128)),
    # Two groups where the middle query of 200 attends to at most 3,072 keys.
    (64, {"Nk": 512}, (128, 64)),
    (64, {"Nk": 3072}, (128, 64)),
    (64, {"Nk": 3073}, (192, 128)),
    (64, {"Nk": 3172, "window": CAUSAL}, (128, 64)),
    (64, {"Nk": 3173, "window": CAUSAL}, (192, 128)),
    (64, {"Nq": 6144, "Nk": 6144, "window": CAUSAL}, (128, 64)),
    (64, {"Nq": 6145, "Nk": 6145, "window": CAUSAL}, (192, 128)),
    (64, {"Nk": 1 << 20, "window": (3071, 0)}, (128, 64)),
    (64, {"Nk": 1 << 20, "window": (3071, 1)}, (192, 128)),
    (64, {"Nk": 1 << 20, "sequences": 2}, (128, 64)),
    (64, {"Nk": 512, "dropout_p": 0.5}, (192, 128)),
    *((32, {"Nk": 512, "enabled_options": {name}}, (128, 64)) for name in ("kv_lengths", "sinks")),
    *(
        (64, {"Nk": Nk, "window": CAUSAL, "enabled_options": {name}}, (192, keys))
        for name in ("softcap", "alibi_slopes", "bias")
        for Nk, keys in ((512, 64), (513, 128))
    ),
    # Wider heads: tall where there are many queries, never by the number of heads.
    (128, {"Nq": 8192, "Nk": 513}, (192, 64)),
    (128, {"Nq": 8192, "Nk": 513, "B": 1, "Hq": 1, "Hkv": 1, "window": CAUSAL}, (192, 64)),
    (128, {"Nq": 8191, "Nk": 8192}, (128, 128)),
    (128, {"Nq": 8192, "Nk": 512}, (128, 128)),
    (128, {"Nq": 8192, "Nk": 8192, "sequences": 2}, (128, 128)),
    (96, {"Nq": 4096, "Nk": 513, "dropout_p": 0.5}, (192, 96)),
    (72, {"Nq": 4095, "Nk": 4096}, (128, 128)),
    # Under a block mask tiles are low, whatever the keys and the diagonal.
    (192, {"Dv": 128, "Nk": 300, "window": CAUSAL, "enabled_options": {"block_mask"}}, (128, 128)),
    *(
        (dim, {"Nk": Nk, "window": window, "enabled_options": {"block_mask"}}, (128, keys))
        for dim, keys in ((32, 128), (64, 128), (96, 128), (128, 128), (192, 96), (256, 64))
        for window, Nk in product([(None, None), CAUSAL], [2, 300, 4096])
    ),
    (96, {"Nq": 9000, "Nk": 9000, "enabled_options": {"block_mask"}}, (128, 128)),
]


BACKWARD_TILES: list[tuple[dict[str, Any], int]] = [
    ({"Nq": 1024}, 80),
    ({"Nq": 80}, 80),
    ({"Nq": 78}, 80),
    ({"Nq": 77}, 64),  # more would be empty
    ({"Nq": 512}, 64),
    ({"Nq": 1024, "Dv": 64}, 80),
    ({"Nq": 1024, "D": 64}, 64),  # dQ has 64 columns for each of two warpgroups
    ({"Nq": 2048, "window": CAUSAL}, 80),
    ({"Nq": 2000, "window": CAUSAL}, 64),  # a tile on the diagonal is half masked out
    ({"Nq": 2048, "window": (100, None)}, 64),
    ({"Nq": 2048, "window": (None, 1)}, 80),
    ({"Nq": 2048, "Nk": 4096, "window": (2046, 0)}, 64),
    ({"Nq": 2048, "Nk": 4096, "window": (1024, 1023)}, 80),
    ({"Nq": 2048, "Nk": 1024, "window": (1000, 1048)}, 64),
    ({"Nq": 1024, "Nk": 16384}, 80),
    ({"Nq": 1024, "Nk": 1 << 20}, 80),
    ({"Nq": 1024, "sequences": 2}, 64),
    ({"Nq": 1024, "dropout_p": 0.5}, 64),
    *(
        ({"Nq": 1024, "enabled_options": {name}}, 64)
        for name in ("softcap", "alibi_slopes", "mask", "block_mask")
    ),
    ({"Nq": 2048, "window": CAUSAL, "enabled_options": {"block_mask"}}, 64),
    # One option a case: the order of a set, and so the name of the case, differs among processes.
    *(({"Nq": 1024, "enabled_options": {name}}, 80) for name in ("kv_lengths", "sinks")),
]


def repairing_bytes(tile: TileSize, dim: int, value: int) -> int:
    return hopper_backward_bytes(tile, dim, value, repairs=True)


SHARED: list[tuple[Callable[[TileSize, int, int], int], TileSize, int, int, int]] = [
    # Queries, and the next ones where there is space; staging memory; stages of keys and values.
    (hopper_forward_bytes, TileSize(192, 128, 12, stages=2), 64, 64, 6 * 8 + 24 + 2 * 32),
    (hopper_forward_bytes, TileSize(192, 128, 12, stages=2), 32, 64, 6 * 8 + 24 + 2 * 32),
    (hopper_forward_bytes, TileSize(128, 128, 8, stages=2), 128, 128, 4 * 16 + 16 + 2 * 64),
    (hopper_forward_bytes, TileSize(128, 96, 8, stages=2), 192, 128, 3 * 24 + 16 + 2 * 60),
    (hopper_forward_bytes, TileSize(128, 128, 8, stages=2), 192, 128, 2 * 24 + 16 + 2 * 80),
    (hopper_forward_bytes, TileSize(128, 96, 8, stages=2), 192, 192, 2 * 24 + 16 + 2 * 72),
    (hopper_forward_bytes, TileSize(128, 80, 8, stages=2), 256, 256, 2 * 32 + 2 * 80),
    (hopper_forward_bytes, TileSize(128, 64, 8, stages=2), 256, 256, 2 * 32 + 16 + 2 * 64),
    (hopper_forward_bytes, TileSize(192, 248, 12, stages=2), 64, 128, 4 * 8 + 2 * 93),
    # The same for each of two groups.
    (hopper_forward_bytes, TileSize(128, 64, 8, stages=4, groups=2), 64, 64, 2 * (32 + 16 + 64)),
    (hopper_forward_bytes, TileSize(128, 64, 8, stages=5, groups=2), 64, 32, 2 * (16 + 16 + 80)),
    # k and v, stages of q and dout, dS, and three dQ tiles of each warpgroup.
    (hopper_backward_bytes, TileSize(64, 128, 8, 1, 2), 128, 128, 64 + 48 + 32 + 32 + 48),
    (hopper_backward_bytes, TileSize(128, 128, 8, 1, 2), 64, 64, 32 + 48 + 32 + 64 + 48),
    (hopper_backward_bytes, TileSize(64, 128, 8, 1, 2), 64, 64, 32 + 24 + 16 + 32 + 48),
    # dQ beside dP: two stages more of q than of dout, and one tile of dS.
    (hopper_backward_bytes, TileSize(128, 128, 8, 1, 3), 64, 64, 32 + 64 + 32 + 32 + 48),
    (hopper_backward_bytes, TileSize(64, 128, 8, 1, 2), 64, 128, 48 + 24 + 32 + 32 + 48),
    (hopper_backward_bytes, TileSize(64, 128, 8, 1, 2), 128, 64, 48 + 48 + 16 + 32 + 48),
    (hopper_backward_bytes, TileSize(64, 128, 8, 1, 1), 128, 128, 64 + 32 + 16 + 32 + 48),
    # dQ transposed: one tile of dS, and one whole dQ tile.
    (hopper_backward_bytes, TileSize(80, 128, 8, 1, 2), 128, 128, 64 + 60 + 40 + 20 + 40),
    (hopper_backward_bytes, TileSize(80, 128, 8, 1, 2), 128, 64, 48 + 60 + 20 + 20 + 40),
    # Halves of a tile: as many stages of q, and one of dS.
    (hopper_backward_bytes, TileSize(64, 128, 8, 1, 2), 192, 128, 80 + 48 + 32 + 16 + 48),
    # Wide heads: as many stages of q, and two tiles of P.
    (hopper_backward_bytes, TileSize(64, 64, 8, 1, 2), 256, 256, 64 + 64 + 64 + 32),
    (hopper_backward_bytes, TileSize(64, 64, 8, 1, 3), 192, 192, 48 + 72 + 72 + 32),
    (hopper_backward_bytes, TileSize(64, 64, 8, 1, 3), 192, 128, 40 + 72 + 48 + 32),
    (hopper_backward_bytes, TileSize(64, 64, 8, 1, 3), 128, 256, 48 + 48 + 96 + 32),
    # Their dq: queries and dout, and stages that take keys and values in turn.
    (hopper_wide_dq_bytes, TileSize(128, 64, 8, 1, 3), 256, 256, 64 + 64 + 3 * 32),
    (hopper_wide_dq_bytes, TileSize(128, 64, 8, 1, 4), 128, 192, 32 + 48 + 4 * 24),
    # To repair: k once more.
    (repairing_bytes, TileSize(64, 128, 8), 128, 64, 48 + 32 + 8 + 32 + 48 + 32),
    (repairing_bytes, TileSize(80, 128, 8), 128, 128, 64 + 20 + 20 + 40 + 40 + 32),
    # Of halves, two tiles of dS and one dQ tile.
    (repairing_bytes, TileSize(64, 128, 8), 192, 128, 80 + 24 + 16 + 32 + 16 + 48),
]


@pytest.mark.parametrize(("count", "tile", "dim", "value", "kilobytes"), SHARED)
def test_shared_memory(count: Any, tile: TileSize, dim: int, value: int, kilobytes: int) -> None:
    assert count(tile, dim, value) == kilobytes * 1024
