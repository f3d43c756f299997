"""Calls that differ in numbers only share a program, and their results are the library's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402 - JAX may be absent

import tileattn  # noqa: E402 - as above
from tests.arrays import normal  # noqa: E402 - as above
from tileattn.jax import attention, callbacks, numbers  # noqa: E402 - as above

SIZES = (2, 4, 2, 11, 19, 8, 6)
Make = Callable[[Any], dict[str, Any]]

COMPILED: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **__: COMPILED.append(event) if "backend_compile" in event else None
)


def rows() -> tuple[Any, ...]:
    return tuple(normal(SIZES, np.dtype(np.float32)))


def slope(x: Any) -> dict[str, Any]:
    return {"score_mod": lambda s, b, h, i, j: s - x * abs(i - j)}


def both(x: Any) -> dict[str, Any]:
    return {
        "score_mod": lambda s, b, h, i, j: s * x[0] + 0.125,
        "mask_mod": lambda b, h, i, j: i - j < x[1],
        "softcap": 20.0 + x[0],
    }


KINDS: list[tuple[Make, list[Any]]] = [
    (slope, [0.5, 0.25, 0.0, -0.0, -3.0, 1e300, float("nan"), float("-inf")]),
    (slope, [np.float32(0.3), np.float32(0.7)]),
    (lambda n: {"mask_mod": lambda b, h, i, j: i - j < n}, [3, 4, 0, -2, (1 << 30) - 1]),
    (both, [(0.5, 3), (0.75, -1), (-1.5, 8)]),
    (lambda x: {"scale": x}, [0.3, 0.4, -2.0, np.float64(0.7), np.array(0.1)]),
    (lambda x: {"softcap": x}, [3.0, 4, 0.5]),
    (lambda n: {"window": (n, 2), "causal": False}, [1, 5, 30]),
    (lambda p: {"dropout_p": p, "seed": 3}, [0.1, 0.5, 0.75]),
    (lambda n: {"dropout_p": 0.5, "seed": n}, [1, 7, (1 << 63) + 5, (1 << 64) - 1]),
]


@pytest.mark.parametrize(("make", "values"), KINDS)
def test_new_numbers_compile_nothing(make: Make, values: list[Any]) -> None:
    q, k, v, dout = rows()
    arrays, cotangent = tuple(map(jnp.asarray, (q, k, v))), jnp.asarray(dout)
    for n, value in enumerate(values):
        options = make(value)
        expected = tileattn.forward(q, k, v, backend="numpy", **options)
        grads = tileattn.backward(dout, q, k, v, *expected, backend="numpy", **options)
        before = len(COMPILED)
        out, pullback = jax.vjp(
            lambda *x, options=options: attention(*x, backend="numpy", **options), *arrays
        )
        found = out, *pullback(cotangent)
        jax.block_until_ready(found)
        assert n == 0 or len(COMPILED) == before, value
        for x, y in zip(found, (expected.out, *grads[:3]), strict=True):
            assert np.asarray(x).tobytes() == y.tobytes(), value


def test_elements_of_vmap_share_a_program() -> None:
    q, k, v, _ = rows()
    batch = jnp.stack([jnp.asarray(q), 2 * jnp.asarray(q)])
    for n, x in enumerate((0.5, 0.25, -1.5)):

        def call(q: Any, x: Any = x) -> Any:
            return attention(q, k, v, backend="numpy", **slope(x))

        before = len(COMPILED)
        found = jax.vmap(call)(batch).block_until_ready()
        assert n == 0 or len(COMPILED) == before
        for own, array in zip(found, (q, 2 * q), strict=True):
            expected = tileattn.forward(array, k, v, backend="numpy", **slope(x)).out
            assert np.array_equal(own, expected)


def test_zero_turns_an_option_off() -> None:
    q, k, v, _ = rows()
    kinds: list[dict[str, Any]] = [
        {"scale": 0.0},
        {"dropout_p": 0.0},
        {"dropout_p": 0.5, "seed": 0},
    ]
    for options in kinds:
        found = attention(q, k, v, backend="numpy", **options)
        assert np.array_equal(found, tileattn.forward(q, k, v, backend="numpy", **options).out)


@pytest.mark.parametrize("option", ["scale", "softcap", "dropout_p"])
def test_nan_is_refused_where_the_call_is_written(option: str) -> None:
    q, k, v, _ = rows()
    valid, nan = ({option: x} for x in (0.5, float("nan")))
    attention(q, k, v, backend="numpy", return_lse=False, **valid)
    with pytest.raises(ValueError, match=f"{option} must be"):
        attention(q, k, v, backend="numpy", return_lse=False, **nan)


def test_a_new_length_compiles_one_program() -> None:
    """NumPy arrays, too, are copied without a program of their own."""
    rng = np.random.default_rng(0)
    given = {n: rng.normal(size=(2, 3, n, 8)).astype(np.float32) for n in (5, 9, 13)}
    attention(*[given[5]] * 3, causal=True).block_until_ready()
    for n, most in ((9, 1), (13, 1), (9, 0), (5, 0)):
        before = len(COMPILED)
        attention(*[given[n]] * 3, causal=True).block_until_ready()
        assert len(COMPILED) - before <= most


def test_arrays_of_numpy_are_copied() -> None:
    size = 64 * 1024  # bytes; some addresses in it have every alignment
    memory = np.zeros(size, np.uint8)
    start = -memory.ctypes.data % 4096
    x = memory[start : start + 4 * 3 * 7 * 8].view(np.float32).reshape(3, 7, 8)
    x[...] = np.random.default_rng(0).normal(size=x.shape)
    expected = tileattn.forward(x, x, x)
    grads = tileattn.backward(expected.out, x, x, x, *expected)
    q = jnp.array(x.tolist(), jnp.float32)
    out, pullback = jax.vjp(lambda q: attention(q, x, x), q)
    x[...] = np.nan
    assert np.array_equal(out, expected.out)
    assert np.array_equal(pullback(out)[0], grads.dq)


def test_numbers_are_found_by_their_address() -> None:
    """A host that knows the numbers of a program need not wait for a GPU to read them."""
    array = numbers.array_of(b"the numbers")
    assert numbers.array_of(b"the numbers") is array
    address = array.unsafe_buffer_pointer()

    class OnDevice:
        def __init__(self) -> None:
            self.__cuda_array_interface__ = {"data": (address, True)}

    assert numbers.bytes_of(OnDevice()) == b"the numbers"
    assert numbers.bytes_of(np.frombuffer(b"of another array", np.uint8)) == b"of another array"
    array.delete()
    with pytest.raises(AttributeError, match="tobytes"):  # it would be read
        numbers.bytes_of(OnDevice())
    assert bytes(np.asarray(numbers.array_of(b"the numbers"))) == b"the numbers"


def test_programs_get_the_arrays_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA passes them on without a copy, so that their addresses are known."""
    known = []

    def spied(array: Any) -> bytes:
        known.append(array.ctypes.data in numbers._copied_to)
        return numbers.bytes_of(array)

    monkeypatch.setattr(callbacks, "bytes_of", spied)
    q = jnp.asarray(rows()[0])
    jax.grad(lambda q: attention(q, q, q, scale=0.123).sum())(q).block_until_ready()
    assert known == [True, True]


def test_eager_calls_copy_numbers_explicitly() -> None:
    q = jnp.asarray(rows()[0])
    with jax.transfer_guard("disallow"):
        attention(q, q, q, scale=0.321, kv_lengths=[3, 4]).block_until_ready()


# --- under jit ------------------------------------------------------------------------------------


def test_traced_numbers_that_functions_capture() -> None:
    """They are arrays of the program: it serves all of their values, and computes gradients."""
    q, k, v, dout = rows()
    traced = []

    def loss(slope: Any, width: Any, offset: Any, lengths: Any) -> Any:
        traced.append(1)
        out = attention(
            *(q, k, v),
            q_offset=offset,
            kv_lengths=lengths,
            score_mod=lambda s, b, h, i, j: s - slope * jnp.abs(i - j),
            mask_mod=lambda b, h, i, j: jnp.abs(i - j) < width,
            backend="numpy",
        )
        return jnp.vdot(out, dout), out

    program = jax.jit(jax.grad(loss, has_aux=True))
    for x, width, offset in ((0.5, 4, 3), (0.25, 7, 0), (-1.0, 2, 8), (np.nan, 5, 1)):
        lengths = np.array([19, 2 * width])
        dx, out = program(x, width, offset, lengths)
        options: dict[str, Any] = {
            "score_mod": lambda s, b, h, i, j, t: s - t * abs(i - j),
            "mask_mod": lambda b, h, i, j, t, width=width: abs(i - j) < width,
            "aux": (np.array(x, np.float32),),
            "q_offset": offset,
            "kv_lengths": lengths,
            "backend": "numpy",
        }
        expected = tileattn.forward(q, k, v, **options)
        grads = tileattn.backward(dout, q, k, v, *expected, **options)
        assert grads.daux is not None
        assert np.array_equal(out, expected.out, equal_nan=True)
        assert np.array_equal(dx, grads.daux[0], equal_nan=True)
        assert np.isnan(dx) == np.isnan(x)
    assert len(traced) == 1


def test_traced_options_name_what_to_do() -> None:
    q = jnp.asarray(rows()[0])
    for option in ("scale", "softcap", "dropout_p", "window"):
        call = jax.jit(lambda x, option=option: attention(q, q, q, **{option: x}))
        with pytest.raises(TypeError, match=f"{option} must be a Python value"):
            call(0.5)
