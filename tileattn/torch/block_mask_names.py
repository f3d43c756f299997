"""Names of block masks: a PyTorch operator takes a string, not an object."""

from typing import Any
from weakref import WeakValueDictionary

import torch

from tileattn.call.block_mask import BlockMask

_named: WeakValueDictionary[str, BlockMask] = WeakValueDictionary()
_compiled: dict[str, BlockMask] = {}


def name_of(x: Any) -> str:
    """Name a block mask. The name is valid while the mask lives; compiled programs keep it."""
    if not isinstance(x, BlockMask):
        raise TypeError(
            f"block_mask must be a tileattn.BlockMask; got {type(x).__name__} "
            "(BlockMask.from_mask makes one from a boolean array)"
        )
    return _name_in_program(x) if torch.compiler.is_compiling() else _name(x)


def block_mask_of(name: str) -> BlockMask:
    """Look up a block mask by its name."""
    return _named[name]


def _name(x: BlockMask) -> str:
    name = str(id(x))
    _named[name] = x
    return name


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # PyTorch's
def _name_in_program(x: BlockMask) -> str:
    """Name a mask whose compiled backward pass may run after the caller has dropped it."""
    name = _name(x)
    _compiled[name] = x
    return name
