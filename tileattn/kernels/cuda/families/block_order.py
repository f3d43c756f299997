"""Kernels that put the work tiles of packed sequences in order, before a persistent kernel."""

from collections.abc import Iterable
from dataclasses import replace

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.context import KernelLaunch, KernelTraits, Parts
from tileattn.kernels.cuda.families.grid import Grid, GridSizes
from tileattn.kernels.cuda.families.key import KernelKey

ORDERS_QUERIES, ORDERS_KEYS = "order_query_blocks", "order_key_blocks"
COUNTS = {ORDERS_QUERIES: "count_query_blocks", ORDERS_KEYS: "count_key_blocks"}
_BLOCK_BYTES, _COUNT_BYTES = 48, 4  # bytes of a `PackedBlock`, and of the count of a chunk

# As in ``src/block_order.cuh``: up to WHOLE blocks are sorted together, more in chunks of CHUNK.
WHOLE, CHUNK = 4096, 1024

_WARPS = 8  # few, so that the blocks of short calls are spread over several SMs
_TOGETHER = 32  # threads that find the place of one block
_WHY = "the longest sequences first, whose lengths may be known only on the device"
_WHY_COUNT = f"many blocks: each is compared with {CHUNK:,} neighbours"


def with_orders(problem: Problem, launches: Iterable[KernelLaunch]) -> tuple[KernelLaunch, ...]:
    """Insert the ordering kernels of packed sequences before the persistent kernels.

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
        KernelLaunch(
            *(count, blocks._replace(together=CHUNK, above=WHOLE)), why=_WHY_COUNT, traits=_COUNTING
        ),
        KernelLaunch(key, order, why=_WHY, traits=_ORDERING),
    ]


def _blocks(key: KernelKey) -> Grid:
    """Return the rule for the block numbers of a head; some have no block."""
    if key.kernel == ORDERS_QUERIES:
        return Grid("queries of a head", key.block_q)
    return Grid("keys of a head", key.block_k)


def ordered_blocks(problem: Problem, key: KernelKey) -> int:
    """Count the block numbers that a kernel puts in order."""
    return _blocks(key).thread_blocks(GridSizes(problem)) or 0


def order_bytes(problem: Problem, key: KernelKey) -> int:
    """Count the bytes of the order that a kernel writes, and of the counts of its chunks."""
    blocks = ordered_blocks(problem, key)
    chunks = -(-blocks // CHUNK) if blocks > WHOLE else 0
    return blocks * _BLOCK_BYTES + chunks * _COUNT_BYTES


_COUNTING = KernelTraits(beside_rows=True)
_ORDERING = KernelTraits(
    beside_rows=True,
    workspace=lambda P, key: Parts({"block_order": order_bytes(P, key)}, {}),
)
