"""Packed sequences in the oracle against a plain loop over them with its dense calls.

Tolerances are a few units in the last place of float64: `error_bound` is made from the oracle.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.arrays import Array, Given, normal
from tileattn import reference
from tileattn.oracle.dense import visibility
from tileattn.oracle.packed import dense_options, packed, padded
from tileattn.results import Attention, Gradients
from tileattn.testing.bounds import named

HQ, HKV, D, DV = 4, 2, 3, 5
# Longer and shorter than their keys, one query, without queries, without keys, without either.
CU_Q = [0, 6, 9, 10, 10, 14, 14]
CU_K = [0, 4, 11, 12, 15, 15, 15]
S = len(CU_Q) - 1


def arrays(cu_q: list[int] = CU_Q, cu_k: list[int] = CU_K) -> tuple[Given, Array]:
    """q, k, v and dout of three axes, and dlse."""
    given = normal((1, HQ, HKV, cu_q[-1], cu_k[-1], D, DV), np.float64)
    q, k, v, dout = (x[0] for x in given)
    return (q, k, v, dout), np.random.default_rng(3).normal(size=q.shape[:2])


def option_sets() -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(1)
    sinks, table = rng.normal(size=HQ), rng.normal(size=(S, 9))
    lengths = [3, 7, 0, 2, 0, 0]
    return {
        "none": {},
        "scale": {"scale": -0.7},
        "softcap": {"softcap": 1.5},
        "alibi": {"alibi_slopes": rng.random(HQ)},
        "alibi by sequence": {"alibi_slopes": rng.random((S, HQ)), "kv_lengths": lengths},
        "causal": {"causal": True},
        "causal, top left": {"causal": True, "q_offset": 0},
        "window": {"window": (2, 1)},
        "lengths": {"kv_lengths": np.array(lengths, np.int32)},
        "lengths, causal": {"kv_lengths": lengths, "causal": True},
        "offsets": {"q_offset": [-3, 2, 0, 1, -1, 5], "causal": True},
        "sinks": {"sinks": sinks, "causal": True},
        "infinite sinks": {"sinks": np.array([-np.inf, 0.5, np.inf, 1]), "causal": True},
        "dropout": {"dropout_p": 0.4, "seed": 2**40 + 3},
        "score_mod": {"score_mod": lambda s, b, h, i, j: s * (1 + b) + 0.1 * (h + i) - 0.2 * j},
        "mask_mod": {"mask_mod": lambda b, h, i, j: (i + j + h) % (b + 2) < 2},
        "aux": {
            "score_mod": lambda s, b, _h, i, j, t, u: s * u + t[b, i - j + 4],
            "aux": (table, np.array(0.7)),
        },
        "all": {
            "softcap": 2.0,
            "alibi_slopes": rng.random((S, HQ)),
            "window": (3, 2),
            "kv_lengths": lengths,
            "q_offset": [2, 3, 0, -1, 0, 0],
            "sinks": sinks,
            "dropout_p": 0.3,
            "seed": 5,
            "score_mod": lambda s, b, _h, i, j, t: s + t[b, i] * j,
            "mask_mod": lambda b, _h, i, j, _t: i + j != b + 2,
            "aux": (table,),
        },
    }


OPTION_SETS = option_sets()
every_option = pytest.mark.parametrize("options", OPTION_SETS.values(), ids=OPTION_SETS.keys())


def of_sequence(options: dict[str, Any], s: int) -> dict[str, Any]:
    """Options of one sequence alone."""
    own = dict(options)
    for name, axes in (("kv_lengths", 1), ("q_offset", 1), ("alibi_slopes", 2)):
        if np.ndim(own.get(name, 0)) == axes:
            own[name] = own[name][s]
    return own


def loop(
    given: Given, dlse: Array, cu_q: list[int], cu_k: list[int], options: dict[str, Any]
) -> tuple[Attention, Gradients]:
    """One dense call for each sequence; results side by side, gradients of parameters summed.

    Sequence s stands at batch entry s, where dropout and the user's functions find its number.
    Earlier entries hold it, too, but nothing is asked of them: their upstream gradients are 0.
    """
    q, k, v, dout = given
    out, lse = np.zeros(dout.shape), np.zeros(q.shape[:2])
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    dsinks: Any = 0
    daux: list[Any] = [0] * len(options.get("aux", ()))
    for s, (of_q, of_k) in enumerate(zip(pairwise(cu_q), pairwise(cu_k), strict=True)):
        rows, keys = slice(*of_q), slice(*of_k)
        own = of_sequence(options, s)
        one = [np.stack([x[:, part]] * (s + 1)) for x, part in ((q, rows), (k, keys), (v, keys))]
        upstream = [np.stack([0 * x[:, rows]] * s + [x[:, rows]]) for x in (dout, dlse)]
        attention = reference.forward(*one, **own)
        grads = reference.backward(upstream[0], *one, dlse=upstream[1], **own)
        out[:, rows], lse[:, rows] = attention.out[s], attention.lse[s]
        dq[:, rows], dk[:, keys], dv[:, keys] = grads.dq[s], grads.dk[s], grads.dv[s]
        dsinks = None if grads.dsinks is None else dsinks + grads.dsinks
        daux = [total + part for total, part in zip(daux, grads.daux or (), strict=True)]
    gradients = Gradients(dq, dk, dv, None, dsinks, tuple(daux) if daux else None)
    return Attention(out, lse), gradients


def assert_same(actual: Attention | Gradients, expected: Attention | Gradients) -> None:
    assert type(actual) is type(expected)
    ours, theirs = named(actual), named(expected)
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        assert np.shape(ours[name]) == np.shape(x), name
        if x is None:
            assert ours[name] is None, name
        else:
            np.testing.assert_allclose(ours[name], x, rtol=1e-12, atol=1e-13, err_msg=name)


@every_option
def test_packed_sequences_are_a_loop_over_them(options: dict[str, Any]) -> None:
    given, dlse = arrays()
    attention, gradients = loop(given, dlse, CU_Q, CU_K, options)
    call = options | {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}
    assert_same(reference.forward(*given[:3], **call), attention)
    assert_same(reference.backward(given[3], *given[:3], dlse=dlse, **call), gradients)


def test_without_dlse() -> None:
    given, dlse = arrays()
    options: dict[str, Any] = {"sinks": np.arange(4.0), "causal": True}
    gradients = loop(given, 0 * dlse, CU_Q, CU_K, options)[1]
    call = options | {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}
    assert_same(reference.backward(given[3], *given[:3], **call), gradients)


@pytest.mark.parametrize("given_for", ["q", "k"])
def test_one_of_the_two_means_both(given_for: str) -> None:
    given, dlse = arrays(CU_Q, CU_Q)
    attention, gradients = loop(given, dlse, CU_Q, CU_Q, {"causal": True})
    call: dict[str, Any] = {f"cu_seqlens_{given_for}": np.array(CU_Q, np.int32), "causal": True}
    assert_same(reference.forward(*given[:3], **call), attention)
    assert_same(reference.backward(given[3], *given[:3], dlse=dlse, **call), gradients)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_arrays_of_integers_do_for_lists(dtype: Any) -> None:
    given, _ = arrays()
    expected = reference.forward(*given[:3], cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K)
    cu_q, cu_k = (np.array(x, dtype) for x in (CU_Q, CU_K))
    assert_same(reference.forward(*given[:3], cu_seqlens_q=cu_q, cu_seqlens_k=cu_k), expected)


@pytest.mark.parametrize("axes", [2, 4])
def test_other_numbers_of_axes_are_answered_in_kind(axes: int) -> None:
    (q, k, v, dout), dlse = arrays()
    call: dict[str, Any] = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "causal": True}
    head = 0 if axes == 2 else np.newaxis
    q, k, v, dout, dlse = (x[:1] if axes == 2 else x for x in (q, k, v, dout, dlse))
    attention = reference.forward(q, k, v, **call)
    gradients = reference.backward(dout, q, k, v, dlse=dlse, **call)
    few = [x[head] for x in (q, k, v, dout)]
    assert_same(reference.forward(*few[:3], **call), Attention(*(x[head] for x in attention)))
    dq, dk, dv = (x[head] for x in gradients[:3])
    expected = Gradients(dq, dk, dv, None, None)
    assert_same(reference.backward(few[3], *few[:3], dlse=dlse[head], **call), expected)


@pytest.mark.parametrize("cu_seqlens", [[0], [0, 0], [0, 0, 0]])
def test_no_sequences_and_none_but_empty_ones(cu_seqlens: list[int]) -> None:
    (q, k, v, dout), dlse = arrays([0], [0])
    n = len(cu_seqlens) - 1
    call: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens,
        "kv_lengths": [0] * n,
        "q_offset": [1] * n,
        "alibi_slopes": np.ones((n, HQ)),
        "sinks": np.zeros(HQ),
    }
    out, lse = reference.forward(q, k, v, **call)
    assert (out.shape, lse.shape) == ((HQ, 0, DV), (HQ, 0))
    gradients = reference.backward(dout, q, k, v, dlse=dlse, **call)
    assert [x.shape for x in gradients[:3]] == [x.shape for x in (q, k, v)]
    np.testing.assert_array_equal(gradients.dsinks, np.zeros(HQ))


def test_nothing_of_another_sequence_enters() -> None:
    """Sequence 1 holds NaN everywhere; the others have the results that they had."""
    (q, k, v, dout), dlse = arrays()
    call: dict[str, Any] = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "causal": True}
    attention = reference.forward(q, k, v, **call)
    gradients = reference.backward(dout, q, k, v, dlse=dlse, **call)
    rows, keys = slice(*CU_Q[1:3]), slice(*CU_K[1:3])
    for x, part in ((q, rows), (k, keys), (v, keys), (dout, rows), (dlse, rows)):
        x[:, part] = np.nan
    spoiled = [*reference.forward(q, k, v, **call)]
    spoiled += reference.backward(dout, q, k, v, dlse=dlse, **call)[:3]
    parts = (rows, rows, rows, keys, keys)
    for x, clean, part in zip(spoiled, [*attention, *gradients[:3]], parts, strict=True):
        assert np.isnan(x[:, part]).all()
        others, expected = (np.delete(y, part, axis=1) for y in (x, clean))
        np.testing.assert_allclose(others, expected, rtol=1e-12)


def test_visibility_of_the_dense_equivalent_by_hand() -> None:
    """Two queries of three keys, then one query of one: rows of padding see nothing."""
    call = {"cu_seqlens_q": [0, 2, 3], "cu_seqlens_k": [0, 3, 4], "causal": True}
    expected = [["110", "111"], ["100", "000"]]
    rows = [[[digit == "1" for digit in row] for row in entry] for entry in expected]
    np.testing.assert_array_equal(visibility((2, 1, 2, 3), call)[:, 0], rows)


def test_options_of_dense_calls_are_left_as_they_are() -> None:
    options = {"causal": True, "kv_lengths": 3, "cu_seqlens_q": None}
    assert dense_options(options) is options


def test_options_made_dense_twice_are_the_same() -> None:
    once = dense_options({"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "q_offset": 2})
    np.testing.assert_equal(dense_options(once), once)


def test_packing_undoes_padding() -> None:
    x = np.arange(28.0).reshape(2, 14)
    dense = padded(x, 3, np.array(CU_Q), fill=-1)
    assert dense.shape == (S, 2, 6)
    np.testing.assert_array_equal(dense[2, 1], [x[1, 9], -1, -1, -1, -1, -1])
    np.testing.assert_array_equal(packed(dense, np.array(CU_Q)), x[np.newaxis])
