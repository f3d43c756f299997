"""Tensor maps without addresses: where TMA finds the boxes of an array.

A map has an address, sizes, strides and the box that one copy moves. All but the address is decided
here; the CUDA driver encodes it.
"""

from typing import Any, NamedTuple

from tileattn.kernels.cuda.plan.layout import ArrayLayout

MAX_STRIDE = 1 << 40  # bytes; the driver accepts smaller strides only
_UNIT = 16  # bytes; alignment of addresses and strides
_ELEMENT = 2  # bytes of an element of a map; two numbers of 8 bits are one
COLUMNS = 64  # elements of a row of a box: 128 bytes, the width of the swizzle


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
    """Describe the tensor map of (B, H, N, D) as 16-bit elements, in boxes of ``rows`` rows."""
    return TensorMap(name, x.dtype, *sizes_and_strides(x, x.itemsize), (COLUMNS, rows, 1, 1))


def sizes_and_strides(x: Any, itemsize: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes and strides of the tensor map of anything with a shape and strides."""
    (B, H, N, D), (b, h, n, _) = x.shape, x.strides
    # The driver also checks the stride of an axis of length 1, which may be anything.
    pitch = -(-D * itemsize // _UNIT) * _UNIT
    strides = (n if N > 1 else pitch, h if H > 1 else pitch, b if B > 1 else pitch)
    return (D * itemsize // _ELEMENT, N, H, B), strides


def can_map(x: ArrayLayout) -> bool:
    """Return True if an array with aligned rows can have a tensor map.

    It cannot if an axis is broadcast or reversed, or its stride is too long.
    """
    return all(0 < s < MAX_STRIDE for n, s in zip(x.shape[:-1], x.strides, strict=False) if n > 1)
