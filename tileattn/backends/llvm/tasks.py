"""Divide the work of a kernel into tasks; return the parameters that describe them."""

from collections.abc import Container
from dataclasses import replace
from typing import NamedTuple

from tileattn.backends.llvm.arrays import block_size
from tileattn.backends.llvm.parameter_gradient import layouts, sharing
from tileattn.backends.threads import worker_count
from tileattn.call.problem import Operands, Problem
from tileattn.kernels.llvm.params import BF16_ARRAYS, BF16_TRANSPOSES, OF_PASS
from tileattn.kernels.llvm.sizes import BLOCK, DECODE_ROWS, ROWS, TERMS, padded, state_bytes
from tileattn.kernels.llvm.target import Target

_SERIAL_WORK = 1 << 22  # multiply-adds up to which one thread is faster than several
_WORD = 8  # bytes of a counter
_READ = 3  # multiply-adds that reading an element of K or V counts as when decoding
_QUOTA = (
    1 << 31
)  # multiply-adds (0.03 s) after which a kernel returns, so that it can be interrupted


class Grid(NamedTuple):
    """The tasks of one function."""

    tasks: int
    threads: int  # maximum that share them
    quota: int  # tasks that a thread takes at a time


class Part(NamedTuple):
    """An array of the workspace of a call."""

    nbytes: int
    uninitialised: int = 0  # bytes before the ones that are set to 0


class Division(NamedTuple):
    """The tasks of a module."""

    values: dict[str, int]  # parameters for the kernel
    grids: list[Grid]  # tasks of each function
    workspace: dict[str, Part]  # by the names of fields
    own_bytes: int = 0  # that a worker needs beside its tiles

    @property
    def fields(self) -> list[int]:
        """The parameters in the order of their fields."""
        return [*(dict.fromkeys(OF_PASS, 0) | self.values).values()]


def forward_work(P: Problem, kernel: str = "forward") -> int:
    """Return the work of a forward kernel in multiply-adds, memory reads included."""
    reads = P.B * P.Hkv * P.Nk * (P.D + P.Dv) if kernel == "decode" else 0
    return P.B * P.Hq * P.Nq * P.Nk * (P.D + P.Dv) + _READ * reads


def is_parallel(work: int) -> bool:
    """Return True if several threads do ``work`` multiply-adds faster than one."""
    return work > _SERIAL_WORK


def divide(
    kernel: str, P: Problem, target: Target, x: Operands, arrays: Container[str],
    split_keys: int, few: int, longest: int,
) -> Division:  # fmt: skip
    """Divide the work of a kernel that reads the named arrays.

    The decoding kernel takes the sequences of up to ``few`` queries, the forward kernel the rest;
    ``longest`` is the most keys of a sequence.
    """
    if kernel == "decode":
        P = P if P.Nq <= few else replace(P, Nq=few)
        division = _decode(P, target, longest, split_keys)
    else:
        division = (_forward if kernel == "forward" else _backward)(P, target, x)
    if "block_kinds" in arrays:
        division.values.update(zip(("block_q", "block_k"), block_size(P, x), strict=True))
    division.values["few"] = few
    if not target.bf16:
        return division
    values, grids, workspace, _ = division
    blocks = sum(_bf16_blocks(P, operand) for operand in BF16_ARRAYS if operand in arrays)
    prepare = _grid(blocks, forward_work(P))
    return Division(values, [prepare, *grids], workspace | _transposes(P, kernel, target))


def _bf16_blocks(P: Problem, operand: str) -> int:
    """Count the blocks of an operand; ``bf16_prepare`` has one task for each."""
    heads, length, _ = BF16_ARRAYS[operand]
    return int(P.B * getattr(P, heads) * -(-getattr(P, length) // BLOCK))


def _transposes(P: Problem, kernel: str, target: Target) -> dict[str, Part]:
    """Describe the transposed operands that the bfloat16 matmuls of a pass read.

    A transpose is cut into blocks of rows. Matmuls may read up to TERMS elements past the last one.
    """
    parts: dict[str, Part] = {}
    for operand in BF16_TRANSPOSES[kernel]:
        columns = padded(target, P.accum_dtype.itemsize, getattr(P, BF16_ARRAYS[operand][2]))
        size = P.dtype.itemsize * _bf16_blocks(P, operand) * columns * BLOCK
        parts[f"{operand}_t"] = Part(size + P.dtype.itemsize * TERMS, size)
    return parts


def _forward(P: Problem, target: Target, _: Operands) -> Division:
    """Make a task of each block of rows."""
    blocks = -(-P.group * P.Nq // target.width(P.accum_dtype.itemsize))
    return Division({"blocks": blocks}, [_grid(P.B * P.Hkv * blocks, forward_work(P))], {})


def _decode(P: Problem, target: Target, longest: int, split_keys: int) -> Division:
    """Make a task of each block of rows and split of keys."""
    rows, count = P.group * P.Nq, splits(P, longest, split_keys)
    blocks = -(-rows // DECODE_ROWS)
    groups = P.B * P.Hkv * blocks
    row = state_bytes(target, P.accum_dtype.itemsize, P.Dv)
    split = row * min(rows, DECODE_ROWS)
    size = groups * count * split
    workspace = {"partials": Part(size, size), "ended": Part(_WORD * groups)}
    values = {"blocks": blocks, "splits": count, "split_keys": split_keys}
    values |= {"partials_n": count * split, "partials_s": split, "partials_r": row}
    return Division(values, [_grid(groups * count, forward_work(P, "decode"))], workspace)


def splits(P: Problem, longest: int, keys: int) -> int:
    """Return the most splits of ``keys`` keys that a block of rows attends to."""
    left, right = P.window
    if left is None:
        return max(1, -(-longest // keys))
    reach = longest if right is None else min(longest, P.Nq + left + right)
    return max(1, (reach + keys - 2) // keys + 1)


def _backward(P: Problem, target: Target, x: Operands) -> Division:
    """Make a task of each key block, and of each block of rows before and after."""
    blocks = -(-P.Nk // target.width(P.accum_dtype.itemsize))
    learned = layouts(P, x)
    tasks, shared = P.B * P.Hkv * blocks, sharing(P, x, learned)
    columns = padded(target, P.accum_dtype.itemsize, P.D)
    rows = _grid(P.B * P.Hq * -(-P.Nq // ROWS), P.B * P.Hq * P.Nq * (P.D + P.Dv))
    keys = _grid(tasks // max(1, shared["sharing"]), forward_work(P))
    chains = min(worker_count(), keys.threads)
    values = {"blocks": blocks, "chains": chains, "dq_columns": columns, **shared}
    own_bytes = sum(layout.own_bytes for layout in learned)
    workspace = {"semaphore": Part(_WORD * max(1, tasks))}
    return Division(values, [rows, keys, rows], workspace, own_bytes)


def _grid(tasks: int, work: int) -> Grid:
    quota = max(1, tasks * _QUOTA // max(1, work))
    return Grid(tasks, tasks if is_parallel(work) else 1, quota)
