"""Ranks that share a sequence: ``mpiexec -n 4 python examples/ring.py``."""

from typing import Any

import numpy as np
from mpi4py import MPI

import tileattn
import tileattn.distributed as dist

B, HQ, HKV, N, D = 1, 4, 2, 1000, 32


def main() -> None:
    """Compute causal attention and its gradients on all ranks; compare with one call."""
    comm = MPI.COMM_WORLD
    rng = np.random.default_rng(0)  # the same arrays on all ranks, of which each keeps its part
    q, dout = rng.standard_normal((2, B, HQ, N, D), np.float32)
    k, v = rng.standard_normal((2, B, HKV, N, D), np.float32)
    options: dict[str, Any] = {"causal": True, "window": (400, None), "dropout_p": 0.1, "seed": 1}

    layout = dist.Layout.zigzag(N, comm.size)
    own_q, own_k, own_v = (layout.take(x, comm.rank) for x in (q, k, v))
    (out, _), pullback = dist.vjp(own_q, own_k, own_v, comm, layout=layout, timeout=60.0, **options)
    grads = pullback(layout.take(dout, comm.rank))

    parts = comm.gather((out, grads.dq, grads.dk, grads.dv))
    if parts is not None:
        whole, single = tileattn.vjp(q, k, v, **options)
        expected = (whole.out, *single(dout)[:3])
        for name, of_ranks, x in zip(
            ("out", "dq", "dk", "dv"), zip(*parts, strict=True), expected, strict=True
        ):
            # Ranks add up in another order: the results differ by roundings of float32.
            np.testing.assert_allclose(layout.join(of_ranks), x, rtol=2e-5, atol=2e-5)
            print(f"{name} of {comm.size} ranks is that of one call")


if __name__ == "__main__":
    main()
