"""A bidirectional prefix on every backend, against the oracle and the same mask as a function."""

import re
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.arrays import normal
from tests.conftest import Runner
from tests.contract.test_backends import check
from tests.contract.test_paged import able as has_pages
from tests.contract.test_paged import cache
from tileattn import reference
from tileattn.testing import AttentionCase, assert_attention_close, error_bound

pytestmark = pytest.mark.usefixtures("one_blas_thread")

B, HQ, HKV, NQ, NK, D, DV = 3, 4, 2, 61, 150, 24, 20
LENGTHS = [150, 77, 5]


def able(runner: Runner) -> None:
    q, k, v, _ = normal((B, HQ, HKV, 2, NK, D, DV))
    reason = runner.why_not(q, k, v, {"prefix": 3, "causal": True})
    if reason is not None:
        pytest.skip(f"{runner.name}: {reason}")


def scored(s: Any, b: Any, h: Any, i: Any, j: Any, x: Any) -> Any:
    return s + x[h, j] - 0.1 * b * abs(i - j)


OPTIONS: dict[str, dict[str, Any]] = {
    "integer": {"prefix": 100},
    "each": {"prefix": np.array([140, 0, 3])},
    "past the end": {"prefix": [1 << 60, 200, 0], "kv_lengths": LENGTHS},
    "offset": {"prefix": 20, "q_offset": [60, 3, -70], "sinks": np.linspace(-1, 1, HQ)},
    "window": {"prefix": [120, 90, 4], "window": (30, None), "dropout_p": 0.2, "seed": 5},
    "far": {"prefix": 9, "q_offset": [1 << 60, -(1 << 60), 5]},
    "functions": {
        "prefix": [100, 7, 2],
        "score_mod": scored,
        "mask_mod": lambda b, h, i, j, _: (i + j + b) % 5 != h,
        "aux": (np.random.default_rng(3).normal(size=(HQ, NK)),),
    },
    "mask": {"prefix": 110, "mask": np.random.default_rng(4).random((NQ, NK)) < 0.7},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_prefixes_with_other_options(runner: Runner, options: dict[str, Any]) -> None:
    able(runner)
    q, k, v, dout = normal((B, HQ, HKV, NQ, NK, D, DV), np.float64)
    _, grads = check(runner, AttentionCase(q, k, v, dout, None, options | {"causal": True}))
    assert (grads.daux is None) == ("aux" not in options)


def test_a_prefix_of_each_packed_sequence(runner: Runner) -> None:
    able(runner)
    ends = {"cu_seqlens_q": [0, 20, 20, 61], "cu_seqlens_k": [0, 50, 60, 150]}
    q, k, v, dout = normal((1, HQ, HKV, NQ, NK, D, DV), np.float64)
    options = {**ends, "causal": True, "prefix": [45, 3, 70]}
    check(runner, AttentionCase(q, k, v, dout, None, options))


def test_a_prefix_in_pages(runner: Runner) -> None:
    able(runner)
    has_pages(runner)
    rng = np.random.default_rng(0)
    made = cache(LENGTHS, 16, np.float32, rng)
    q = rng.normal(size=(B, HQ, 7, D)).astype(np.float32)
    options: dict[str, Any] = {"causal": True, "prefix": [150, 3, 5]}
    found = runner.forward(q, made.k_pages, made.v_pages, **made.paged, **options)
    dense = options | {"kv_lengths": LENGTHS}
    expected = reference.forward(q, made.k, made.v, **dense)
    assert_attention_close(found, expected, error_bound(q, made.k, made.v, **dense))


def test_it_is_the_mask_function_of_its_meaning(runner: Runner) -> None:
    able(runner)
    q, k, v, _ = normal((B, HQ, HKV, NQ, NQ, D, DV), np.float32)
    lengths = np.array([40, 0, 7])
    found = runner.forward(q, k, v, causal=True, prefix=lengths)
    expected = runner.forward(
        q, k, v, mask_mod=lambda b, _h, i, j, x: (j <= i) | (j < x[b]), aux=(lengths,)
    )
    np.testing.assert_array_equal(found.out, expected.out)
    np.testing.assert_array_equal(found.lse, expected.lse)


def test_a_call_like_an_earlier_one_reads_the_new_prefix(runner: Runner) -> None:
    able(runner)
    q, k, v, _ = normal((B, HQ, HKV, 8, NK, D, DV), np.float32)
    for prefix in (0, 150, [3, 146, 150]):
        options: dict[str, Any] = {"causal": True, "prefix": prefix}
        found = runner.forward(q, k, v, **options)
        expected = reference.forward(q, k, v, **options)
        assert_attention_close(found, expected, error_bound(q, k, v, **options))


def test_empty_tiles_are_skipped(cpu_backend: str) -> None:
    """A short prefix leaves a long causal call the work that it had as a mask function."""
    x = np.zeros((1, 1, 8192, 64), np.float32)

    def work(**options: Any) -> int:
        tiles = tileattn.explain(x, x, x, backend=cpu_backend, **options).tiles
        return int(tiles["partial"] + tiles["full"])

    causal = work(mask_mod=lambda _b, _h, i, j: j <= i)
    assert 0.98 * causal < work(causal=True, prefix=256) < 1.02 * causal


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"prefix": 3}, ValueError, "causal must be True with prefix; got False"),
        ({"prefix": 3, "window": (4, 1)}, ValueError, "causal must be True with prefix"),
        ({"prefix": [1, -1], "causal": True}, ValueError, "prefix must hold non-negative integers"),
        ({"prefix": 0.5, "causal": True}, TypeError, "prefix must be an integer, or integers of"),
        ({"prefix": [1, 2, 3], "causal": True}, ValueError, "prefix must be an integer, or"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k, v, _ = normal((2, HQ, HKV, 2, NK, D, DV))
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        tileattn.forward(q, k, v, **changed)
