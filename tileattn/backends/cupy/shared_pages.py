"""Block tables of a cascade on the device: one launch, on the current stream."""

from typing import Any

import numpy as np

from tileattn.backends.cupy.single_launch import on_device, run
from tileattn.kernels.cuda.plan.shared_pages import POINTERS, plan_tables


def cascade_tables(table: Any, lengths: Any, shared: Any, page: int) -> tuple[Any, Any, Any, Any]:
    """Compute the tables and lengths of both calls, as in ``tileattn.cascading``.

    At least one array is on the device. Lengths that the host knows stay there.
    """
    import cupy

    (B, width), G, number = table.shape, len(shared), 0
    given = {"block_table": table, "kv_lengths": lengths, "shared_lengths": shared}
    own, whole = lengths, shared
    if type(shared) is np.ndarray:
        if type(lengths) is np.ndarray:
            own = lengths - np.repeat(shared, B // G)
            del given["kv_lengths"]
        if (shared == shared[0]).all():
            number = int(shared[0])
            del given["shared_lengths"]
    arrays = on_device(given)
    results = {
        "table": cupy.ndarray((B, width), arrays["block_table"].dtype),
        "shared_table": cupy.ndarray((G, width), arrays["block_table"].dtype),
    }
    if "kv_lengths" in arrays:
        results["own_lengths"] = own = cupy.ndarray((B,), np.int64)
    if type(shared) is not np.ndarray:
        results["whole_lengths"] = whole = cupy.ndarray((G,), np.int64)
    run(plan_tables, POINTERS, arrays | results, (number,), G, page)
    return results["table"], own, results["shared_table"], whole
