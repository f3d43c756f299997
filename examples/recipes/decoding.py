"""Decoding, token by token, with a cache of keys and values."""

import numpy as np

import tileattn

rng = np.random.default_rng(0)
B, Hq, Hkv, N, D = 2, 8, 2, 40, 32
q = rng.standard_normal((B, Hq, N, D), np.float32)
k, v = rng.standard_normal((2, B, Hkv, N, D), np.float32)

k_cache, v_cache = np.zeros((2, B, Hkv, 64, D), np.float32)
lengths = np.zeros(B, np.int64)
whole = tileattn.forward(q, k, v, causal=True).out
for n in range(N):
    new = slice(n, n + 1)
    # This writes to the caches, and returns where each sequence now ends.
    lengths = tileattn.append_kv(k_cache, v_cache, k[:, :, new], v[:, :, new], kv_lengths=lengths)
    step = tileattn.forward(q[:, :, new], k_cache, v_cache, kv_lengths=lengths, causal=True)
    # Another kernel with sums in another order: the results differ by roundings of float32.
    np.testing.assert_allclose(step.out, whole[:, :, new], atol=1e-5)
print("lengths", lengths, "last row:", step.out[0, 0, 0, :4].round(3))
