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
from tileattn.kernels.cuda.families.shared_memory import generic_static_bytes
from tileattn.kernels.cuda.plan.device import Device, device_of_arch
from tileattn.kernels.cuda.plan.layout import ArrayLayout, contiguous
from tileattn.kernels.cuda.tile_sizes import TileSize

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


@pytest.mark.parametrize("device", [H200, A100])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("changed", [{}, {"D": 64}, {"D": 200}, {"D": 300}, {"Nk": 0}, {"B": 0}])
def test_parts_of_the_workspace(device: Device, deterministic: bool, changed: Fields) -> None:
    """They are aligned, do not overlap, and parts that start at zero come last."""
    sizes: Fields = {"Nq": 300, "Nk": 530, "D": 72, "Dv": 40}
    problem = asked(**sizes | changed)
    plan = backward(problem, device, deterministic=deterministic)
    found = plan.workspace
    ends = [*sorted(found.starts.values()), found.nbytes][1:]
    past = dict(zip(sorted(found.starts, key=found.starts.__getitem__), ends, strict=True))
    assert all(start % 256 == 0 for start in found.starts.values())
    rows = problem.B * problem.Hq * plan.fields["rows"] * 4
    for name in ("delta", "lse_log2", "row_max") if problem.B else ():
        assert past[name] - found.starts[name] >= rows >= problem.B * problem.Hq * problem.Nq * 4
    zeros = {name for name, start in found.starts.items() if start >= found.zeros}
    counters = {"head_flags", "row_counter", "tile_counter", "dq_semaphore", "dq_counter"}
    in_any_order = {"dq_accum"} if device == A100 else set()
    assert zeros == (counters | in_any_order) & found.starts.keys()


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
        with pytest.raises(ValueError, match=f"must be one of sm_75, .*; got '{name}'"):
            device_of_arch(name)
