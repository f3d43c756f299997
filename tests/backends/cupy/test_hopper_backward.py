"""The Hopper backward kernels: which calls they support, what follows them, with what; no GPU."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tests.backends.cupy import fake_cupy
from tests.backends.cupy.fake_cupy import Machine
from tests.backends.cupy.test_hopper import CONTEXT, H200, REFUSED, SUPPORTED
from tileattn.kernels.config import hopper
from tileattn.kernels.config.context import FAILED, LARGE, NON_FINITE, KernelLaunch
from tileattn.kernels.config.families import backward_launches
from tileattn.kernels.config.hopper import (
    HOPPER_BACKWARD,
    HOPPER_DQ_CONVERT,
    HOPPER_WIDE,
)
from tileattn.kernels.config.shared_memory import HOPPER_STATIC, hopper_backward_bytes
from tileattn.kernels.config.tiles import TileSize
from tileattn.kernels.launch.catalog import problem_of
from tileattn.kernels.launch.layout import contiguous_inputs
from tileattn.kernels.launch.plan import plan_backward
from tileattn.kernels.launch.scheduler import schedule_of, work_tiles
from tileattn.problem import Problem

B, HQ, HKV, NQ, NK, D, DV = 2, 6, 2, 300, 530, 72, 40
BEFORE = ("backward_preprocess", "backward_large_scores")
OWN = (HOPPER_BACKWARD, HOPPER_BACKWARD)  # the second NaN-safe
AFTER = [HOPPER_DQ_CONVERT, "backward_dkdv", "backward_dq"]
ELSEWHERE = ("backward_dkdv", "backward_dq_convert", "backward_dq")
OPTIONS: list[tuple[str, ...]] = [(), ("softcap",), ("alibi_slopes",), ("sinks", "kv_lengths")]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with fake_cupy.machine(monkeypatch) as made:
        made.arch = "sm_90a"
        yield made


def arrays(gpu: Machine, dtype: Any = np.float16) -> dict[str, Any]:
    """Give the arguments of ``backward``."""
    shapes = {"dout": (B, HQ, NQ, DV), "q": (B, HQ, NQ, D), "k": (B, HKV, NK, D)}
    shapes |= {"v": (B, HKV, NK, DV), "out": (B, HQ, NQ, DV)}
    made = {name: gpu.array(shape, dtype) for name, shape in shapes.items()}
    return {**made, "lse": gpu.array((B, HQ, NQ))}


def kernels(gpu: Machine) -> list[str]:
    return [key.kernel for key, *_ in gpu.launches]


def launches_of(problem: Problem, sm_count: int = 132, **changed: Any) -> tuple[KernelLaunch, ...]:
    options = {"deterministic": False, "sinks": False} | changed
    return backward_launches(problem, CONTEXT._replace(sm_count=sm_count), **options)


# --- the rule -----------------------------------------------------------------------------------

REFUSED_BACKWARD: list[tuple[str, Problem, dict[str, Any]]] = [
    *REFUSED,
    ("block_mask is in use", problem_of("float16", 64, ["block_mask"]), {}),
    ("the head dimension of q and k is no multiple of 8", replace(SUPPORTED, D=60), {}),
]


@pytest.mark.parametrize(("reason", "problem", "changed"), REFUSED_BACKWARD, ids=str)
def test_what_it_does_not_support_and_why(
    reason: str, problem: Problem, changed: dict[str, Any]
) -> None:
    context = CONTEXT._replace(**changed)
    launches = backward_launches(problem, context, deterministic=False, sinks=False)
    (why,) = (x.why for x in launches if x.why.startswith("the generic kernel, because"))
    assert reason in why
    assert {x.key.kernel for x in launches}.isdisjoint({HOPPER_BACKWARD, HOPPER_WIDE})


def test_every_clause_of_the_rule_is_tried() -> None:
    tried = tuple(reason for reason, *_ in REFUSED_BACKWARD)
    assert [why for why, _ in hopper._UNSUPPORTED_BACKWARD if not why.startswith(tried)] == []


def test_a_fixed_order_of_sums_is_the_same_kernel_in_another_order() -> None:
    P = replace(SUPPORTED, B=3, Hkv=50, Hq=100)
    launches, fixed = launches_of(P), launches_of(P, deterministic=True)
    assert [launch.key.kernel for launch in fixed if launch.in_order] == [HOPPER_BACKWARD] * 2
    assert [launch._replace(in_order=False) for launch in fixed] == list(launches)
    layout = contiguous_inputs(P)
    schedules = [schedule_of(P, layout, each, 50 << 20) for each in (launches, fixed)]
    assert [(x.assignment, x.in_order) for x in schedules] == [(None, False), (None, True)]


@pytest.mark.parametrize(
    ("D", "Nq", "together", "grouped", "in_order"),
    [
        (128, 512, 50, 25, 16),
        (128, 4096, 6, 9, 6),
        (128, 1 << 20, 9, 9, 9),
        (256, 512, 25, 12, 8),
    ],
)
def test_how_many_heads_are_worked_on_together(
    D: int, Nq: int, together: int, grouped: int, in_order: int
) -> None:
    """Their queries, gradients and sums fill 25 MiB, unless that is less than a turn of the GPU."""
    P = replace(SUPPORTED, B=3, Hkv=50, Hq=50, Nq=Nq, Nk=4096, D=D, Dv=D)

    def groups(P: Problem, deterministic: bool = False) -> int:
        launches = launches_of(P, deterministic=deterministic)
        return schedule_of(P, contiguous_inputs(P), launches, 50 << 20).head_groups

    assert groups(P) == -(-150 // together)
    assert groups(replace(P, Hq=100)) == -(-150 // grouped)  # twice as much of each head of keys
    assert groups(P, deterministic=True) == -(-150 // in_order)
    # Where blocks of keys differ in length, of each head there are 1,024 keys at work.
    causal = replace(P, window=(None, 0))
    assert groups(causal, deterministic=True) == -(-150 // (16 if D == 128 else 8))


def test_claimed_in_order_a_head_has_its_keys_in_order() -> None:
    """So of the works that are claimed, the first that is not done waits for no other."""
    for blocks, heads, parts in ((7, 6, 1), (7, 6, 2), (5, 7, 3), (1, 4, 4), (9, 1, 1)):
        block, head, _ = work_tiles(blocks, heads, parts)
        for each in range(heads):
            assert block[head == each].tolist() == list(range(blocks))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("uses", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("dim", "value", "rooms"),
    [
        (8, 64, (64, 64)),
        (64, 32, (64, 64)),
        (72, 40, (128, 64)),
        (40, 96, (64, 128)),
        (128, 128, (128, 128)),
    ],
)
def test_what_it_serves(
    dtype: str, uses: tuple[str, ...], dim: int, value: int, rooms: tuple[int, int]
) -> None:
    problem = replace(problem_of(dtype, dim, uses), Dv=value, window=(7, 0))
    own = next(x for x in launches_of(problem) if x.tensor_maps)
    key, shared, why = own.key, own.shared_bytes, own.why
    assert (key.kernel, key.dtype, key.head_dim, key.value_dim) == (HOPPER_BACKWARD, dtype, *rooms)
    assert (key.softcap, key.alibi) == ("softcap" in uses, "alibi_slopes" in uses)
    assert key.fold_scale is not (key.softcap or key.alibi)
    assert why.startswith("wgmma and tensor maps, tiles")
    # A softcap has its slopes in registers, and wide heads their sums.
    assert key.block_q == (128 if rooms == (64, 64) and key.fold_scale else 64)
    assert (key.block_k, key.warps_m, key.warps_n, key.producer_warps) == (128, 8, 1, 4)
    assert key.threads == 384
    assert shared + 3072 <= CONTEXT.shared_limit


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("uses", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("dim", "value", "rooms", "stages"),
    [
        (136, 8, (192, 128), 2),
        (192, 128, (192, 128), 2),
        (192, 192, (192, 192), 2),
        (64, 192, (128, 192), 2),
        (200, 64, (256, 128), 1),
        (40, 256, (128, 256), 1),
        (256, 256, (256, 256), 1),
    ],
)
def test_the_kernel_for_wide_heads(
    dtype: str, uses: tuple[str, ...], dim: int, value: int, rooms: tuple[int, int], stages: int
) -> None:
    """Two warpgroups for the same 64 keys: sums of more keys have no room in registers."""
    problem = replace(problem_of(dtype, dim, uses), Dv=value, window=(7, 0))
    own = next(x for x in launches_of(problem) if x.tensor_maps)
    key, shared, why = own.key, own.shared_bytes, own.why
    assert (key.kernel, key.dtype, key.head_dim, key.value_dim) == (HOPPER_WIDE, dtype, *rooms)
    assert why.startswith("wgmma and tensor maps, tiles")
    assert (key.block_q, key.block_k, key.stages) == (64, 64, stages)
    assert (key.warps_m, key.warps_n, key.producer_warps, key.threads) == (8, 1, 4, 384)
    assert shared + HOPPER_STATIC <= CONTEXT.shared_limit


@pytest.mark.parametrize(
    ("tile", "dim", "value", "kilobytes"),
    [
        (TileSize(64, 128, 8, 1, 2), 128, 128, 64 + 3 * 16 + 2 * 16 + 2 * 16 + 6 * 8),
        (TileSize(128, 128, 8, 1, 2), 64, 64, 32 + 3 * 16 + 2 * 16 + 2 * 32 + 6 * 8),
        (TileSize(64, 128, 8, 1, 2), 64, 64, 32 + 3 * 8 + 2 * 8 + 2 * 16 + 6 * 8),
        (TileSize(64, 128, 8, 1, 2), 64, 128, 48 + 3 * 8 + 2 * 16 + 2 * 16 + 6 * 8),
        (TileSize(64, 128, 8, 1, 2), 128, 64, 48 + 3 * 16 + 2 * 8 + 2 * 16 + 6 * 8),
        (TileSize(64, 128, 8, 1, 1), 128, 128, 64 + 2 * 16 + 1 * 16 + 2 * 16 + 6 * 8),
        # Wide heads: queries twice, four pieces of sums, and a tile of probabilities.
        (TileSize(64, 64, 8, 1, 1), 256, 256, 64 + 2 * 32 + 1 * 32 + 2 * 8 + 4 * 8 + 16),
        (TileSize(64, 64, 8, 1, 2), 192, 192, 48 + 2 * 24 + 2 * 24 + 2 * 8 + 4 * 8 + 16),
        (TileSize(64, 64, 8, 1, 2), 192, 128, 40 + 2 * 24 + 2 * 16 + 2 * 8 + 4 * 8 + 16),
        (TileSize(64, 64, 8, 1, 1), 128, 256, 48 + 2 * 16 + 1 * 32 + 2 * 8 + 4 * 8 + 16),
    ],
)
def test_shared_memory(tile: TileSize, dim: int, value: int, kilobytes: int) -> None:
    """Keys and values, queries, gradients of the output, those at the scores, and pieces of dq."""
    assert hopper_backward_bytes(tile, dim, value) == kilobytes * 1024


@pytest.mark.parametrize(
    ("tile", "dim", "value", "kilobytes"),
    [
        (TileSize(64, 128, 8), 128, 64, 48 + 2 * 16 + 1 * 8 + 2 * 16 + 6 * 8 + 32),
        (TileSize(64, 64, 8), 256, 128, 48 + 1 * 32 + 1 * 16 + 2 * 8 + 4 * 8 + 16 + 32),
    ],
)
def test_shared_memory_to_repair(tile: TileSize, dim: int, value: int, kilobytes: int) -> None:
    """The keys once more, and of wide heads queries once."""
    assert hopper_backward_bytes(tile, dim, value, repairs=True) == kilobytes * 1024


# --- the launches -------------------------------------------------------------------------------


@pytest.mark.parametrize(("keys", "blocks"), [(100, 6), (129, 12), (24 * 128, 132)])
def test_what_follows_it(keys: int, blocks: int) -> None:
    problem = replace(SUPPORTED, B=2, Hq=6, Hkv=3, Nq=300, Nk=keys, D=72, Dv=40)
    rows, maxima, own, safe, *after = launches_of(problem)
    assert (rows.key.kernel, maxima.key.kernel) == BEFORE
    assert (maxima.key.head_flags, maxima.grid) == (LARGE, 2 * 6 * 3)
    assert (own.key.kernel, own.key.add_dq, own.key.head_flags) == (HOPPER_BACKWARD, True, 0)
    assert own.grid == blocks
    # Where something is not finite the same kernel, but for stages, does it.
    key = replace(own.key, head_flags=NON_FINITE, stages=1, smem_bytes=safe.shared_bytes)
    assert safe == own._replace(key=key, shared_bytes=safe.shared_bytes, why=safe.why)
    assert safe.shared_bytes == hopper_backward_bytes(TileSize(64, 128, 8), 128, 64, repairs=True)
    assert own.shared_bytes == hopper_backward_bytes(TileSize(64, 128, 8, 1, 2), 128, 64)
    assert own.tensor_maps == (("q", 64), ("k", 128), ("v", 128), ("dout", 64))
    assert [launch.key.kernel for launch in after] == AFTER
    for launch in after:
        key = launch.key
        assert (key.head_flags, key.add_dq) == (0 if key.kernel == HOPPER_DQ_CONVERT else 6, False)
        assert (key.producer_warps, launch.tensor_maps) == (0, ())
    assert after[0].grid == 2 * 6 * 5  # tiles of queries
    assert (after[0].key.head_dim, after[0].key.threads) == (own.key.head_dim, 128)
    context = CONTEXT._replace(tensor_maps=False, sm_count=132)
    generic = backward_launches(problem, context, deterministic=True, sinks=False)[1:]
    assert generic[0] == maxima
    assert [launch.key.kernel for launch in generic[1:]] == AFTER[1:]
    for launch, like in zip(after[1:], generic[1:], strict=True):
        assert launch.why.startswith("for heads with large scores or with something not finite")
        few = min(like.grid, 132 * like.key.min_blocks_per_sm)
        key = replace(like.key, head_flags=LARGE | FAILED)
        assert launch == like._replace(key=key, grid=few, why=launch.why)


def test_what_follows_the_kernel_for_wide_heads() -> None:
    problem = replace(SUPPORTED, B=2, Hq=6, Hkv=3, Nq=300, Nk=100, D=200, Dv=40)
    *before, own, safe, finish, keys, queries = launches_of(problem)
    after = finish, keys, queries
    assert tuple(launch.key.kernel for launch in before) == BEFORE
    assert own.key.kernel == safe.key.kernel == HOPPER_WIDE
    assert safe.shared_bytes == hopper_backward_bytes(TileSize(64, 64, 8), 256, 128, repairs=True)
    assert (own.grid, own.key.add_dq) == (12, True)
    assert own.tensor_maps == (("q", 64), ("k", 64), ("v", 64), ("dout", 64))
    assert [launch.key.kernel for launch in after] == AFTER
    # It undoes the order of the sums, which depends on the heads and the tiles of queries.
    key, like = finish.key, own.key
    assert (key.head_dim, key.value_dim) == (like.head_dim, like.value_dim) == (256, 128)
    assert key.block_q == like.block_q
    softcap = replace(SUPPORTED, D=200, Dv=40, softcap=2.0, uses=frozenset({"softcap"}))
    capped = launches_of(softcap)
    assert capped[3].key == key  # as there are no more terms
    # Where the cap is flat, only the generic kernels know what is NaN.
    assert [launch.key.kernel for launch in capped] == [*BEFORE, HOPPER_WIDE, *AFTER]
    assert {launch.key.head_flags for launch in capped[4:]} == {NON_FINITE | LARGE | FAILED}


def test_gradients_of_sinks_come_last() -> None:
    launches = launches_of(problem_of("bfloat16", 64, ["sinks"]), sinks=True)
    assert [launch.key.kernel for launch in launches] == [
        *(*BEFORE, *OWN),
        *AFTER,
        "backward_dsinks",
    ]


def test_what_repairs_elsewhere() -> None:
    """Sums in memory lack the special heads; dq in a fixed order comes from one kernel for all."""
    for arch in ("sm_80", "sm_90", "sm_100"):
        context = CONTEXT._replace(arch=arch)
        launches = backward_launches(SUPPORTED, context, deterministic=False, sinks=False)
        assert [s.key.kernel for s in launches] == [*BEFORE, *ELSEWHERE]
        repairing = [s.key.kernel for s in launches if s.key.head_flags]
        assert repairing == ["backward_large_scores", "backward_dq"]
        launches = backward_launches(SUPPORTED, context, deterministic=True, sinks=False)
        assert [s.key.kernel for s in launches if s.key.head_flags] == ["backward_large_scores"]


# --- what they are started with -----------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "kind"), [(np.float16, 6), (ml_dtypes.bfloat16, 9)])
def test_maps_say_where_the_arrays_lie(gpu: Machine, dtype: Any, kind: int) -> None:
    given = arrays(gpu, dtype)
    given["k"] = gpu.array((B, NK, HKV, D), dtype).swapaxes(1, 2)
    given["dout"] = gpu.array((B, HQ, NQ, 2 * DV), dtype)[..., DV:]
    tileattn.backward(**given, causal=True)
    assert kernels(gpu) == [*BEFORE, *OWN, *AFTER]
    key, blocks, shared, params = gpu.launches[2]
    assert (key.head_dim, key.value_dim) == (128, 64)
    assert (key, shared) in gpu.allowed
    assert blocks == B * HKV * 5
    maps, again = gpu.maps
    assert again == maps
    q, k, v, dout = (given[name] for name in ("q", "k", "v", "dout"))
    expected = [
        (q, (D, NQ, HQ, B), (2 * D, 2 * NQ * D, 2 * HQ * NQ * D), 64),
        (k, (D, NK, HKV, B), (2 * HKV * D, 2 * D, 2 * NK * HKV * D), 128),
        (v, (DV, NK, HKV, B), (2 * DV, 2 * NK * DV, 2 * HKV * NK * DV), 128),
        (dout, (DV, NQ, HQ, B), (4 * DV, 4 * NQ * DV, 4 * HQ * NQ * DV), 64),
    ]
    for made, (x, sizes, strides, rows) in zip(maps, expected, strict=True):
        assert made == (x.data.ptr, kind, sizes, strides, (64, rows, 1, 1), (0, 3, 3, 0))
    assert params["schedule"] == 0


def test_marks_are_zeros_next_to_each_other(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[tuple[int, int]] = []

    def clear(address: int, value: int, nbytes: int, stream: int) -> None:
        cleared.append((address, nbytes))
        gpu.clear(address, value, nbytes, stream)

    monkeypatch.setattr("cupy.cuda.runtime.memsetAsync", clear)
    given = arrays(gpu)
    tileattn.backward(**given)
    tileattn.backward(**given, deterministic=True)
    # Parts begin at multiples of 256 bytes: sums, which need not be zeros; marks of 4 heads, works
    # claimed, and how many have added to both parts of 5 tiles of each of 12 heads.
    sums, half = B * HQ * NQ * 128 * 4, len(gpu.launches) // 2
    assert sums % 256 == 0
    starts = {"dq_accum": -sums, "head_flags": 0, "tile_counter": 256, "dq_semaphore": 512}
    for n, (address, nbytes) in enumerate(cleared):
        assert nbytes == 512 + 12 * 5 * 2 * 4
        for *_, params in gpu.launches[n * half : (n + 1) * half]:
            assert {name: int(params[name]) - address for name in starts} == starts
            assert params["in_order"] == n
    assert len(cleared) == 2


@pytest.mark.parametrize("wrong", ["broadcast", "unaligned", "reversed"])
def test_dout_that_can_have_no_map(wrong: str) -> None:
    problem = replace(SUPPORTED, B=B, Hq=HQ, Hkv=HKV, Nq=NQ, Nk=NK)
    layout = contiguous_inputs(problem).with_contiguous_results(problem, "backward")
    dout = layout.get("dout")
    assert dout is not None
    batch, head, row, column = dout.strides
    changed = {
        "broadcast": replace(dout, strides=(0, 0, 0, column)),
        "unaligned": replace(dout, alignment=2),
        "reversed": replace(dout, strides=(batch, head, -row, column)),
    }
    plan = plan_backward(problem, layout, H200)
    assert [launch.key.kernel for launch in plan.launches] == [*BEFORE, *OWN, *AFTER]
    plan = plan_backward(problem, layout.with_arrays(dout=changed[wrong]), H200)
    assert [launch.key.kernel for launch in plan.launches] == [*BEFORE, *ELSEWHERE]
    assert plan.tensor_maps == {}


def test_maps_are_made_again_for_another_dout_alone(gpu: Machine) -> None:
    given = arrays(gpu)
    for _ in range(3):
        tileattn.backward(**given)
    assert len(gpu.encoded) == 4
    given["dout"] = gpu.array(given["dout"].shape, np.float16)
    tileattn.backward(**given)
    *_, before, own, safe = (made[3].address for made in gpu.maps)
    assert own == safe == given["dout"].data.ptr != before
    assert len(gpu.encoded) == 8
