"""Calls in float32 that the kernels for split numbers run, for tests of both passes."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.arrays import Array, Given, normal
from tests.gpu.hopper import MASKS
from tileattn.backends.cupy import describe
from tileattn.kernels.cuda.tuning import H100

B, HQ, HKV, NQ, NK = 2, 4, 2, 205, 324
GROUP = HQ // HKV
SQUARE = [(64, 64), (128, 128)]
WRONG = [math.nan, math.inf, -math.inf]
RNG = np.random.default_rng(7)


def drawn(D: int = 64, Dv: int = 64, Nq: int = NQ, Nk: int = NK, seed: int = 0) -> Given:
    return normal((B, HQ, HKV, Nq, Nk, D, Dv), np.float32, seed)


def use_generic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the generic kernels take what the Hopper kernels take."""
    device = describe.device_of(0)
    tuning = replace(H100, generic_plane_rows=H100.plane_rows)
    generic = replace(device, arch=device.arch.rstrip("a"), tuning=tuning)
    monkeypatch.setattr(describe, "device_of", lambda _: generic)


def tilt(s: Any, _b: Any, h: Any, i: Any, j: Any, slopes: Any) -> Any:
    return s + slopes[h] * np.cos(i - j)


def stripes(_b: Any, _h: Any, i: Any, j: Any, _slopes: Any) -> Any:
    return (i + j) % 7 > 0


SLOPES = RNG.random(HQ).astype(np.float32)
BIAS = RNG.standard_normal((B, HQ, NQ, NK)).astype(np.float32)
SEEN = RNG.random((HQ, NQ, NK)) < 0.7
PLAIN: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "offset": {"causal": True, "q_offset": [-40, 150]},
    "window": {"window": (200, 9)},
    "left": {"window": (150, None), "q_offset": 120},
    "lengths": {"kv_lengths": [290, 63], "sinks": SLOPES},
}
"""Calls that run the same kernels: three for each pair of head dimensions."""
MODIFIED: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "bias and mask": ((64, 64), {"bias": BIAS, "mask": SEEN, "window": (200, 5)}),
    "block mask": ((128, 128), {"block_mask": MASKS["dense"](NQ, NK), "causal": True}),
    "functions": ((128, 128), {"score_mod": tilt, "mask_mod": stripes, "aux": (SLOPES,)}),
    "dropout, aligned to 8 bytes": ((38, 54), {"dropout_p": 0.3, "causal": True, "seed": 5}),
    "negative scale, aligned to 4 bytes": ((17, 101), {"scale": -0.3, "sinks": SLOPES}),
    "192 columns": ((192, 160), {"causal": True, "kv_lengths": [290, 63]}),
    "256 columns": ((256, 256), {"window": (200, 9), "sinks": SLOPES}),
    "all": (
        (96, 80),
        {
            **{"bias": BIAS[0].astype(np.float16), "mask": SEEN, "dropout_p": 0.2},
            **{"softcap": 3.0, "alibi_slopes": SLOPES, "sinks": SLOPES},
            **{"window": (300, 90), "q_offset": [11, -30], "kv_lengths": [NK, 200]},
        },
    ),
}


def moderate(q: Array, k: Array) -> float:
    """Return a scale for scores up to about 4."""
    q, k = (x.astype(np.float64) for x in (q, k.repeat(GROUP, axis=1)))
    return float(4 / np.abs(q @ k.swapaxes(-1, -2)).max())


AMPLITUDES = [
    *((x, 1, 1) for x in (1e-30, 1e-10, 1e10, 1e30)),
    *((1, x, 1) for x in (1e-30, 1e-10, 1e10, 1e30)),
    *((1, 1, x) for x in (1e-30, 1e-10, 1e10, 1e30)),
    *((1e30, 1e-30, 1e30), (1e-30, 1e30, 1e-30), (1e15, 1e15, 1e10), (1e-15, 1e-15, 1e-10)),
]


def uneven(name: str, x: Array) -> Array:
    x, rows = x.copy(), np.arange(x.shape[-2])[:, np.newaxis]
    if name == "log-normal":
        x *= np.exp(3 * np.random.default_rng(1).standard_normal(x.shape)).astype(np.float32)
    elif name == "a huge column":
        x[..., 3] *= 1e6
    elif name == "a huge row in a tile":
        x[..., 100, :] *= 1e5
    elif name == "alternating rows":
        x *= np.where(rows % 2, 1, 2.0**-20).astype(np.float32)
    elif name == "rows too small for their tile":
        x *= np.where(rows % 5, 1, 2.0**-40).astype(np.float32)
    elif name == "zeros":
        x *= rows % 64 == 9
    else:
        assert name == SUBNORMAL
        x *= np.float32(1e-39)
    return x


UNEVEN = (
    *("log-normal", "a huge column", "a huge row in a tile", "alternating rows", "zeros"),
    "rows too small for their tile",
)
SUBNORMAL = "subnormal numbers"  # not in q and in k: their products would be 0
