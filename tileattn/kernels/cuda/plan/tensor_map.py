"""Tensor maps without addresses: where TMA finds the boxes of an array.

A map has an address, sizes, strides and the box that one copy moves. All but the address is decided
here; the CUDA driver encodes it.
"""

from typing import NamedTuple

from tileattn.kernels.cuda.plan.layout import ArrayLayout

MAX_STRIDE = 1 << 40  # bytes; the driver accepts smaller strides only
_UNIT = 16  # bytes; alignment of addresses and strides
_COLUMNS = 64  # columns of a box: 128 bytes, the width of the swizzle


class TensorMap(NamedTuple):
    """A tensor map without its address; axes from the innermost outwards."""

    name: str
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # bytes between entries of the outer three axes
    box: tuple[int, ...]  # entries of each axis that one copy moves

    def __str__(self) -> str:
        return (
            f"{self.name} of shape {self.sizes[::-1]}, strides {self.strides[::-1]} bytes, in "
            f"boxes of {self.box[1]} rows"
        )


def tensor_map(name: str, x: ArrayLayout, rows: int) -> TensorMap:
    """Describe the tensor map of 16-bit elements (B, H, N, D), in boxes of ``rows`` rows."""
    pitch = -(-x.shape[-1] * x.itemsize // _UNIT) * _UNIT
    # The driver also checks the stride of an axis of length 1, which may be anything.
    strides = [s if n > 1 else pitch for n, s in zip(x.shape[:-1], x.strides, strict=False)]
    box = (_COLUMNS, rows, 1, 1)
    return TensorMap(name, x.dtype, x.shape[::-1], tuple(strides[::-1]), box)


def can_map(x: ArrayLayout) -> bool:
    """Return True if an array with aligned rows can have a tensor map.

    It cannot if an axis is broadcast or reversed, or its stride is too long.
    """
    return all(0 < s < MAX_STRIDE for n, s in zip(x.shape[:-1], x.strides, strict=False) if n > 1)
