"""Passes in as many groups of heads as there may be, whatever is worth its start."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from tileattn.distributed.model.memory_plan import CPU, GPU, Device


def tireless(device: Device, budget: float = 0.0) -> Device:
    """A device to which no call or message is too small."""
    return device._replace(tile=1, units=1, call=0.0, step=0.0, rows=1, budget=budget)


@contextmanager
def in_groups(budget: float = 0.0) -> Iterator[None]:
    """Divide passes until they hold no more than a budget, in units of a share."""
    with (
        patch("tileattn.distributed.model.memory_plan.CPU", tireless(CPU, budget)),
        patch("tileattn.distributed.model.memory_plan.GPU", tireless(GPU, budget)),
        patch("tileattn.distributed.rank_blocks._ALIGNED", 4),
    ):
        yield
