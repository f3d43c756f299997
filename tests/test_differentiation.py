"""``vjp``: the two passes that its options name, whatever happens to the caller's dictionary."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tileattn
from tileattn.backends.numpy.backend import NumpyBackend

Array = NDArray[Any]

B, HQ, HKV, NQ, NK, D, DV = 2, 4, 2, 7, 9, 3, 6
RNG = np.random.default_rng(0)
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "arrays": {"bias": RNG.normal(size=(HQ, 1, NK)), "sinks": RNG.normal(size=HQ)},
    "lengths": {"kv_lengths": [4, 9], "q_offset": 1, "window": (3, 1)},
    "scores": {"scale": 0.7, "softcap": 2.0, "dropout_p": 0.4, "seed": 5},
}


def arrays() -> tuple[list[Array], Array, Array]:
    """Make q, k and v, and the gradients for out and lse."""
    shapes = ((B, HQ, NQ, D), (B, HKV, NK, D), (B, HKV, NK, DV), (B, HQ, NQ, DV), (B, HQ, NQ))
    *inputs, dout, dlse = (RNG.normal(size=shape) for shape in shapes)
    return inputs, dout, dlse


def assert_same(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_the_results_are_those_of_both_calls(options: dict[str, Any]) -> None:
    inputs, dout, dlse = arrays()
    attention, pullback = tileattn.vjp(*inputs, **options)
    assert isinstance(attention, tileattn.Attention)
    assert_same(attention, tileattn.forward(*inputs, **options))
    for given in (None, dlse):
        grads = pullback(dout, given)
        assert isinstance(grads, tileattn.Gradients)
        q, k, v = inputs
        expected = tileattn.backward(dout, q, k, v, *attention, dlse=given, **options)
        assert_same(grads, expected)
    assert_same(pullback(dout, dlse=dlse, deterministic=True), grads)


def test_a_dictionary_that_changes_does_not_reach_the_pullback() -> None:
    inputs, dout, _ = arrays()
    options: dict[str, Any] = {"causal": True, "softcap": 2.0}
    _, pullback = tileattn.vjp(*inputs, **options)
    expected = pullback(dout)
    options.clear()
    assert_same(pullback(dout), expected)


def test_the_backend_is_that_of_both_passes() -> None:
    class Counts(NumpyBackend):
        name = "counts"
        passes: list[str] = []  # noqa: RUF012 - a list for all of them

        def forward(self, *given: Any) -> Any:
            self.passes.append("forward")
            return super().forward(*given)

        def backward(self, *given: Any) -> Any:
            self.passes.append("backward")
            return super().backward(*given)

    tileattn.register_backend(Counts())
    inputs, dout, _ = arrays()
    _, pullback = tileattn.vjp(*inputs, backend="counts")
    assert Counts.passes == ["forward"]
    pullback(dout)
    assert Counts.passes == ["forward", "backward"]


def test_what_is_wrong_is_refused_where_it_is_given() -> None:
    inputs, dout, _ = arrays()
    with pytest.raises(TypeError, match=r"^causal must be True or False"):
        tileattn.vjp(*inputs, causal=1)  # type: ignore[arg-type]  # wrong on purpose
    _, pullback = tileattn.vjp(*inputs)
    with pytest.raises(ValueError, match=r"^dout must have shape"):
        pullback(dout[0])
    with pytest.raises(TypeError, match=r"^deterministic must be True or False"):
        pullback(dout, deterministic=1)
