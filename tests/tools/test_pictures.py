"""The pictures of the docs show what benchmarks/results and the schedules hold."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import RESULTS, load
from tools import pages, pictures
from tools.pictures import speed


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return shutil.copytree(RESULTS, tmp_path / "results")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Copy the pages and their pictures, which a test may write."""
    shutil.copytree(pages.ROOT / "docs", tmp_path / "docs")
    shutil.copy(pages.ROOT / "README.md", tmp_path)
    return tmp_path


def change(folder: Path, name: str, how: Callable[[Any], None]) -> None:
    result = load(folder, name)
    how(result["rows"])
    (folder / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")


@pytest.mark.slow
def test_the_pictures_and_pages_are_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # a check needs none
    assert pictures.main(["--check"]) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("matplotlib_figure")
def test_a_changed_result_is_drawn_again_and_nothing_else(
    results: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def slower(rows: Any) -> None:
        rows[0]["tflops"]["cudnn"] -= 0.01

    fresh = {path: path.stat().st_mtime_ns for path in (root / "docs").rglob("*.*")}
    change(results, "gpu_backward_bf16", slower)
    assert pictures.main(["--check"], root, results) == 1
    named = [line.partition(" is stale")[0] for line in capsys.readouterr().out.splitlines()]
    assert [Path(path).name for path in named] == ["speed_light.svg", "speed_dark.svg"]
    assert pictures.main(["--write"], root, results) == 0
    assert pictures.main(["--check"], root, results) == 0
    written = [path.name for path, time in fresh.items() if path.stat().st_mtime_ns != time]
    assert sorted(written) == ["speed_dark.svg", "speed_light.svg"]


def test_an_unverified_result_is_not_drawn(results: Path) -> None:
    def lengths(name: str) -> list[float]:
        return [N for N, _ in speed.picture(results).values[0][-1][name]]

    before = lengths("fa4")
    change(results, "gpu_forward_bf16", lambda rows: rows[0]["mismatch"].update(fa4=0.3))
    assert lengths("fa4") == before[1:]
    assert lengths("cudnn") == before
