"""Documents in one long row of tokens: attention stays within each, by a mask of one line."""

import numpy as np

import tileattn

rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 1, 4, 500, 32), np.float32)
document = np.repeat([0, 1, 2, 3], [200, 40, 160, 100])[None].astype(np.int32)  # (B, N)


def same_document(b, h, i, j, document):
    return (document[b, i] == document[b, j]) & (i >= j)


# Tiles between documents are skipped. Where each is a sequence of its own, cu_seqlens_q and
# cu_seqlens_k say the same without a number for each token.
out, lse = tileattn.forward(q, k, v, mask_mod=same_document, aux=(document,))
first = [x[:, :, :200] for x in (q, k, v)]
# Other tiles: the results differ by roundings of float32.
np.testing.assert_allclose(out[:, :, :200], tileattn.forward(*first, causal=True).out, atol=1e-6)
