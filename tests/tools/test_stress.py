"""The stress test of the GPU meets every case, counts what differs, and does not wait for ever."""

import argparse
import time
from itertools import product
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.on_gpu import needs_gpu
from tileattn.kernels.cuda.families.tiles import HEAD_DIM_BUCKETS
from tools import stress_gpu
from tools.stress_gpu import Case, Report, run

PAIRS = list(product(HEAD_DIM_BUCKETS, HEAD_DIM_BUCKETS))
CASE = Case("float16", 64, 64, 257, 129, "causal")


def chosen(**given: Any) -> argparse.Namespace:
    options = stress_gpu.parser().parse_args([])
    options.pairs = [(64, 64)]
    vars(options).update({"processes": 2, "seconds": 30} | given)
    return options


def visits(number: int, _chosen: Any, _deadline: float, _place: Any, reports: Any) -> None:
    reports.put(Report(CASE, "a", 10, (0, 0, 0, number, 0)))


def hangs(number: int, *_: Any) -> None:
    time.sleep(0 if number else 1000)


@pytest.mark.slow
def test_processes_report() -> None:
    tally = run(chosen(), visits)
    assert not tally.failures
    assert tally.calls == {("float16", 64, 64): 22}
    assert tally.differ == {("float16", 64, 64, "dk"): 1}


@pytest.mark.slow
def test_a_process_that_hangs_is_a_failure() -> None:
    failures = run(chosen(hang=3), hangs).failures
    assert failures[0].startswith("process 0 hangs at Case(")


@needs_gpu[0]
@needs_gpu[1]
@pytest.mark.parametrize("wrong", [False, True])
def test_a_result_that_differs_is_seen(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = stress_gpu.Worker(repeats=10)
    calls = iter(range(11))

    def forward(*arrays: Any, **options: Any) -> Any:
        attention = actual(*arrays, **options)
        if next(calls) == 4 and wrong:
            attention.lse.ravel()[-1] = np.nan
        return attention

    actual = tileattn.forward
    monkeypatch.setattr(tileattn, "forward", forward)
    found = worker.visit(CASE, checks=not wrong)
    assert found.calls == 10
    assert bool(found.differ[1]) is wrong
    assert found.differ[0] == 0
