"""The command ``bench`` hands its arguments on, and says what is missing in one line."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import tileattn
from benchmarks import configurations, cpu, report
from benchmarks.configurations import DTYPES
from benchmarks.engines import ENGINES
from benchmarks.part import PARTS, commands
from tileattn.cli.bench import BENCHMARKS
from tileattn.cli.commands import main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("section", BENCHMARKS)
def test_every_benchmark_says_what_it_takes(
    section: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", section, "--help"])
    assert stop.value.code == 0
    assert f"usage: python -m tileattn bench {section} [-h]" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["gpu", "nonfinite", "memory --device gpu"])
def test_without_a_gpu_it_ends_with_one_line(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tileattn, "available_backends", lambda: {"cupy": "there is no device"})
    with pytest.raises(SystemExit, match=r"^[^\n]*: there is no device[^\n]*$"):
        main(["bench", *line.split()])


@pytest.mark.parametrize("part", PARTS)
def test_the_commands_of_a_part_are_understood(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="whole models are made of it: pip install torch")
    monkeypatch.setattr(tileattn, "available_backends", lambda: {"cupy": "there is no device"})
    for line in commands(part, None, []):
        with pytest.raises(SystemExit, match=r"^[^\n]*: there is no device[^\n]*$"):
            main(["bench", *line])


def zeros(_: Any, shape: tuple[int, ...], dtype: str, __: int = 0) -> Any:
    return np.zeros(shape, DTYPES[dtype])


@pytest.mark.slow
def test_the_speed_of_the_cpu_is_written_with_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu, "shortest_seconds", lambda calls, _: dict.fromkeys(calls, 0.5))
    for module in (configurations, cpu):  # drawing the numbers takes most of the time
        monkeypatch.setattr(module, "normal", zeros)
    monkeypatch.setattr(report, "of_process", lambda _, text, __: cpu.child(text))
    for name in ("torch", *ENGINES):
        monkeypatch.setitem(sys.modules, name, None)
    cpu.main(["--quick", "--name", "mine", "--to", str(tmp_path)])
    result = json.loads((tmp_path / "mine.json").read_text(encoding="utf-8"))
    assert result["machine"]["command"] == "python -m tileattn bench cpu --quick --name mine"
    assert set(report.host()) | {"torch", "peers", "commit", "date", "command"} == set(
        result["machine"]
    )
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
