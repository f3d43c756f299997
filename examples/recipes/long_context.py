"""Both passes over a long sequence, in a fraction of the memory of its score matrix."""

import tracemalloc

import numpy as np

import tileattn

N, D = 20_000, 32
rng = np.random.default_rng(0)
q, k, v, dout = rng.standard_normal((4, 1, 1, N, D), np.float32)

tracemalloc.start()
options = {"causal": True, "window": (2000, 0)}
attention = tileattn.forward(q, k, v, **options)
tileattn.backward(dout, q, k, v, *attention, **options)
peak = tracemalloc.get_traced_memory()[1]
tracemalloc.stop()
scores = 4 * N * N
assert peak < scores / 20
print(f"The scores would take {scores / 2**20:,.0f} MiB; the peak is below a twentieth of that.")
