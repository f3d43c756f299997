"""Options that are NumPy's numbers mean what Python's numbers of the same value do."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tileattn import dropout_mask, reference
from tileattn.call.parse import parse

Q, K, V = np.random.default_rng(0).standard_normal((3, 2, 3, 9, 8)).astype(np.float32)
FLOATS: tuple[Any, ...] = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.longdouble)
INTEGERS: tuple[Any, ...] = (np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64)
PLAIN: dict[str, Any] = {
    "scale": 0.375,
    "softcap": 2,
    "dropout_p": 0.25,
    "seed": 77,
    "window": (3, 2),
    "q_offset": 1,
    "kv_lengths": 7,
}


def as_numpy(kind: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Options with some of the numbers in a type of NumPy's."""
    made = {name: PLAIN[name] for name in names}
    typed = {
        name: tuple(map(kind, x)) if isinstance(x, tuple) else kind(x) for name, x in made.items()
    }
    return PLAIN | typed


CASES = {kind: as_numpy(kind, ("scale", "softcap", "dropout_p")) for kind in FLOATS}
SIZES = ("softcap", "seed", "window", "q_offset", "kv_lengths")
CASES |= {kind: as_numpy(kind, SIZES) for kind in INTEGERS}


@pytest.mark.parametrize("options", CASES.values(), ids=[kind.__name__ for kind in CASES])
def test_the_problem_is_that_of_plain_numbers(options: dict[str, Any]) -> None:
    problem, _ = parse(Q, K, V, options)
    assert problem == parse(Q, K, V, PLAIN)[0]
    for number in (problem.scale, problem.softcap, problem.dropout_p, problem.seed):
        assert type(number) in {int, float}
    for implementation in (tileattn, reference):
        ours, theirs = (implementation.forward(Q, K, V, **given) for given in (options, PLAIN))
        np.testing.assert_array_equal(ours.out, theirs.out)
    kept = dropout_mask((1, 2, 30, 40), options["dropout_p"], options["seed"])
    np.testing.assert_array_equal(kept, dropout_mask((1, 2, 30, 40), 0.25, 77))


@pytest.mark.parametrize("kind", [*FLOATS, np.int8, np.uint64])
def test_a_zero_of_numpys_is_no_use_of_an_option(kind: Any) -> None:
    zeros = {"dropout_p": kind(0), "causal": np.False_, "seed": np.int32(0)}
    assert parse(Q, K, V, zeros)[0] == parse(Q, K, V, {})[0]


def test_what_rounds_to_one_is_refused() -> None:
    nearly = np.nextafter(np.longdouble(1), np.longdouble(0))
    if float(nearly) < 1:
        pytest.skip("the platform's long double is a double")
    with pytest.raises(ValueError, match=r"^dropout_p must be .*, but not including, 1; got "):
        dropout_mask((1, 1, 2, 2), nearly, 0)
