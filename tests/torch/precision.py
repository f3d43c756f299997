"""PyTorch's settings for the precision of its float32 matmuls."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

PLACES = {
    "torch.backends": torch.backends,
    "torch.backends.cuda.matmul": torch.backends.cuda.matmul,
    "torch.backends.mkldnn.matmul": torch.backends.mkldnn.matmul,
}
FOR_ALL = "torch.set_float32_matmul_precision"


def settings() -> list[str]:
    """Return ``fp32_precision`` of each place."""
    return [place.fp32_precision for place in PLACES.values()]


@contextmanager
def precision(place: str, value: str) -> Iterator[None]:
    """Set one setting, or all by the older function, inside a ``with`` block; then restore them."""
    before = settings()
    try:
        if place == FOR_ALL:
            torch.set_float32_matmul_precision(value)
        else:
            PLACES[place].fp32_precision = value
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        for each, own in zip(PLACES.values(), before, strict=True):
            each.fp32_precision = own
