"""A prefix that samples share: attend to it in one call, and merge with each sample's own keys."""

import numpy as np

import tileattn

rng = np.random.default_rng(0)
B, H, D = 3, 4, 32
q = rng.standard_normal((B, H, 1, D), np.float32)
k_prefix, v_prefix = rng.standard_normal((2, H, 500, D), np.float32)
k_own, v_own = rng.standard_normal((2, B, H, 20, D), np.float32)

# The queries of all samples become the rows of one call: the prefix is read once.
together = tileattn.forward(q[:, :, 0].swapaxes(0, 1), k_prefix, v_prefix)
prefix = tileattn.Attention(
    together.out.swapaxes(0, 1)[:, :, None], together.lse.swapaxes(0, 1)[:, :, None]
)
merged = tileattn.merge(*zip(prefix, tileattn.forward(q, k_own, v_own), strict=True))

k, v = (
    np.concatenate([np.broadcast_to(old, (B, *old.shape)), own], axis=2)
    for old, own in ((k_prefix, k_own), (v_prefix, v_own))
)
# The results differ by roundings of float32.
np.testing.assert_allclose(merged.out, tileattn.forward(q, k, v).out, atol=1e-5)
share = np.exp(prefix.lse - merged.lse)[:, 0, 0]
print("probability that head 0 gives to the prefix:", share.round(3))
