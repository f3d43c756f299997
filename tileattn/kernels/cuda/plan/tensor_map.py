"""Tensor maps: what tells TMA where the boxes of an array lie.

A map has an address, sizes, strides and the box that one copy moves. All but the address is decided
here; the driver encodes it.
"""

from dataclasses import dataclass

from tileattn.kernels.cuda.plan.layout import ArrayLayout

MAX_STRIDE = 1 << 40  # bytes; the driver takes strides below
_UNIT = 16  # bytes that addresses and rows must be aligned to
_COLUMNS = 64  # of a box: 128 bytes, the width of the swizzle


@dataclass(frozen=True, slots=True)
class TensorMap:
    """All of a tensor map but the address; axes from the innermost on."""

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
    """Describe the tensor map, in boxes of some rows, of 16-bit elements (B, H, N, D)."""
    pitch = -(-x.shape[-1] * x.itemsize // _UNIT) * _UNIT
    # The driver looks at the stride of an axis with one entry, too, where it may be anything.
    strides = [s if n > 1 else pitch for n, s in zip(x.shape[:-1], x.strides, strict=False)]
    box = (_COLUMNS, rows, 1, 1)
    return TensorMap(name, x.dtype, x.shape[::-1], tuple(strides[::-1]), box)


def can_map(x: ArrayLayout) -> bool:
    """Whether an array whose rows are aligned can have a tensor map.

    It cannot where an axis is broadcast or reversed, or its stride is too long.
    """
    return all(0 < stride < MAX_STRIDE for stride in x.row_strides)
