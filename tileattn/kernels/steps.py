"""Which kernels a pass starts, in order, each with its number of blocks."""

from dataclasses import replace
from typing import NamedTuple

from tileattn.kernels.key import KernelKey
from tileattn.kernels.select import (
    HOPPER,
    HOPPER_GROUP_ROWS,
    ROW_WARPS,
    Facts,
    choose,
    choose_forward,
    padded_rows,
    room,
    row_key,
    rows_of_block,
)
from tileattn.kernels.tiles import LARGEST
from tileattn.problem import Problem


class Step(NamedTuple):
    """One kernel, started once.

    Parameters
    ----------
    key : KernelKey
        What is compiled.
    blocks : int
        Blocks of threads.
    shared : int
        Bytes of dynamic shared memory.
    why : str
        Why this kernel, in one clause.
    boxes : tuple of (str, int)
        Arrays of which the kernel takes tensor maps, each with the rows of a box.
    """

    key: KernelKey
    blocks: int
    shared: int = 0
    why: str = "one warp for each row"
    boxes: tuple[tuple[str, int], ...] = ()


def forward_steps(problem: Problem, facts: Facts) -> tuple[Step, ...]:
    """List what the forward pass starts: nothing where there is no query.

    Parameters
    ----------
    problem : Problem
        What is asked.
    facts : Facts
        Of its arrays and its device.

    Returns
    -------
    tuple of Step
        In order.
    """
    P = problem
    heads = P.B * P.Hq
    if not heads * P.Nq:
        return ()
    key, shared, _, why = choose_forward(P, facts)
    blocks = heads * -(-P.Nq // key.block_q)
    if key.kernel == HOPPER:
        # Blocks of threads stay, and take one block of queries after the other.
        boxes = (("q", HOPPER_GROUP_ROWS), ("k", key.block_k), ("v", key.block_k))
        return (Step(key, min(facts.processors, blocks), shared, why, boxes),)
    if key.kernel != "forward":
        return (Step(key, _rows(heads * P.Nq), shared, why),)
    columns = max(1, -(-P.Dv // key.value_dim))
    return (Step(key, columns * blocks, shared, why),)


def backward_steps(
    problem: Problem, facts: Facts, *, deterministic: bool, sinks: bool
) -> tuple[Step, ...]:
    """List what the backward pass starts.

    Parameters
    ----------
    problem : Problem
        What is asked.
    facts : Facts
        Of its arrays and its device.
    deterministic : bool
        Whether dq is summed in a fixed order, by a kernel of its own.
    sinks : bool
        Whether the call has sinks.

    Returns
    -------
    tuple of Step
        In order. Where a step's key has ``add_dq``, dq is summed in an array of zeros.
    """
    P, dtype = problem, problem.dtype.name
    queries, keys = P.B * P.Hq * P.Nq, P.B * P.Hkv * P.Nk
    steps: list[Step] = []
    if queries:
        steps.append(_rows_step(P, facts))
    add_dq = False
    if keys:
        key, shared, _, why = choose("backward_keys", P, facts)
        if key.kernel == "backward_keys":
            add_dq = queries > 0 and not deterministic
            write_dbias = facts.bias_shape == (P.B, P.Hq, P.Nq, P.Nk)
            key = replace(key, add_dq=add_dq, write_dbias=write_dbias)
            blocks = P.B * P.Hkv * -(-P.Nk // key.block_k)
        else:
            blocks = _rows(keys)
        steps.append(Step(key, blocks, shared, why))
        if add_dq:
            finish = replace(key, kernel="backward_finish", warps_m=ROW_WARPS, warps_n=1)
            rows = rows_of_block(finish, finish.head_dim)
            finish = replace(finish, add_dq=False, write_dbias=False)
            steps.append(Step(finish, -(-queries // rows)))
    if queries and not add_dq:
        key, shared, _, why = choose("backward_queries", P, facts)
        tiled = key.kernel == "backward_queries"
        blocks = P.B * P.Hq * -(-P.Nq // key.block_q) if tiled else _rows(queries)
        steps.append(Step(key, blocks, shared, why))
    if facts.bias and queries * P.Nk and not any(step.key.write_dbias for step in steps):
        steps.append(_bias_step(P, facts))
    if sinks and P.Hq:
        steps.append(Step(row_key("backward_sinks", dtype), P.Hq))
    return tuple(steps)


def _rows_step(P: Problem, facts: Facts) -> Step:
    key = KernelKey(
        *("backward_rows", P.dtype.name),
        value_dim=room(min(P.Dv, LARGEST)),
        warps_m=ROW_WARPS,
        vector=facts.vector,
    )
    rows = P.B * P.Hq * padded_rows(P.Nq)
    return Step(key, -(-rows // rows_of_block(key, key.value_dim)))


def _bias_step(P: Problem, facts: Facts) -> Step:
    key, shared, _, why = choose("backward_bias", P, facts)
    b, h, rows, columns = facts.bias_shape
    if key.kernel != "backward_bias":
        return Step(key, _rows(b * h * rows * columns), shared, why)
    tiles = 1 if rows == 1 else -(-P.Nq // key.block_q)
    tiles *= 1 if columns == 1 else -(-P.Nk // key.block_k)
    return Step(key, b * h * tiles, shared, why)


def _rows(rows: int) -> int:
    return -(-rows // ROW_WARPS)
