"""Bytes between slow and fast memory, and FLOPs: counted, in closed form, and recorded."""

from tileattn.traffic.model import ALGORITHMS, KINDS, counted, explained, flops, modelled
from tileattn.traffic.record import Traffic, recorded

__all__ = [
    "ALGORITHMS", "KINDS", "Traffic", "counted", "explained", "flops", "modelled", "recorded",
]  # fmt: skip
