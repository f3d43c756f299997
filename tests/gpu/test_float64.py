"""float64 on the GPU: tiles of all head dimensions, and pairs of thread blocks for wide heads."""

from typing import Any

import numpy as np
import pytest

import tileattn
from tests.arrays import normal
from tests.on_gpu import bits, hold, needs_gpu, poisoned, sent

pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread")]

B, HQ, HKV, NQ, NK = 2, 4, 2, 203, 331
DIMS = [(64, 64), (96, 80), (128, 128), (256, 256), (160, 96), (40, 200)]


def drawn(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape)


OPTIONS: dict[str, dict[str, Any]] = {
    "no option": {},
    "causal": {"causal": True},
    "window": {"window": (70, 20), "kv_lengths": np.array([331, 97])},
    "dropout": {"dropout_p": 0.3, "seed": 5, "window": (None, 100)},
    "bias": {"bias": drawn(1, B, HQ, NQ, NK)},
    "broadcast bias": {"bias": drawn(2, HQ, 1, NK), "softcap": 3.0},
    "mask": {"mask": drawn(3, B, 1, NQ, NK) > -0.5, "alibi_slopes": np.array([0.3, 0.1, 0.0, 0.2])},
    "sinks": {"sinks": drawn(4, HQ), "causal": True},
}


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_both_passes(dims: tuple[int, int], name: str) -> None:
    """Both orders of the sums of dq, and results where memory was NaN before."""
    given = [sent(x) for x in normal((B, HQ, HKV, NQ, NK, *dims), np.float64)]
    q, k, v, dout = given
    options = {n: x if n == "kv_lengths" else sent(x) for n, x in OPTIONS[name].items()}
    with poisoned():
        attention = tileattn.forward(q, k, v, **options)
        in_order, again, other = (
            tileattn.backward(dout, q, k, v, *attention, deterministic=order, **options)
            for order in (True, True, False)
        )
    hold(given, attention, in_order, options)
    hold(given, attention, other, options)
    assert bits(in_order) == bits(again)
