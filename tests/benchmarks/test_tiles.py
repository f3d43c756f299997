"""A forward pass can be held to a kernel and its tiles, to time one size against the others."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import gpu_tiles
from benchmarks.configurations import Inputs
from tests.backends.cupy import fake_cupy
from tileattn.kernels.cuda.families.families import forward_launches
from tileattn.kernels.cuda.families.hopper import HOPPER
from tileattn.kernels.cuda.families.tiles import TileSize
from tileattn.kernels.cuda.plan.catalog import context_of, problem_of

CONTEXT = context_of("sm_90a")._replace(sm_count=132)
PROBLEM = replace(problem_of("float16", 64), B=2, Hq=16, Hkv=16, Nq=4096, Nk=4096)
SIZES = [(kernel, tile) for kernel, tiles in gpu_tiles.TILES.items() for tile in tiles]


@pytest.mark.parametrize(("kernel", "tile"), SIZES)
def test_the_kernel_has_the_tiles_that_it_is_held_to(kernel: str, tile: TileSize) -> None:
    launch = gpu_tiles.launch_with(kernel, tile, PROBLEM, CONTEXT)
    key = launch.key
    assert (key.kernel, key.block_q, key.block_k, key.warps_m) == (kernel, *tile[:3])
    assert launch.grid == min(
        132 if kernel == HOPPER else 1 << 30, 2 * 16 * -(-4096 // key.block_q)
    )


def test_the_chosen_tiles_are_started_as_they_always_are() -> None:
    (chosen,) = forward_launches(PROBLEM, CONTEXT)
    key, why = chosen.key, chosen.why
    sizes = key.block_q, key.block_k, key.warps_m, key.warps_n, key.stages
    tile = TileSize(*sizes, groups=key.groups, tuned=True)
    assert gpu_tiles.launch_with(key.kernel, tile, PROBLEM, CONTEXT) == chosen._replace(why=why)


def test_tiles_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"TileSize.* does not fit forward: no tile fits"):
        gpu_tiles.launch_with("forward", TileSize(128, 1024, 4, stages=2), PROBLEM, CONTEXT)


def test_a_prepared_call_starts_the_kernel_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cupy.machine(monkeypatch) as gpu:
        gpu.arch = "sm_90a"
        q, k, v, dout = (gpu.array((1, 2, 100, 64), np.float16) for _ in range(4))
        call = gpu_tiles.prepared("forward", TileSize(32, 64, 1), Inputs(q, k, v, dout))
        assert not gpu.launches
        out, lse = call()
        call()
        assert [(key.kernel, key.block_q) for key, *_ in gpu.launches] == [("forward", 32)] * 2
        assert (out.shape, lse.shape, lse.dtype) == ((1, 2, 100, 64), (1, 2, 100), np.float32)
