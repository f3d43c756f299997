"""The command ``bench`` hands its arguments on, and says what is missing in one line."""

import json
import os
import subprocess
import sys
from functools import partial
from itertools import groupby
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tileattn
from benchmarks import cpu, report
from benchmarks.configurations import PASSES, Configuration
from benchmarks.device import AGREEMENT, difference
from benchmarks.implementations import Naive, Tileattn
from tileattn.cli.commands import BENCHMARKS, main

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
    monkeypatch.setattr(cpu, "shortest_seconds", lambda calls, _: dict.fromkeys(calls, 0.5))
    monkeypatch.setattr(report, "of_process", lambda _, text, __: cpu.child(text))
    monkeypatch.setitem(sys.modules, "torch", None)
    cpu.main(["--quick", "--name", "mine", "--to", str(tmp_path)])
    result = json.loads((tmp_path / "mine.json").read_text(encoding="utf-8"))
    assert result["machine"]["command"] == "python -m tileattn bench cpu --quick --name mine"
    assert set(report.host()) | {"torch", "commit", "date", "command"} == set(result["machine"])
    rows = {row["section"]: row for row in reversed(result["rows"])}  # the first of each
    assert set(rows) == set(cpu.SECTIONS)
    assert rows["grid"]["gflops"]["numpy"] == float(f"{4 * 8 * 256**2 * 64 / 0.5 / 1e9:.4g}")
    assert rows["small"]["us"]["naive"] == 0.5e6 / 100
    assert rows["decoding"]["gbytes_per_second"]["copy"] == float(f"{8 * 2**22 / 0.5e9:.4g}")
    assert rows["options"]["over_plain"]["numpy"] == 1
    assert rows["scaling"]["threads"] == 1
    out = capsys.readouterr().out
    assert "torch is missing: it is not installed" in out
    assert "dtype f32  pass forward  N 256  cases 4" in out


def test_some_sections_are_enough(tmp_path: Path) -> None:
    cpu.main(["--quick", "--seconds", "0", "--only", "small", "--to", str(tmp_path)])
    rows = json.loads((tmp_path / "cpu.json").read_text(encoding="utf-8"))["rows"]
    assert [(row["section"], row["pass"]) for row in rows] == [("small", x) for x in PASSES]
    with pytest.raises(SystemExit):
        cpu.main(["--only", "large"])


def test_speedups_are_geometric_means_of_those_who_ran_everywhere() -> None:
    same = {"section": "grid", "dtype": "f32", "pass": "forward", "N": 8}
    rates: list[report.Row] = [{"llvm": 8.0, "torch": 1.0, "numpy": 1.0}, {"llvm": 1.0, "torch": 2}]
    (row,) = cpu.speedups([same | {"gflops": rate} for rate in rates])
    assert row == {
        "dtype": "f32",
        "pass": "forward",
        "N": 8,
        "cases": 2,
        "llvm over PyTorch": pytest.approx(2),
    }


def test_implementations_take_turns_and_get_the_same_inputs() -> None:
    order: list[str] = []
    calls: cpu.Calls = {name: partial(order.append, name) for name in "ab"}
    assert set(cpu.shortest_seconds(calls, 0.1)) == {"a", "b"}
    turns = "".join(name for name, _ in groupby(order))
    assert turns == "ab" * (len(turns) // 2)
    one = Configuration("forward", "f32", 1, 2, 24, 8, causal=True)
    ours, naive = (cpu.prepared(one, each)() for each in (Tileattn(), Naive(np)))
    assert difference([ours], [naive], np) <= AGREEMENT["f32"]


@pytest.mark.parametrize(
    ("clock", "expected"), [((0, 0, 0.4, 0.8, 1.2, 1.6), 1.0), ((0, 0, 5, 10), 2.0)]
)
def test_the_first_round_does_not_count(
    clock: tuple[float, ...], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "time", SimpleNamespace(perf_counter=partial(next, iter(clock))))
    monkeypatch.setattr(cpu, "one_turn", lambda call: call())
    found = cpu.shortest_seconds({"one": partial(next, iter([0.5, 2.0, 1.0, 2.5]))}, seconds=1)
    assert found == {"one": expected}


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
