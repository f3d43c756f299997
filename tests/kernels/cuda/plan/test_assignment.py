"""The table that assigns work tiles to workers; no GPU."""

import heapq
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.cuda.plan.assigned import Array, ends_of, loads_of
from tests.kernels.cuda.plan.planning import H200, asked, forward
from tileattn.kernels.cuda.plan.assignment import assign

COSTS = st.lists(st.integers(1, 60), min_size=1, max_size=80)


def longest_of_greedy(costs: list[int], workers: int) -> int:
    """Load of the longest worker if each takes the next tile when it is free."""
    loads = [0] * workers
    for cost in costs:
        heapq.heapreplace(loads, loads[0] + cost)
    return max(loads)


def shuffled(count: int, random: Any) -> Array:
    numbers = list(range(count))
    random.shuffle(numbers)
    return np.array(numbers)


@given(COSTS, st.integers(1, 5), st.integers(1, 3), st.data(), st.randoms())
def test_every_tile_has_one_worker(
    times: list[int], teams: int, team: int, data: st.DataObject, random: Any
) -> None:
    late = data.draw(st.integers(0, len(times) - 1))
    costs, order = np.array(times), shuffled(len(times), random)
    table = assign(order, costs[order], teams * team, team, late)
    assert table.shape[1] == teams * team + late
    loads_of(table, costs)
    # The last ones begin by themselves, in their order, and others keep theirs.
    early, ends = np.hsplit(table, [teams * team])
    assert ends[0].tolist() == order[len(order) - late :].tolist()
    assert (ends[1:] == len(order)).all()
    places = np.append(order.argsort(), len(order))[early]
    assert (np.diff(places, axis=0) >= 0).all()


@given(COSTS, st.integers(1, 9), st.randoms())
def test_evening_out_never_takes_longer(times: list[int], workers: int, random: Any) -> None:
    costs, order = np.array(times), shuffled(len(times), random)
    loads = loads_of(assign(order, costs[order], workers), costs)
    assert loads.max() <= longest_of_greedy(costs[order].tolist(), workers)
    assert loads.max() * workers <= loads.sum() + (workers - 1) * costs.max()


@pytest.mark.parametrize(
    ("times", "workers", "longest"),
    [([3, 3, 2, 2, 2], 2, 6), ([5, 5, 4, 4, 3, 3, 3], 3, 9), ([7] * 9, 4, 21)],
)
def test_the_longest_worker_exchanges_tiles(times: list[int], workers: int, longest: int) -> None:
    """The best there is; without exchanges it is longer, except where all tiles are equal."""
    costs = np.array(times)
    loads = loads_of(assign(np.arange(len(costs)), costs, workers), costs)
    assert loads.max() == longest
    assert (longest_of_greedy(times, workers) > longest) == (len(set(times)) > 1)


@given(COSTS, st.integers(1, 5), st.integers(2, 3), st.data())
def test_teams_go_in_step(times: list[int], teams: int, team: int, data: st.DataObject) -> None:
    """If successive tiles are equal in groups of a team, its workers always have equal tiles."""
    costs = np.repeat(times, team)
    late = team * data.draw(st.integers(0, len(times) - 1))
    table = assign(np.arange(len(costs)), costs, teams * team, team, late)
    columns = np.append(costs, 0)[table[:, : teams * team]].reshape(len(table), teams, team)
    assert (columns == columns[..., :1]).all()


@given(COSTS, st.integers(1, 9), st.data())
def test_late_workers_end_with_the_others(
    times: list[int], workers: int, data: st.DataObject
) -> None:
    """As soon as if each tile had gone to who is free first."""
    costs = np.sort(times)[::-1].copy()
    late = data.draw(st.integers(0, len(costs) - 1))
    loads = loads_of(assign(np.arange(len(costs)), costs, workers, late=late), costs)
    ends = ends_of(loads, workers)
    assert ends.sum() == costs.sum()
    assert ends.max() * workers <= ends.sum() + (workers - 1) * costs.max()


# --- plans ---------------------------------------------------------------------------------------


def test_late_thread_blocks_are_launched_for_an_assignment_alone() -> None:
    sizes: dict[str, Any] = {"B": 1, "Hq": 16, "Hkv": 16, "Nq": 6000, "Nk": 6000, "D": 64, "Dv": 64}
    plan = forward(asked(**sizes), H200)
    (launch,) = plan.launches
    workers = plan.constants["assignment"].shape[1]
    assert launch.grid * launch.key.groups == workers > H200.sm_count
    plain = forward(asked(**sizes), H200, tables=False)
    assert plain.is_provisional
    assert plain.constants == plain.carried == {}
    assert plain.launches == (launch._replace(grid=H200.sm_count),)
