"""A sliding window with a sink for each head: a logit in the softmax that has no value."""

import numpy as np

import tileattn

rng = np.random.default_rng(0)
q, k, v, dout = rng.standard_normal((4, 1, 4, 200, 32), np.float32)
sinks = np.array([0.0, 1.0, 2.0, -np.inf], np.float32)  # -inf: no sink

options = {"window": (63, 0), "sinks": sinks}
attention = tileattn.forward(q, k, v, **options)
grads = tileattn.backward(dout, q, k, v, *attention, **options)

without = tileattn.forward(q, k, v, window=(63, 0))
weight = np.exp(without.lse - attention.lse)  # the probability that is left to the keys
# The results differ by roundings of float32.
np.testing.assert_allclose(attention.out, weight[..., None] * without.out, atol=1e-6)
print("probability that the sinks take from row 100:", (1 - weight[0, :, 100]).round(3))
print("dsinks", grads.dsinks.round(2))
