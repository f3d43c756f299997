"""Exact attention over a sequence that several ranks share, through MPI or PyTorch.

Each rank holds a part of the queries and a part of the keys. The options are those of one device,
by the indices of the whole sequence.
"""

from tileattn.distributed.functional import backward, forward, vjp
from tileattn.distributed.layout import Layout

__all__ = ["Layout", "backward", "forward", "vjp"]
