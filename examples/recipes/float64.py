"""The error of a float32 result, by the same call in float64."""

import numpy as np

import tileattn

rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 1, 4, 300, 64))
exact = tileattn.forward(q, k, v, softcap=20.0, window=(100, 0)).out
single = tileattn.forward(*(x.astype(np.float32) for x in (q, k, v)), softcap=20.0, window=(100, 0))

error = np.abs(single.out - exact).max()
assert exact.dtype == np.float64
# float32 has 7 digits, and rounding errors add up over 100 keys.
assert error < 1e-5
print(f"{exact[0, 0, 200, 0]:.10f} in float64")
print(f"{single.out[0, 0, 200, 0]:.6f}     in float32")
