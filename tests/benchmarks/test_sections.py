"""Each GPU benchmark writes its file of results; here on NumPy arrays, with an invented clock."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import decode, distributed, invariant, model_shapes, nonfinite, options, packed
from benchmarks.comparison import compare
from benchmarks.configurations import PASSES, Call, normal
from benchmarks.decode import Decoding
from benchmarks.libraries import Arrays, Step
from benchmarks.model_shapes import Model
from benchmarks.report import Row
from tests.benchmarks.fake_gpu import MACHINE, Fake
from tests.distributed.threads import Rank, World, on_ranks
from tileattn import reference
from tileattn.testing import assert_attention_close, error_bound

CACHES = [
    Decoding("equal", 4, 2, [24] * 3),
    Decoding("drafts", 4, 2, [24] * 3, Nq=4),
    Decoding("lengths", 4, 2, [5, 24, 17]),
    Decoding("pages", 4, 2, [24] * 3, page=5),
    Decoding("int8", 4, 2, [24] * 3, cache="int8"),
    Decoding("float8", 4, 2, [5, 24, 17], page=5, cache="float8_e4m3fn"),
    Decoding("latent", 4, 1, [24, 17], Nq=2, page=8, is_latent=True),
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make problems that NumPy computes at once."""
    monkeypatch.setattr(decode, "cases", lambda: CACHES)
    for name, size in {"H": 2, "LONGEST": 16, "SHORT": 4, "EQUAL": (4, 8)}.items():
        monkeypatch.setattr(packed, name, size)
    for name, size in {"B": 2, "H": 2, "N": 30, "D": 8, "WINDOW": 9, "DOCUMENT": 7}.items():
        monkeypatch.setattr(options, name, size)
    cases = tuple(
        case._replace(configuration=replace(one, N=128, H=4, D=8, Hkv=one.Hkv and 2))
        for case in nonfinite.CASES
        for one in [case.configuration]
    )
    monkeypatch.setattr(nonfinite, "CASES", cases)


def written(folder: Path, name: str) -> list[Row]:
    """Read the rows of a file of results."""
    result = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    assert {"commit", "date", "command", *MACHINE} == set(result["machine"])
    rows: list[Row] = result["rows"]
    return rows


@pytest.mark.parametrize("case", CACHES, ids=lambda case: case.name)
def test_decoding_attends_to_the_cache_of_each_sequence(case: Decoding) -> None:
    step = decode.step_of(np, case, 8, 0)
    q, k, v = step.rows
    table = step.options.get("block_table")
    given: dict[str, Any] = {"kv_lengths": case.lengths, "causal": True}
    given |= {name: x for name, x in step.options.items() if name.endswith("descale")}
    if table is not None:
        k, v = (np.concatenate(np.moveaxis(y[table], 1, 0), axis=2) for y in (k, v))
        for name in given.keys() & {"k_descale", "v_descale"}:
            given[name] = np.concatenate(np.moveaxis(given[name][table], 1, 0), axis=2)
    expected = reference.forward(q, k, v, **given)
    (call,) = Arrays("tileattn").passes(step)
    found = expected._replace(out=call())
    assert_attention_close(found, expected, error_bound(q, k, v, **given), names=("out",))


def test_decoding_rates_count_the_keys_that_exist(tmp_path: Path) -> None:
    decode.main(["--head-dim", "8", "--to", str(tmp_path), "--peers", "fa4"], Fake())
    rows = written(tmp_path, "gpu_decode")
    assert [row["case"] for row in rows] == [case.name for case in CACHES]
    for row, case in zip(rows, CACHES, strict=True):
        # Keys and values of two heads: two bytes each, or one, and a factor of four bytes a row.
        read = sum(case.lengths) * 2 * 2 * (8 * 2 if case.cache == "bf16" else 8 + 4)
        if case.is_latent:
            read, flops = (24 + 17) * 576 * 2, (23 + 24 + 16 + 17) * 4 * 2 * (576 + 512)
            assert row["tflops"]["tileattn"] == pytest.approx(flops / 2e-3 / 1e12)
        assert (row["times_bf16"] == 1) is (case.cache != "bf16")
        assert row["gbytes_per_second"]["tileattn"] == pytest.approx(read / 2e-3 / 1e9)


def test_invariant_calls_are_compared_with_calls_without_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariant, "cases", lambda: CACHES[:4])
    invariant.main(["--head-dim", "8", "--to", str(tmp_path)], Fake())
    rows = written(tmp_path, "gpu_invariant")
    assert [(row["case"], row["speed"]) for row in rows] == [(x.name, 1) for x in CACHES[:4]]
    assert {*map(str, (row["mismatch"] for row in rows))} == {"{}"}


@pytest.mark.slow
def test_each_option_is_compared_with_the_plain_call(tmp_path: Path) -> None:
    options.main(["--peers", "fa4", "--to", str(tmp_path)], Fake())
    rows = written(tmp_path, "gpu_options")
    names = list(options.options(np))
    assert [(row["option"], row["pass"]) for row in rows] == [(x, y) for x in names for y in PASSES]
    assert {(row["us"]["tileattn"], row["times_plain"]) for row in rows} == {(2000, 1)}


@pytest.mark.slow
def test_equal_lengths_are_compared_with_a_batch(tmp_path: Path) -> None:
    argv = ["--head-dim", "8", "--tokens", "32", "--peers", "fa4", "--to", str(tmp_path)]
    packed.main(argv, Fake())
    rows = written(tmp_path, "gpu_packed")
    assert [row["pass"] for row in rows] == [*PASSES] * 8
    assert [row["of_batch"] for row in rows[::4]] == [1, 1, None, None]
    assert {*map(str, (row["mismatch"] for row in rows))} == {"{}"}  # of the batch, too


class Off(Arrays):
    """A library whose results differ by a number, and which lacks a window."""

    ours = False

    def __init__(self, off: float) -> None:
        super().__init__("off", "numpy")
        self._off = np.float32(off)

    def passes(self, step: Step) -> list[Call]:
        calls = [] if "window" in step.options else super().passes(step)
        return [partial(self._moved, call) for call in calls]

    def _moved(self, call: Call) -> Any:
        found = call()
        return tuple(x + self._off for x in (found if isinstance(found, tuple) else (found,)))


class Broken(Arrays):
    ours = False

    def passes(self, step: Step) -> list[Call]:
        raise MemoryError(f"no room for {len(step.rows)} arrays")


def test_only_libraries_with_the_same_results_get_a_speedup() -> None:
    rows = tuple(normal(np, (2, 2, 20, 8), "f32", seed) for seed in range(4))
    libraries = {"tileattn": Arrays("tileattn"), "near": Off(0), "far": Off(0.5)}
    libraries["broken"] = Broken("broken")
    passes = list(compare([Step(rows, {"causal": True})], libraries, Fake(), "f32"))
    assert [kind for kind, _ in passes] == [*PASSES]
    for _, found in passes:
        assert found["us"] == {"tileattn": 2000, "near": 2000, "far": 2000}
        assert found["speedup_over"] == {"near": 1}
        assert set(found["mismatch"]) == {"far"}
        assert found["failed"] == {"broken": "MemoryError: no room for 4 arrays"}
    ((kind, found),) = compare([Step(rows[:3], {"window": (3, 0)})], libraries, Fake(), "f32")
    assert (kind, list(found["us"])) == ("forward", ["tileattn"])


def test_a_call_takes_the_steps_in_turn() -> None:
    class Recorded(Arrays):
        def passes(self, step: Step) -> list[Call]:
            def call() -> Any:
                seen.append(step.number)
                return step.rows[0]

            return [call]

    seen: list[float] = []
    rows = (np.ones((1, 1, 2, 8), np.float32),) * 3
    steps = [Step(rows, {}, number) for number in range(3)]
    ten = Timed(10)
    list(compare(steps, {"tileattn": Recorded("tileattn")}, ten, "f32"))
    assert seen == [0, *([0, 1, 2] * 4)[:10]]


def test_every_model_is_timed_in_both_passes(tmp_path: Path) -> None:
    small = [
        Model("bias", 2, 4, 2, 20, 30, 8, bias=True),
        Model("mask", 1, 2, 2, 20, 20, 8, 4, {"causal": True, "window": (5, 0)}),
        Model("decoding", 3, 2, 1, 1, 20, 8, backward=False),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_shapes, "MODELS", small)
        argv = ["--peers", "efficient", "--name", "gpu_models_small", "--to", str(tmp_path)]
        model_shapes.main(argv, Fake())
    rows = written(tmp_path, "gpu_models_small")
    assert [(row["case"], row["pass"]) for row in rows] == [
        *(("bias", kind) for kind in PASSES),
        *(("mask", kind) for kind in PASSES),
        ("decoding", "forward"),
    ]
    assert [row["options"] for row in rows[1:3]] == ["bias (1, H, N, Nk)", "window (5, 0)"]


class Timed(Fake):
    """A device that makes each call so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self._times = times

    def time_each(self, calls: Sequence[Call]) -> list[list[float]]:
        for _ in range(self._times):
            for call in calls:
                call()
        return [[0.1, 0.1, 0.1] for _ in calls]


class Slow(Fake):
    """A device on which the calls of a turn take one after the other of some seconds."""

    def __init__(self, *seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def time_each(self, calls: Sequence[Call]) -> list[list[float]]:
        more = len(calls) - len(self._seconds)
        return [[9.0, x, 0.0] for x in (*self._seconds, *[self._seconds[0]] * more)]


@pytest.mark.slow
@pytest.mark.parametrize(("slowest", "status"), [(2.0, 0), (2.01, 1), (np.nan, 1)])
def test_a_slow_call_with_nan_fails_the_benchmark(
    slowest: float, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--to", str(tmp_path), "--quick"]
    assert nonfinite.main(argv, Slow(1.0, 1.5, slowest)) == status
    named = [line for line in capsys.readouterr().out.splitlines() if line.startswith("above 2")]
    assert len(named) == status * len(nonfinite.PASSES)
    assert written(tmp_path, "nonfinite")


@pytest.mark.slow
def test_rank_0_writes_each_schedule_and_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    argv = ["--quick", "--seconds", "0", "--length", "40", "--heads", "3", "--to", str(tmp_path)]

    def run(comm: Any) -> None:
        distributed.main(argv, lambda: comm)

    assert on_ranks(2, run) == [None, None]
    result = json.loads((tmp_path / "distributed_cpu.json").read_text(encoding="utf-8"))
    rows = {(x["pass"], x["causal"], x["schedule"], x["layout"]): x for x in result["rows"]}
    assert len(rows) == 2 * 2 * 6 * 2
    row = rows["both", True, "ring", "zigzag"]
    expected = row["one_rank_ms"] / row["ms"] / 2
    assert row["fraction_of_linear"] == pytest.approx(expected, rel=1e-2)  # stored to four digits
    assert "2 ranks do not form" in rows["forward", False, "heads-4", "zigzag"]["failed"]


@pytest.mark.parametrize("comm", [None, Rank(World(1), 0)], ids=["none", "one"])
def test_one_rank_is_told_how_to_start_several(comm: Any) -> None:
    with pytest.raises(
        SystemExit, match=r"only one rank: start several by `mpiexec -n 2 python -m tileattn bench"
    ):
        distributed.main([], lambda: comm)
