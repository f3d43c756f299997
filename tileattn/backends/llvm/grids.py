"""How the work of a kernel is divided into tasks, and which parameters say so."""

from collections.abc import Callable, Container
from typing import NamedTuple

import numpy as np

from tileattn.backends.llvm import dot
from tileattn.backends.llvm.arrays import Array, block_size
from tileattn.backends.threads import worker_count
from tileattn.kernels.llvm.params import DBIAS_OF_KEYS, DBIAS_OF_ROWS, DBIAS_OF_TILES, DOT_ARRAYS
from tileattn.kernels.llvm.target import DECODE_ROWS, ROWS, Target, padded, state_bytes
from tileattn.problem import Operands, Problem

_SERIAL_WORK = 1 << 22  # multiply-adds up to which starting a thread costs more than it brings
_READ = 3  # multiply-adds that an element of K or V counts as: threads share the bandwidth
_QUOTA = 1 << 31  # multiply-adds, a few hundredths of a second, after which a kernel may be left


class Grid(NamedTuple):
    """The work of one function."""

    tasks: int
    threads: int  # that may share them
    quota: int  # tasks that a thread takes at a time


class Division(NamedTuple):
    """The work of a module: parameters, a grid for each function, and memory of a call."""

    values: dict[str, int]
    grids: list[Grid]
    workspace: Callable[[], dict[str, Array]]


def forward_work(P: Problem, kernel: str = "forward") -> int:
    """Count the multiply-adds of a forward kernel, or what takes as long."""
    reads = P.B * P.Hkv * P.Nk * (P.D + P.Dv) if kernel == "decode" else 0
    return P.B * P.Hq * P.Nq * P.Nk * (P.D + P.Dv) + _READ * reads


def is_parallel(work: int) -> bool:
    """Whether so many multiply-adds are enough work for threads."""
    return work > _SERIAL_WORK


def divide(
    kernel: str, P: Problem, target: Target, x: Operands, arrays: Container[str], split_keys: int
) -> Division:
    """Divide the work of a kernel that reads the named arrays."""
    if kernel == "decode":
        values, grids, workspace = _decode(P, target, x, split_keys)
    else:
        values, grids, workspace = (_forward if kernel == "forward" else _backward)(P, target, x)
    values |= dict(zip(("block_q", "block_k"), block_size(P, x), strict=False))
    if not target.dot:
        return Division(values, grids, workspace)
    blocks = sum(dot.blocks(P, operand) for operand in DOT_ARRAYS if operand in arrays)
    prepare = _grid(blocks, forward_work(P))
    return Division(values, [prepare, *grids], lambda: workspace() | dot.workspace(P, kernel))


def _forward(P: Problem, target: Target, _: Operands) -> Division:
    """Let a task have the rows of a block."""
    blocks = -(-P.group * P.Nq // target.width(P.accum_dtype.itemsize))
    return Division({"blocks": blocks}, [_grid(P.B * P.Hkv * blocks, forward_work(P))], dict)


def _decode(P: Problem, target: Target, x: Operands, split_keys: int) -> Division:
    """Let a task have the rows of a block and the keys of a split."""
    rows, count = P.group * P.Nq, splits(P, x, split_keys)
    blocks = -(-rows // DECODE_ROWS)
    groups = P.B * P.Hkv * blocks
    states = (
        groups,
        count,
        min(rows, DECODE_ROWS),
        state_bytes(target, P.accum_dtype.itemsize, P.Dv),
    )

    def workspace() -> dict[str, Array]:
        return {"partials": np.empty(states, np.uint8), "ended": np.zeros(groups, np.int64)}

    values = {"blocks": blocks, "splits": count, "split_keys": split_keys}
    return Division(values, [_grid(groups * count, forward_work(P, "decode"))], workspace)


def splits(P: Problem, x: Operands, keys: int) -> int:
    """Count the splits of so many keys that the keys of one block of rows reach, at most."""
    longest = int(x.kv_lengths.max(initial=0))
    left, right = P.window
    if left is None:
        return max(1, -(-longest // keys))
    reach = longest if right is None else min(longest, P.Nq + left + right)
    return max(1, (reach + keys - 2) // keys + 1)


def _backward(P: Problem, target: Target, x: Operands) -> Division:
    """Let a task have the keys of a block, and before and after it some rows."""
    blocks = -(-P.Nk // target.width(P.accum_dtype.itemsize))
    tasks, sharing = P.B * P.Hkv * blocks, _sharing(P, x)

    def workspace() -> dict[str, Array]:
        return {"semaphore": np.zeros(max(1, tasks), np.int64)}

    columns = padded(target, P.accum_dtype.itemsize, P.D)
    rows = _grid(P.B * P.Hq * -(-P.Nq // ROWS), P.B * P.Hq * P.Nq * (P.D + P.Dv))
    keys = _grid(tasks // max(1, sharing["sharing"]), forward_work(P))
    chains = min(worker_count(), keys.threads)
    values = {"blocks": blocks, "chains": chains, "dq_columns": columns, **sharing}
    return Division(values, [rows, keys, rows], workspace)


def _grid(tasks: int, work: int) -> Grid:
    quota = max(1, tasks * _QUOTA // max(1, work))
    return Grid(tasks, tasks if is_parallel(work) else 1, quota)


def _sharing(P: Problem, x: Operands) -> dict[str, int]:
    """Say how dbias is summed, and which key heads share a task."""
    alone = {"sharing": 1, "sharing_step": 0, "group_step": 1, "dbias_kind": 0}
    if x.bias is None:
        return alone
    b, h, n, m = x.bias.shape
    if m == 1:
        return alone | {"dbias_kind": DBIAS_OF_ROWS}
    if n == 1:
        return alone | {"dbias_kind": DBIAS_OF_KEYS}
    shared = alone | {"dbias_kind": DBIAS_OF_TILES}
    over_batch, over_heads = b < P.B, h < P.Hq
    if over_heads:
        shared |= {"sharing": P.Hkv, "sharing_step": 1, "group_step": P.Hkv}
    if over_batch:
        shared |= {"sharing": P.B, "sharing_step": P.Hkv, "group_step": 1}
    if over_batch and over_heads:
        shared |= {"sharing": P.B * P.Hkv, "sharing_step": 1}
    return shared
