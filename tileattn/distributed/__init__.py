"""Exact attention over a sequence that several ranks share, through MPI, NCCL or PyTorch.

Each rank holds a part of the queries and a part of the keys. The options are the same as for one
device; indices refer to the whole sequence.
"""

from tileattn.distributed.functional import backward, forward, vjp
from tileattn.distributed.layout import Layout
from tileattn.distributed.model.cost import CPU_RATES, GPU_RATES, Cost, Link, PassCost, Rates
from tileattn.distributed.prediction import Prediction, explain, predict

__all__ = [
    "CPU_RATES",
    "GPU_RATES",
    "Cost",
    "Layout",
    "Link",
    "PassCost",
    "Prediction",
    "Rates",
    "backward",
    "explain",
    "forward",
    "predict",
    "vjp",
]
