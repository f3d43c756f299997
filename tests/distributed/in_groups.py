"""Passes in as many groups of heads as there may be, whatever is worth its start."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from tileattn.distributed.held import CPU


@contextmanager
def in_groups(budget: float = 0.0) -> Iterator[None]:
    """Divide passes until they hold no more than a budget, in units of a share."""
    device = CPU._replace(tile=1, tiles=0, message=0, rows=1, budget=budget)
    with (
        patch("tileattn.distributed.held.CPU", device),
        patch("tileattn.distributed.rank_blocks._ALIGNED", 4),
    ):
        yield
