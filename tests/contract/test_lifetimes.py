"""Nothing that a caller passes outlives the call: caches keep copies and expressions."""

import gc
from collections.abc import Iterator
from types import FunctionType
from typing import Any
from weakref import ref

import numpy as np
import pytest

from tests.contract.test_every_option import entry_of
from tests.every_option import ENTRIES, VALUES, Call, call_with
from tileattn import BlockMask

# JAX compiles other options into programs, which it keeps, or copies them.
CASES = [(entry, option) for entry in ("numpy", "llvm", "torch") for option in VALUES]
CASES += [("jax", "score_mod"), ("jax", "mask_mod")]


def copied(x: Any) -> Any:
    """Copy an argument, with all that it consists of."""
    if isinstance(x, tuple):
        return tuple(map(copied, x))
    if isinstance(x, np.ndarray):
        return x.copy()
    if isinstance(x, BlockMask):
        return BlockMask(x.kinds.astype(bool), x.block_size)
    if isinstance(x, FunctionType):
        code = x.__code__.replace(co_name="copied")
        return FunctionType(code, {"abs": abs}, "copied", x.__defaults__, x.__closure__)
    return x


def objects(x: Any) -> Iterator[Any]:
    """List the objects of an argument, of which the caller may expect that they die."""
    if isinstance(x, tuple | dict):
        for y in x.values() if isinstance(x, dict) else x:
            yield from objects(y)
    elif isinstance(x, np.ndarray | BlockMask):
        yield x
    elif isinstance(x, FunctionType):
        yield from (x, x.__code__)


@pytest.mark.parametrize(("entry", "option"), CASES)
def test_no_argument_is_kept_alive(entry: str, option: str) -> None:
    entry_of(entry)
    gc.freeze()  # the collection below then skips a million objects of PyTorch and JAX

    def run() -> list[tuple[str, Any]]:
        call = call_with({name: copied(x) for name, x in VALUES[option].options.items()})
        for _ in range(2):
            ENTRIES[entry](call)
        named = [*zip(Call._fields, call[:-1], strict=False), *call.options.items()]
        return [(name, ref(x)) for name, argument in named for x in objects(argument)]

    made = run()
    gc.collect()
    assert [name for name, x in made if x() is not None] == []
