"""The forward pass on a GPU by a given kernel with given tiles."""

from functools import partial
from typing import Any

from benchmarks.configurations import Call, Inputs
from tileattn.kernels.config.hopper import HOPPER, hopper_forward
from tileattn.kernels.config.select import Choice, Facts, choose
from tileattn.kernels.config.tiles import TileSize
from tileattn.kernels.launch import call
from tileattn.kernels.launch.steps import Step, forward_step
from tileattn.problem import Problem, parse

# A warp for 32 queries, or for 16 where there are no more; Hopper's own has four for 64. Stages are
# those of the fastest row of the table.
TILES = {
    "forward": tuple(
        TileSize(rows, keys, max(1, rows // 32), stages=2)
        for rows in (16, 32, 64, 128)
        for keys in (32, 64, 128)
    ),
    HOPPER: tuple(
        TileSize(rows, keys, rows // 16, stages=4) for rows in (128, 192) for keys in (64, 96, 128)
    ),
}


def steps_with(kernel: str, tile: TileSize, problem: Problem, facts: Facts) -> tuple[Step, ...]:
    """List what the forward pass starts where its kernel and its tiles are given.

    Raises
    ------
    ValueError
        Where the tiles have no room.
    """
    hopper = kernel == HOPPER
    choice: Choice = (
        hopper_forward(problem, tile) if hopper else choose(kernel, problem, facts, (tile,))
    )
    if (choice.key.kernel, choice.key.block_q, choice.key.block_k) != (kernel, *tile[:2]):
        raise ValueError(f"{kernel} has no room for {tile}: {choice.why}")
    return (forward_step(problem, facts, choice),)


def prepared(kernel: str, tile: TileSize, x: Inputs) -> Call:
    """Give a call that computes the output and the logsumexp; both are made once."""
    import cupy

    problem, operands = parse(x.q, x.k, x.v, {})
    started = call.Call(problem, operands)
    out = cupy.ndarray(x.dout.shape, x.dout.dtype)
    lse = cupy.ndarray(out.shape[:3], problem.accum_dtype)
    started.add_rows("out", out, result=True)
    started.addresses["lse"] = lse.data.ptr
    plan = started.plan(partial(steps_with, kernel, tile))

    def run() -> Any:
        started.run(plan)
        return out, lse

    return run
