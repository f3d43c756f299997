"""What is launched before a pass over packed sequences: its work tiles are put in order."""

from collections.abc import Iterable

from tileattn.kernels.config.context import KernelLaunch, block_count
from tileattn.kernels.config.hopper import HOPPER, HOPPER_BACKWARDS
from tileattn.kernels.config.key import KernelKey
from tileattn.problem import Problem

ORDERS_QUERIES, ORDERS_KEYS = "order_query_blocks", "order_key_blocks"
BLOCK_BYTES = 48  # of a `PackedBlock`

_WARPS = 8  # so that the blocks of short calls have several SMs, which find places side by side
_TOGETHER = 32  # threads that find the place of one block
_WHY = "the longest sequences first, whose lengths the device alone may know"


def order_launches(problem: Problem, launches: Iterable[KernelLaunch]) -> tuple[KernelLaunch, ...]:
    """Launch what puts the work tiles of persistent kernels in order, where there are some."""
    P = problem
    if P.sequences is None:
        return ()
    for launch in launches:
        kernel = {HOPPER: ORDERS_QUERIES} | dict.fromkeys(HOPPER_BACKWARDS, ORDERS_KEYS)
        if launch.key.kernel in kernel:
            key = KernelKey(
                *(kernel[launch.key.kernel], P.dtype.name),
                block_q=launch.key.block_q,
                block_k=launch.key.block_k,
                warps_m=_WARPS,
                packed=True,
                paged=P.page is not None,
            )
            return (
                KernelLaunch(key, -(-ordered_blocks(P, key) * _TOGETHER // key.threads), why=_WHY),
            )
    return ()


def ordered_blocks(problem: Problem, key: KernelKey) -> int:
    """Count the numbers that a kernel puts in order: blocks of a head, and some without one."""
    if key.kernel == ORDERS_QUERIES:
        return block_count(problem, problem.Nq, key.block_q)
    return block_count(problem, problem.Nk, key.block_k)
