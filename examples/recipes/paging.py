"""Caches in pages: sequences grow without moving, and share what they have in common."""

import numpy as np

import tileattn

rng = np.random.default_rng(0)
H, D, page = 4, 32, 16
k_pages, v_pages = np.full((2, 10, H, page, D), np.nan, np.float32)  # ten pages, any order

# Two samples of one prompt of 32 tokens: both read pages 3 and 7, and each writes its own page.
table = np.array([[3, 7, 0], [3, 7, 5]])
prompt = rng.standard_normal((2, 1, H, 32, D), np.float32)
tileattn.append_kv(k_pages, v_pages, *prompt, kv_lengths=[0], block_table=table[:1])
new = rng.standard_normal((2, 2, H, 1, D), np.float32)
paged = {"block_table": table}
lengths = tileattn.append_kv(k_pages, v_pages, *new, kv_lengths=[32, 32], **paged)

q = rng.standard_normal((2, H, 1, D), np.float32)
out, lse = tileattn.forward(q, k_pages, v_pages, kv_lengths=lengths, causal=True, **paged)
for n in range(2):
    k, v = (
        np.concatenate([old[0], x[n]], axis=1)[None] for old, x in zip(prompt, new, strict=True)
    )
    # Other tiles: the results differ by roundings of float32.
    np.testing.assert_allclose(out[n : n + 1], tileattn.forward(q[n : n + 1], k, v).out, atol=1e-5)
print("lengths", lengths, "pages written:", np.flatnonzero(~np.isnan(k_pages[:, 0, 0, 0])))
