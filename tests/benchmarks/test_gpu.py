"""The GPU benchmark measures what it says; here on NumPy arrays, with a clock that is made up."""

import json
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import configurations, gpu
from benchmarks.configurations import (
    DTYPES,
    HEAD_DIMS,
    LENGTHS,
    PASSES,
    Call,
    Configuration,
    Inputs,
    Mask,
    grid_of,
)
from benchmarks.device import Gpu
from benchmarks.implementations import BASELINES, Naive, Tileattn, find
from tests.benchmarks.fake_gpu import MACHINE, Fake

ONE = Configuration("forward", "f32", 2, 3, 20, 8)
BACK = Configuration("backward", "f64", 2, 3, 20, 8, causal=True)


class Bent(Naive):
    """Naive NumPy whose results pass through a function; its calls may raise."""

    def __init__(self, name: str, bend: Callable[[Any], Any]) -> None:
        super().__init__(np)
        self.name, self._bend = name, bend

    def forward(self, x: Inputs, mask: Mask) -> Call:
        call = super().forward(x, mask)
        return lambda: self._bend(call())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems that NumPy computes at once."""
    monkeypatch.setattr(configurations, "TOKENS", 512)
    monkeypatch.setattr(configurations, "HIDDEN", dict.fromkeys(DTYPES, 16))


@pytest.mark.parametrize(
    ("kind", "causal", "flops"),
    [
        ("forward", False, 4 * 2 * 3 * 20 * 20 * 8),
        ("forward", True, 2 * 2 * 3 * 20 * 20 * 8),
        ("backward", False, 10 * 2 * 3 * 20 * 20 * 8),
        ("backward", True, 5 * 2 * 3 * 20 * 20 * 8),
    ],
)
def test_flops_are_counted_as_the_papers_do(kind: str, causal: bool, flops: int) -> None:
    assert Configuration(kind, "bf16", 2, 3, 20, 8, causal).flops == flops


def test_the_grid_keeps_tokens_and_width_and_shares_inputs() -> None:
    grid = grid_of(DTYPES, HEAD_DIMS, LENGTHS, PASSES, (False, True))
    assert len(set(grid)) == len(grid) == 4 * 3 * 6 * 2 * 2
    assert {one.B * one.N for one in grid} == {16384}
    assert {one.H * one.D for one in grid if one.dtype != "f64"} == {2048}
    assert {one.H * one.D for one in grid if one.dtype == "f64"} == {512}
    inputs = [(one.dtype, one.shapes) for one in grid]
    assert sum(a != b for a, b in pairwise(inputs)) == len(set(inputs)) - 1


@pytest.mark.parametrize("one", [ONE, BACK])
def test_what_agrees_gets_a_speedup(one: Configuration) -> None:
    again = Tileattn("deterministic", ("backward",), deterministic=True)
    row = gpu.compare(one, [Tileattn(), again, Naive(np)], Fake())
    assert row["tflops"]["numpy"] == round(one.flops / 0.002 / 1e12, 2)
    assert row["speedup_over"] == {"numpy": 1.0}
    assert row["mismatch"] == row["failed"] == {}
    assert row["spread"]["tileattn"] == 0.5
    assert ("deterministic" in row["tflops"]) is (one.kind == "backward")


@pytest.mark.parametrize("bend", [lambda x: 1.01 * x, lambda x: np.where(x > 1, np.nan, x)])
def test_what_differs_is_named_and_gets_no_speedup(bend: Callable[[Any], Any]) -> None:
    row = gpu.compare(ONE, [Tileattn(), Bent("wrong", bend), Naive(np)], Fake())
    assert set(row["mismatch"]) == {"wrong"}
    assert set(row["speedup_over"]) == {"numpy"}
    assert set(gpu.verified(row)) == {"tileattn", "numpy"}


@pytest.mark.parametrize("factor", [1.01, np.nan])
def test_a_wrong_result_of_ours_gets_no_speedup_at_all(factor: float) -> None:
    ours = Bent("tileattn", lambda x: x * np.float32(factor))
    row = gpu.compare(ONE, [ours, Naive(np)], Fake())
    assert row["speedup_over"] == {}
    assert "numpy" in row["mismatch"]
    assert gpu.verified(row) == {}


def test_a_failure_is_recorded_and_the_comparison_goes_on() -> None:
    def fail(_: Any) -> Any:
        raise MemoryError("no room for 8 GB\nof scores")

    row = gpu.compare(ONE, [Tileattn(), Bent("big", fail), Naive(np)], Fake())
    assert row["failed"] == {"big": "MemoryError: no room for 8 GB"}
    assert set(row["speedup_over"]) == {"numpy"}


def run(tmp_path: Path, *argv: str, device: Gpu | None = None) -> None:
    always = ["--to", str(tmp_path), "--head-dim", "8", "--length", "16", "--peers", "cupy"]
    gpu.main([*always, *argv], device or Fake())


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_every_section_writes_its_file(tmp_path: Path) -> None:
    run(tmp_path, *(f"--{name}" for name in gpu.SECTIONS), "--dtype", "f32", "--quick")
    names = {"gpu.json", *(f"gpu_{name}.json" for name in gpu.SECTIONS[1:])}
    assert {path.name for path in tmp_path.iterdir()} == names
    for name in names:
        result = json.loads((tmp_path / name).read_text(encoding="utf-8"))
        assert list(result) == ["machine", "section", "missing", "rows"]
        assert {"commit", "date", "command", *MACHINE} == set(result["machine"])
        assert result["rows"]
    grid = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["rows"]
    kinds = [("forward", False), ("forward", True), ("backward", False), ("backward", True)]
    assert [(row["pass"], row["causal"]) for row in grid] == kinds


class Interrupted(Fake):
    """A device that a user takes away after three configurations."""

    def __init__(self) -> None:
        super().__init__()
        self.left = iter(range(6))  # two implementations each

    def time(self, calls: Sequence[Call]) -> list[float]:
        if next(self.left, None) is None:
            raise KeyboardInterrupt
        return super().time(calls)


@pytest.mark.usefixtures("small")
def test_what_was_measured_is_kept_when_a_run_is_broken_off(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "--dtype", "f32,f64", "--pass", "forward", device=Interrupted())
    assert len(json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["rows"]) == 3


def test_a_missing_baseline_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found, missing = find(BASELINES, np)
    assert [one.name for one in found] == ["numpy"]
    assert set(missing) == {"flash", "cudnn", "efficient", "math", "fa3", "fa4"}
    assert all("torch" in why for why in missing.values())
