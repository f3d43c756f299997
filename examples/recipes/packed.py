"""Sequences of different lengths, concatenated: no padding is computed."""

import itertools

import numpy as np

import tileattn

rng = np.random.default_rng(0)
offsets = np.cumsum([0, 70, 9, 121])  # sequence n has the tokens from offsets[n] to offsets[n + 1]
q, k, v, dout = rng.standard_normal((4, 4, offsets[-1], 32), np.float32)  # heads, tokens, D

packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "causal": True}
attention = tileattn.forward(q, k, v, **packed)
grads = tileattn.backward(dout, q, k, v, *attention, **packed)

for start, end in itertools.pairwise(offsets):
    one = [x[:, start:end] for x in (q, k, v)]
    assert np.array_equal(attention.out[:, start:end], tileattn.forward(*one, causal=True).out)
    print(f"tokens {start} to {end}: norm of dk {np.linalg.norm(grads.dk[:, start:end]):.2f}")
