"""Messages as NCCL sends them: in the order of a stream, without tags."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue
from typing import Any

import numpy as np
import pytest

import tileattn.distributed as dist
from tests.distributed.in_groups import in_groups
from tests.distributed.threads import PATIENCE, Rank, on_ranks
from tests.distributed.whole_sequence import check_once, layouts
from tileattn.distributed import Layout
from tileattn.testing import AttentionCase

SCHEDULES: list[Any] = ["ring", "gather", ("heads", 2), "heads"]


class Step:
    """Messages that start together."""

    def __init__(self) -> None:
        self.messages: list[tuple[Any, int, bool]] = []
        self.over = threading.Event()

    def wait(self) -> None:
        if not self.over.wait(PATIENCE / 4):
            raise TimeoutError("messages of a step wait for one another")


class Streamed(Rank):
    """A rank with one stream: a step starts when the step before is complete.

    A message is over when the other rank has received it, in a step that has begun there.
    """

    def __init__(self, other: Rank) -> None:
        super().__init__(other.world, other.rank)
        self.step: Step | None = None
        self.steps: Queue[Step] = Queue()
        threading.Thread(target=self.run, daemon=True).start()

    @contextmanager
    def together(self) -> Iterator[None]:
        assert self.step is None
        self.step = step = Step()
        yield
        self.step = None
        if step.messages:
            self.steps.put(step)

    def send(self, x: Any, to: int, tag: int) -> Any:  # noqa: ARG002 - NCCL has no tags
        return self.begun(x, to, sends=True)

    def receive(self, x: Any, source: int, tag: int) -> Any:  # noqa: ARG002 - as above
        return self.begun(x, source, sends=False)

    def begun(self, x: Any, peer: int, *, sends: bool) -> Step:
        assert self.step is not None, "a message outside of a step would block those behind it"
        assert x.flags.c_contiguous
        self.step.messages.append((x, peer, sends))
        return self.step

    def run(self) -> None:
        while True:
            step = self.steps.get()
            box = self.world.box
            for x, peer, sends in step.messages:
                if sends:
                    box((self.rank, peer)).put(x)
            for to, peer, sends in step.messages:
                if not sends:
                    x = box((peer, self.rank)).get()
                    assert (x.shape, x.dtype) == (to.shape, to.dtype)
                    np.copyto(to, x)
                    box((peer, self.rank, "received")).put(None)
            for _, peer, sends in step.messages:
                if sends:
                    box((self.rank, peer, "received")).get()
            step.over.set()


def streamed(ranks: int, run: Any) -> list[Any]:
    found = on_ranks(ranks, lambda comm: run(Streamed(comm)))
    for x in found:
        if isinstance(x, Exception):
            raise x
    return found


LAYOUTS = {
    "zigzag": Layout.zigzag(37, 4),
    "ranges anywhere": layouts(np.random.default_rng(7), 37, 4),
    "two ranks without tokens": Layout.contiguous([0, 20, 0, 17]),
}
# Schedules, options and head groups with each other, and a layout with each of them.
STEPS = [
    pytest.param(schedule, options, budget, name, id=f"{schedule}-{options}-{budget}-{name}")
    for n, schedule in enumerate(SCHEDULES)
    for m, options in enumerate([{}, {"causal": True}, {"window": (9, 3)}, {"kv_lengths": [30, 7]}])
    for o, budget in enumerate([0.0, 1.5, 100.0])
    for name in [[*LAYOUTS][(n + m + o) % 3]]
]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "options", "budget", "layout"), STEPS)
def test_no_step_waits_for_another(
    schedule: Any, options: dict[str, Any], budget: float, layout: str
) -> None:
    rng = np.random.default_rng(5)
    q, dout = rng.standard_normal((2, 2, 8, 37, 6), np.float32)
    k, v = rng.standard_normal((2, 2, 4, 37, 6), np.float32)
    case = AttentionCase(q, k, v, dout, None, options)
    with in_groups(budget):
        check_once(case, LAYOUTS[layout], LAYOUTS[layout], on=streamed, schedule=schedule)


def test_ranges_that_touch_are_one_segment() -> None:
    segments = Layout.zigzag(16, 2).segments(1)
    assert segments == [(4, 12, slice(0, 8))]
    assert len(Layout.zigzag(16, 2).segments(0)) == 2


def test_calls_of_a_known_kind_are_not_compared_again() -> None:
    rng = np.random.default_rng(2)
    q, k, v = rng.standard_normal((3, 2, 10, 6), np.float32)
    options: dict[str, Any] = {"causal": True, "alibi_slopes": np.array([0.1, 0.2])}

    def run(comm: Any) -> Any:
        comm.validated = {}
        counts, gather = [0], comm.gather

        def counted(x: Any) -> Any:
            counts[-1] += 1
            return gather(x)

        comm.gather = counted
        for window in (None, None, (3, 0)):
            dist.forward(q, k, v, comm, backend="numpy", window=window, **options)
            counts.append(0)
        again = dist.forward(2 * q, k, v, comm, backend="numpy", window=None, **options)
        comm.validated, known = {}, counts[:]
        fresh = dist.forward(2 * q, k, v, comm, backend="numpy", window=None, **options)
        return known, again.out.tobytes() == fresh.out.tobytes()

    for counts, same in streamed(2, run):
        assert counts[0] == counts[2] > 0
        assert counts[1] == counts[3] == 0
        assert same
