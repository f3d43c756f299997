"""Products of float32 by float16 parts are as exact as in float32, and so is attention."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tileattn import reference
from tileattn.algorithm.splitting import (
    BACKWARD_P_FACTOR,
    FORWARD_P_FACTOR,
    TILE_ROWS,
    gradient_product,
    scores,
    weighted_sum,
)
from tileattn.testing import error_bound

Array = NDArray[Any]


def exactly(x: Array) -> Array:
    return x.astype(np.float64)


def single(x: Array) -> Array:
    """Round to float32, and clip to its largest numbers."""
    largest = float(np.finfo(np.float32).max)
    return np.clip(x, -largest, largest).astype(np.float32)


def inputs(kind: str, seed: int, B: int, M: int, N: int, D: int) -> dict[str, Array]:
    """Draw q, k and v of a call with grouped heads; scores are of order 1 to 10."""
    rng = np.random.default_rng(seed)
    x = {
        "q": rng.standard_normal((B, 3, M, D)),
        "k": rng.standard_normal((B, 1, N, D)),
        "v": rng.standard_normal((B, 1, N, D)),
    }
    if kind.startswith("log-normal"):
        sigma = float(kind.split()[1])
        for name, y in x.items():
            wild = np.exp(sigma * y) * rng.choice([-1, 1], y.shape)
            x[name] = wild / np.sqrt(np.mean(wild**2)) if name != "v" else wild
    elif kind.startswith("amplitude"):
        size = float(kind.split()[1])
        x["q"], x["k"], x["v"] = x["q"] * size, x["k"] / size, x["v"] * size
    elif kind == "huge column":
        x["v"][..., 3] *= 2.0**20
        x["q"][..., 5] *= 2.0**20
        x["k"][..., 5] *= 2.0**-20
    elif kind == "huge column of q":
        x["q"][..., 5] *= 2.0**20
        x["k"][..., 5] = 0
    elif kind == "huge key in each tile":
        x["k"][..., 7::TILE_ROWS, :] *= 8
        x["v"][..., 7::TILE_ROWS, :] *= 2.0**20
    elif kind == "positive values":
        x["v"] = np.abs(x["v"])
    return {name: single(y) for name, y in x.items()}


USUAL = [
    "normal",
    "positive values",
    *(f"log-normal {sigma}" for sigma in (1, 2)),
    *(f"amplitude {size}" for size in (1e-30, 1e-10, 1e10, 1e30)),
    "huge column",
    "huge column of q",
    "huge key in each tile",
]
SHAPES = [(37, 200, 64), (21, 333, 128), (50, 130, 80), (30, 100, 200)]
each_shape = pytest.mark.parametrize(("M", "N", "D"), SHAPES)


def error_of(actual: Array, exact: Array) -> float:
    return float(np.linalg.norm(actual - exact))


@each_shape
@pytest.mark.parametrize("kind", USUAL)
def test_products_are_as_exact_as_in_float32(kind: str, M: int, N: int, D: int) -> None:
    """The error is at most twice that of ``np.matmul``; with OpenBLAS it is 0.4 to 1.7 times."""
    x = inputs(kind, 0, 2, M, N, D)
    s, k = scores(x["q"], x["k"]), x["k"].swapaxes(-1, -2)
    exact = exactly(x["q"]) @ exactly(k)
    assert error_of(s, exact) <= 2 * error_of(x["q"] @ k, exact)
    p = FORWARD_P_FACTOR * np.exp((s - s.max(axis=-1, keepdims=True)) * np.float32(D**-0.5))
    exact = exactly(p) @ exactly(x["v"])
    assert error_of(weighted_sum(p, x["v"]), exact) <= 2 * error_of(p @ x["v"], exact)


def row_errors(actual: Array, exact: Array) -> Array:
    error: Array = np.linalg.norm(actual - exact, axis=-1)
    return error


@each_shape
@pytest.mark.parametrize("rows", [32, 64])
def test_gradient_products_are_as_exact_as_in_float32(M: int, N: int, D: int, rows: int) -> None:
    """The error is at most 1.2 times as large as in ``np.matmul``. OpenBLAS: 0.6 to 0.8 times."""
    rng = np.random.default_rng(0)
    ds, x = (rng.standard_normal((2, *shape)).astype(np.float32) for shape in ((M, N), (N, D)))
    exact = exactly(ds) @ exactly(x)
    assert error_of(gradient_product(ds, x, rows), exact) <= 1.2 * error_of(ds @ x, exact)


@each_shape
@pytest.mark.parametrize("kind", ["rows", "columns", "tiles", "zeros"])
def test_each_row_of_gradients_is_as_exact_as_in_float32(kind: str, M: int, N: int, D: int) -> None:
    """The error of a row is 0.7 to 1.2 times as large as in ``np.matmul`` with OpenBLAS."""
    rng = np.random.default_rng(1)
    ds, x = rng.standard_normal((2, M, N)), rng.standard_normal((2, N, D))
    if kind == "rows":
        ds *= np.exp2(rng.uniform(-80, 0, (2, M, 1)))
    elif kind == "columns":
        ds *= np.exp2(rng.uniform(-24, 0, (2, 1, N)))
    elif kind == "tiles":
        ds[..., TILE_ROWS:] *= 2.0**-60
        x[:, :TILE_ROWS] = 0
    else:
        ds *= rng.random((2, M, N)) < 0.5
        ds[:, ::3], ds[..., :TILE_ROWS], x[:, 7:20] = 0, 0, 0
    ds, x = single(ds), single(x)
    exact, actual = exactly(ds) @ exactly(x), gradient_product(ds, x)
    assert not actual[~ds.any(axis=-1)].any()
    some = ds.any(axis=-1)
    ratios = row_errors(actual, exact)[some] / row_errors(ds @ x, exact)[some]
    assert np.sqrt(np.mean(ratios**2)) <= 2


@pytest.mark.parametrize("sigma", [3, 4])
def test_scores_of_few_products(sigma: float) -> None:
    """If one product decides a sum, float32 rounds once: 2**-24. Parts lose up to 2**-21."""
    x = inputs(f"log-normal {sigma}", 0, 2, 37, 200, 64)
    k = x["k"].swapaxes(-1, -2)
    exact = exactly(x["q"]) @ exactly(k)
    error = error_of(scores(x["q"], x["k"]), exact)
    assert error <= 8 * error_of(x["q"] @ k, exact)
    assert error <= 2.0**-21 * np.linalg.norm(np.abs(exactly(x["q"])) @ np.abs(exactly(k)))


def attended(x: dict[str, Array], scale: float) -> tuple[Array, Array]:
    """Attend with split products: out and lse."""
    s = scores(x["q"], x["k"]) * np.float32(scale)
    m = s.max(axis=-1, keepdims=True)
    p = np.exp(s - m)
    total = p.sum(axis=-1, keepdims=True)
    out = weighted_sum(p * FORWARD_P_FACTOR, x["v"]) / (total * FORWARD_P_FACTOR)
    return out, (m + np.log(total))[..., 0]


@each_shape
@pytest.mark.parametrize("kind", [*USUAL, "log-normal 4"])
def test_attention_is_within_the_error_bound(kind: str, M: int, N: int, D: int) -> None:
    x, scale = inputs(kind, 1, 2, M, N, D), D**-0.5
    bounds, exact = error_bound(**x, scale=scale), reference.forward(**x, scale=scale)
    out, lse = attended(x, scale)
    assert error_of(out, exact.out) <= bounds["out"].error
    assert error_of(lse, exact.lse) <= bounds["lse"].error


def gradients(
    x: dict[str, Array], dout: Array, lse: Array, delta: Array, scale: float
) -> tuple[Array, Array, Array]:
    """Return dq, dk and dv by split products. An exponent is rounded once, as in the kernels."""
    q, k, v = x["q"], x["k"], x["v"]
    s = exactly(scores(q, k, TILE_ROWS)) * scale - exactly(lse)[..., None]
    p = np.ldexp(np.exp2(single(s / np.log(2) + 8)), -8)  # rounded with 2**8
    ds = p * (scores(dout, v, TILE_ROWS) - delta[..., None])
    dk = gradient_product(ds.swapaxes(-1, -2), q)
    dv = weighted_sum(p.swapaxes(-1, -2) * BACKWARD_P_FACTOR, dout) / BACKWARD_P_FACTOR
    dq, dk = (y * np.float32(scale) for y in (gradient_product(ds, k), dk))
    return dq, dk.sum(axis=1, keepdims=True), dv.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("kind", ["normal", "log-normal 1", "huge column", "huge key in each tile"])
@pytest.mark.parametrize(("M", "N", "D"), [(70, 130, 64), (50, 70, 80)])
def test_gradients_are_within_the_error_bound(kind: str, M: int, N: int, D: int) -> None:
    x, scale = inputs(kind, 2, 2, M, N, D), D**-0.5
    dout = np.random.default_rng(3).standard_normal(x["q"].shape).astype(np.float32)
    bounds = error_bound(**x, dout=dout, scale=scale)
    out, lse = attended(x, scale)
    exact = reference.backward(dout, x["q"], x["k"], x["v"], out, lse, scale=scale)
    got = gradients(x, dout, lse, (dout * out).sum(axis=-1), scale)
    for name, actual in zip(("dq", "dk", "dv"), got, strict=True):
        assert error_of(actual, getattr(exact, name)) <= bounds[name].error


def beside_a_sink(gap: float) -> dict[str, Array]:
    """Make a call in which key 0, of value 0, has 2**gap times the probability of any other.

    Elements of q and k have few bits: the scores are exact, so only P counts.
    """
    rng, scale = np.random.default_rng(0), 64**-0.5
    q, k = (rng.standard_normal((1, 1, n, 64)) * 0.01 for n in (16, 500))
    q[..., 0], k[..., 0], k[..., 0, :] = 4, 0, 0
    k[..., 0, 0] = gap * np.log(2) / scale / 4
    v = rng.standard_normal((1, 1, 500, 64))
    v[..., 0, :] = 0
    few_bits = (x.astype(np.float16).astype(np.float32) for x in (q, k, v))
    return dict(zip(("q", "k", "v"), few_bits, strict=True))


@pytest.mark.parametrize("gap", [4.0, 12.0, 20.0, 24.0, 26.0, 28.0, 30.0])
def test_p_beside_a_sink(gap: float) -> None:
    """P loses up to 2**-47 of the largest P of its row.

    The error of out is that of plain float32 up to 2**26, and within its bound up to 2**30. An H200
    has larger errors, since tensor cores truncate sums: see docs/numerics.md.
    """
    x, scale = beside_a_sink(gap), np.float32(64**-0.5)
    exact = reference.forward(**x).out
    error = error_of(attended(x, 64**-0.5)[0], exact)
    s = x["q"] @ x["k"].swapaxes(-1, -2) * scale
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    plain = error_of(p @ x["v"] / p.sum(axis=-1, keepdims=True), exact)
    if gap <= 26:
        assert error <= 1.2 * plain
    if gap <= 30:
        assert error <= error_bound(**x)["out"].error
