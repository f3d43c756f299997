"""Both passes of a problem on ranks: each gets its part, and the results are put together."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

import tileattn.distributed as dist
from tests.distributed.in_groups import in_groups
from tests.distributed.threads import on_ranks
from tileattn import Attention, Gradients, reference
from tileattn.distributed import Layout
from tileattn.testing import AttentionCase, assert_attention_close, error_bound


def layouts(rng: np.random.Generator, length: int, ranks: int) -> Layout:
    """Draw a layout: contiguous with empty parts, zigzag, striped, or ranges anywhere."""
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
    """Return the part of a rank."""
    options = dict(case.options)
    for name in ("bias", "mask"):
        x = options.get(name)
        if x is not None and x.ndim > 1 and x.shape[-2] > 1:
            options[name] = queries.take(x, rank)
    q, dout = (queries.take(x, rank) for x in (case.q, case.dout))
    k, v = (keys.take(x, rank) for x in (case.k, case.v))
    dlse = None if case.dlse is None else queries.take(case.dlse, rank, axis=-1)
    return AttentionCase(q, k, v, dout, dlse, options)


def results(
    case: AttentionCase,
    queries: Layout,
    keys: Layout,
    on: Callable[..., list[Any]] = on_ranks,
    **more: Any,
) -> tuple[Attention, Gradients]:
    """Compute both passes; gradients of shared inputs must be the same on all ranks."""

    def run(comm: Any) -> Any:
        q, k, v, dout, dlse, options = cut(case, queries, keys, comm.rank)
        given = options | {"layout": queries, "layout_k": keys, "backend": "numpy"} | more
        attention, pullback = dist.vjp(q, k, v, comm, **given)
        return attention, pullback(dout, dlse)

    found = on(queries.ranks, run)
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
    for other in grads[1:]:
        assert_same(other.dsinks, grads[0].dsinks)
        assert (other.daux is None) == (grads[0].daux is None)
    return Attention(out, lse), Gradients(dq, dk, dv, dbias, grads[0].dsinks, grads[0].daux)


def assert_same(a: Any, b: Any) -> None:
    assert (a is None and b is None) or a.tobytes() == b.tobytes()


def comparison(case: AttentionCase) -> Callable[[Attention, Gradients], None]:
    """Return a function that compares results of the ranks with the oracle."""
    q, k, v, dout, dlse, options = case
    bounds = error_bound(q, k, v, dout, dlse=dlse, **options)
    expected = reference.forward(q, k, v, **options)
    of_expected = reference.backward(dout, q, k, v, dlse=dlse, **options)
    for name, x in _of_lse(case, expected.lse)._asdict().items():
        if isinstance(x, np.ndarray):
            more = float(np.linalg.norm(np.where(np.isfinite(x), x, 0)))
            bounds[name] = bounds[name]._replace(error=bounds[name].error + more)

    def compare(attention: Attention, grads: Gradients) -> None:
        assert_attention_close(attention, expected, bounds)
        assert_attention_close(grads, of_expected, bounds)

    return compare


def _of_lse(case: AttentionCase, lse: Any) -> Gradients:
    """Return the error of the gradients if each lse errs by a unit in its last place.

    One call computes the sums of a row with a large lse again, in two words. A rank cannot: its lse
    also counts keys of other ranks. So the rounding of lse is an error of a row of P.
    """
    q, k, v, dout, dlse, options = case
    unit = np.spacing(np.where(np.isfinite(lse), np.abs(lse), 0)).astype(dout.dtype)
    of_dlse = None if dlse is None else dlse * unit
    return reference.backward(dout * unit[..., np.newaxis], q, k, v, dlse=of_dlse, **options)


def check_once(case: AttentionCase, queries: Layout, keys: Layout, **more: Any) -> None:
    """Compare with the oracle, with all heads at a time."""
    comparison(case)(*results(case, queries, keys, **more))


def check(
    case: AttentionCase,
    queries: Layout,
    keys: Layout,
    compare: Callable[[Attention, Gradients], None] | None = None,
    **more: Any,
) -> None:
    """Compare with the oracle, once with all heads at a time and once in head groups.

    ``compare`` is the `comparison` of the case, of a caller that has several layouts.
    """
    compare = compare or comparison(case)
    compare(*results(case, queries, keys, **more))
    with in_groups():
        compare(*results(case, queries, keys, **more))
