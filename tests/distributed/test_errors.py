"""Ranks that refuse a call or do not answer; layouts; how far keys travel."""

from typing import Any

import numpy as np
import pytest

import tileattn
import tileattn.distributed as dist
from tests.distributed.in_groups import in_groups
from tests.distributed.threads import Rank as Thread
from tests.distributed.threads import World, on_ranks
from tileattn.distributed import Layout
from tileattn.distributed.comm.mpi import MPI

X = np.random.default_rng(0).standard_normal((3, 1, 2, 12, 8))
Q, K, V = X


def call(comm: Any, **options: Any) -> tileattn.Attention:
    return dist.forward(Q, K, V, comm, backend="numpy", **options)


def raised(found: list[Any]) -> list[str]:
    assert all(isinstance(x, Exception) for x in found), found
    return [f"{type(x).__name__}: {x}" for x in found]


def test_a_rank_that_refuses_is_named() -> None:
    def run(comm: Any) -> Any:
        q = Q if comm.rank != 1 else Q[..., :4]
        return dist.forward(q, K, V, comm)

    first, second, third = raised(on_ranks(3, run))
    assert second == "ValueError: k must have the head dimension of q, 4; got 8"
    assert first == third == f"RuntimeError: rank 1 has failed: {second}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"layout": 3},
            "layout must be 'contiguous', 'zigzag' or a tileattn.distributed.Layout; got 3",
        ),
        ({"layout": Layout.contiguous([24])}, "layout must be for 2 ranks; got one for 1"),
        ({"layout": Layout.contiguous([11, 13])}, "layout must give rank 0 the 12 tokens of its"),
        ({"mask": np.ones((12, 23), bool)}, "mask must broadcast to (B, Hq, Nq, Nk)"),
        ({"unknown": 1}, "unknown option 'unknown'"),
        (
            {"schedule": "star"},
            "schedule must be one of 'ring', 'heads', ('heads', n), 'gather', 'auto'; got 'star'",
        ),
        ({"schedule": ("heads", 0)}, "'auto'; got ('heads', 0)"),
        ({"schedule": ("ring", 2)}, "'auto'; got ('ring', 2)"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    found = raised(on_ranks(2, lambda comm: call(comm, **options)))
    assert message in found[0]


def test_gradients_need_what_forward_has_returned() -> None:
    def run(comm: Any) -> Any:
        out, lse = call(comm)
        return dist.backward(out, Q, K, V, out[..., :11, :], lse, comm)

    first, _ = raised(on_ranks(2, run))
    assert first.startswith("ValueError: out must have shape (1, 2, 12, 8); got (1, 2, 11, 8)")


def test_heads_that_ranks_do_not_divide() -> None:
    found = raised(on_ranks(3, lambda comm: call(comm, schedule="heads")))
    message = "schedule must be 'ring'; got 'heads', but k has 2 heads, and 3 ranks share them"
    assert set(found) == {f"ValueError: {message}"}


@pytest.mark.parametrize(
    ("ranks", "n", "reason"),
    [
        (6, 4, "6 ranks do not form groups of 4"),
        (6, 3, "k has 2 heads, and 3 ranks share them"),
    ],
)
def test_groups_that_ranks_do_not_form(ranks: int, n: int, reason: str) -> None:
    found = raised(on_ranks(ranks, lambda comm: call(comm, schedule=("heads", n))))
    start = "ValueError: schedule must be 'ring' or ('heads', 2); "
    assert set(found) == {f"{start}got ('heads', {n}), but {reason}"}


@pytest.mark.parametrize("budget", [0.0, 100.0])
def test_ranks_that_exchange_heads_have_the_bits_of_one_call(budget: float) -> None:
    layout = Layout.zigzag(12, 2)

    def run(comm: Any) -> Any:
        q, k, v = (layout.take(x, comm.rank) for x in X)
        given: dict[str, Any] = {"layout": layout, "schedule": "heads", "causal": True}
        return dist.forward(q, k, v, comm, backend="numpy", **given)

    whole = tileattn.forward(Q, K, V, causal=True, backend="numpy")
    with in_groups(budget):
        found = on_ranks(2, run)
    assert np.array_equal(layout.join([x.out for x in found]), whole.out)
    assert np.array_equal(layout.join([x.lse for x in found], axis=-1), whole.lse)


@pytest.mark.parametrize(
    "parts", [(((0, 5),), ((6, 9),)), (((0, 5),), ((4, 9),)), (((0, 5), (9, 5)),)]
)
def test_a_layout_holds_each_token_once(parts: Any) -> None:
    with pytest.raises(
        ValueError, match=r"parts must hold each token once: expected a range from .*; got"
    ):
        Layout(parts)


def test_parts_are_joined_again() -> None:
    x = np.random.default_rng(0).random((2, 3, 17, 4))
    for layout in (Layout.zigzag(17, 3), Layout.contiguous([0, 17, 0]), Layout.zigzag(17, 20)):
        parts = [layout.take(x, rank) for rank in range(layout.ranks)]
        assert np.array_equal(layout.join(parts), x)
        assert layout.length == 17


def sent(layout: Layout, ranks: int, **options: Any) -> list[int]:
    """Return the bytes that each rank sends in the forward pass."""
    worlds: list[World] = []

    def run(comm: Thread) -> Any:
        worlds.append(comm.world)
        q, k, v = (layout.take(x[..., : layout.length, :], comm.rank) for x in X)
        return dist.forward(q, k, v, comm, layout=layout, backend="numpy", **options)

    for x in on_ranks(ranks, run):
        assert isinstance(x, tileattn.Attention), x
    return worlds[0].bytes_sent


def test_keys_travel_no_further_than_they_are_needed() -> None:
    layout, part = Layout.contiguous([3, 3, 3, 3]), 2 * 3 * 8 * 8 * 2  # heads, keys, D, bytes; k, v
    assert sent(layout, 4) == [3 * part] * 4
    assert sent(layout, 4, causal=True) == [part, 2 * part, 3 * part, 0]
    assert sent(layout, 4, causal=True, window=(2, None)) == [part, part, part, 0]
    assert sent(layout, 4, window=(0, 0)) == [0] * 4
    assert sent(layout, 4, kv_lengths=[3]) == [part, part, part, 0]


@pytest.mark.parametrize("budget", [0.0, 100.0])
@pytest.mark.parametrize("schedule", ["ring", "gather", ("heads", 2)])
def test_results_have_the_same_bits_again(schedule: Any, budget: float) -> None:
    def run(comm: Any) -> Any:
        options: dict[str, Any] = {"causal": True, "sinks": np.ones(2), "schedule": schedule}
        attention, pullback = dist.vjp(Q, K, V, comm, backend="numpy", **options)
        grads = pullback(Q)
        return [x.tobytes() for x in (*attention, *grads[:3], grads.dsinks)]

    with in_groups(budget):
        found = on_ranks(4, run)
        assert found == on_ranks(4, run)
    assert len({dsinks for *_, dsinks in found}) == 1


def test_groups_of_one_rank_are_a_ring() -> None:
    def run(comm: Any) -> Any:
        return [
            call(comm, causal=True, schedule=schedule).out.tobytes()
            for schedule in ("ring", ("heads", 1))
        ]

    assert all(ring == groups for ring, groups in on_ranks(3, run))


class Silent:
    """A request that no rank answers."""

    def Test(self) -> bool:  # noqa: N802 - as mpi4py names it
        return False


def test_who_waits_too_long_says_for_whom() -> None:
    class Comm:
        def Get_rank(self) -> int:  # noqa: N802 - as mpi4py names it
            return 0

        def Get_size(self) -> int:  # noqa: N802 - as above
            return 2

        def Irecv(self, x: Any, source: int, tag: int) -> Silent:  # noqa: N802, ARG002 - as above
            return Silent()

    waiting = MPI(Comm(), 0.01).receive(np.zeros(3), 1, 0)
    with pytest.raises(TimeoutError, match=r"waited 0.01 s for rank 1 to send; it has failed"):
        waiting.wait()
