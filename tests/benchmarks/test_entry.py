"""The command ``bench`` hands its arguments on, and says what is missing in one line."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import tileattn
from benchmarks import cpu, report
from benchmarks.configurations import Configuration, draw
from benchmarks.device import AGREEMENT, difference
from benchmarks.implementations import Naive, Tileattn
from tileattn.cli import BENCHMARKS, main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("section", BENCHMARKS)
def test_every_benchmark_says_what_it_takes(
    section: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", section, "--help"])
    assert stop.value.code == 0
    assert f"usage: python -m tileattn bench {section} [-h]" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    [
        "-q --to /home/me",
        "--to=/home/me -q",
        "-q --update",
        "--record /home/me/x.json -q",
        "-q --to",
    ],
)
def test_a_command_says_nothing_of_the_folder(line: str) -> None:
    assert report.command("python -m this", line.split()) == "python -m this -q"


@pytest.mark.parametrize("line", ["gpu", "nonfinite", "memory --device gpu"])
def test_without_a_gpu_it_ends_with_one_line(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tileattn, "available_backends", lambda: {"cupy": "there is no device"})
    with pytest.raises(SystemExit, match=r"^[^\n]*: there is no device[^\n]*$"):
        main(["bench", *line.split()])


@pytest.mark.parametrize("command", [["-m", "benchmarks.gpu"], ["benchmarks/cpu.py"]], ids=str)
def test_the_commands_of_older_results_go_on_working(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *command, "--help"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "usage: python -m tileattn bench" in done.stdout


def test_the_speed_of_the_cpu_is_written_with_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu, "core_rates", lambda: [{"D": 64, "gflops": 1.0, "exp_ns": 1.0}])
    monkeypatch.setattr(cpu, "median_seconds", lambda calls, _: dict.fromkeys(calls, 0.5))
    monkeypatch.setattr(cpu, "draw", lambda _, __, dtype: draw(np, SMALL, dtype))
    monkeypatch.setitem(sys.modules, "torch", None)
    cpu.main(["--seconds", "0", "--name", "mine", "--to", str(tmp_path)])
    result = json.loads((tmp_path / "mine.json").read_text(encoding="utf-8"))
    assert result["machine"]["command"] == "python -m tileattn bench cpu --seconds 0 --name mine"
    assert set(report.host()) | {"torch", "commit", "date", "command"} == set(result["machine"])
    row = result["rows"][0]
    assert row["gflops"]["tileattn"] == round(4 * 8 * 1024**2 * 64 / 0.5 / 1e9, 1)
    assert row["speedup_over"] == {"numpy": 1.0, "lower_bound": 1.0}
    assert "torch is missing: it is not installed" in capsys.readouterr().out


SMALL = ((1, 1, 16, 8),) * 4  # in the place of many tokens: nobody looks at the values


def test_implementations_take_turns_and_get_the_same_inputs() -> None:
    order: list[str] = []
    calls: cpu.Calls = {name: partial(order.append, name) for name in "ab"}
    assert set(cpu.median_seconds(calls, 0.0)) == {"a", "b"}
    assert "".join(order) == "ab" * (len(order) // 2)
    one = Configuration("forward", "f32", 1, 2, 24, 8, causal=True)
    ours, naive = (cpu.prepared(one, each)() for each in (Tileattn(), Naive(np)))
    assert difference([ours], [naive], np) <= AGREEMENT["f32"]


@pytest.mark.parametrize("found", [None, ModuleType("benchmarks")], ids=["missing", "another"])
def test_without_a_checkout_one_line_names_the_remedy(
    found: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if found is not None:
        found.__file__ = "/elsewhere.py"
    monkeypatch.setitem(sys.modules, "benchmarks", found)
    assert main(["bench", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "in a checkout of the repository" in line
