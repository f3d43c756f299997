"""What is launched before a pass over packed sequences: its work tiles are put in order."""

from collections.abc import Iterable, Iterator

from tileattn.kernels.config.context import KernelLaunch, block_count
from tileattn.kernels.config.hopper import HOPPER, HOPPER_BACKWARDS, HOPPER_WIDE_DQ
from tileattn.kernels.config.key import KernelKey
from tileattn.problem import Problem

ORDERS_QUERIES, ORDERS_KEYS = "order_query_blocks", "order_key_blocks"
BLOCK_BYTES = 48  # of a `PackedBlock`

_WARPS = 8  # so that the blocks of short calls have several SMs, which find places side by side
_TOGETHER = 32  # threads that find the place of one block
_ORDERS = dict.fromkeys((HOPPER, HOPPER_WIDE_DQ), ORDERS_QUERIES) | dict.fromkeys(
    HOPPER_BACKWARDS, ORDERS_KEYS
)
_WHY = "the longest sequences first, whose lengths the device alone may know"


def with_orders(problem: Problem, launches: Iterable[KernelLaunch]) -> Iterator[KernelLaunch]:
    """Launch before each persistent kernel what puts its work tiles in order, where there are some.

    Those of a pass that take the same blocks follow each other, and share an order.
    """
    P, last = problem, None
    for launch in launches:
        orders = _ORDERS.get(launch.key.kernel)
        if P.sequences is not None and orders not in (None, last):
            last = orders
            key = KernelKey(
                *(orders, P.dtype.name),
                block_q=launch.key.block_q,
                block_k=launch.key.block_k,
                warps_m=_WARPS,
                packed=True,
                paged=P.page is not None,
            )
            grid = -(-ordered_blocks(P, key) * _TOGETHER // key.threads)
            yield KernelLaunch(key, grid, why=_WHY)
        yield launch


def ordered_blocks(problem: Problem, key: KernelKey) -> int:
    """Count the numbers that a kernel puts in order: blocks of a head, and some without one."""
    if key.kernel == ORDERS_QUERIES:
        return block_count(problem, problem.Nq, key.block_q)
    return block_count(problem, problem.Nk, key.block_k)
