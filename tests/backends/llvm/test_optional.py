"""Modules without code for options compute the same bits as those with it."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tileattn.backends.llvm import call, plain
from tileattn.backends.llvm.execute import memory_layout
from tileattn.call.parse import parse
from tileattn.call.prepared import CALLS
from tileattn.call.problem import Problem
from tileattn.kernels.llvm.params import Layout

pytest.importorskip("llvmlite")


def with_options(P: Problem) -> Layout:
    """Choose modules with code for all options."""
    return memory_layout(P)._replace(optional=True)


def results(queries: int, dtype: Any) -> list[bytes]:
    """Run both passes on the arrays of a fixed seed."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        rng.standard_normal((2, heads, n, 24)).astype(dtype)
        for heads, n in ((4, queries), (2, 75), (2, 75), (4, queries))
    )
    options: dict[str, Any] = {"window": (40, 3), "kv_lengths": [75, 60], "backend": "llvm"}
    attention = tileattn.forward(q, k, v, **options)
    gradients = tileattn.backward(dout, q, k, v, *attention, **options)
    return [x.tobytes() for x in (*attention, *gradients[:3])]


@pytest.mark.parametrize("queries", [1, 37])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_module_without_code_for_options_has_the_same_bits(
    queries: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = results(queries, dtype)
    CALLS.clear()
    for module in (call, plain):
        monkeypatch.setattr(module, "memory_layout", with_options)
    assert results(queries, dtype) == without


@pytest.mark.parametrize(
    ("options", "optional"),
    [
        ({}, False),
        ({"causal": True, "scale": 0.3}, False),
        ({"softcap": 5.0}, True),
        ({"dropout_p": 0.1, "seed": 2}, True),
        ({"mask": np.ones((1, 7), bool)}, True),
        ({"bias": np.zeros((1, 7))}, True),
        ({"sinks": np.zeros(2)}, True),
        ({"alibi_slopes": np.zeros(2)}, True),
        ({"prefix": 3, "causal": True}, True),
        ({"score_mod": lambda s, b, h, i, j: s + b * h * (i - j)}, True),
    ],
)
def test_options_decide_about_the_module(options: dict[str, Any], optional: bool) -> None:
    q = np.zeros((1, 2, 7, 8), np.float32)
    problem, _ = parse(q, q, q, options)
    assert memory_layout(problem).optional is optional
