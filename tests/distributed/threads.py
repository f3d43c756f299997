"""Ranks that are threads of one process; messages are queues."""

import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from queue import Empty, Queue
from typing import Any

import numpy as np

PATIENCE = 60.0


class World:
    """State that the ranks share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.boxes: dict[Any, Queue[Any]] = defaultdict(Queue)
        self.lock = threading.Lock()
        self.barrier = threading.Barrier(size)
        self.gathered: list[Any] = [None] * size
        self.bytes_sent = [0] * size
        self.messages_sent = [0] * size

    def box(self, key: Any) -> "Queue[Any]":
        with self.lock:
            return self.boxes[key]


class Rank:
    """A communicator of one thread."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size
        self.patience = PATIENCE

    def send(self, x: Any, to: int, tag: int) -> "Sent":
        assert x.flags.c_contiguous
        assert to != self.rank
        self.world.bytes_sent[self.rank] += x.nbytes
        self.world.messages_sent[self.rank] += 1
        self.world.box((self.rank, to, tag)).put(x)  # not a copy: it may not change under way
        return Sent()

    def receive(self, x: Any, source: int, tag: int) -> "Received":
        return Received(self.world.box((source, self.rank, tag)), x, self.patience)

    def together(self) -> Any:
        return nullcontext()

    def gather(self, x: Any) -> list[Any]:
        self.world.gathered[self.rank] = x
        self.world.barrier.wait(self.patience)
        found = list(self.world.gathered)
        self.world.barrier.wait(self.patience)
        return found


class Sent:
    def wait(self) -> None:
        pass


class Received:
    def __init__(self, box: "Queue[Any]", to: Any, patience: float) -> None:
        self.box, self.to, self.patience = box, to, patience

    def wait(self) -> None:
        try:
            x = self.box.get(timeout=self.patience)
        except Empty:
            raise TimeoutError("nothing was sent") from None
        assert (x.dtype, x.shape) == (self.to.dtype, self.to.shape)
        np.copyto(self.to, x)


def on_ranks(size: int, run: Callable[[Rank], Any], *, all_received: bool = True) -> list[Any]:
    """Run a function on every rank; return what each returns or raises."""
    world, found = World(size), list[Any]([None] * size)

    def work(rank: int) -> None:
        try:
            found[rank] = run(Rank(world, rank))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    if all_received:
        assert all(not x.qsize() for x in world.boxes.values()), "a message was not received"
    return found
