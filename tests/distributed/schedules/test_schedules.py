"""Ranks that share a sequence against the oracle on all of it."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings

import tileattn.distributed as dist
from tests.distributed.in_groups import in_groups
from tests.distributed.threads import on_ranks
from tileattn import Attention, Gradients, reference
from tileattn.distributed import Layout
from tileattn.distributed.validation import REFUSED
from tileattn.testing import AttentionCase, assert_attention_close, error_bound, problems
from tileattn.testing.functions import MASKS, SCORES, draw_functions
from tileattn.testing.options import DRAW, Choices

OPTIONS = tuple(name for name in DRAW if name not in REFUSED)


def layouts(rng: np.random.Generator, length: int, ranks: int) -> Layout:
    """One of any kind: contiguous with empty parts, zigzag, or ranges anywhere."""
    kind = rng.integers(4)
    cuts = np.sort(rng.integers(0, length + 1, ranks - 1))
    if kind == 0:
        return Layout.contiguous(np.diff([0, *cuts, length]).tolist())
    if kind == 1:
        return Layout.zigzag(length, ranks)
    if kind == 2:
        return Layout.striped(length, ranks, int(rng.integers(1, 20)))
    ends = [0, *np.sort(rng.integers(0, length + 1, 2 * ranks)), length]
    parts: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for start, stop in pairwise(ends):
        parts[rng.integers(ranks)].append((start, stop))
    return Layout(tuple(tuple(part) for part in parts))


def cut(case: AttentionCase, queries: Layout, keys: Layout, rank: int) -> AttentionCase:
    """The part of a rank."""
    options = dict(case.options)
    for name in ("bias", "mask"):
        x = options.get(name)
        if x is not None and x.ndim > 1 and x.shape[-2] > 1:
            options[name] = queries.take(x, rank)
    q, dout = (queries.take(x, rank) for x in (case.q, case.dout))
    k, v = (keys.take(x, rank) for x in (case.k, case.v))
    dlse = None if case.dlse is None else queries.take(case.dlse, rank, axis=-1)
    return AttentionCase(q, k, v, dout, dlse, options)


def check(case: AttentionCase, queries: Layout, keys: Layout, **more: Any) -> None:
    """Hold what the ranks return, put together, to the oracle: heads at once, and in groups."""
    check_once(case, queries, keys, **more)
    with in_groups():
        check_once(case, queries, keys, **more)


def check_once(case: AttentionCase, queries: Layout, keys: Layout, **more: Any) -> None:
    ranks = queries.ranks

    def run(comm: Any) -> Any:
        q, k, v, dout, dlse, options = cut(case, queries, keys, comm.rank)
        given = options | {"layout": queries, "layout_k": keys, "backend": "numpy"} | more
        attention, pullback = dist.vjp(q, k, v, comm, **given)
        return attention, pullback(dout, dlse)

    found = on_ranks(ranks, run)
    for x in found:
        if isinstance(x, Exception):
            raise x
    out, lse = (queries.join([x[0][n] for x in found], axis=n - 2) for n in range(2))
    grads = [x[1] for x in found]
    dq = queries.join([g.dq for g in grads])
    dk, dv = (keys.join([getattr(g, name) for g in grads]) for name in ("dk", "dv"))
    dbias, bias = grads[0].dbias, case.options.get("bias")
    if bias is not None and bias.ndim > 1 and bias.shape[-2] > 1:
        dbias = queries.join([g.dbias for g in grads])
    q, k, v, dout, dlse, options = case
    bounds = error_bound(q, k, v, dout, dlse=dlse, **options)
    joined = Gradients(dq, dk, dv, dbias, grads[0].dsinks, grads[0].daux)
    expected = reference.backward(dout, q, k, v, dlse=dlse, **options)
    assert_attention_close(
        type(found[0][0])(out, lse), reference.forward(q, k, v, **options), bounds
    )
    assert_attention_close(joined, expected, bounds)
    for other in grads[1:]:
        assert_same(other.dsinks, joined.dsinks)
        assert (other.daux is None) == (joined.daux is None)


def assert_same(a: Any, b: Any) -> None:
    assert (a is None and b is None) or a.tobytes() == b.tobytes()


@given(case=problems(options=OPTIONS, max_length=60))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_every_result_is_that_of_the_oracle(case: AttentionCase) -> None:
    rng = np.random.default_rng(abs(hash((case.q.shape, case.k.shape))) % 2**32)
    ranks = int(rng.integers(1, 6))
    check(case, layouts(rng, case.q.shape[-2], ranks), layouts(rng, case.k.shape[-2], ranks))


@given(case=problems(options=OPTIONS, max_length=60))
@settings(max_examples=75, deadline=None, derandomize=True)
def test_ranks_that_exchange_heads(case: AttentionCase) -> None:
    rng = np.random.default_rng(abs(hash((case.q.shape, case.k.shape))) % 2**32)
    ranks = max(n for n in (1, 2, 3, 4) if heads_of_keys(case) % n == 0)
    queries, keys = (layouts(rng, x.shape[-2], ranks) for x in (case.q, case.k))
    check(case, queries, keys, schedule="heads")


@given(case=problems(options=OPTIONS, max_length=60))
@settings(max_examples=75, deadline=None, derandomize=True)
def test_groups_of_ranks_that_exchange_heads(case: AttentionCase) -> None:
    rng = np.random.default_rng(abs(hash((case.q.shape, case.k.shape))) % 2**32)
    n = max(n for n in (1, 2, 3) if heads_of_keys(case) % n == 0)
    assume(n > 1)
    ranks = n * int(rng.integers(2, 6 // n + 1))
    queries, keys = (layouts(rng, x.shape[-2], ranks) for x in (case.q, case.k))
    check(case, queries, keys, schedule=("heads", n))


def heads_of_keys(case: AttentionCase) -> int:
    return case.k.shape[-3] if case.k.ndim > 2 else 1


@given(case=problems(options=OPTIONS, max_length=60))
@settings(max_examples=75, deadline=None, derandomize=True)
def test_ranks_that_gather_all_keys(case: AttentionCase) -> None:
    rng = np.random.default_rng(abs(hash((case.q.shape, case.k.shape))) % 2**32)
    ranks = int(rng.integers(1, 6))
    queries, keys = (layouts(rng, x.shape[-2], ranks) for x in (case.q, case.k))
    check(case, queries, keys, schedule="gather")


@given(case=problems(options=OPTIONS, max_length=60))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_blocks_run_on_any_backend(case: AttentionCase) -> None:
    pytest.importorskip("llvmlite")
    queries, keys = (Layout.zigzag(x.shape[-2], 3) for x in (case.q, case.k))
    check(case, queries, keys, backend="llvm")


@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=str)
def test_gradients_of_large_scores(dtype: Any) -> None:
    rng = np.random.default_rng(3)
    q, dout = (rng.standard_normal((2, 4, 37, 8)) for _ in range(2))
    k, v = rng.standard_normal((2, 2, 2, 53, 8))
    q, k, v, dout = (x.astype(dtype) for x in (100 * q, 10 * k, v, dout))
    case = AttentionCase(q, k, v, dout, None, {"causal": True, "sinks": np.full(4, 900.0)})
    for schedule in ("ring", "gather", ("heads", 2)):
        check(case, Layout.zigzag(37, 4), Layout.zigzag(53, 4), schedule=schedule)


@pytest.mark.parametrize("schedule", ["ring", "gather", ("heads", 2)], ids=str)
@pytest.mark.parametrize("shift", [64.0, -4096.0, 2.0**18])
def test_a_constant_in_all_scores_changes_nothing(shift: float, schedule: Any) -> None:
    """Scores are multiples of a sixteenth: each is exact in float32, but no logsumexp is."""
    rng = np.random.default_rng(3)
    q = (rng.integers(-2, 3, (2, 4, 37, 16)) / 2).astype(np.float32)
    k = (rng.integers(-2, 3, (2, 2, 53, 16)) / 2).astype(np.float32)
    v, dout = (rng.standard_normal(x.shape, np.float32) for x in (k, q))
    options: dict[str, Any] = {"scale": 0.25, "causal": True}
    queries, keys = Layout.zigzag(37, 4), Layout.zigzag(53, 4)

    def run(comm: Any) -> Any:
        own, upstream = (queries.take(x, comm.rank) for x in (q, dout))
        others = [keys.take(x, comm.rank) for x in (k, v)]
        given = options | {"layout": queries, "layout_k": keys, "schedule": schedule}
        bias = np.full(1, shift, np.float32)
        given |= {"backend": "numpy", "bias": bias}
        attention, pullback = dist.vjp(own, others[0], others[1], comm, **given)
        return attention.out, *pullback(upstream, wrt=("q", "k", "v"))[:3]

    out, dq, dk, dv = zip(*on_ranks(4, run), strict=True)
    bounds = error_bound(q, k, v, dout, **options)
    lse = reference.forward(q, k, v, **options).lse.astype(np.float32)
    found = Gradients(queries.join(dq), keys.join(dk), keys.join(dv), None, None)
    attention = Attention(queries.join(out), lse)
    assert_attention_close(attention, reference.forward(q, k, v, **options), bounds)
    assert_attention_close(found, reference.backward(dout, q, k, v, **options), bounds)


@pytest.mark.parametrize("score_mod", [None, *SCORES])
@pytest.mark.parametrize("mask_mod", [None, *MASKS])
def test_functions(score_mod: str | None, mask_mod: str | None) -> None:
    # Each function is shared by two ranks and by three.
    ranks = 2 + ([None, *SCORES].index(score_mod) + [None, *MASKS].index(mask_mod)) % 2
    rng = np.random.default_rng(ranks)
    q, dout = rng.standard_normal((2, 2, 4, 37, 8))
    k, v = rng.standard_normal((2, 2, 2, 53, 8))
    own = draw_functions(Choices(rng), score_mod, mask_mod, (2, 4, 37, 53))
    case = AttentionCase(q, k, v, dout, None, own | {"dropout_p": 0.2, "seed": 9, "causal": True})
    check(case, layouts(rng, 37, ranks), layouts(rng, 53, ranks))
    queries, keys = layouts(rng, 37, 2 * ranks), layouts(rng, 53, 2 * ranks)
    check(case, queries, keys, schedule=("heads", 2))
    if ranks == 2:
        check(case, layouts(rng, 37, 2), layouts(rng, 53, 2), schedule="heads")
