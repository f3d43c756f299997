"""NumPy arrays of every make: unaligned, read-only, of subclasses, with odd strides."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.arrays import Array, normal

SIZES = (2, 4, 2, 29, 37, 8, 12)
B, HQ, HKV, NQ, NK, D, DV = SIZES

pytestmark = pytest.mark.usefixtures("cpu_backend")


class Named(np.ndarray):
    """A subclass, as that of a library of units."""


def unaligned(x: Array) -> Array:
    memory = np.zeros(x.nbytes + 1, np.uint8)
    found = memory[1:].view(x.dtype).reshape(x.shape)
    found[...] = x
    assert x.itemsize == 1 or not found.flags.aligned
    return found


def read_only(x: Array) -> Array:
    found = x.copy()
    found.setflags(write=False)
    return found


def backwards(x: Array) -> Array:
    """Return the same numbers in memory of another order, with gaps."""
    memory = np.zeros([2 * n for n in x.shape], x.dtype)
    found = memory[(np.s_[::-2],) * x.ndim]
    found[...] = x
    return found


MAKES: dict[str, Callable[[Array], Array]] = {
    "unaligned": unaligned,
    "read-only": read_only,
    "backwards": backwards,
    "subclass": lambda x: x.view(Named),
}


def call(made: Callable[[Array], Array], dtype: Any) -> list[Array]:
    """Run both passes with every array of a make."""
    rng = np.random.default_rng(0)
    sums = np.float64 if dtype == np.float64 else np.float32
    q, k, v, dout = map(made, normal(SIZES, dtype))
    arrays: dict[str, Array] = {
        "bias": rng.standard_normal((HQ, NQ, NK)).astype(dtype),
        "mask": rng.random((B, 1, NQ, NK)) < 0.7,
        "alibi_slopes": rng.random((B, HQ)).astype(sums),
        "sinks": rng.standard_normal(HQ).astype(sums),
        "kv_lengths": np.array([NK, 20]),
        "q_offset": np.array([3, -2]),
    }
    options: dict[str, Any] = {name: made(x) for name, x in arrays.items()}
    out, lse = tileattn.forward(q, k, v, **options)
    dlse = rng.standard_normal(lse.shape).astype(sums)
    saved = made(out), made(lse)
    return [out, lse, *tileattn.backward(dout, q, k, v, *saved, dlse=made(dlse), **options)]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("made", MAKES.values(), ids=MAKES)
def test_results_do_not_depend_on_the_make_of_an_array(made: Any, dtype: Any) -> None:
    expected = call(lambda x: x, dtype)
    for ours, theirs in zip(call(made, dtype), expected, strict=True):
        assert type(ours) is np.ndarray
        assert ours.flags.writeable
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", ["kv_lengths", "q_offset"])
def test_integers_of_the_other_byte_order_are_taken(name: str) -> None:
    q, k, v, _ = normal(SIZES)
    values = np.array([3, 20])
    options: list[dict[str, Any]] = [{name: values}, {name: values.astype(">i8")}]
    ours, theirs = (tileattn.forward(q, k, v, **given) for given in options)
    np.testing.assert_array_equal(ours.out, theirs.out)


@pytest.mark.parametrize("name", ["q", "bias", "sinks"])
def test_floats_of_the_other_byte_order_are_refused(name: str) -> None:
    q, k, v, _ = normal(SIZES)
    given: dict[str, Any] = {"q": q, "bias": np.zeros((NQ, NK)), "sinks": np.zeros(HQ)}
    given[name] = given[name].astype(given[name].dtype.newbyteorder("S"))
    with pytest.raises(TypeError, match=rf"^{name} must have dtype .*; got [<>]f\d; "):
        tileattn.forward(k=k, v=v, **given)
