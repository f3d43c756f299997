"""What is launched before a pass over packed sequences: its work tiles are put in order."""

from collections.abc import Iterable
from dataclasses import replace

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.context import KernelLaunch, KernelTraits, Parts
from tileattn.kernels.cuda.families.grid import Grid, GridSizes
from tileattn.kernels.cuda.families.key import KernelKey

ORDERS_QUERIES, ORDERS_KEYS = "order_query_blocks", "order_key_blocks"
COUNTS = {ORDERS_QUERIES: "count_query_blocks", ORDERS_KEYS: "count_key_blocks"}
_BLOCK_BYTES, _COUNT_BYTES = 48, 4  # of a `PackedBlock`, and of the blocks of a chunk

# As in ``src/block_order.cuh``: up to so many blocks are put in order together; of more, each chunk
# of so many.
WHOLE, CHUNK = 4096, 1024

_WARPS = 8  # so that the blocks of short calls have several SMs, which find places side by side
_TOGETHER = 32  # threads that find the place of one block
_WHY = "the longest sequences first, whose lengths the device alone may know"
_WHY_COUNT = f"many blocks, of which each is compared with {CHUNK:,} neighbours"


def with_orders(problem: Problem, launches: Iterable[KernelLaunch]) -> tuple[KernelLaunch, ...]:
    """Put the work tiles of packed sequences in order before each persistent kernel.

    Successive kernels that take the same blocks share an order.
    """
    P, last = problem, None
    found: list[KernelLaunch] = []
    for launch in launches:
        of = launch.traits.persistent
        if P.is_packed and of and of != last:
            last = of
            found += _ordering(P, launch, ORDERS_QUERIES if of == "queries" else ORDERS_KEYS)
        found.append(launch)
    return tuple(found)


def _ordering(P: Problem, launch: KernelLaunch, kernel: str) -> list[KernelLaunch]:
    key = KernelKey(
        *(kernel, P.dtype.name),
        block_q=launch.key.block_q,
        block_k=launch.key.block_k,
        warps_m=_WARPS,
        packed=True,
        paged=P.is_paged,
    )
    count, blocks = replace(key, kernel=COUNTS[kernel]), _blocks(key)
    order = blocks._replace(together=key.threads // _TOGETHER)
    return [
        KernelLaunch(count, blocks._replace(together=CHUNK, above=WHOLE), why=_WHY_COUNT),
        KernelLaunch(key, order, why=_WHY, traits=_ORDERING),
    ]


def _blocks(key: KernelKey) -> Grid:
    """Return what a kernel puts in order: the blocks of a head, and numbers without a block."""
    if key.kernel == ORDERS_QUERIES:
        return Grid("queries of a head", key.block_q)
    return Grid("keys of a head", key.block_k)


def ordered_blocks(problem: Problem, key: KernelKey) -> int:
    """Count the numbers that a kernel puts in order."""
    return _blocks(key).thread_blocks(GridSizes(problem)) or 0


def order_bytes(problem: Problem, key: KernelKey) -> int:
    """Count the bytes of the order that a kernel writes, and of what was counted for it."""
    blocks = ordered_blocks(problem, key)
    chunks = -(-blocks // CHUNK) if blocks > WHOLE else 0
    return blocks * _BLOCK_BYTES + chunks * _COUNT_BYTES


_ORDERING = KernelTraits(workspace=lambda P, key: Parts({"block_order": order_bytes(P, key)}, {}))
