"""A learned bias for each distance, and its gradient."""

import numpy as np

import tileattn

rng = np.random.default_rng(0)
q, k, v, dout = rng.standard_normal((4, 1, 4, 200, 32), np.float32)
table = np.zeros((4, 65), np.float32)  # for each head, distances from -32 to 32


def relative(s, b, h, i, j, table):
    return s + table[h, np.clip(i - j, -32, 32) + 32]


# No array of N x N numbers is made.
options = {"score_mod": relative, "aux": (table,), "causal": True}
attention, pullback = tileattn.vjp(q, k, v, **options)
gradient = pullback(dout).daux[0]

# A finite difference confirms the gradient of one number of the table.
moved = table.copy()
moved[2, 35] += 0.05
change = tileattn.forward(q, k, v, **options | {"aux": (moved,)}).out - attention.out
# A difference over 0.05 is the derivative to about 5 %.
difference = (change * dout).sum() / 0.05
np.testing.assert_allclose(difference, gradient[2, 35], rtol=0.05)
print(f"gradient {gradient[2, 35]:.3f}, difference {difference:.3f}")
