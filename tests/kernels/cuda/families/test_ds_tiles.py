"""The kernels that sum dS over pairs: which one a call has, and its grid."""

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.kernels.cuda.plan.planning import A100, H200, asked, kernels
from tileattn.call.problem import problem_of
from tileattn.kernels.cuda.families.backward_pass import backward_launches
from tileattn.kernels.cuda.families.context import KernelLaunch
from tileattn.kernels.cuda.families.grid import GridSizes
from tileattn.kernels.cuda.plan.catalog import context_of
from tileattn.kernels.cuda.plan.device import Device
from tileattn.kernels.cuda.plan.layout import contiguous, contiguous_inputs
from tileattn.kernels.cuda.plan.plan import plan_backward, with_grids

B, HQ, NQ, NK = 2, 6, 300, 530
SHAPES = [(B, HQ, NQ, NK), (1, HQ, NQ, NK), (B, 1, 1, NK), (1, 1, NQ, 1), (1, 1, 1, 1)]
TILES = [B * HQ * 3 * 5, HQ * 3 * 5, B * 5, 3, 1]
COPIES = [1, 1, 5, 3, 9]  # a quarter of the rows of score tiles: B, HQ x 3, B x HQ, B x HQ x 3


def launches(
    dtype: str, dim: int, shape: Any, sms: int = 132, *, dqkv: bool = True
) -> tuple[KernelLaunch, ...]:
    problem = replace(problem_of(dtype, dim, {"bias"}), B=B, Hq=HQ, Hkv=2, Nq=NQ, Nk=NK)
    context = context_of("sm_90a")._replace(
        **{"bias": "float32", "full_bias": shape == SHAPES[0], "bias_alignment_bytes": 16},
        dbias=True,
        sm_count=sms,
        dqkv=dqkv,
    )
    found = backward_launches(problem, context, deterministic=False, sinks=False)
    return with_grids(found, GridSizes(problem, shape))


@pytest.mark.parametrize(("shape", "tiles", "copies"), [*zip(SHAPES, TILES, COPIES, strict=True)])
@pytest.mark.parametrize("dim", [64, 128])
def test_on_hopper(dim: int, shape: Any, tiles: int, copies: int) -> None:
    """A persistent kernel sums every dbias, also one with all axes of the scores."""
    for sms in (132, 4):
        found = launches("bfloat16", dim, shape, sms)
        own, total = (x for x in found if "dbias" in x.key.kernel)
        assert (own.key.kernel, own.key.tile) == ("backward_dbias_sm90", (128, 128))
        assert own.grid == min(tiles * copies, sms)
        assert total.key.kernel == "backward_dbias_sum"
        elements = math.prod(shape)
        together = 32 if elements <= 1 << 16 else 256
        assert total.grid == (-(-elements // together) if copies > 1 else 1)
        assert [name for name, _ in own.tensor_maps] == ["q", "k", "v", "dout"]
        assert not any(x.key.write_dbias for x in found)


@pytest.mark.parametrize(("dtype", "dim"), [("float32", 64), ("float16", 256), ("float16", 300)])
def test_elsewhere(dtype: str, dim: int) -> None:
    """The generic kernel over keys writes a dbias that is not broadcast."""
    kernels = ["naive_dbias"] if dim > 256 else ["backward_dbias", "backward_dbias_sum"]
    for shape in SHAPES:
        found = launches(dtype, dim, shape)
        own = [x.key.kernel for x in found if "dbias" in x.key.kernel]
        written = any(x.key.write_dbias and not x.key.head_flags for x in found)
        assert (own, written) in ((kernels, False), ([], shape == SHAPES[0]))


@pytest.mark.parametrize(("dtype", "dim"), [("float16", 64), ("float32", 64), ("float16", 300)])
@pytest.mark.parametrize("shape", SHAPES)
def test_alone(dtype: str, dim: int, shape: Any) -> None:
    """Where the gradients of q, k and v are not wanted, nothing computes them."""
    found = [x.key.kernel for x in launches(dtype, dim, shape, dqkv=False)]
    before = "naive_large_scores" if dim > 256 else "backward_large_scores"
    hopper = "_sm90" * (dim <= 128 and dtype == "float16")
    own = ["naive_dbias"] if dim > 256 else ["backward_dbias" + hopper, "backward_dbias_sum"]
    assert found == ["backward_preprocess", before, *own]


@pytest.mark.parametrize("device", [H200, A100])
def test_without_arrays_for_other_gradients(device: Device) -> None:
    problem = asked("float16", {"bias", "sinks"}, D=64, Dv=64)
    inputs = contiguous_inputs(problem).with_arrays(
        bias=contiguous((1, 6, 37, 56), "float32"), sinks=contiguous((6,), "float32")
    )
    layout = inputs.with_contiguous_results(problem, "backward")
    some = {name: x for name, x in layout.arrays if name not in ("dq", "dk", "dv")}
    plan = plan_backward(problem, layout._replace(arrays=tuple(some.items())), device)
    dbias = "backward_dbias_sm90" if device == H200 else "backward_dbias"
    assert kernels(plan)[2:] == [dbias, "backward_dbias_sum", "backward_dsinks"]
    assert "dq_at" not in plan.fields
    assert not plan.workspace.starts.keys() & {"dq_accum", "dq_semaphore"}


# Sizes of calls (B, H, N), the tile that sums dbias of a bias (1, H, N, N), and its copies.
@pytest.mark.parametrize(
    ("sizes", "dtype", "tile", "copies"),
    [
        ((1024, 6, 49), "bfloat16", (64, 64), 66),  # Swin
        ((100, 24, 49), "float16", (64, 64), 16),
        ((9, 24, 64), "float16", (64, 64), 3),
        ((128, 4, 384), "bfloat16", (128, 128), 11),  # AlphaFold
        ((16, 16, 512), "bfloat16", (128, 128), 1),  # T5
    ],
)
def test_thread_blocks_share_few_tiles(sizes: Any, dtype: str, tile: Any, copies: int) -> None:
    """Each has at least four batch entries, and their number does not depend on the GPU."""
    B, H, N = sizes
    problem = asked(dtype, {"bias"}, B=B, Hq=H, Hkv=H, Nq=N, Nk=N, D=32, Dv=32)
    inputs = contiguous_inputs(problem).with_arrays(bias=contiguous((1, H, N, N), dtype))
    layout = inputs.with_contiguous_results(problem, "backward")
    for device in (H200, replace(H200, sm_count=20)):
        plan = plan_backward(problem, layout, device)
        (own,) = (x for x in plan.launches if x.key.kernel == "backward_dbias_sm90")
        assert (own.key.tile, plan.fields["dbias_copies"]) == (tile, copies)
        tiles = H * (-(-N // tile[0])) ** 2
        assert own.grid == min(tiles * copies, device.sm_count * own.key.min_blocks_per_sm)
        assert ("dbias_sums" in plan.workspace.starts) == (copies > 1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("changed", "written"),
    [
        ({}, True),
        ({"B": 1}, True),
        ({"window": (None, 0)}, False),  # some tiles are empty, and are not written
        ({"Nq": 6000, "Nk": 6000}, False),  # too large for copies
    ],
)
def test_copies_of_dbias_for_each_batch_entry(dtype: str, changed: Any, written: bool) -> None:
    """The kernel over keys writes dS of a bias that batch entries share; another adds it up."""
    sizes: Any = {"B": 5, "Hq": 4, "Hkv": 2, "Nq": 49, "Nk": 60} | changed
    problem = asked(dtype, {"bias"}, D=32, Dv=32, **sizes)
    shape = 1, problem.Hq, problem.Nq, problem.Nk
    inputs = contiguous_inputs(problem).with_arrays(bias=contiguous(shape, dtype))
    plan = plan_backward(problem, inputs.with_contiguous_results(problem, "backward"), H200)
    own = [x.key.kernel for x in plan.launches if x.key.write_dbias]
    assert own == ["backward_dkdv"] * written
    assert ("backward_dbias" in kernels(plan)) == (not written)
    assert ("backward_dbias_sum" in kernels(plan)) == (problem.B > 1)
    if written and problem.B > 1:
        assert plan.fields["dbias_copies"] == problem.B
