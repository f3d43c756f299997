"""A long prompt in pieces: each piece attends to all before it."""

import numpy as np

import tileattn

rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 1, 4, 300, 32), np.float32)
whole = tileattn.forward(q, k, v, causal=True).out
for start in range(0, 300, 128):
    end = min(start + 128, 300)
    piece = tileattn.forward(q[:, :, start:end], k[:, :, :end], v[:, :, :end], causal=True)
    # The last query stands at the last key, so no offset is needed; q_offset=start says the same.
    # Other tiles: the results differ by roundings of float32.
    np.testing.assert_allclose(piece.out, whole[:, :, start:end], atol=1e-5)
