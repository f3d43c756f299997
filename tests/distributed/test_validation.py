"""Ranks that differ in an argument: all raise, and the message names the argument."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tileattn.distributed as dist
from tests.distributed.threads import Rank, on_ranks
from tileattn.call.options import Options
from tileattn.distributed import Layout
from tileattn.distributed.validation import COMPARED, REFUSED

B, HQ, HKV, N, NK, D = 2, 4, 2, 6, 9, 8  # queries and keys of each rank
RANKS = 3
RNG = np.random.default_rng(0)
Q = RNG.standard_normal((B, HQ, N, D))
K, V = RNG.standard_normal((2, B, HKV, NK, D))
LONG = RNG.standard_normal((B, HQ, 1, RANKS * NK))
CHANGED = LONG + (np.arange(LONG.size) == 7).reshape(LONG.shape)


def plus(n: float) -> Callable[..., Any]:
    """Make functions with the same code and different captured values."""
    return lambda s, _b, _h, i, _j: s + n * i


def before(n: int) -> Callable[..., Any]:
    return lambda _b, _h, i, j: i + n > j


def read(s: Any, b: Any, h: Any, i: Any, j: Any, x: Any) -> Any:  # noqa: ARG001 - its form
    return s + x[h]


def read_table(s: Any, b: Any, h: Any, i: Any, j: Any, x: Any) -> Any:  # noqa: ARG001 - as above
    return s + x[h, 0]


def with_aux(array: Any) -> dict[str, Any]:
    return {"score_mod": read if array.ndim == 1 else read_table, "aux": (array,)}


# Pairs of values of each option that differ between ranks; a dict has several options.
DIFFERENT: dict[str, list[tuple[Any, Any]]] = {
    "scale": [(0.5, 0.25), (None, 0.5)],
    "softcap": [(None, 10.0), (5.0, 10.0)],
    "alibi_slopes": [
        (None, np.ones(HQ)),
        (np.ones(HQ), np.arange(HQ) / 8),
        (np.ones(HQ), np.ones(HQ, np.float32)),
        (np.ones(HQ), np.ones((B, HQ))),
    ],
    "bias": [
        (None, np.zeros((N, RANKS * NK))),
        (None, LONG),
        (LONG, CHANGED),
        (np.zeros(RANKS * NK), np.ones(RANKS * NK)),
        (LONG, LONG.astype(np.float32)),
        (np.zeros((N, RANKS * NK)), np.zeros((N, RANKS * NK), np.float32)),
        (np.zeros((N, RANKS * NK)), np.zeros((HQ, N, RANKS * NK))),
        (np.zeros((N, RANKS * NK)), np.zeros((N, 1))),
    ],
    "causal": [(False, True)],
    "window": [(None, (3, None)), ((3, None), (4, None)), ((3, None), (3, 0))],
    "mask": [
        (None, np.ones((N, RANKS * NK), bool)),
        (np.ones(RANKS * NK, bool), np.arange(RANKS * NK) > 3),
        (LONG > 0, CHANGED > 0.5),
        (np.ones((N, RANKS * NK), bool), np.ones((HQ, N, RANKS * NK), bool)),
    ],
    "kv_lengths": [(None, [5, 6]), ([5, 6], [6, 5])],
    "q_offset": [(None, 0), (1, 2), ([1, 2], [2, 1])],
    "origin": [(None, (0, 0, 3, 0)), ((0, 0, 3, 0), (0, 0, 4, 0))],
    "sinks": [
        (None, np.zeros(HQ)),
        (np.zeros(HQ), np.ones(HQ)),
        (np.zeros(HQ), np.zeros(HQ, np.float32)),
    ],
    "dropout_p": [(0.0, 0.1), (0.2, 0.1)],
    "seed": [(0, 1), (3, 2**64 - 1)],
    "score_mod": [(None, plus(1.0)), (plus(1.0), plus(2.0))],
    "mask_mod": [(None, before(1)), (before(1), before(2))],
    "aux": [
        (with_aux(np.ones(HQ)), with_aux(np.zeros(HQ))),
        (with_aux(np.ones(HQ)), with_aux(np.ones(HQ, np.float32))),
        (with_aux(np.ones(HQ)), with_aux(np.ones(HQ + 1))),
        (with_aux(np.ones((HQ, 9))), with_aux(np.ones((HQ, 9)) + np.eye(HQ, 9))),
    ],
}

CASES = [(name, *pair) for name, pairs in DIFFERENT.items() for pair in pairs]


def test_every_option_has_a_row() -> None:
    assert set(COMPARED) | set(REFUSED) == set(Options.__annotations__)
    assert set(DIFFERENT) == set(COMPARED)


def raised(run: Callable[[Rank], Any], messages: int = 0) -> list[str]:
    """Return what every rank raises, and count the messages that it has sent before."""
    sent: list[list[int]] = []

    def work(comm: Rank) -> Any:
        sent.append(comm.world.messages_sent)
        return run(comm)

    found = on_ranks(RANKS, work)
    assert all(isinstance(x, Exception) for x in found), found
    assert sent[0] == [messages] * RANKS
    return [f"{type(x).__name__}: {x}" for x in found]


def given(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    return {name: value} | ({"dropout_p": 0.5} if name == "origin" else {})


@pytest.mark.parametrize("schedule", ["ring", "auto"])
@pytest.mark.parametrize(("name", "one", "other"), CASES)
def test_options(name: str, one: Any, other: Any, schedule: Any) -> None:
    pairs = (one, other), (other, one)
    for first, last in pairs:

        def run(comm: Rank, first: Any = first, last: Any = last) -> Any:
            options = given(name, last if comm.rank == RANKS - 1 else first)
            return dist.forward(Q, K, V, comm, backend="numpy", schedule=schedule, **options)

        for message in raised(run):
            assert re.match(
                f"ValueError: {name} must be the same on all .*; got .* on rank 2, and ", message
            )


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("layout", "contiguous", "zigzag"),
        ("layout_k", None, Layout.contiguous([NK] * RANKS)),
        ("layout_k", "contiguous", "zigzag"),
        ("layout_k", "contiguous", Layout(tuple(((n, n + NK),) for n in (0, 2 * NK, NK)))),
        ("schedule", "ring", "gather"),
        ("schedule", "ring", ("heads", 1)),
        ("backend", "numpy", "llvm"),
    ],
)
def test_other_arguments(name: str, one: Any, other: Any) -> None:
    def run(comm: Rank) -> Any:
        options: dict[str, Any] = {"layout": "zigzag", "backend": "numpy"}
        options[name] = other if comm.rank == 1 else one
        return dist.forward(Q, K[:, :, :NK], V, comm, **options)

    for message in raised(run):
        assert re.match(
            f"ValueError: {name} must be the same on all .*; got .* on rank 1, and ", message
        )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("dtype", lambda x: [a.astype(np.float32) for a in x]),
        ("q", lambda x: [x[0][:, :2], *x[1:]]),
        ("q", lambda x: [a[:1] for a in x]),
        ("k", lambda x: [x[0], x[1][:, :1], x[2][:, :1]]),
        ("v", lambda x: [*x[:2], x[2][..., :4]]),
    ],
)
def test_arrays(name: str, change: Callable[[list[Any]], list[Any]]) -> None:
    def run(comm: Rank) -> Any:
        q, k, v = change([Q, K, V]) if comm.rank == 1 else (Q, K, V)
        return dist.forward(q, k, v, comm)

    for message in raised(run):
        assert re.match(
            f"ValueError: {name} must be the same on all .*; got .* on rank 1, and ", message
        )


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("dlse", {"dlse": np.ones((B, HQ, N))}),
        ("wrt", {"wrt": ("q", "k")}),
        ("deterministic", {"deterministic": True}),
    ],
)
def test_arguments_of_the_backward_pass(name: str, more: dict[str, Any]) -> None:
    def run(comm: Rank) -> Any:
        _, pullback = dist.vjp(Q, K, V, comm, backend="numpy")
        return pullback(Q, **(more if comm.rank == 2 else {}))

    for message in raised(run, messages=4):  # k and v, in two steps of the forward pass
        assert re.match(
            f"ValueError: {name} must be the same on all .*; got .* on rank 2, and ", message
        )


def test_another_call() -> None:
    def run(comm: Rank) -> Any:
        if comm.rank == 1:
            return dist.explain(Q, K, V, comm)
        return dist.forward(Q, K, V, comm)

    for message in raised(run):
        assert message.startswith(
            "ValueError: the call must be the same on all ranks; got explain on"
        )


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("kv_lengths", ([5, 6], np.array([5, 6], np.int32), (5, 6))),
        ("q_offset", (None, RANKS * (NK - N), [RANKS * (NK - N)] * B)),
        ("scale", (None, 1 / np.sqrt(D), np.float64(1 / np.sqrt(D)))),
        ("layout", ("contiguous", None, Layout.contiguous([N] * RANKS))),
        ("score_mod", (plus(1.0), plus(1.0), plus(1.0))),
        ("bias", (np.zeros((1, RANKS * NK)), np.zeros(RANKS * NK), np.zeros((1, 1, RANKS * NK)))),
    ],
)
def test_values_that_are_the_same_in_other_words(name: str, values: tuple[Any, ...]) -> None:
    def run(comm: Rank) -> Any:
        more: dict[str, Any] = {"layout_k": "contiguous", "backend": "numpy"}
        return dist.forward(Q, K, V, comm, **more | {name: values[comm.rank]})

    found = on_ranks(RANKS, run)
    assert all(isinstance(x, tuple) for x in found), found


def test_rows_of_one_query_on_each_rank() -> None:
    """A mask may differ between ranks then; a bias may not, because its gradient is summed."""
    rows = RNG.random((RANKS, 1, RANKS * NK)) < 0.5

    def run(comm: Rank) -> Any:
        given: dict[str, Any] = {"backend": "numpy", "schedule": "gather"}
        return dist.forward(Q[:, :, :1], K, V, comm, mask=rows[comm.rank], **given).out

    def biased(comm: Rank) -> Any:
        bias = np.where(rows[comm.rank], 0.0, -1.0)
        return dist.forward(Q[:, :, :1], K, V, comm, bias=bias, backend="numpy")

    def without(comm: Rank) -> Any:
        return dist.forward(Q[:, :, :1], K, V, comm, backend="numpy").out

    for out in (*on_ranks(RANKS, run), *on_ranks(RANKS, without)):
        assert isinstance(out, np.ndarray), out
    assert raised(biased)[0].startswith("ValueError: bias must be the same on all ranks; got")
