"""Tiles that the GPU classifies and lists by the values of arrays, as NumPy does it."""

from typing import Any

import numpy as np
import pytest

import tileattn
from tests.gpu.hopper import described
from tests.kernels.cuda.src.test_tile_lists import (
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
from tileattn.kernels.cuda.plan.plan import plan_backward, plan_forward

pytestmark = [*needs_gpu, pytest.mark.usefixtures("on_hopper")]


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
        workspace = cupy.full(plan.workspace.nbytes, 0xAB, np.uint8)
        addresses = {name: x.data.ptr for name, x in arrays.items()}
        executable = Executable(plan, tuple(addresses))
        Pass([*arrays], []).run(executable, addresses, arrays, 0, workspace)
        if kind == "forward":
            assert bits((arrays["out"], arrays["lse"])) == bits((out, lse))
        else:
            assert bits(tuple(arrays[x] for x in ("dq", "dk", "dv"))) == bits(grads[:3])
        there = cupy.asnumpy(workspace)
        parts = {name: there[start:] for name, start in plan.workspace.starts.items()}
        kinds = kinds_of(problem, tile_of(plan), aux)
        found = as_numbers(parts["tile_kinds"], np.int8, kinds.shape)
        np.testing.assert_array_equal(found, kinds)
        if plan.tile_lists is not None:
            lists = expected_lists(plan, kinds)
            found = as_numbers(parts["tile_list"], np.int32, lists.shape)
            np.testing.assert_array_equal(found, lists)
