"""What an operator of PyTorch cannot take, functions and block masks, under names that it can."""

from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakValueDictionary

import torch

from tileattn.algorithm.block_mask import BlockMask
from tileattn.expressions.state import state_of

# A compiled graph has the name of a function, which may be made anew in each call: equal functions
# are one, and are kept.
_functions: dict[Hashable, Callable[..., Any]] = {}
_named: WeakValueDictionary[str, Any] = WeakValueDictionary()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # PyTorch's
def name_of(x: Any) -> str:
    """Name an object, for as long as it lives; a function lives on."""
    if not isinstance(x, BlockMask):
        state = state_of(x)
        x = _functions.setdefault(x if state is None else state, x)
    name = str(id(x))
    _named[name] = x
    return name


def named(name: str) -> Any:
    """Look up the object of a name."""
    return _named[name]
