"""The measured bytes of docs/io.md are those of benchmarks/results, and absent without them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools import traffic_table
from tools.traffic_table import BEGIN, END

MACHINE = {"command": "python -m tileattn bench traffic", "gpu": "a GPU", "date": "2026-11-21"}
COUNTS = {"dram_read_bytes": 4_000_000, "dram_write_bytes": 500_000}


def row(**more: Any) -> dict[str, Any]:
    sizes = {"B": 2, "H": 16, "N": 512, "D": 64, "dtype": "fp16", "tile": [128, 64]}
    sizes |= {"gflop": {"standard": 60.0, "flash1": 70.0, "flash2": 70.0}}
    return sizes | {"modelled_bytes": {"standard": 9e9, "flash1": 7e6, "flash2": 5e6}} | more


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(traffic_table, "RESULTS", tmp_path)
    return tmp_path


def write(results: Path, *rows: dict[str, Any]) -> None:
    text = json.dumps({"machine": MACHINE, "rows": rows})
    (results / "traffic.json").write_text(text, encoding="utf-8")


def test_the_page_is_up_to_date() -> None:
    assert traffic_table.main(["--check"]) == 0


def test_without_counts_there_is_no_section(results: Path) -> None:
    assert list(traffic_table.lines()) == []
    write(results, row(), row(tileattn={"ms": 1.0, "not_counted": "no permission"}))
    assert list(traffic_table.lines()) == []


def test_counted_bytes_stand_beside_the_model(results: Path) -> None:
    write(
        results,
        row(tileattn=COUNTS | {"ms": 1.234, "l2_bytes": 8000}, plain={"not_run": "no room"}),
    )
    lines = list(traffic_table.lines())
    assert lines[0] == "## What a GPU moves"
    sizes = "| 2 | 16 | 512 | 64 | fp16 | 128 x 64 | 5 MB | 9 GB | 8 kB | 4.5 MB |  |  |"
    assert lines[-3:] == [f"{sizes} 1.23 |  |  |", "", "CuPy did not run at N = 512: `no room`."]
    assert len([line for line in lines if line.startswith("|")]) == 3  # a head and one row
    assert any(MACHINE["command"] in line and MACHINE["gpu"] in line for line in lines)


def test_the_row_of_the_paper_stands_beside_its_figures(results: Path) -> None:
    told = {"gflop": 66.6, "hbm_gbytes": 40.3, "ms": 41.7}
    paper = {"gpu": "its GPU", "standard": told, "flash1": told | {"ms": 7.3}}
    ours = COUNTS | {"ms": 2.0, "l2_bytes": 7_000_000_000}
    write(results, row(tileattn=ours, pytorch={"ms": 12345.6}, paper=paper), row(tileattn=ours))
    lines = list(traffic_table.lines())
    first = lines.index("| standard attention, the paper | its GPU | 66.6 | 40.3 |  | 41.7 |")
    assert lines[first + 1 : first + 5] == [
        "| FlashAttention, the paper | its GPU | 66.6 | 40.3 |  | 7.3 |",
        "| tileattn | a GPU | 70.0 | 0.0045 | 7 | 2 |",
        "| PyTorch | a GPU | 60.0 |  |  | 12346 |",
        "| CuPy | a GPU | 60.0 |  |  |  |",
    ]


def test_a_changed_count_makes_the_page_stale(results: Path) -> None:
    page = results / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
    write(results, row(tileattn=COUNTS))
    assert traffic_table.main(["--write", "--page", str(page)]) == 0
    assert traffic_table.main(["--check", "--page", str(page)]) == 0
    write(results, row(tileattn=COUNTS | {"dram_read_bytes": 5_000_000}))
    assert traffic_table.main(["--check", "--page", str(page)]) == 1
