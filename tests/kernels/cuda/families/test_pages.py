"""Plans of keys in pages; no GPU."""

from typing import Any

import pytest

from tests.kernels.cuda.plan.planning import A100, H200, asked, forward, kernels
from tileattn.kernels.cuda.families.block_order import ORDERS_QUERIES
from tileattn.kernels.cuda.families.decode import DECODE
from tileattn.kernels.cuda.families.grid import PACKED_ROWS
from tileattn.kernels.cuda.families.hopper import HOPPER
from tileattn.kernels.cuda.families.size_class import FEW_ROWS, MOST_ROWS, WHOLE
from tileattn.kernels.cuda.families.split import COMBINE, SPLIT
from tileattn.kernels.cuda.plan.device import Device
from tileattn.kernels.cuda.plan.layout import contiguous, contiguous_inputs
from tileattn.kernels.cuda.plan.plan import LaunchPlan

PAGES, WIDTH = 300, 48
SIZES: dict[str, Any] = {"B": 3, "Hq": 8, "Hkv": 2, "Nq": 500, "D": 128, "Dv": 128}


def plan(page: int, options: Any = (), device: Device = H200, **changed: Any) -> LaunchPlan:
    sizes = SIZES | {"Nk": WIDTH * page, "page": page} | changed
    P = asked("bfloat16", {"kv_lengths", *options}, **sizes)
    arrays = {
        name: contiguous((PAGES, P.Hkv, page, n), P.dtype.name)
        for name, n in (("k", P.D), ("v", P.Dv))
    }
    table = contiguous((P.entries, WIDTH), "int32")
    return forward(P, device, contiguous_inputs(P).with_arrays(block_table=table, **arrays))


@pytest.mark.parametrize(("page", "box"), [(16, 16), (48, 16), (64, 64), (192, 64), (256, 128)])
def test_boxes_of_the_hopper_kernel_divide_pages_and_tiles(page: int, box: int) -> None:
    made = plan(page, window=(None, 0))
    assert kernels(made) == [HOPPER]
    assert made.launches[0].key.paged
    assert not made.launches[0].key.gathered
    assert made.launches[0].key.block_k == 128
    ((_, k, v),) = made.tensor_maps.values()
    assert k.box == v.box == (64, box, 1, 1)
    assert k.sizes == (128, page, 2, PAGES)


@pytest.mark.parametrize("page", [1, 3, 8, 24, 40])
def test_the_hopper_kernel_gathers_keys_if_boxes_would_be_small(page: int) -> None:
    made = plan(page, window=(None, 0))
    assert kernels(made) == [HOPPER]
    key = made.launches[0].key
    assert key.paged
    assert key.gathered
    ((q,),) = made.tensor_maps.values()
    assert q.box == (64, 64, 1, 1)
    assert made.fields["page"] == page
    assert made.fields["table_width"] == WIDTH


@pytest.mark.parametrize("page", [8, 16, 64])
def test_a_group_of_warps_has_a_warp_that_gathers_keys(page: int) -> None:
    """Two groups at most: with more, a group has only the warp that finds work tiles."""
    made = plan(page, B=64, Nq=64, Nk=64, D=64, Dv=64)
    assert kernels(made) == [HOPPER]
    (key,) = {launch.key for launch in made.launches}
    assert key.groups == (2 if key.gathered else 4)


def test_packed_sequences_of_few_queries_have_kernels_of_their_own() -> None:
    """Those with few rows are split, others are taken whole."""
    made = plan(16, {"cu_seqlens_q"}, B=1)
    assert kernels(made) == [ORDERS_QUERIES, HOPPER, DECODE, COMBINE, SPLIT]
    assert all(launch.key.paged and launch.key.packed for launch in made.launches)
    assert [x.key.block_q for x in made.launches[2::2]] == [PACKED_ROWS, FEW_ROWS]
    assert made.fields["max_split_rows"] == FEW_ROWS
    assert made.fields["splits"] == 3
    longer = plan(100, {"cu_seqlens_q"}, B=1, sequences=7)
    assert kernels(longer) == [ORDERS_QUERIES, HOPPER, DECODE, COMBINE, SPLIT]
    assert longer.fields["splits"] == 19
    assert longer.fields["partial_rows"] == 7 * PACKED_ROWS
    few, join, many = longer.launches[2:]
    assert few.grid == min(19 * 7 * 2, 2 * H200.sm_count)
    assert join.grid * join.key.warps_m == 7 * 2 * PACKED_ROWS
    assert many.traits.split_keys == WHOLE


@pytest.mark.parametrize("page", [16, 50, 100])
def test_tiles_of_packed_sequences_do_not_depend_on_how_many_there_are(page: int) -> None:
    plans = [plan(page, {"cu_seqlens_q"}, B=1, Nq=Nq) for Nq in (1, 5, 9, 20, 32, 500)]
    tiles = {
        tuple(
            (x.key.tile, x.traits.piece_keys, x.traits.group_keys)
            for x in made.launches
            if x.key.kernel in (DECODE, SPLIT)
        )
        for made in plans
    }
    assert len(tiles) == 1
    assert len(tiles.pop()) == 2


@pytest.mark.parametrize(
    ("page", "changed", "why"),
    [
        (16, {"Dv": 20}, "the head dimension of v is not a multiple of 8"),
        (16, {"device": A100}, "the GPU does not have compute capability 9.0"),
    ],
    ids=str,
)
def test_what_the_hopper_kernel_does_not_take(page: int, changed: Any, why: str) -> None:
    made = plan(page, {"cu_seqlens_q"}, **changed)
    assert {*kernels(made)} - {COMBINE} == {SPLIT}
    assert made.fields["max_split_rows"] == MOST_ROWS
    assert why in made.launches[0].why


@pytest.mark.parametrize(("Nq", "first"), [(1, DECODE), (8, DECODE), (32, HOPPER)])
def test_the_keys_of_few_queries_are_split(Nq: int, first: str) -> None:
    """By a kernel whose GEMMs are transposed if few rows share keys."""
    made = plan(16, Nq=Nq, Nk=1 << 16)
    assert kernels(made) == [first, COMBINE]
    assert made.launches[0].key.split_kv
