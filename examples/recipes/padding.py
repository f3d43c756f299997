"""Sequences of different lengths, padded to the longest."""

import numpy as np

import tileattn

rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 2, 4, 100, 32), np.float32)
lengths = [100, 60]

# Keys past a length are never read, so they may be NaN. q_offset=0 says that query i is token i.
k[1, :, 60:] = v[1, :, 60:] = np.nan
out, lse = tileattn.forward(q, k, v, kv_lengths=lengths, q_offset=0, causal=True)

# Rows of padding are computed like others: a loss must leave them out.
alone = tileattn.forward(q[1:, :, :60], k[1:, :, :60], v[1:, :, :60], causal=True)
assert np.array_equal(out[1:, :, :60], alone.out)
print("shape", out.shape, "finite", np.isfinite(out).all())
print("token 59 of the short sequence:", out[1, 0, 59, :4].round(3))
