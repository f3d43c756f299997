"""Functions that capture JAX's arrays, and call its functions."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", reason="its arrays are captured: pip install jax")

import jax
import jax.numpy as jnp

from tileattn.jax import attention

RNG = np.random.default_rng(0)
Q = jnp.asarray(RNG.normal(size=(2, 3, 11, 8)), jnp.float32)
TABLE = jnp.asarray(RNG.normal(size=(3, 21)), jnp.float32)
IDS = jnp.asarray(RNG.integers(0, 3, 11))


def captured(table: Any) -> Any:
    return attention(
        *(Q, Q, Q),
        score_mod=lambda s, b, h, i, j: s + table[h, i - j],
        mask_mod=lambda b, h, i, j: IDS[i] == IDS[j],
    ).sum()


def passed(table: Any) -> Any:
    return attention(
        *(Q, Q, Q),
        score_mod=lambda s, b, h, i, j, t, n: s + t[h, i - j],
        mask_mod=lambda b, h, i, j, t, n: n[i] == n[j],
        aux=(table, IDS),
    ).sum()


@pytest.mark.parametrize(
    "transformed", [lambda f: f, jax.jit, jax.grad, lambda f: jax.jit(jax.grad(f))]
)
def test_captured_arrays_are_parameters(transformed: Any) -> None:
    np.testing.assert_array_equal(transformed(captured)(TABLE), transformed(passed)(TABLE))


def test_captured_arrays_are_mapped() -> None:
    tables = jnp.stack([TABLE, 2 * TABLE])
    found = jax.vmap(captured)(tables)
    np.testing.assert_array_equal(found, jnp.stack([captured(x) for x in tables]))


def test_numbers_are_parameters() -> None:
    def call(slope: Any) -> Any:
        return attention(Q, Q, Q, score_mod=lambda s, b, h, i, j: s - slope * jnp.abs(i - j)).sum()

    slope = jnp.float32(0.25)
    expected = jax.grad(
        lambda t: attention(
            Q, Q, Q, score_mod=lambda s, b, h, i, j, t: s - t * abs(i - j), aux=(t,)
        ).sum()
    )(slope)
    np.testing.assert_array_equal(jax.jit(jax.grad(call))(slope), expected)


@pytest.mark.parametrize(
    ("in_jax", "in_numpy"),
    [
        ("jnp.where(i >= j, s, -jnp.inf)", "np.where(i >= j, s, -np.inf)"),
        ("5 * jnp.tanh(s / 5)", "5 * np.tanh(s / 5)"),
        ("s - jnp.abs(i - j)", "s - abs(i - j)"),
        ("jnp.clip(s, -1, 1) * jnp.exp(-s * s)", "np.clip(s, -1, 1) * np.exp(-s * s)"),
        ("jax.nn.sigmoid(s) + jax.numpy.minimum(i, j)", "s.sigmoid() + np.minimum(i, j)"),
        ("s + i.astype(jnp.float32) * jnp.float32(0.5)", "s + i.astype(float) * 0.5"),
        ("s + jnp.logaddexp(s, jnp.round(s))", "s + np.logaddexp(s, np.round(s))"),
        ("jax.scipy.special.erf(s)", "s.erf()"),
    ],
)
def test_functions_of_jax_are_those_of_numpy(in_jax: str, in_numpy: str) -> None:
    names = {"jax": jax, "jnp": jnp, "np": np}
    functions = (eval(f"lambda s, b, h, i, j: {text}", names) for text in (in_jax, in_numpy))
    found, expected = (attention(Q, Q, Q, score_mod=f) for f in functions)
    np.testing.assert_array_equal(found, expected)


NUMBER = jnp.float32(2.0)
SLOPES = jnp.arange(1.0, 4.0)


@pytest.mark.parametrize(
    ("computed", "expected"),
    [
        ("s + sum(w for w in SLOPES)", "s + 6.0"),
        ("s * float(NUMBER)", "s * 2.0"),
        ("s * float(jnp.square(NUMBER))", "s * 4.0"),
        ("s * (NUMBER * 2) + -NUMBER", "s * 4.0 + -2.0"),
        ("s * 2 if NUMBER > 0 else s", "s * 2"),
        ("NUMBER * s + jnp.where(i > j, NUMBER, s)", "s * 2.0 + jnp.where(i > j, 2.0, s)"),
        ("s + (SLOPES * 2)[h]", "s + 2.0 * (h + 1)"),
        ("s + (4 - SLOPES)[h]", "s + (3.0 - h)"),
        ("s + SLOPES[::-1][h] + SLOPES.T[h]", "s + (3.0 - h) + (h + 1.0)"),
        ("s + float(jnp.sum(SLOPES)) + len(SLOPES)", "s + 6.0 + 3"),
        ("s + TABLE[0][i - j]", "s + TABLE[0, i - j]"),
    ],
)
def test_captured_arrays_are_those_of_jax(computed: str, expected: str) -> None:
    names = {"jnp": jnp, "NUMBER": NUMBER, "SLOPES": SLOPES, "TABLE": TABLE}
    found, other = (
        attention(Q, Q, Q, score_mod=eval(f"lambda s, b, h, i, j: {text}", names))
        for text in (computed, expected)
    )
    np.testing.assert_array_equal(found, other)
