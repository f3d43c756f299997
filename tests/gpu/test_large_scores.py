"""Scores of any finite size on the GPU: probabilities stay normalised.

The yardstick is the plain formula with P = exp(S - max) / sum. Of a rounded logsumexp probabilities
are off by the rounding: at scores of 1e9 by powers of e**64, and then no bound means anything.
"""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tests.arrays import Array, Given, normal
from tests.on_gpu import host, needs_gpu, poisoned, sent
from tileattn.oracle.dense import Forward, evaluate_backward, evaluate_forward
from tileattn.testing import assert_attention_close, error_bound
from tileattn.testing.rounding import floors, norm, storing, summing

pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread")]

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
AMPLITUDES = (1e-3, 0.1, 1.0, 10.0, 100.0)
LARGE = (1e3, 1e4)
LOWEST = float(np.finfo(np.float32).min)


def drawn(
    dtype: Any, amplitude: float = 1.0, D: int = 64, Nq: int = 140, Nk: int = 150, seed: int = 0
) -> Given:
    """Draw q, k, v and dout of two batch entries with two heads that share keys."""
    q, k, v, dout = normal((2, 2, 1, Nq, Nk, D, D), np.float64, seed)
    q, k, v, dout = (x.astype(dtype) for x in (amplitude * q, amplitude * k, v, dout))
    return q, k, v, dout


def results(given: Given, options: dict[str, Any], **more: Any) -> dict[str, tuple[Array, ...]]:
    """Run both passes; what is None is left out."""
    q, k, v, dout = map(sent, given)
    there = {n: sent(x) for n, x in options.items()}
    with poisoned():
        attention = tileattn.forward(q, k, v, **there)
        grads = tileattn.backward(dout, q, k, v, *attention, **(more | there))
    found = host(attention)._asdict() | host(grads)._asdict()
    return {name: (x,) for name, x in found.items() if x is not None}


def normalised(forward: Forward) -> Forward:
    """Divide by the sum in place of subtracting the logsumexp."""
    o, S = forward.options, forward.scores
    sinks = np.asarray([-np.inf] if o.sinks is None else o.sinks).astype(S.dtype)[:, np.newaxis]
    largest = np.maximum(S.max(axis=-1), sinks)
    shift = np.where(np.isfinite(largest), largest, 0)[..., np.newaxis]
    P = np.where(forward.attended, np.exp(S - shift), 0)
    total = P.sum(axis=-1, keepdims=True) + np.exp(sinks[..., np.newaxis] - shift)
    P = P / np.where(total > 0, total, 1)
    return replace(forward, P=P, out=(P * forward.kept) @ forward.v)


def evaluated(
    given: Given, dtype: Any, options: dict[str, Any], of_lse: bool = False
) -> dict[str, Array]:
    """Evaluate the formula, if asked for with probabilities of the logsumexp in that dtype."""
    q, k, v, dout = given
    with np.errstate(all="ignore"):
        forward = evaluate_forward(q, k, v, dtype, options)
        forward = forward if of_lse else normalised(forward)
        backward = evaluate_backward(forward, dout, None)
    found = {"out": forward.out, "lse": forward.lse, **backward.grads._asdict()}
    return {name: x for name, x in found.items() if x is not None}


def hold(
    given: Given,
    found: dict[str, tuple[Array, ...]],
    options: dict[str, Any],
    of_lse: bool = False,
) -> None:
    """Allow results twice the error of the formula, and the roundings that no kernel avoids.

    A result is the sum of what is found, each of which was stored.
    """
    dtype = given[0].dtype
    sums = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    exact = evaluated(given, np.longdouble if dtype == np.float64 else np.float64, options)
    plain = evaluated(given, sums, options, of_lse)
    q, k, v, dout = given
    forward = normalised(evaluate_forward(q, k, v, np.float64, options))
    backward = evaluate_backward(forward, dout, None)
    unavoidable = floors(forward, backward, None, storing(dtype), summing(sums))
    for name, parts in found.items():
        kind, want = parts[0].dtype, exact[name]
        finite = np.isfinite(want)
        got = sum(x.astype(want.dtype) for x in parts)
        assert np.array_equal(np.isfinite(got), finite), name
        rough = plain[name].astype(kind).astype(want.dtype)
        stored = np.sqrt(sum(np.sum(storing(kind).of(x.astype(want.dtype)[finite])) for x in parts))
        error = 2 * norm((rough - want)[finite]) + np.hypot(unavoidable[name], stored)
        ok = norm((got - want)[finite]) <= error
        assert ok, (name, norm((got - want)[finite]), error)


def hold_sums(given: Given, found: dict[str, tuple[Array, ...]]) -> None:
    """Every row of P sums to 1, so all of dv sums to all of dout."""
    dtype, dout = given[0].dtype, given[3].astype(np.float64)
    dv = found["dv"][0].astype(np.float64)
    size = np.abs(dv).sum(axis=(1, 2)) + np.abs(dout).sum(axis=(1, 2))
    # P and dv are stored, at half a unit each; and sums have errors of their own.
    sums = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    unit = 2 * storing(dtype).relative + 4 * summing(sums).relative
    ok = np.abs(dv.sum(axis=(1, 2)) - dout.sum(axis=(1, 2))) <= unit * size
    assert ok.all()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_amplitudes(dtype: Any, deterministic: bool) -> None:
    options = {"q_offset": 30, "causal": True}
    for amplitude in AMPLITUDES:
        given = drawn(dtype, amplitude)
        found = results(given, options, deterministic=deterministic)
        hold(given, found, options)
        hold_sums(given, found)


@pytest.mark.parametrize(
    ("dtype", "D"),
    [(np.float16, 128), (np.float16, 192), (np.float16, 320), (np.float32, 128), (np.float32, 300)],
)
def test_head_dimensions(dtype: Any, D: int) -> None:
    for amplitude in (1.0, 100.0):
        given = drawn(dtype, amplitude, D, Nq=70, Nk=90)
        found = results(given, {})
        hold(given, found, {})
        hold_sums(given, found)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_key_takes_all(dtype: Any, deterministic: bool) -> None:
    """So far apart are the scores: P is one-hot, whatever the rounding of the products."""
    for amplitude in LARGE:
        q, k, v, dout = given = drawn(dtype, amplitude, seed=1)
        S = evaluate_forward(q, k, v, np.float64, {}).scores
        second, first = np.moveaxis(np.sort(S, axis=-1)[..., -2:], -1, 0)
        apart = (first - second).min()
        assert apart > 1e-5 * np.abs(S).max()
        P = np.equal(S, first[..., np.newaxis]).astype(np.float64)
        found = results(given, {}, deterministic=deterministic)
        unit = max(storing(q.dtype).relative, summing(np.dtype(np.float32)).relative)
        values = np.repeat(v.astype(np.float64), 2, axis=1)
        ok = np.abs(found["out"][0] - P @ values) <= 2 * unit * np.abs(P @ values)
        assert ok.all()
        dout = dout.astype(np.float64)
        dv, size = ((P.swapaxes(2, 3) @ x).sum(axis=1) for x in (dout, np.abs(dout)))
        others = np.exp(-apart) * np.abs(dout).sum()
        ok = np.abs(found["dv"][0][:, 0] - dv) <= 4 * unit * size + others
        assert ok.all()


def masked(value: float, rows: bool, shape: tuple[int, ...] = (140, 150)) -> Array:
    """Make an additive mask of whole rows, or of parts of them."""
    bias = np.zeros(shape, np.float32)
    if rows:
        bias[..., ::3, :] = value
    else:
        bias[..., 20:, 100:] = value
        bias[..., :9, ::2] = value
    return bias


@pytest.mark.parametrize("value", [-1e4, -1e9, LOWEST])
@pytest.mark.parametrize("dtype", DTYPES)
def test_additive_masks(dtype: Any, value: float) -> None:
    given = drawn(dtype)
    for rows in (False, True):
        options = {"bias": masked(value, rows)}
        for deterministic in (False, True):
            found = results(given, options, deterministic=deterministic)
            hold(given, found, options)
            hold_sums(given, found)


@pytest.mark.parametrize("value", [-1e9, LOWEST])
def test_additive_masks_of_the_shape_of_the_scores(value: float) -> None:
    given = drawn(np.float16)
    options = {"bias": masked(value, True, (2, 2, 140, 150))}
    found = results(given, options)
    hold(given, found, options)
    hold_sums(given, found)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_masked_row_takes_its_gradient(dtype: Any) -> None:
    """All scores of query 0 are -1e9, of which float32 has no other within 32."""
    import cupy

    rng = np.random.default_rng(0)
    q, k, v = (cupy.asarray(rng.standard_normal((1024, 64)).astype(dtype)) for _ in range(3))
    bias, dout = cupy.zeros((1024, 1024), np.float32), cupy.zeros((1024, 64), dtype)
    bias[0], dout[0] = -1e9, 1
    for deterministic in (False, True):
        attention = tileattn.forward(q, k, v, bias=bias)
        dv = tileattn.backward(dout, q, k, v, *attention, bias=bias, deterministic=deterministic).dv
        # P of equal scores sums to 1. The bound is the one for float32 on standard-normal inputs.
        assert abs(float(dv[:, 0].astype(np.float64).sum()) - 1) <= 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("amplitude", [1.0, 100.0])
def test_sinks(dtype: Any, amplitude: float) -> None:
    """Below and above the scores, by so much that their exponentials overflow, and infinite."""
    given = drawn(dtype, amplitude)
    for sinks in ([0.5, 1e4], [-1e4, -np.inf], [1e9, 300.0], [-1e9, 3e38]):
        options = {"sinks": np.asarray(sinks)}
        hold(given, results(given, options), options)
    found = results(given, {"sinks": np.full(2, np.inf)})
    assert (found["lse"][0] == np.inf).all()
    assert not found["out"][0].any()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_softcaps_of_any_size(dtype: Any) -> None:
    given = drawn(dtype, 10.0)
    for cap in (1e-45, 1e-20, 1e-3, 30.0, 1e4, 1e20, 1e39):
        options = {"softcap": cap}
        hold(given, results(given, options), options)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_logsumexp_of_more_keys_than_these(dtype: Any, deterministic: bool) -> None:
    """The two halves of the keys apart, with the merged results: all scores lie about 1250."""
    import cupy

    given = drawn(dtype)
    q, k = given[:2]
    q[..., 0], k[..., 0] = 100, 100
    parts = [np.s_[:, :, :70], np.s_[:, :, 70:]]
    there = [cupy.asarray(x) for x in given]
    halves = [(there[1][part], there[2][part]) for part in parts]
    attended = [tileattn.forward(there[0], *half) for half in halves]
    merged = tileattn.merge([a.out for a in attended], [a.lse for a in attended])
    first, second = (
        host(tileattn.backward(there[3], there[0], *half, *merged, deterministic=deterministic))
        for half in halves
    )
    found = {
        "dq": (first.dq, second.dq),
        "dk": (np.concatenate([first.dk, second.dk], axis=2),),
        "dv": (np.concatenate([first.dv, second.dv], axis=2),),
    }
    # The weight of these keys is known only from the logsumexp, which was rounded.
    hold(given, found, {}, of_lse=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_sinks_without_keys(dtype: Any) -> None:
    """No kernel looks for the row maximum then: it is that of the sinks alone."""
    q, k, v, dout = drawn(dtype, Nk=0)
    dlse = np.ones(q.shape[:3], np.float64 if dtype == np.float64 else np.float32)
    options: dict[str, Any] = {"sinks": np.array([-1e4, 30.0], dtype)}
    expected = tileattn.reference.backward(dout, q, k, v, dlse=dlse, **options)
    there = {name: sent(x) for name, x in options.items()}
    x, y, z, upstream = map(sent, (q, k, v, dout))
    with poisoned():
        out, lse = tileattn.forward(x, y, z, **there)
        grads = tileattn.backward(upstream, x, y, z, out, lse, dlse=sent(dlse), **there)
    bounds = error_bound(q, k, v, dout, dlse=dlse, **options)
    assert_attention_close(host(grads), expected, bounds)
