"""The work tiles of each group of each CTA in the Hopper forward pass, found on the CPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kernels.cuda.plan.planning import H200, asked, forward
from tests.kernels.cuda.src.on_host import Array, block_with, built, ordered, pointer
from tests.kernels.cuda.src.scheduler_on_host import scheduler_texts
from tileattn.kernels.cuda.families.hopper import HOPPER
from tileattn.kernels.cuda.plan.layout import contiguous_inputs
from tileattn.kernels.cuda.plan.plan import LaunchPlan

CAUSAL = (None, 0)

_WORKERS = """\
#include <vector>
#include "tile_scheduler_sm90.cuh"

// Two passes of all workers. The workers alternate: each takes one work tile at a time.
extern "C" int take_all(const Params* p, int grid, int* found) {
    const int* const begin = found;
    gridDim.x = grid;
    std::vector<WorkOrder<>> orders;
    for (int group = 0; group < GROUPS; ++group)
        orders.insert(orders.end(), grid, WorkOrder<>(*p, group));
    for (int pass = 0; pass < 2; ++pass) {
        std::vector<bool> ended(orders.size());
        for (auto& order : orders) order.restart();
        for (bool any = true; any;) {
            any = false;
            for (int n = 0; n < int(orders.size()); ++n) {
                FwdWorkTile work{};
                blockIdx.x = n % grid;
                if (ended[n] || !get_work(*p, orders[n], work)) {
                    ended[n] = true;
                    continue;
                }
                const int row[] = {pass, n, work.iteration, work.b, work.h, work.q0};
                found = std::copy(row, row + 6, found), any = true;
            }
        }
    }
    return int(found - begin) / 6;
}
"""


def taken(folder: Path, plan: LaunchPlan, **integers: Array) -> Array:
    """Find pass, worker, iteration, batch entry, head and first query of each work tile."""
    launch = next(x for x in plan.launches if x.key.kernel == HOPPER)
    P, arrays = plan.problem, {name: x.array() for name, x in plan.constants.items()}
    most = P.B * P.Hq * (P.Nq // launch.key.block_q + 1 + (P.sequences or 0))
    if P.sequences is not None:
        arrays["block_order"] = ordered(folder, plan, **integers)
    if "next_tiles" in plan.workspace.starts:
        arrays |= {"next_tiles": np.empty(most, np.int32), "tile_counter": np.zeros(1, np.uint32)}
    block = block_with(plan, integers, **arrays)
    texts = scheduler_texts(launch.key) | {"workers.cpp": _WORKERS}
    found = np.empty((2 * most, 6), np.int32)
    library = built(folder, texts, "workers.cpp")
    return found[: library.take_all(pointer(block), launch.grid, pointer(found))]


def assert_each_once(found: Array, plan: LaunchPlan, wanted: set[tuple[int, int, int]]) -> None:
    """Each work tile goes to one worker, in both passes; no SM has two before each has one."""
    launch = next(x for x in plan.launches if x.key.kernel == HOPPER)
    first, second = (found[found[:, 0] == n, 1:] for n in range(2))
    assert np.array_equal(first[np.lexsort(first.T)], second[np.lexsort(second.T)])
    tiles = [tuple(row) for row in first[:, 2:].tolist()]
    assert len(tiles) == len(wanted)
    assert set(tiles) == wanted
    workers = set(first[:, 0].tolist())
    assert workers == set(range(min(len(wanted), launch.workers)))
    for worker in workers:
        own = first[first[:, 0] == worker, 1]
        assert own.tolist() == list(range(len(own)))


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("window", [(None, None), CAUSAL, (70, 20)], ids=str)
@pytest.mark.parametrize("Nq", [100, 777, 2000])
@pytest.mark.parametrize("sm_count", [1, 5, 132])
@pytest.mark.parametrize("tables", [True, False])
def test_every_work_tile_goes_to_one_worker(
    D: int, window: Any, Nq: int, sm_count: int, tables: bool, tmp_path: Path
) -> None:
    problem = asked(D=D, Dv=D, Hq=6, Hkv=3, Nq=Nq, Nk=900, window=window)
    plan = forward(problem, replace(H200, sm_count=sm_count), tables=tables)
    (launch,) = plan.launches
    assert (launch.key.groups, launch.workers) == (128 // D, 128 // D * launch.grid)
    starts = range(0, Nq, launch.key.block_q)
    wanted = {(b, h, q0) for b in range(problem.B) for h in range(6) for q0 in starts}
    assert_each_once(taken(tmp_path, plan), plan, wanted)


@pytest.mark.parametrize("window", [(None, None), CAUSAL], ids=str)
@pytest.mark.parametrize("assigned", [True, False])
def test_late_thread_blocks_take_the_last_work_tiles(
    window: Any, assigned: bool, tmp_path: Path
) -> None:
    """Without an assignment, in a first call, there are no late CTAs."""
    problem = asked(D=64, Dv=64, Hq=6, Hkv=3, Nq=7000, Nk=7000, window=window)
    plan = forward(problem, replace(H200, sm_count=20), tables=assigned)
    (launch,) = plan.launches
    assert (launch.key.groups, launch.grid > 20) == (1, assigned)
    wanted = {(b, h, q0) for b in range(2) for h in range(6) for q0 in range(0, 7000, 192)}
    found = taken(tmp_path, plan)
    assert_each_once(found, plan, wanted)
    of_worker = np.bincount(found[found[:, 0] == 0, 1])
    assert of_worker[:20].min() > 1
    assert (of_worker[20:] == 1).all()


@pytest.mark.parametrize(("heads", "single"), [(6, 5), (1, 0)])
def test_heads_are_claimed_one_after_another(heads: int, single: int, tmp_path: Path) -> None:
    """The last heads are interleaved, the longest blocks first."""
    problem = asked(B=1, D=128, Dv=128, Hq=heads, Hkv=heads, Nq=640, Nk=640, window=CAUSAL)
    plan = forward(problem, replace(H200, sm_count=4))
    assert plan.fields["single_heads"] == single
    found = taken(tmp_path, plan)
    found = found[found[:, 0] == 0, 2:]  # workers alternate, so claims are in order
    blocks = [512, 384, 256, 128, 0]
    expected = [(h, q0) for h in range(single) for q0 in blocks]
    expected += [(h, q0) for q0 in blocks for h in range(single, heads)]
    assert [(h, q0) for _, _, h, q0 in found.tolist()] == expected


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("lengths", [(700, 0, 1, 300, 129), (5, 3, 2, 1, 0)])
@pytest.mark.parametrize("sm_count", [1, 5, 132])
def test_every_work_tile_of_packed_sequences_is_claimed_once(
    D: int, lengths: tuple[int, ...], sm_count: int, tmp_path: Path
) -> None:
    ends = np.cumsum([0, *lengths])
    tokens = sum(lengths)
    sizes: dict[str, Any] = {"B": 1, "Hq": 4, "Hkv": 2, "Nq": tokens, "Nk": tokens}
    problem = asked("float16", {"cu_seqlens_q"}, **sizes, D=D, Dv=D, window=CAUSAL, sequences=5)
    layout = contiguous_inputs(problem)._replace(kv_lengths=None, q_offset=None)
    plan = forward(problem, replace(H200, sm_count=sm_count), layout)
    launch = plan.launches[-1]
    assert launch.key.groups == 128 // D
    rows = launch.key.block_q
    wanted = {
        (b, h, q0) for b, n in enumerate(lengths) for h in range(4) for q0 in range(0, n, rows)
    }
    found = taken(tmp_path, plan, cu_seqlens_q=ends, cu_seqlens_k=ends)
    assert_each_once(found, plan, wanted)


_SPLITS = """\
#include "tile_scheduler_sm90.cuh"

extern "C" int splits_of(const Params* p, int b) { return WorkOrder<true>::splits_of(*p, b).count; }
"""


@pytest.mark.parametrize(("Nk", "expected"), [(49, [1, 1, 1]), (9000, [0, 1, 2])])
def test_an_only_split_has_a_work_tile_even_without_keys(
    Nk: int, expected: list[int], tmp_path: Path
) -> None:
    """It writes the rows that attend to no key. Where there are more, another kernel does."""
    sizes: dict[str, Any] = {"B": 3, "Hq": 4, "Hkv": 2, "Nq": 49, "D": 32, "Dv": 32}
    problem = asked("bfloat16", {"kv_lengths"}, Nk=Nk, **sizes)
    plan = forward(problem, H200)
    launch = plan.launches[0]
    assert launch.key.split_kv
    split = launch.traits.split_keys
    block = block_with(plan, {"kv_lengths": np.minimum([0, 1, split + 1], Nk)})
    texts = scheduler_texts(launch.key) | {"splits.cpp": _SPLITS}
    library = built(tmp_path, texts, "splits.cpp")
    assert [library.splits_of(pointer(block), b) for b in range(3)] == expected
