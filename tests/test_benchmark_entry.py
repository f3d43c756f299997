"""The verb ``bench`` hands its arguments on, and says what is missing in one line."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import benchmarks
from benchmarks import cpu, memory, report
from tileattn.cli import BENCHMARKS, main

ROOT = Path(__file__).parents[1]


def test_alone_it_lists_the_sections(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(BENCHMARKS)


@pytest.mark.parametrize("section", BENCHMARKS)
def test_every_section_says_what_it_takes(section: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", section, "--help"])
    assert stop.value.code == 0
    assert f"usage: python -m tileattn bench {section} [-h]" in capsys.readouterr().out


def test_the_rest_of_the_line_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(memory, "main", seen.append)
    assert main(["bench", "memory", "--device", "cpu", "--length", "512", "1024"]) == 0
    assert seen == [["--device", "cpu", "--length", "512", "1024"]]


def test_a_section_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "speed"])
    assert "'speed'" in capsys.readouterr().err


@pytest.mark.parametrize("section", BENCHMARKS)
def test_every_section_asks_where_its_files_go(
    section: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", section, "--help"])
    assert "--to FOLDER | --update" in " ".join(capsys.readouterr().out.split())


def test_the_folder_of_results() -> None:
    parser = argparse.ArgumentParser()
    report.add_target(parser)
    assert parser.parse_args([]).to == Path()
    assert parser.parse_args(["--update"]).to == report.RESULTS
    assert parser.parse_args(["--to", "there"]).to == Path("there")


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


def another(*path: str, file: str | None = None) -> ModuleType:
    made = ModuleType("benchmarks")
    made.__path__, made.__file__ = list(path), file
    return made


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "is not installed"),
        (another("/elsewhere"), "is another one, ['/elsewhere']"),
        (another(file="/elsewhere.py"), "is another one, /elsewhere.py"),
    ],
    ids=["missing", "folder", "file"],
)
def test_without_a_checkout_one_line_names_the_remedy(
    found: Any, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "benchmarks", found)
    assert main(["bench", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert "in a checkout of the repository" in line


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
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cpu, "core_rates", lambda: [{"D": 64, "gflops": 1.0, "exp_ns": 1.0}])
    monkeypatch.setattr(cpu, "race", lambda contestants, _: dict.fromkeys(contestants, 0.5))
    monkeypatch.setattr(cpu, "_inputs", lambda shape, count: [small(shape)] * count)
    monkeypatch.setitem(sys.modules, "torch", None)
    cpu.main(["--seconds", "0", "--name", "mine"])
    result = json.loads((tmp_path / "mine.json").read_text(encoding="utf-8"))
    assert result["machine"]["command"] == "python -m tileattn bench cpu --seconds 0 --name mine"
    assert set(report.host()) | {"torch", "commit", "date", "command"} == set(result["machine"])
    assert result["missing"] == {"torch": "it is not installed: pip install torch"}
    row = result["rows"][0]
    assert row["gflops"]["tileattn"] == round(4 * 8 * 1024**2 * 64 / 0.5 / 1e9, 1)
    assert "torch is missing: it is not installed" in capsys.readouterr().out


def small(shape: tuple[int, ...]) -> Any:
    """Array with few tokens in the place of one with many: nobody looks at the values."""
    return np.ones((*shape[:-2], min(shape[-2], 16), shape[-1]), np.float32)


def test_the_package_tells_itself_from_another() -> None:
    assert benchmarks.MEASURES == "tileattn"
