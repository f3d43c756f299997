"""Tiles that the GPU classifies and lists as NumPy does it, and plans without host tables."""

from typing import Any

import numpy as np
import pytest

import tileattn
from tests.gpu.hopper import described
from tests.kernels.cuda.src.test_tile_lists import (
    OWN,
    as_numbers,
    expected_lists,
    kinds_of,
    reading,
    tile_of,
)
from tests.on_gpu import bits, needs_gpu, sent
from tileattn.backends.cupy import describe
from tileattn.backends.cupy.cached_passes import Pass
from tileattn.backends.cupy.executable import Executable
from tileattn.kernels.cuda.plan.plan import LaunchPlan, plan_backward, plan_forward
from tileattn.kernels.cuda.plan.tile_lists import END

pytestmark = [*needs_gpu, pytest.mark.usefixtures("on_hopper")]


def run(plan: LaunchPlan, arrays: dict[str, Any]) -> dict[str, Any]:
    """Run a plan in a poisoned workspace, and return the parts of the workspace on the host."""
    import cupy

    workspace = cupy.full(plan.workspace.nbytes, 0xAB, np.uint8)
    addresses = {name: x.data.ptr for name, x in arrays.items()}
    executable = Executable(plan, tuple(addresses))
    Pass([*arrays], []).run(executable, addresses, arrays, 0, workspace)
    there = cupy.asnumpy(workspace)
    return {name: there[start:] for name, start in plan.workspace.starts.items()}


@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=lambda x: x.__name__)
@pytest.mark.parametrize(("D", "Hkv"), [(64, 4), (128, 2), (256, 1)])
@pytest.mark.parametrize(
    ("name", "Nq", "Nk"),
    [
        *((name, 470, 917) for name in sorted(reading(1, 1))),
        *((name, 4500, 5300) for name in ("by_head", "documents", "prefix_lm")),
    ],
)
def test_kinds_and_lists(name: str, Nq: int, Nk: int, D: int, Hkv: int, dtype: Any) -> None:
    """Both passes begin with a poisoned workspace, and repeat the same bits."""
    import cupy

    rng = np.random.default_rng(0)
    shapes = (2, 4, Nq, D), (2, Hkv, Nk, D), (2, Hkv, Nk, D), (2, 4, Nq, D)
    q, k, v, dout = (
        cupy.asarray(rng.standard_normal(shape, np.float32).astype(dtype)) for shape in shapes
    )
    own = reading(Nq, Nk)[name]
    aux = own["aux"]
    options = {"mask_mod": own["mask_mod"], "aux": tuple(map(sent, aux))}
    out, lse = tileattn.forward(q, k, v, **options)
    asked = {**options, "wrt": ("q", "k", "v"), "deterministic": True}
    grads = tileattn.backward(dout, q, k, v, out, lse, **asked)
    for kind, plan_pass in (("forward", plan_forward), ("backward", plan_backward)):
        problem, layout = described(kind, q, k, v, dout=dout, **options)
        more: Any = {"deterministic": True} if kind == "backward" else {}
        plan = plan_pass(problem, layout, describe.device_of(0), **more)
        arrays = {"q": q, "k": k, "v": v, **{f"aux[{n}]": x for n, x in enumerate(options["aux"])}}
        arrays |= {"out": cupy.empty_like(out), "lse": cupy.empty_like(lse)}
        if kind == "backward":
            arrays |= {"out": out, "lse": lse, "dout": dout}
            arrays |= {
                name: cupy.full_like(x, np.nan)
                for name, x in zip(("dq", "dk", "dv"), (q, k, v), strict=True)
            }
        parts = run(plan, arrays)
        if kind == "forward":
            assert bits((arrays["out"], arrays["lse"])) == bits((out, lse))
        else:
            assert bits(tuple(arrays[x] for x in ("dq", "dk", "dv"))) == bits(grads[:3])
        kinds = kinds_of(problem, tile_of(plan), aux)
        found = as_numbers(parts["tile_kinds"], np.int8, kinds.shape)
        np.testing.assert_array_equal(found, kinds)
        if plan.tile_lists is not None:
            lists = expected_lists(plan, kinds)
            found = as_numbers(parts["tile_list"], np.int32, lists.shape)
            np.testing.assert_array_equal(found, lists)


@pytest.mark.parametrize(("D", "Hkv"), [(64, 4), (128, 2), (256, 1)])
@pytest.mark.parametrize("name", sorted(OWN))
def test_the_gpu_lists_what_the_host_lists(name: str, D: int, Hkv: int) -> None:
    """Without tables a pass has the same lists, and so the same bits."""
    check_without_tables((2, 4, Hkv, 470, 917, D), mask_mod=OWN[name])


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window": (700, 100)},
        {"causal": True, "kv_lengths": [4000, 129, 2500]},
        {"kv_lengths": [130, 4000, 2500]},
        {},
    ],
    ids=str,
)
def test_orders_without_tables(D: int, options: dict[str, Any]) -> None:
    """The order of work tiles changes no bit."""
    check_without_tables((3, 12, 4, 3000, 4000, D), **options)


def check_without_tables(sizes: tuple[int, ...], **options: Any) -> None:
    import cupy

    B, Hq, Hkv, Nq, Nk, D = sizes
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        cupy.asarray(rng.standard_normal((B, h, n, D), np.float32).astype(np.float16))
        for h, n in ((Hq, Nq), (Hkv, Nk), (Hkv, Nk), (Hq, Nq))
    )
    out, lse = tileattn.forward(q, k, v, **options)
    given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout}
    for kind, plan_pass in (("forward", plan_forward), ("backward", plan_backward)):
        call = described(kind, q, k, v, dout=dout, **options)
        more: Any = {"deterministic": True} if kind == "backward" else {}
        found, lists = [], []
        for tables in (True, False):
            plan = plan_pass(*call, describe.device_of(0), tables=tables, **more)
            results = {"out": cupy.zeros_like(out), "lse": cupy.zeros_like(lse)}
            if kind == "backward":
                results = {f"d{n}": cupy.zeros_like(given[n]) for n in "qkv"}
            names = {name for name, _ in call[1].arrays}
            arrays = {n: x for n, x in (given | results).items() if n in names}
            parts = run(plan, arrays)
            assert {"assignment", "tile_list"}.isdisjoint(plan.constants) or tables
            found.append(bits(tuple(results.values())))
            if "tile_list" in plan.constants:
                lists.append(plan.constants["tile_list"].array().copy())
            elif lists:
                lists.append(as_numbers(parts["tile_list"], np.int32, lists[0].shape))
        assert found[0] == found[1]
        if lists and kind == "backward":
            for x in lists:  # ranks of unused entries
                x[..., 1::2] *= x[..., ::2] < END - x.shape[-1]
        if lists:
            np.testing.assert_array_equal(lists[0], lists[1])
