"""Documents in one sequence: a mask function keeps attention within each of them."""

import numpy as np

import tileattn

rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 1, 4, 500, 32), np.float32)
document = np.repeat([0, 1, 2, 3], [200, 40, 160, 100])[None].astype(np.int32)  # (B, N)


def same_document(b, h, i, j, document):
    return (document[b, i] == document[b, j]) & (i >= j)


# Tiles between documents are skipped. cu_seqlens_q can say the same, without a number per token.
out, lse = tileattn.forward(q, k, v, mask_mod=same_document, aux=(document,))
first = [x[:, :, :200] for x in (q, k, v)]
# Other tiles: the results differ by roundings of float32.
np.testing.assert_allclose(out[:, :, :200], tileattn.forward(*first, causal=True).out, atol=1e-6)

zeros = np.zeros((1, 1, 500, 1))  # all scores are 0: lse is the logarithm of the number of keys
count = tileattn.forward(zeros, zeros, zeros, mask_mod=same_document, aux=(document,)).lse
print("keys of tokens 199, 200, 201, 499:", np.exp(count[0, 0, [199, 200, 201, 499]]).round())
