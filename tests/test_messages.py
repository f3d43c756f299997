"""Messages have the names that the caller gave."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import tileattn
from tileattn.messages import called, calling

X = np.zeros((2, 5, 8), np.float32)


def test_names_hold_in_a_block_of_one_thread() -> None:
    with calling({"bias": "attn_mask"}), ThreadPoolExecutor(1) as threads:
        with calling({"k": "key"}):
            assert [called(name) for name in ("bias", "k", "q")] == ["attn_mask", "key", "q"]
            assert threads.submit(called, "bias").result() == "bias"
        assert called("k") == "k"
    with pytest.raises(ZeroDivisionError), calling({"bias": "attn_mask"}):
        _ = 1 / 0
    assert called("bias") == "bias"


def test_only_names_of_arguments_are_replaced() -> None:
    with (
        calling({"scale": "softmax_scale", "k": "key", "number": "wrong"}),
        pytest.raises(TypeError, match=r"^softmax_scale must be a finite number or None; got 'k'$"),
    ):
        tileattn.forward(X, X, X, scale="k")  # type: ignore[arg-type]  # what is refused
    with calling({"k": "key"}), pytest.raises(ValueError, match=r"^key must have the head dim"):
        tileattn.forward(X, X[..., :7], X)
