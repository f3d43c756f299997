"""Blocks of a problem: with ``origin`` they have the dropout and the functions of the whole."""

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.conftest import Runner
from tileattn import Attention, Gradients, reference
from tileattn.testing import assert_attention_close, error_bound

B, HQ, HKV, NQ, NK, D = 2, 4, 2, 37, 83, 16
CUTS = (0, 21, 48, NK)


def relative(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return s + table[h, i - j + NK] * (b + 1)


def stripes(b: Any, h: Any, i: Any, j: Any, _: Any) -> Any:
    return (i + j + h + b) % 5 != 0


def functions(rng: np.random.Generator) -> dict[str, Any]:
    table = rng.standard_normal((HQ, NQ + NK))
    return {"score_mod": relative, "mask_mod": stripes, "aux": (table,)}


@pytest.mark.parametrize("own", [False, True])
def test_blocks_join_to_the_whole(runner: Runner, own: bool) -> None:
    rng = np.random.default_rng(5)
    q, dout = rng.standard_normal((2, B, HQ, NQ, D))
    k, v = rng.standard_normal((2, B, HKV, NK, D))
    options: dict[str, Any] = {"dropout_p": 0.4, "seed": 3, "causal": True, "q_offset": 40}
    options |= functions(rng) if own else {}
    reason = runner.why_not(q, k, v, {**options, "origin": (0, 0, 1, 2)})
    if reason is not None:
        pytest.skip(reason)
    whole = runner.forward(q, k, v, **options)
    grads = runner.backward(dout, q, k, v, *whole, wrt=("q",), **options)
    rows = slice(1, 2), slice(2, 4), slice(13, NQ)  # of q; key head 1
    outs, lses, dq = [], [], np.zeros_like(whole.out[rows])
    for k0, k1 in pairwise(CUTS):
        keys = rows[0], slice(1, 2), slice(k0, k1)
        given = options | {"origin": (1, 2, 13, k0), "q_offset": 53 - k0}
        part = runner.forward(q[rows], k[keys], v[keys], **given)
        outs.append(part.out)
        lses.append(part.lse)
        operands = dout[rows], q[rows], k[keys], v[keys], whole.out[rows], whole.lse[rows]
        dq += runner.backward(*operands, wrt=("q",), **given).dq
    joined = tileattn.merge(outs, lses)
    given = options | {"origin": (1, 2, 13, 0), "q_offset": 53}
    bounds = error_bound(q[rows], k[1:, 1:], v[1:, 1:], dout[rows], **given)
    expected = reference.forward(q, k, v, **options)
    of_rows = Attention(*(x[rows] for x in expected))
    of_expected = reference.backward(dout, q, k, v, **options).dq[rows]
    assert_attention_close(joined, of_rows, bounds)
    for found in (dq, grads.dq[rows]):
        ours, theirs = (Gradients(x, None, None, None, None) for x in (found, of_expected))
        assert_attention_close(ours, theirs, bounds, names=("dq",))
    without = runner.forward(q[rows], k[1:, 1:], v[1:, 1:], **options)
    with pytest.raises(AssertionError):  # an origin matters
        assert_attention_close(without, of_rows, bounds)


@pytest.mark.parametrize(
    ("origin", "error", "message"),
    [
        ((0, 0, 0), ValueError, "origin must be integers of shape (4,) or (2, 4), "),
        (np.zeros((3, 4), int), ValueError, "origin must be integers of shape (4,) or"),
        ((0, 0, -1, 0), ValueError, "origin must hold integers from 0 to 2**31 - 1; got -1"),
        ((0, 0, 0, 2**31), ValueError, "origin must hold integers from 0"),
        ((0.0, 0, 0, 0), TypeError, "origin must be integers of shape (4,) or"),
        ("begin", TypeError, "origin must be integers of shape (4,) or"),
    ],
)
def test_what_is_refused(origin: Any, error: type[Exception], message: str) -> None:
    q = np.zeros((B, HQ, NQ, D))
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        tileattn.forward(q, q, q, origin=origin)
