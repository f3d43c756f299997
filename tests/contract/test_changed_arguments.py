"""Arguments may change after a call: an equal call later reads the new values."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tileattn
from tileattn.call.prepared import CALLS

B, H, N, D = 2, 4, 20, 8
rng = np.random.default_rng(0)
Q, K, V = rng.normal(size=(3, B, H, N, D)).astype(np.float32)
ONES = np.ones(H, np.float32)

# For each option: others that it needs, its value, and what is written into it.
CASES: dict[str, tuple[dict[str, Any], Callable[[], Any], Any]] = {
    "kv_lengths": ({}, lambda: np.array([20, 5]), [3, 20]),
    "kv_lengths, a list": ({}, lambda: [20, 5], [3, 20]),
    "q_offset": ({"causal": True}, lambda: np.array([0, 5]), [3, 2]),
    "cu_seqlens_q, a list": ({}, lambda: [0, 12, 20], [0, 3, 20]),
    "origin, a list": ({"dropout_p": 0.4}, lambda: [0, 0, 0, 0], [1, 1, 2, 3]),
    "scale": ({}, lambda: np.array(0.5), 0.1),
    "softcap": ({}, lambda: np.array(0.5), 0.1),
    "dropout_p": ({}, lambda: np.array(0.5), 0.1),
    "seed": ({"dropout_p": 0.5}, lambda: np.array(5), 3),
    "bias": ({}, lambda: np.zeros((N, N), np.float32), 0.3 * np.arange(N)),
    "mask": ({}, lambda: np.tri(N, dtype=bool), np.eye(N) > 0),
    "prefix": ({"causal": True}, lambda: np.array([0, 5]), [3, 2]),
    "tree_mask": ({}, np.tri(N, dtype=bool)[None].copy, np.eye(N) > 0),
    "sinks": ({}, ONES.copy, 3),
    "alibi_slopes": ({}, ONES.copy, 3),
}


def option_of(name: str) -> str:
    return name.partition(",")[0]


def written(x: Any, value: Any) -> None:
    x[() if isinstance(x, np.ndarray) else slice(None)] = value


def call(name: str, x: Any, others: dict[str, Any], backend: str) -> Any:
    q, k, v = (a[:1] if name.startswith("cu_") else a for a in (Q, K, V))
    options = {**others, option_of(name): x}
    return tileattn.forward(q, k, v, backend=backend, **options)


@pytest.mark.parametrize("name", CASES)
def test_an_option_that_is_written_to(name: str, cpu_backend: str) -> None:
    others, make, value = CASES[name]
    x = make()
    for _ in range(3):  # a call that is known
        before = call(name, x, others, cpu_backend)
    written(x, value)
    for _ in range(2):
        after = call(name, x, others, cpu_backend)
    CALLS.clear()
    expected = call(name, type(x)(x) if isinstance(x, list) else x.copy(), others, cpu_backend)
    np.testing.assert_array_equal(after.out, expected.out)
    assert (after.out != before.out).any()


@pytest.mark.parametrize("name", [*CASES][:9])
def test_a_pullback_has_the_lengths_and_numbers_of_its_call(name: str, cpu_backend: str) -> None:
    others, make, value = CASES[name]
    given = [a[:1] for a in (Q, K, V)] if name.startswith("cu_") else [Q, K, V]
    options = {**others, option_of(name): make()}
    attention, pullback = tileattn.vjp(*given, backend=cpu_backend, **options)
    expected = pullback(attention.out)
    written(options[option_of(name)], value)
    for ours, theirs in zip(pullback(attention.out)[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(ours, theirs)
