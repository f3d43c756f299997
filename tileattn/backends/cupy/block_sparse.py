"""Block masks on CuPy devices: each mask is uploaded once."""

from collections.abc import Callable
from typing import Any, NamedTuple

from tileattn.backends.cupy.streams import outlive_readers, stream_name, uploaded
from tileattn.call.block_mask import BlockMask
from tileattn.kernels.cuda.plan.block_sparse import once, partial_blocks
from tileattn.kernels.cuda.plan.tile_lists import TileLists


class _Uploaded(NamedTuple):
    """Arrays on a device, and the stream on which their memory was allocated."""

    arrays: tuple[Any, ...]
    stream: tuple[int, int]


def mask_addresses(mask: BlockMask, device: int, lists: TileLists | None) -> dict[str, int]:
    """Upload a block mask to CuPy's current device; return addresses by parameter name.

    ``lists`` are the lists that kernels read, None if they read none.
    """
    kinds, bits = _uploaded(mask, device, lambda: partial_blocks(mask))
    found: dict[str, int] = {"block_kinds": kinds.data.ptr, "block_bits": bits.data.ptr}
    if lists is not None:
        (entries,) = _uploaded(mask, (device, lists), lambda: (lists.lists(mask),))
        found["tile_list"] = entries.data.ptr
    return found


def _uploaded(mask: BlockMask, key: Any, make: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    """Upload arrays made from a mask to CuPy's current device, once.

    The copy is complete before any stream reads it, since all streams do. It outlives the mask if
    the current stream may still read it.
    """

    def copied() -> _Uploaded:
        return _Uploaded(tuple(map(uploaded, make())), stream_name())

    there: _Uploaded = once(mask, key, copied)
    outlive_readers(there, there.stream)
    return there.arrays
