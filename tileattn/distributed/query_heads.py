"""Some query heads of each key head at a time: a block's call holds what is of these.

It has all keys of the block, so that there are as many work tiles of keys, and they travel once.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from tileattn.distributed.arrays import library
from tileattn.distributed.call import Call
from tileattn.distributed.head_groups import Heads

Array = NDArray[Any]


def calls_of(call: Call) -> Iterator[tuple[Call, slice]]:
    """Yield the call of some query heads, and which these are; key heads are a batch if several."""
    if call.splits == 1:
        yield call, slice(None)
        return
    P, x = call.problem, call.operands
    if P.Hkv > 1:
        xp = library(x.kv_lengths)
        x = x._replace(
            q=queries_of(x.q, P.Hkv, slice(0, P.group)),
            k=keys_of(x.k, call),
            v=keys_of(x.v, call),
            kv_lengths=xp.repeat(x.kv_lengths, P.Hkv),
            q_offset=xp.repeat(x.q_offset, P.Hkv),
        )
        one = replace(call, problem=replace(P, B=P.Hkv, Hq=P.group, Hkv=1), operands=x)
    else:
        one = call
    size = P.group // call.splits
    for start in range(0, P.group, size):
        some = slice(start, start + size)
        yield one.of_heads(Heads(some, slice(0, 1))), some


def queries_of(x: Array, Hkv: int, some: slice) -> Array:
    """View some query heads of each key head."""
    if some != slice(None) and Hkv > 1:
        x = x[0].reshape(Hkv, x.shape[1] // Hkv, *x.shape[2:])
    return x[:, some]


def keys_of(x: Array, call: Call) -> Array:
    """View keys, or their gradients, as those of the calls, and back."""
    return x.swapaxes(0, 1) if call.splits > 1 and call.problem.Hkv > 1 else x
