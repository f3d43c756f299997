"""Plans of latent attention, whose values are a view of the keys; no GPU."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.kernels.cuda.plan.planning import A100, H200, asked, forward, kernels
from tileattn.backends.cupy.describe import is_view
from tileattn.backends.cupy.explain import explain_on
from tileattn.call.problem import Operands, Problem
from tileattn.errors import UnsupportedError
from tileattn.kernels.cuda.families.decode import DECODE
from tileattn.kernels.cuda.families.latent import LATENT
from tileattn.kernels.cuda.families.pages import why_not_cache
from tileattn.kernels.cuda.families.split import COMBINE
from tileattn.kernels.cuda.plan.device import Device
from tileattn.kernels.cuda.plan.layout import ArrayLayout, CallLayout, contiguous, contiguous_inputs
from tileattn.kernels.cuda.plan.plan import LaunchPlan

PAGES = 200


def latent(dtype: str = "bfloat16", options: Any = (), **changed: Any) -> Problem:
    sizes = {"B": 3, "Hq": 16, "Hkv": 1, "Nq": 2, "Nk": 16384, "D": 576, "Dv": 512}
    return asked(dtype, {"kv_lengths", *options}, **sizes | changed)


def layout_of(P: Problem, *, v_is_k: bool = True) -> CallLayout:
    layout = contiguous_inputs(P)
    if P.page is None:
        k = contiguous((P.B, P.Hkv, P.Nk, P.D), P.dtype.name)
    else:
        k = contiguous((PAGES, P.Hkv, P.page, P.D), P.dtype.name)
        table = contiguous((P.B, P.Nk // P.page), "int64")
        layout = layout.with_arrays(block_table=table)
    v = ArrayLayout((*k.shape[:-1], P.Dv), k.strides, k.dtype)
    return layout.with_arrays(k=k, v=v)._replace(v_is_k=v_is_k)


def plan(P: Problem, device: Device = H200, *, v_is_k: bool = True) -> LaunchPlan:
    return forward(P, device, layout_of(P, v_is_k=v_is_k))


@pytest.mark.parametrize("page", [None, 8, 16, 64, 128])
@pytest.mark.parametrize("Hq", [16, 100, 128])
def test_a_plan(Hq: int, page: int | None) -> None:
    P = latent(Hq=Hq, page=page)
    made = plan(P)
    assert kernels(made) == [LATENT, COMBINE]
    first, join = made.launches
    blocks = -(-P.group * P.Nq // 64)
    assert first.grid == made.fields["splits"] * P.B * blocks
    assert join.grid == P.B * P.Hq * P.Nq
    assert join.key.value_dim == first.key.value_dim == 512
    ((one,),) = made.tensor_maps.values()
    assert (one.name, one.sizes[0], one.box) == ("k", 576, (64, min(page or 64, 64), 1, 1))
    rows = P.B * Hq * P.Nq * made.fields["splits"]
    assert made.workspace.nbytes >= rows * 514 * 4


def test_splits_depend_only_on_the_rows_that_share_keys() -> None:
    for Hq in (16, 32, 128):
        calls = (latent(Hq=Hq, Nk=Nk, B=B, Nq=1) for Nk in (600, 8192) for B in (1, 7))
        (keys,) = {plan(P).fields["split_keys"] for P in calls}
        assert keys % 64 == 0


def test_one_split_is_not_joined() -> None:
    made = plan(latent(Nk=500))
    assert kernels(made) == [LATENT]
    assert made.workspace.nbytes == 0


@pytest.mark.parametrize(
    ("changed", "v_is_k", "device", "why"),
    [
        ({}, False, H200, "v is not a view"),
        ({}, True, A100, "does not have compute capability 9.0"),
        ({"dtype": "float32"}, True, H200, "dtype is neither"),
        ({"options": {"mask"}}, True, H200, "mask is in use"),
        ({"D": 640}, True, H200, "the head dimension of k is above 576"),
        ({"Dv": 576}, True, H200, "the head dimension of v is above 512"),
    ],
)
def test_what_the_naive_kernel_computes(
    changed: dict[str, Any], v_is_k: bool, device: Device, why: str
) -> None:
    made = plan(latent(**changed), device, v_is_k=v_is_k)
    assert kernels(made) == ["naive_forward"]
    assert why in made.launches[0].why


def test_pages_that_no_kernel_reads() -> None:
    assert why_not_cache(latent(page=64)) is None
    assert "pages of fewer" in str(why_not_cache(latent(page=50)))
    assert "above 576" in str(why_not_cache(latent(page=64, D=640)))
    with pytest.raises(UnsupportedError, match="v is not a view"):
        plan(latent(page=64), v_is_k=False)


def test_narrow_heads_have_other_kernels() -> None:
    P = latent(D=192, Dv=128)
    assert kernels(plan(P)) == [DECODE, COMBINE]


def test_explain_counts_each_key_once() -> None:
    P = replace(latent(Nq=1), enabled_options=frozenset())
    q, k, v = (
        np.broadcast_to(np.zeros((), P.dtype), shape)
        for shape in ((P.B, P.Hq, P.Nq, P.D), (P.B, 1, P.Nk, P.D), (P.B, 1, P.Nk, P.Dv))
    )
    lengths = np.full(P.B, P.Nk)
    said = explain_on(H200, P, layout_of(P), Operands(q, k, v, lengths, lengths - P.Nq))
    assert said.kernel == LATENT
    assert said.bytes_moved["k"] == P.B * P.Nk * P.D * 2
    assert said.bytes_moved["v"] == 0
    assert said.traffic["flash2"][0] < q.nbytes + k.nbytes + v.nbytes


def test_a_view() -> None:
    class There:
        def __init__(self, x: Any) -> None:
            self.shape, self.strides = x.shape, x.strides
            self.data = type("Memory", (), {"ptr": x.__array_interface__["data"][0]})

    c = np.zeros((2, 1, 5, 576), np.float16)
    view = c[..., :512]
    assert is_view(There(c), There(view))
    assert not is_view(There(c), There(c[..., 64:]))
    assert not is_view(There(c), There(view.copy()))
    assert not is_view(There(c), There(c[:, :, ::2, :512]))
