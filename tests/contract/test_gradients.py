"""Gradients against central differences of the forward pass, in float64, for every option."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.conftest import Runner
from tileattn import BlockMask

pytestmark = pytest.mark.usefixtures("one_blas_thread")

Array = NDArray[Any]

B, HQ, HKV, NQ, NK, D, DV = 2, 4, 2, 29, 23, 5, 7
STEP = 1e-4
DIRECTIONS = 4


def option_sets() -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(1)
    single: dict[str, Any] = {
        "scale": -0.6,
        "softcap": 1.5,
        "alibi_slopes": rng.random((B, HQ)),
        "bias": rng.normal(size=(HQ, 1, NK)),
        "causal": True,
        "window": (9, 2),
        "mask": rng.random((B, 1, NQ, NK)) < 0.6,
        "block_mask": BlockMask(rng.random((B, HQ, 6, 4)) < 0.6, block_size=(5, 6)),
        "kv_lengths": np.array([11, 23]),
        "q_offset": np.array([-4, 3]),
        "sinks": rng.normal(size=HQ),
        "dropout_p": 0.3,
    }
    sets: dict[str, dict[str, Any]] = {name: {name: value} for name, value in single.items()}
    sets["q_offset"]["causal"] = True
    sets["dropout_p"]["seed"] = 2**40 + 7
    return {"none": {}, **sets, "all": {**single, "seed": 3}}


OPTION_SETS = option_sets()


@pytest.mark.parametrize("options", OPTION_SETS.values(), ids=OPTION_SETS.keys())
def test_gradients_are_slopes_of_the_forward_pass(runner: Runner, options: dict[str, Any]) -> None:
    """The slope along a random direction is the gradient's component, for each input in turn."""
    rng = np.random.default_rng(0)
    call: dict[str, Any] = {
        "q": rng.normal(size=(B, HQ, NQ, D)),
        "k": rng.normal(size=(B, HKV, NK, D)),
        "v": rng.normal(size=(B, HKV, NK, DV)),
        **options,
    }
    dout, dlse = rng.normal(size=(B, HQ, NQ, DV)), rng.normal(size=(B, HQ, NQ))

    def loss(**changed: Any) -> float:
        out, lse = runner.forward(**(call | changed))
        return float(np.sum(out * dout) + np.sum(np.where(np.isfinite(lse), lse, 0) * dlse))

    attention = runner.forward(**call)
    grads = runner.backward(dout, call["q"], call["k"], call["v"], *attention, dlse=dlse, **options)
    for name in ("q", "k", "v", "bias", "sinks"):
        if name not in call:
            assert getattr(grads, "d" + name) is None
            continue
        for _ in range(DIRECTIONS):
            direction = rng.normal(size=call[name].shape)
            ahead = loss(**{name: call[name] + STEP * direction})
            behind = loss(**{name: call[name] - STEP * direction})
            component = float(np.sum(getattr(grads, "d" + name) * direction))
            assert (ahead - behind) / (2 * STEP) == pytest.approx(component, rel=1e-5, abs=1e-5)
            assert component != 0
