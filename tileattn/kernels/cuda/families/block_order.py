"""What is launched before a pass over packed sequences: its work tiles are put in order."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.context import KernelLaunch, block_count
from tileattn.kernels.cuda.families.hopper import HOPPER, HOPPER_BACKWARDS, HOPPER_WIDE_DQ
from tileattn.kernels.cuda.families.key import KernelKey

ORDERS_QUERIES, ORDERS_KEYS = "order_query_blocks", "order_key_blocks"
COUNTS = {ORDERS_QUERIES: "count_query_blocks", ORDERS_KEYS: "count_key_blocks"}
_BLOCK_BYTES, _COUNT_BYTES = 48, 4  # of a `PackedBlock`, and of the blocks of a chunk

# As in ``src/block_order.cuh``: up to so many blocks are put in order together; of more, each chunk
# of so many.
WHOLE, CHUNK = 4096, 1024

_WARPS = 8  # so that the blocks of short calls have several SMs, which find places side by side
_TOGETHER = 32  # threads that find the place of one block
_ORDERS = dict.fromkeys((HOPPER, HOPPER_WIDE_DQ), ORDERS_QUERIES) | dict.fromkeys(
    HOPPER_BACKWARDS, ORDERS_KEYS
)
_WHY = "the longest sequences first, whose lengths the device alone may know"
_WHY_COUNT = f"many blocks, of which each is compared with {CHUNK:,} neighbours"


def with_orders(problem: Problem, launches: Iterable[KernelLaunch]) -> Iterator[KernelLaunch]:
    """Launch before each persistent kernel what puts its work tiles in order, where there are some.

    Those of a pass that take the same blocks follow each other, and share an order.
    """
    P, last = problem, None
    for launch in launches:
        orders = _ORDERS.get(launch.key.kernel)
        if orders is not None and P.sequences is not None and orders != last:
            last = orders
            key = KernelKey(
                *(orders, P.dtype.name),
                block_q=launch.key.block_q,
                block_k=launch.key.block_k,
                warps_m=_WARPS,
                packed=True,
                paged=P.page is not None,
            )
            numbers = ordered_blocks(P, key)
            if numbers > WHOLE:
                count = replace(key, kernel=COUNTS[orders])
                yield KernelLaunch(count, -(-numbers // CHUNK), why=_WHY_COUNT)
            yield KernelLaunch(key, -(-numbers * _TOGETHER // key.threads), why=_WHY)
        yield launch


def ordered_blocks(problem: Problem, key: KernelKey) -> int:
    """Count the numbers that a kernel puts in order: blocks of a head, and some without one."""
    if key.kernel == ORDERS_QUERIES:
        return block_count(problem, problem.Nq, key.block_q)
    return block_count(problem, problem.Nk, key.block_k)


def order_bytes(problem: Problem, key: KernelKey) -> int:
    """Count the bytes of the order that a kernel writes, and of what it counted for it."""
    numbers = ordered_blocks(problem, key)
    chunks = -(-numbers // CHUNK) if numbers > WHOLE else 0
    return numbers * _BLOCK_BYTES + chunks * _COUNT_BYTES
