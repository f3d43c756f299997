"""The stress test of the GPU meets every case, counts what differs, and does not wait for ever."""

import argparse
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.on_gpu import needs_gpu
from tileattn.errors import BackendUnavailableError
from tileattn.kernels.cuda.families.tiles import HEAD_DIM_BUCKETS
from tileattn.kernels.cuda.jit import compile as compiler
from tools import stress_gpu
from tools.check_sass import keys
from tools.stress_gpu import LENGTHS, MASKS, NAMES, VARIANTS, Case, Report, Tally, cases, run

PAIRS = list(product(HEAD_DIM_BUCKETS, HEAD_DIM_BUCKETS))
CASE = Case("float16", 64, 64, 257, 129, "causal")


def test_all_pairs_dtypes_masks_and_lengths_are_met() -> None:
    met = {case for turn in range(2 * len(LENGTHS)) for case in cases(PAIRS, turn)}
    assert met >= {
        Case(dtype, *pair, *lengths, mask, spoiled)
        for dtype in ("float16", "bfloat16")
        for pair in PAIRS
        for lengths in LENGTHS
        for mask in MASKS
        for spoiled in (False, True)
    }


def test_what_differs_is_counted() -> None:
    tally = Tally("plain")
    tally.add(Report(CASE, "a", 100, (0,) * 5))
    assert not tally.differing
    tally.add(Report(CASE, "a", 100, (0, 0, 0, 3, 0)))
    tally.add(Report(CASE, "b", 100, (0,) * 5))
    assert len(tally.differing) == 2
    (row,) = tally.rows()
    assert row["calls"] == 303
    assert row["differ"] == dict.fromkeys(NAMES, 0) | {"dk": 3}


@pytest.mark.parametrize("variant", VARIANTS)
def test_trouble_is_compiled_where_it_is_asked_for(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEATTN_CACHE_DIR", str(tmp_path / "cache"))
    _, key = keys([(64, 64)], ["float16"], [()])[:2]
    try:
        plain = compiler.compiled(key, "compute_90a")
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    assert VARIANTS["plain"] == compiler.TROUBLE
    monkeypatch.setattr(compiler, "TROUBLE", VARIANTS[variant])
    made = compiler.compiled(key, "compute_90a")
    assert (made.image == plain.image) == (variant == "plain")


# --- processes ------------------------------------------------------------------------------------


def chosen(**given: Any) -> argparse.Namespace:
    options = stress_gpu.parser().parse_args([])
    options.pairs = [(64, 64)]
    vars(options).update({"processes": 2, "seconds": 30} | given)
    return options


def visits(number: int, _chosen: Any, _deadline: float, _place: Any, reports: Any) -> None:
    reports.put(Report(CASE, "a", 10, (0, 0, 0, number, 0)))


def hangs(number: int, *_: Any) -> None:
    time.sleep(0 if number else 1000)


def dies(number: int, *_: Any) -> None:
    raise SystemExit(number * 7)


def test_processes_report() -> None:
    tally = run(chosen(), visits)
    assert not tally.failures
    assert tally.calls == {("float16", 64, 64): 22}
    assert tally.differ == {("float16", 64, 64, "dk"): 1}


def test_a_process_that_hangs_is_a_failure() -> None:
    failures = run(chosen(hang=3), hangs).failures
    assert failures[0].startswith("process 0 hangs at Case(")


def test_a_process_that_dies_is_a_failure() -> None:
    assert run(chosen(), dies).failures == ["process 1 ended with status 7"]


# --- on a GPU -------------------------------------------------------------------------------------


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
