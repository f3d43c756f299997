"""A long prompt in chunks: each chunk attends to itself and to all chunks before it."""

import numpy as np

import tileattn

rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 1, 4, 300, 32), np.float32)
whole = tileattn.forward(q, k, v, causal=True).out
for start in range(0, 300, 128):
    end = min(start + 128, 300)
    chunk = tileattn.forward(q[:, :, start:end], k[:, :, :end], v[:, :, :end], causal=True)
    # The last query is aligned with the last key. q_offset=start would say the same.
    # Other tiles: the results differ by roundings of float32.
    np.testing.assert_allclose(chunk.out, whole[:, :, start:end], atol=1e-5)
    print(f"queries {start} to {end}, keys 0 to {end}: equal")
