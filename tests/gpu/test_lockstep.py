"""Heads that exceed the L2 cache: CTAs of the Hopper kernels keep pace."""

import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tests.arrays import relative_error
from tests.on_gpu import bits, busy, host, needs_gpu, random_arrays
from tileattn import Attention, reference
from tileattn.testing import assert_attention_close, error_bound

pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread", "on_hopper")]

N = 1 << 18  # 64 MiB of keys and values


@pytest.fixture(scope="module")
def given() -> list[Any]:
    return random_arrays(*[(1, 1, N, 64)] * 3, dtype=ml_dtypes.bfloat16)


def seconds(call: Any) -> float:
    """Time a call, with what waits on its stream before it."""
    import cupy

    cupy.cuda.Device().synchronize()
    start = time.perf_counter()
    call()
    cupy.cuda.Device().synchronize()
    return time.perf_counter() - start


@pytest.fixture(scope="module")
def attended(given: list[Any]) -> tuple[Any, ...]:
    """Arguments of the backward pass of a causal call."""
    return given[0], *given, *tileattn.forward(*given, causal=True)


@pytest.mark.parametrize("causal", [True, False])
def test_rows_of_a_long_call(given: list[Any], causal: bool) -> None:
    """Some rows against the oracle, and all of them against the same call again."""
    found = tileattn.forward(*given, causal=causal)
    assert bits(tileattn.forward(*given, causal=causal)) == bits(found)
    attention = host(found)
    q, k, v = (x.get() for x in given)
    for row in (0, 1, *np.random.default_rng(1).integers(0, N, 9).tolist(), N - 1):
        keys = row + 1 if causal else N
        one = q[:, :, row : row + 1], k[:, :, :keys], v[:, :, :keys]
        some = Attention(*(x[:, :, row : row + 1] for x in attention))
        assert_attention_close(some, reference.forward(*one), error_bound(*one))


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_a_long_call(given: list[Any], causal: bool) -> None:
    """Compare some keys with the oracle's formulas, and all bits with the same call again.

    P, dS, what delta is made of and the results are rounded to bfloat16, by up to 2^-9 each.
    """
    found = tileattn.forward(*given, causal=causal)

    def backward(deterministic: bool = False) -> Any:
        q, k, v = given
        return tileattn.backward(
            *(q, q, k, v), found.out, found.lse, causal=causal, deterministic=deterministic
        )

    grads, again, ordered = backward(), backward(), backward(deterministic=True)
    assert bits(again)[1:3] == bits(grads)[1:3]
    dq, dk, dv, dq_ordered = (x.get().astype(np.float64) for x in (*grads[:3], ordered.dq))
    assert relative_error(dq, dq_ordered) <= 2**-8
    q, k, v, out, lse = (x.get()[0, 0].astype(np.float64) for x in (*given, *found))
    dout, scale = q, 1 / 8
    delta = (out * dout).sum(1)
    for key in (0, 1, *np.random.default_rng(1).integers(0, N, 5).tolist(), N - 1):
        rows = slice(key if causal else 0, N)
        p = np.exp(scale * q[rows] @ k[key] - lse[rows])
        ds = p * (dout[rows] @ v[key] - delta[rows])
        assert relative_error(dv[0, 0, key], p @ dout[rows]) <= 2**-7
        assert relative_error(dk[0, 0, key], scale * ds @ q[rows]) <= 2**-7


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_ctas_that_do_not_run_are_not_waited_for(
    given: list[Any], attended: tuple[Any, ...], direction: str
) -> None:
    """Half of the SMs are taken: the other CTAs wait once, then go on without them."""
    import cupy

    def call() -> Any:
        if direction == "forward":
            return tileattn.forward(*given, causal=True)
        return tileattn.backward(*attended, causal=True)[1:3]

    expected = bits(call())
    alone = seconds(call)
    wait = busy(1e3 * 6 * alone, sms=66)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    found: list[Any] = []

    def both() -> None:
        with streams[0]:
            wait()
        with streams[1]:
            found.append(call())

    both()
    streams[1].synchronize()
    assert not streams[0].done  # the call ended while half of the SMs were still taken
    streams[0].synchronize()
    assert bits(found[0]) == expected
