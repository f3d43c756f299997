"""What NaN and infinity cost is measured as it says; on NumPy arrays, with a clock made up."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tileattn
from benchmarks import nonfinite
from benchmarks.configurations import Call, random_blocks
from benchmarks.nonfinite import CASES, EVERY, PASSES, faults, spoiled
from tests.benchmarks.fake_gpu import MACHINE, Fake
from tileattn.oracle.dense import visibility


class Slow(Fake):
    """A device on which the calls of a turn take one after the other of some seconds."""

    def __init__(self, *seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def time_each(self, calls: Sequence[Call]) -> list[list[float]]:
        more = len(calls) - len(self._seconds)
        return [[9.0, x, 0.0] for x in (*self._seconds, *[self._seconds[0]] * more)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems that NumPy computes at once."""
    made = tuple(
        c._replace(configuration=replace(one, N=128, H=4, D=8, Hkv=one.Hkv and 2))
        for c in CASES
        for one in [c.configuration]
    )
    monkeypatch.setattr(nonfinite, "CASES", made)


def run(tmp_path: Path, device: Fake, *argv: str) -> int:
    return nonfinite.main(["--to", str(tmp_path), *argv], device)


def test_every_pass_of_every_configuration_is_set_against_the_clean_call(tmp_path: Path) -> None:
    assert run(tmp_path, Fake()) == 0
    result = json.loads((tmp_path / "nonfinite.json").read_text(encoding="utf-8"))
    assert {"commit", "date", "command", *MACHINE} == set(result["machine"])
    assert result["machine"]["command"] == "python -m tileattn bench nonfinite"
    rows = result["rows"]
    assert {(row["case"], row["pass"]) for row in rows} == {
        (c.name, kind) for c in CASES for kind in PASSES
    }
    assert all(row["slowdown"] == 1 and row["ms"] == 2 for row in rows)
    for row in rows:
        if row["pass"] == "forward":
            assert "dout" not in row["values"]
    of_bias = [row["values"] for row in rows if (row["case"], row["pass"]) == ("bias", "backward")]
    assert of_bias == [
        *("clean", "one inf in q", "one nan in k", "one nan in v", "one inf in dout"),
        *("one nan in bias", *(f"every {EVERY}th of {name}" for name in ("q", "k", "v", "dout"))),
        "all of dout inf",
    ]


@pytest.mark.parametrize("option", ["", "bias", "block_mask"])
def test_a_fault_is_where_it_says_and_is_seen(option: str) -> None:
    made = next(c for c in nonfinite.CASES if c.option == option)
    made = made._replace(configuration=replace(made.configuration, N=1024))
    arrays = nonfinite.arrays_of(made, Fake())
    options = made.configuration.mask.options()
    if option == "block_mask":
        options["block_mask"] = random_blocks(1024, 0.5)
    B, H, N, _ = arrays["q"].shape
    visible = visibility((B, H, N, N), options)
    for fault in faults(arrays):
        changed = spoiled(arrays, fault, np)
        wrong = {name: ~np.isfinite(x.astype(np.float32)) for name, x in changed.items()}
        assert [name for name in arrays if wrong[name].any()] == [fault.array] * bool(fault.array)
        if fault.name.startswith("one"):
            ((_, h, row, column),) = np.argwhere(wrong[fault.array])
            seen = visible[0, h]
            assert (seen[:, row].mean() if fault.array in "kv" else seen[row].mean()) >= 0.25
            if fault.array == "bias":
                assert seen[row, column]
        elif fault.array:
            share = wrong[fault.array].mean()
            assert share == 1 if "all" in fault.name else abs(share * EVERY - 1) < 0.1
    assert all(np.isfinite(x.astype(np.float32)).all() for x in arrays.values())


@pytest.mark.parametrize(("slowest", "status"), [(2.0, 0), (2.01, 1), (np.nan, 1)])
def test_above_the_limit_it_fails_and_names_the_row(
    slowest: float, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, Slow(1.0, 1.5, slowest), "--quick") == status
    named = [line for line in capsys.readouterr().out.splitlines() if line.startswith("above 2")]
    assert len(named) == status * len(PASSES)
    assert all("reference" in line and "one nan in k" in line for line in named)


def test_a_failure_is_recorded_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backward = tileattn.backward

    def failing(*given: Any, deterministic: bool, **options: Any) -> Any:
        if deterministic:
            raise RuntimeError("no room\nfor dq")
        return backward(*given, deterministic=deterministic, **options)

    monkeypatch.setattr(tileattn, "backward", failing)
    assert run(tmp_path, Fake(), "--quick") == 1
    rows = json.loads((tmp_path / "nonfinite.json").read_text(encoding="utf-8"))["rows"]
    assert [row["failed"] for row in rows if "failed" in row] == ["RuntimeError: no room"]
    assert len(rows) == 7 + 10 + 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("failed RuntimeError: no room")
