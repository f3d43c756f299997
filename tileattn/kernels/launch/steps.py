"""Which kernels a pass starts, in order, each with its number of blocks."""

from dataclasses import replace
from typing import NamedTuple

from tileattn.kernels.config.hopper import (
    HOPPER,
    HOPPER_BACKWARDS,
    HOPPER_FINISH,
    HOPPER_GROUP_ROWS,
    choose_backward,
    choose_forward,
    repairing,
)
from tileattn.kernels.config.key import KernelKey
from tileattn.kernels.config.select import (
    PLAIN,
    ROW_WARPS,
    Choice,
    Facts,
    choose,
    padded_rows,
    room,
    row_key,
    rows_of_block,
)
from tileattn.kernels.config.tiles import LARGEST
from tileattn.problem import Problem

_FINISH = "one block of threads for each tile of dq"
_REPAIRS = (
    "for heads with large scores or with something not finite; mostly there are none, and it "
    "returns at once"
)

_SAFE = "for heads with something not finite; mostly there are none, and it returns at once"

# Marks of heads, as in src/head.cuh.
NON_FINITE, LARGE, FAILED = 1, 2, 4


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
    in_order : bool
        Whether its blocks of threads add to dq one after the other, in a fixed order.
    """

    key: KernelKey
    blocks: int
    shared: int = 0
    why: str = "one warp for each row"
    boxes: tuple[tuple[str, int], ...] = ()
    in_order: bool = False


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
    if not problem.B * problem.Hq * problem.Nq:
        return ()
    return (forward_step(problem, facts, choose_forward(problem, facts)),)


def forward_step(problem: Problem, facts: Facts, choice: Choice) -> Step:
    """Say how a kernel of the forward pass is started.

    Parameters
    ----------
    problem : Problem
        What is asked, with at least one query.
    facts : Facts
        Of its arrays and its device.
    choice : Choice
        The kernel.

    Returns
    -------
    Step
        The only one of the pass.
    """
    P, (key, shared, _, why) = problem, choice
    heads = P.B * P.Hq
    blocks = heads * -(-P.Nq // key.block_q)
    if key.kernel == HOPPER:
        # Blocks of threads stay, and take one block of queries after the other.
        boxes = (("q", HOPPER_GROUP_ROWS), ("k", key.block_k), ("v", key.block_k))
        return Step(key, min(facts.processors, blocks), shared, why, boxes)
    if key.kernel != "forward":
        return Step(key, _rows(heads * P.Nq), shared, why)
    columns = max(1, -(-P.Dv // key.value_dim))
    return Step(key, columns * blocks, shared, why)


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
        Whether dq is summed in a fixed order: by a kernel of its own, where its blocks of threads
        do not wait for each other.
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
    if queries and keys:
        steps.append(_renormalise_step(P, facts))
    choice = choose_backward(P, facts)
    if choice.key.kernel in HOPPER_BACKWARDS:
        steps += _hopper_steps(P, facts, choice, in_order=deterministic)
    else:
        add_dq = queries * keys > 0 and choice.key.kernel == "backward_keys" and not deterministic
        if keys:
            steps.append(_keys_step(P, facts, choice, add_dq=add_dq))
        if add_dq:
            steps.append(_finish_step(P, steps[-1].key))
            marks = NON_FINITE | LARGE
            steps.append(_repairing(_queries_step(P, facts), facts, marks))
        elif queries:
            steps.append(_queries_step(P, facts))
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


def _hopper_steps(P: Problem, facts: Facts, choice: Choice, *, in_order: bool) -> tuple[Step, ...]:
    """List Hopper's own kernel, then what repairs the heads that it leaves, mostly none."""
    key = replace(choice.key, add_dq=True)
    # Blocks of threads stay, and take one block of keys after the other.
    blocks = min(facts.processors, P.B * P.Hkv * -(-P.Nk // key.block_k))
    boxes = ("q", key.block_q), ("k", key.block_k), ("v", key.block_k), ("dout", key.block_q)
    own = Step(key, blocks, choice.shared, choice.why, boxes, in_order)
    # A softcap where it is flat hides that a gradient is NaN: Hopper's repairs do not know of it.
    safe = () if key.softcap else (_safely(own, choice),)
    portable = choose("backward_keys", P, facts)
    others = _keys_step(P, facts, portable, add_dq=False), _queries_step(P, facts)
    left = LARGE | FAILED | (0 if safe else NON_FINITE)
    sizes = key.head_dim, key.value_dim, key.block_q
    finish = KernelKey(HOPPER_FINISH, key.dtype, *sizes, warps_m=ROW_WARPS)
    tiles = P.B * P.Hq * -(-P.Nq // key.block_q)
    return (
        own,
        *safe,
        Step(finish, tiles, why=_FINISH),
        *(_repairing(step, facts, left) for step in others),
    )


def _safely(own: Step, choice: Choice) -> Step:
    """Give the step of Hopper's kernel that does the heads with something not finite."""
    key, shared, _, _ = repairing(choice, NON_FINITE)
    return own._replace(key=replace(key, add_dq=True), shared=shared, why=_SAFE)


def _repairing(step: Step, facts: Facts, marks: int) -> Step:
    """Let a kernel work on marked heads alone, with as many blocks as run at a time."""
    blocks = min(step.blocks, facts.processors * step.key.residents)
    return step._replace(key=replace(step.key, repairs=marks), blocks=blocks, why=_REPAIRS)


def _keys_step(P: Problem, facts: Facts, choice: Choice, *, add_dq: bool) -> Step:
    key, shared, _, why = choice
    if key.kernel != "backward_keys":
        return Step(key, _rows(P.B * P.Hkv * P.Nk), shared, why)
    write_dbias = facts.bias_shape == (P.B, P.Hq, P.Nq, P.Nk)
    key = replace(key, add_dq=add_dq, write_dbias=write_dbias)
    return Step(key, P.B * P.Hkv * -(-P.Nk // key.block_k), shared, why)


def _finish_step(P: Problem, key: KernelKey) -> Step:
    """Give the kernel that takes over the sums of dq from one over keys."""
    key = replace(key, kernel="backward_finish", warps_m=ROW_WARPS, warps_n=1, loaders=0)
    rows = rows_of_block(key, key.head_dim)
    key = replace(key, add_dq=False, write_dbias=False)
    return Step(key, -(-P.B * P.Hq * P.Nq // rows))


def _queries_step(P: Problem, facts: Facts) -> Step:
    key, shared, _, why = choose("backward_queries", P, facts)
    if key.kernel != "backward_queries":
        return Step(key, _rows(P.B * P.Hq * P.Nq), shared, why)
    return Step(key, P.B * P.Hq * -(-P.Nq // key.block_q), shared, why)


def _renormalise_step(P: Problem, facts: Facts) -> Step:
    """Give the kernel whose scores have the bits of those that dq is computed from."""
    queries = choose("backward_queries", P, facts)
    if queries.key.kernel != "backward_queries":
        key = replace(queries.key, kernel=PLAIN["backward_renormalise"], dropout=False)
        return Step(key, _rows(P.B * P.Hq * P.Nq), why=queries.why)
    key, shared, _, _ = choose("backward_renormalise", P, facts)
    key = replace(key, dropout=False)
    step = Step(key, P.B * P.Hq * -(-P.Nq // key.block_q), shared)
    return _repairing(step, facts, LARGE)


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
