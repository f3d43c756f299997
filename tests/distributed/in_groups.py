"""Divide passes into head groups even if calls are too short to be worth it."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from tileattn.distributed.model.memory_plan import CPU, GPU, Device


def tireless(device: Device, budget: float = 0.0) -> Device:
    """Return a device on which no call or message is too small."""
    return device._replace(tile=1, units=1, call=0.0, step=0.0, rows=1, budget=budget)


@contextmanager
def in_groups(budget: float = 0.0) -> Iterator[None]:
    """Divide passes until a rank holds at most ``budget`` times its share."""
    with (
        patch("tileattn.distributed.model.memory_plan.CPU", tireless(CPU, budget)),
        patch("tileattn.distributed.model.memory_plan.GPU", tireless(GPU, budget)),
        patch("tileattn.distributed.rank_blocks._ALIGNED", 4),
    ):
        yield
