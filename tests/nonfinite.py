"""Helpers of the tests of NaN and infinity: masks of every kind, where to write, what must hold."""

import math
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.arrays import Array, Given, normal
from tests.conftest import Runner
from tileattn import Attention, BlockMask, Gradients, reference
from tileattn.oracle import dense as dense_reference
from tileattn.testing import assert_attention_close, error_bound

B, HQ, HKV = 2, 4, 2
NAMES = ("q", "k", "v", "dout")
WRONG = [math.nan, math.inf, -math.inf]
MIXTURES = ((math.nan,), (math.inf,), (-math.inf,), (math.inf, -math.inf), tuple(WRONG))


def arrays(
    lengths: tuple[int, int], dtype: Any = np.float32, dims: tuple[int, int] = (8, 12)
) -> Given:
    return normal((B, HQ, HKV, *lengths, *dims), dtype)


def masks(lengths: tuple[int, int], block: tuple[int, int] = (8, 5)) -> dict[str, dict[str, Any]]:
    """Masks of every kind; each leaves keys unattended, or queries without a key, or both."""
    Nq, Nk = lengths
    rng = np.random.default_rng(1)
    dense = rng.random((HQ, Nq, Nk)) < 0.5
    dense[:, 3:9] = False
    dense[:, :, 7:20] = False
    blocks = rng.random((B, HQ, -(-Nq // block[0]), -(-Nk // block[1]))) < 0.5
    blocks[:, :, 1] = False
    blocks[..., 2] = False
    partly = np.random.default_rng(2).random((Nq, Nk)) < 0.5
    partly[:, 11:13] = False
    bias = rng.normal(size=(B, HQ, Nq, Nk)).astype(np.float32)
    bias[rng.random(bias.shape) < 0.3] = -math.inf
    lengths_of_keys = {"kv_lengths": [Nk // 2, Nk - 3]}
    return {
        "causal": {"causal": True, "q_offset": -5},
        "window": {"window": (3, 2), "q_offset": [-9, Nk - Nq // 2]},
        "lengths": lengths_of_keys,
        "no length": {"kv_lengths": [0, 4], "causal": True},
        "mask": {"mask": dense},
        "mask of keys": {"mask": np.arange(Nk) % 3 > 0},
        "mask of queries": {"mask": np.arange(Nq)[:, None] % 4 > 0},
        "block mask": {"block_mask": BlockMask(blocks, block)},
        "mixed blocks": {"block_mask": BlockMask.from_mask(partly, block)},
        "bias": {"bias": bias, **lengths_of_keys},
        "dropout": {"dropout_p": 0.3, "causal": True, "q_offset": -5},
        "softcap": {"softcap": 3.0, **lengths_of_keys},
        "all": {
            "mask": dense,
            "kv_lengths": [Nk, Nk - 6],
            "window": (Nk // 2, None),
            "softcap": 2.0,
            "bias": bias[0, :, :1].clip(-1),
            "dropout_p": 0.2,
        },
    }


def both(
    runner: Runner, given: Given, options: dict[str, Any], *, deterministic: bool = True
) -> tuple[Attention, Gradients]:
    q, k, v, dout = given
    attention = runner.forward(q, k, v, **options)
    more = {"deterministic": deterministic, **options}
    return attention, runner.backward(dout, q, k, v, *attention, **more)


def bits(x: Array) -> Array:
    return x.view(f"u{x.itemsize}")


def visibility(given: Given, options: dict[str, Any]) -> NDArray[np.bool_]:
    return dense_reference.visibility((*given[0].shape[:3], given[1].shape[2]), options)


def check_masked_out(
    runner: Runner,
    given: Given,
    options: dict[str, Any],
    wrong: float,
    *,
    deterministic: bool = True,
    loose: Collection[str] = (),
) -> None:
    """Fill masked-out entries: no bit of a result depends on them.

    The order of dq's sums is fixed if ``deterministic``. Kernels may sum results in ``loose`` in
    another order if an entry is not finite, so these are compared with the oracle.
    """
    expected, of_expected = both(runner, given, options, deterministic=deterministic)
    visible = visibility(given, options)
    unattended = ~visible.any(axis=2).reshape(B, HKV, -1, visible.shape[3]).any(axis=2)
    without_key = ~visible.any(axis=3)
    assert unattended.any() or without_key.any()
    q, k, v, dout = (x.copy() for x in given)
    k[unattended] = v[unattended] = q[without_key] = dout[without_key] = wrong
    result, grads = both(runner, (q, k, v, dout), options, deterministic=deterministic)
    # The gradient of a sink is a sum over all queries, those without a key too.
    held = {**expected._asdict(), **of_expected._asdict(), "dsinks": None}
    loose = {*loose, *(() if deterministic else ("dq",))}
    if loose:
        bounds = error_bound(*given, **options)
        exact = reference.forward(*given[:3], **options)
        of_exact = reference.backward(given[3], *given[:3], **options)
        assert_attention_close(result, exact, bounds, names=loose & {*result._fields})
        assert_attention_close(grads, of_exact, bounds, names=loose & {*grads._fields})
    for name in held.keys() - loose:
        theirs = held[name]
        ours = getattr(result if name in result._fields else grads, name)
        if theirs is not None:
            np.testing.assert_array_equal(bits(ours), bits(theirs), name)
    assert not result.out[without_key].any()
    assert "sinks" in options or np.isneginf(result.lse[without_key]).all()
    assert not grads.dq[without_key].any()
    assert not grads.dk[unattended].any()
    assert not grads.dv[unattended].any()


def check_reach(
    runner: Runner,
    given: Given,
    options: dict[str, Any],
    where: str,
    wrong: float,
    *,
    deterministic: bool = True,
) -> None:
    """Spoil one key or value that some rows of a head attend to: it does not reach the others."""
    q, k, v, dout = given[0], given[1].copy(), given[2].copy(), given[3]
    bounds = error_bound(*given, **options)
    expected = reference.forward(q, k, v, **options)
    of_expected = reference.backward(dout, q, k, v, **options)
    _, clean = both(runner, given, options, deterministic=deterministic)
    visible = visibility(given, options)
    j = int(np.argmax(visible[1, 2].any(axis=0)))
    {"k": k, "v": v}[where][1, 1, j, 3] = wrong
    reached = np.zeros(visible.shape[:3], bool)
    reached[1, 2:] = visible[1, 2:, :, j]
    assert reached.any()
    assert (visible.any(axis=3) & ~reached).any()
    result, grads = both(runner, (q, k, v, dout), options, deterministic=deterministic)
    for x, truth in zip((*result, grads.dq), (*expected, of_expected.dq), strict=True):
        x[reached] = truth[reached]  # what may differ
    assert_attention_close(result, expected, bounds)
    assert_attention_close(grads, of_expected, bounds, names=("dq",))
    for ours, theirs in ((grads.dk, clean.dk), (grads.dv, clean.dv)):
        others = np.ones(ours.shape[:2], bool)
        others[1, 1] = False
        np.testing.assert_array_equal(bits(ours[others]), bits(theirs[others]))


def check_visible(
    runner: Runner, given: Given, options: dict[str, Any], *, deterministic: bool = True
) -> tuple[Attention, Gradients]:
    """Compare a call whose arrays are not finite with the oracle, and return its results.

    A NaN stands exactly where the oracle has one, and so do the infinities of both outputs. In the
    gradients ``inf - inf`` and ``0 * inf`` depend on the order of operations: there, what the
    oracle has not finite is not finite, and what a NaN in the place of infinities would not reach
    is finite.
    """
    q, k, v, dout = given
    bounds = error_bound(*given, **options)
    attention, grads = both(runner, given, options, deterministic=deterministic)
    assert_attention_close(attention, reference.forward(q, k, v, **options), bounds)
    expected = reference.backward(dout, q, k, v, **options)
    bias = {"bias": options["bias"]} if "bias" in options else {}
    infinite = [np.isinf(x).any() for x in given] + [np.isposinf(x).any() for x in bias.values()]
    if not any(infinite):
        assert_attention_close(grads, expected, bounds)
        return attention, grads
    q, k, v, dout = (np.where(np.isinf(x), np.array(math.nan, x.dtype), x) for x in given)
    bias = {name: np.where(np.isposinf(x), np.float32(math.nan), x) for name, x in bias.items()}
    reached = reference.backward(dout, q, k, v, **options | bias)
    for name, x in grads._asdict().items():
        if x is not None:
            finite = np.isfinite(x.astype(np.float64))
            assert not (finite & ~np.isfinite(getattr(expected, name))).any(), name
            assert not (~finite & np.isfinite(getattr(reached, name))).any(), name
    return attention, grads


def check_spoiled(
    runner: Runner,
    given: Given,
    options: dict[str, Any],
    rng: np.random.Generator,
    *,
    names: tuple[str, ...] = NAMES,
    deterministic: bool = True,
) -> None:
    """Spoil random places: the results are the oracle's, and heads without any keep their bits."""
    spoiled, there = spoil(given, options, rng, names)
    before = both(runner, given, options, deterministic=deterministic)
    after = check_visible(runner, spoiled, there, deterministic=deterministic)
    clean = np.ones((B, HKV), bool)
    pairs = list(zip(spoiled, given, strict=True))
    if "bias" in options:
        scores = visibility(given, options).shape
        there_bias, bias = (np.broadcast_to(x["bias"], scores) for x in (there, options))
        pairs.append((there_bias, bias))
    for ours, theirs in pairs:
        changed = bits(ours) != bits(theirs)
        clean &= ~changed.reshape(B, HKV, -1).any(axis=2)
    for n, name in ((0, "out"), (0, "lse"), (1, "dq"), (1, "dk"), (1, "dv")):
        if name != "dq" or deterministic:
            ours, theirs = (bits(getattr(x[n], name)) for x in (after, before))
            shape = B, HKV, -1, *ours.shape[2:]
            np.testing.assert_array_equal(ours.reshape(shape)[clean], theirs.reshape(shape)[clean])


def spoil(
    given: Given, options: dict[str, Any], rng: np.random.Generator, names: tuple[str, ...] = NAMES
) -> tuple[Given, dict[str, Any]]:
    """Write what is not finite to elements, columns and rows of some arrays, one to three times."""
    made = dict(zip(NAMES, (x.copy() for x in given), strict=True))
    if "bias" in options:
        made["bias"] = options["bias"].copy()
        names = *names, "bias"
    values = MIXTURES[rng.integers(len(MIXTURES))]
    for _ in range(rng.integers(1, 4)):
        x = made[names[rng.integers(len(names))]]
        head = x.reshape(-1, *x.shape[-2:])[rng.integers(x[..., 0, 0].size)]
        rows, columns = head.shape
        style = rng.integers(3)
        if style == 0:  # both infinities in a column, in the same tile or not
            count = min(rows, 4)
            at: Any = rng.choice(rows, count, replace=False), rng.integers(columns)
        elif style == 1:  # elements
            count = 3
            at = rng.integers(rows, size=count), rng.integers(columns, size=count)
        else:
            count = columns
            at = rng.integers(rows)
        head[at] = rng.choice(values, count)
    spoiled = made["q"], made["k"], made["v"], made["dout"]
    return spoiled, options | {name: x for name, x in made.items() if name == "bias"}
