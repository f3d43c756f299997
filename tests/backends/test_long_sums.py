"""Sums over many keys, and over many queries: their error does not grow with their length."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import tileattn
from tests.arrays import normal, relative_error
from tileattn import reference
from tileattn.backends import threads
from tileattn.kernels.llvm.sizes import SECTION

Array = NDArray[Any]

MANY = 200_001
SIZES = {"decode": (2, MANY), "keys": (24, MANY), "queries": (MANY, 24)}


@pytest.fixture(params=["llvm", "numpy"])
def backend(request: pytest.FixtureRequest) -> str:
    reason = tileattn.available_backends()[request.param]
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    return str(request.param)


@pytest.mark.slow
@pytest.mark.parametrize(("Nq", "Nk"), SIZES.values(), ids=SIZES)
def test_accuracy_of_long_calls_on_normal_inputs(backend: str, Nq: int, Nk: int) -> None:
    """The promise holds at any length, also of gradients of a bias that is broadcast."""
    q, k, v, dout = normal((1, 1, 1, Nq, Nk, 40, 24), np.float32)
    rng = np.random.default_rng(2)
    for shape in ((Nq, 1), (1, Nk)):
        bias = rng.standard_normal(shape).astype(np.float32)
        expected = reference.forward(q, k, v, bias=bias)
        wanted = reference.backward(dout, q, k, v, *expected, bias=bias)
        attention = tileattn.forward(q, k, v, bias=bias, backend=backend)
        grads = tileattn.backward(dout, q, k, v, *attention, bias=bias, backend=backend)
        results = {"out": (attention.out, expected.out)}
        for name in ("dq", "dk", "dv", *(["dbias"] if shape == (1, Nk) else [])):  # else it is 0
            results[name] = getattr(grads, name), getattr(wanted, name)
        errors = {name: relative_error(*pair) for name, pair in results.items()}
        # docs/numerics.md promises 1e-6 for float32 on normal inputs at any length; error_bound
        # grows with the length, so it would let uncompensated sums pass.
        ok = all(error <= 1e-6 for error in errors.values())
        assert ok, errors


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "sinks": np.array([0.5, -1.0])},
    "window": {"window": (SECTION + 70, 40)},
    "dropout": {"dropout_p": 0.25, "seed": 3, "softcap": 9.0},
}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=lambda x: x.__name__)
@pytest.mark.parametrize("Nq", [3, 70, 2 * SECTION + 100])
@pytest.mark.parametrize("chosen", OPTIONS.values(), ids=OPTIONS)
def test_bits_of_long_calls_are_the_same_in_any_batch_and_number_of_threads(
    backend: str, Nq: int, dtype: Any, chosen: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Nk = 2 * SECTION + 77 if Nq < SECTION else 130
    q, k, v, dout = normal((2, 2, 1, Nq, Nk, 16, 24), dtype)
    lengths = np.array([Nk - 9, Nk // 3])

    def both(batch: slice) -> list[Array]:
        given = q[batch], k[batch], v[batch]
        more = {**chosen, "kv_lengths": lengths[batch], "backend": backend}
        if chosen.get("dropout_p") and batch.start:
            more["origin"] = [[1, 0, 0, 0]]
        attention = tileattn.forward(*given, **more)
        grads = tileattn.backward(dout[batch], *given, *attention, **more)
        return [*attention, *grads[:3]]

    together = both(slice(0, 2))
    monkeypatch.setattr(threads, "worker_count", lambda: 1)
    for n in range(2):
        for x, alone in zip(together, both(slice(n, n + 1)), strict=True):
            assert x[n : n + 1].tobytes() == alone.tobytes()


@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("Nq", [2, 40])
def test_what_is_not_finite_stays_so_through_sections(
    backend: str, Nq: int, wrong: float, where: str
) -> None:
    """Return the sum where it is infinite: the part that rounding dropped is NaN there."""
    arrays: dict[str, Any] = dict(
        zip("qkv", normal((1, 2, 2, Nq, 2 * SECTION + 50, 16, 24), np.float32), strict=False)
    )
    arrays[where][0, 1, SECTION + 5, 3] = wrong
    with np.errstate(all="ignore"):
        expected = reference.forward(**arrays)
    found = tileattn.forward(**arrays, backend=backend)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
        np.testing.assert_array_equal(np.isposinf(ours), np.isposinf(theirs))
        np.testing.assert_array_equal(np.isneginf(ours), np.isneginf(theirs))
