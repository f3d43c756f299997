"""A batch of sequences of different lengths, padded to the longest."""

import numpy as np

import tileattn

rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 2, 4, 100, 32), np.float32)
lengths = [100, 60]

# Keys past a length are never read: any value, even NaN, may be there. q_offset=0 says
# that query i is token i, so that causal attention counts from the start of both.
k[1, :, 60:] = v[1, :, 60:] = np.nan
out, lse = tileattn.forward(q, k, v, kv_lengths=lengths, q_offset=0, causal=True)

# Rows of padding are computed like others. A loss leaves them out, or an upstream gradient of 0.
alone = tileattn.forward(q[1:, :, :60], k[1:, :, :60], v[1:, :, :60], causal=True)
assert np.array_equal(out[1:, :, :60], alone.out)
