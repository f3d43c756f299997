"""Predictions of schedules, with ranks and on paper, and the choice of one."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import tileattn.distributed as dist
from tests.distributed.threads import on_ranks
from tileattn.distributed import CPU_RATES, GPU_RATES, Layout, Link, Prediction, Rates, predict
from tileattn.errors import UnsupportedError

RANKS, SHAPES = 4, ((2, 4, 48, 8), (2, 4, 48, 8), (2, 4, 48, 8))
X = np.random.default_rng(0).standard_normal((3, *SHAPES[0]))


def on_paper(**options: Any) -> Prediction:
    return predict(*SHAPES, RANKS, dtype=np.float64, **options)


@pytest.mark.parametrize("mask", [{"causal": True}, {"window": (47, 0)}, {"window": (None, 47)}])
def test_ranks_say_what_is_said_on_paper(mask: dict[str, Any]) -> None:
    """Windows that mask nothing for one rank are included."""
    rates = Rates(1e9, Link(1e-6, 1e8))
    bias = np.zeros((4, 48, 48))
    options: dict[str, Any] = mask | {"layout": Layout.striped(48, RANKS, 5)}

    def run(comm: Any) -> Prediction:
        layout: Layout = options["layout"]
        q, k, v = (layout.take(x, comm.rank) for x in X)
        own = layout.take(bias, comm.rank)
        return dist.explain(q, k, v, comm, rates=rates, bias=own, **options)

    expected = on_paper(rates=rates, bias=bias, **options)
    assert [x.costs for x in on_ranks(RANKS, run)] == [expected.costs] * RANKS


@pytest.mark.parametrize(("on_gpu", "rates"), [(True, GPU_RATES), (False, CPU_RATES)])
def test_rates_are_those_of_the_device(on_gpu: bool, rates: Rates) -> None:
    def run(comm: Any) -> Prediction:
        q, k, v = (np.array_split(x, RANKS, axis=2)[comm.rank] for x in X)
        return dist.explain(q, k, v, comm)

    with patch("tileattn.distributed.call.Call.on_gpu", on_gpu):
        assert [x.rates for x in on_ranks(RANKS, run)] == [rates] * RANKS


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (2, 2)}, {}])
def test_auto_is_what_is_chosen(options: dict[str, Any]) -> None:
    def run(comm: Any) -> Any:
        q, k, v = (np.array_split(x, RANKS, axis=2)[comm.rank] for x in X)
        given = options | {"backend": "numpy"}
        fastest, found = dist.explain(q, k, v, comm, **options).fastest, []
        for forward, backward in (("auto", "auto"), fastest):
            attention = dist.forward(q, k, v, comm, schedule=forward, **given)
            grads = dist.backward(q, q, k, v, *attention, comm, schedule=backward, **given)
            found.append([x.tobytes() for x in (*attention, *grads[:3])])
        return fastest, found

    for fastest, (auto, named) in on_ranks(RANKS, run):
        assert fastest == on_paper(**options).fastest
        assert auto == named


@pytest.mark.parametrize(
    ("rates", "options", "chosen"),
    [
        # Heads share the work of a causal mask, whatever the layout.
        (Rates(1e3, Link(0.0, 1e12)), {"causal": True}, "heads"),
        # Keys travel while a ring computes.
        (Rates(1e6, Link(0.0, 1e8)), {"causal": True, "layout": "zigzag"}, "ring"),
        # Keys of one neighbour and a rank's own are one block.
        (
            Rates(1e15, Link(0.0, 1e6), block=Link(1.0, 1e15)),
            {"causal": True, "window": (1, None)},
            "gather",
        ),
        # Heads are exchanged on a host, and few keys leave it.
        (Rates(1e15, Link(0.0, 1e3), Link(0.0, 1e9), 2), {}, ("heads", 2)),
    ],
)
def test_each_schedule_is_chosen_where_it_is_best(rates: Rates, options: Any, chosen: Any) -> None:
    assert on_paper(rates=rates, **options).chosen == chosen


def test_the_report() -> None:
    lines = str(predict((1, 6, 48, 8), (1, 6, 48, 8), (1, 6, 48, 8), RANKS)).splitlines()
    assert [line[:14].strip() for line in lines] == [
        *("", "schedule", "ring", "('heads', 2)", "gather", "heads", "chosen", "auto")
    ]
    assert lines[-3].endswith("refused: k has 6 heads, and 4 ranks share them")


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (
            ValueError,
            {"layout": Layout.contiguous([12] * 5)},
            "layout must be for 4 ranks; got one",
        ),
        (
            ValueError,
            {"layout_k": Layout.contiguous([12] * 3 + [11])},
            "layout_k must have 48 tokens; got 47",
        ),
        (UnsupportedError, {"cu_seqlens_q": [0, 48]}, "cu_seqlens_q does not go with"),
    ],
)
def test_what_is_refused_on_paper(error: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(error, match=message):
        on_paper(**options)


def test_there_is_a_rank() -> None:
    with pytest.raises(ValueError, match="ranks must be an integer of at least 1; got 0"):
        predict(*SHAPES, 0)


def test_ranks_that_disagree_on_rates() -> None:
    def run(comm: Any) -> Any:
        return dist.explain(X[0], X[1], X[2], comm, rates=Rates(1e9 + comm.rank))

    for error in on_ranks(2, run):
        assert isinstance(error, ValueError)
        assert str(error).startswith(
            "rates must be the same on all ranks; got Rates(flops=1000000001.0"
        )
