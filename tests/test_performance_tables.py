"""The tables of docs/performance.md hold what benchmarks/results holds."""

import json
from pathlib import Path

import pytest

from tools import performance_tables


def test_the_page_is_up_to_date() -> None:
    assert performance_tables.main(["--check"]) == 0


def test_a_changed_result_makes_the_page_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in performance_tables.RESULTS.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    changed = tmp_path / "cpu.json"
    result = json.loads(changed.read_text(encoding="utf-8"))
    result["rows"][0]["gflops"]["tileattn"] += 100
    changed.write_text(json.dumps(result), encoding="utf-8")
    monkeypatch.setattr(performance_tables, "RESULTS", tmp_path)
    assert performance_tables.main(["--check"]) == 1
    assert "performance.md is stale" in capsys.readouterr().out
