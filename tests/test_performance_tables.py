"""The tables of docs/performance.md hold what benchmarks/results holds."""

import json
from pathlib import Path
from typing import Any

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


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder without results."""
    monkeypatch.setattr(performance_tables, "RESULTS", tmp_path)
    return tmp_path


HOST = {
    "processor": "A processor",
    "threads": 2,
    "python": "3.11",
    "numpy": "2.4",
    "commit": "abc",
    "date": "today",
    "command": "python -m tileattn bench",
}


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (folder / name).write_text(json.dumps({"machine": HOST, "rows": rows}), encoding="utf-8")


def test_peaks_stand_side_by_side_and_say_why_one_is_missing(results: Path) -> None:
    same = {"H": 8, "D": 64, "dtype": "fp16", "contestant": "plain"}
    write(
        results,
        "memory_gpu.json",
        [
            same | {"kind": "forward", "N": 512, "peak_bytes": 2_500_000},
            same | {"kind": "both", "N": 512, "failed": "MemoryError: no"},
            same
            | {"kind": "forward", "N": 1024, "not_run": "", "needs_bytes": 3e9, "free_bytes": 1},
            same | {"kind": "both", "N": 1024, "not_run": "would take", "needs_bytes": 3},
        ],
    )
    lines = list(performance_tables._memory("memory_gpu"))
    assert "Peak memory in MB, 8 heads of 64, fp16:" in lines
    assert "| N | plain, forward | plain, both |" in lines
    assert "| 512 | 2.5 | failed |" in lines
    assert "| 1024 | needs 3,000 | too long |" in lines


def test_without_a_file_there_is_no_table(results: Path) -> None:
    assert list(results.iterdir()) == []
    assert list(performance_tables._memory("memory_gpu")) == []


GPU = {"gpu": "A GPU", "multiprocessors": 100, "clock_mhz": 1000.0}
CEILINGS: list[dict[str, Any]] = [{"dtype": "bf16", "tflops": 500.0}, {"gbytes_per_second": 4000.0}]
CELL: dict[str, Any] = {
    "pass": "forward",
    "dtype": "bf16",
    "B": 2,
    "H": 4,
    "N": 8192,
    "D": 64,
    "causal": False,
}


def ran(folder: Path, name: str, section: str, rows: list[dict[str, Any]], **machine: Any) -> None:
    result = {"machine": GPU | machine, "section": section, "rows": rows}
    (folder / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")


def test_each_kernel_stands_beside_its_floors(results: Path) -> None:
    slow: dict[str, Any] = CELL | {"tflops": {"tileattn": 250.0}}
    ran(results, "gpu_ceilings", "ceilings", CEILINGS)
    ran(results, "gpu_here", "grid", [slow, slow | {"N": 512}, slow | {"dtype": "f64"}])
    ran(results, "gpu_there", "grid", [slow], gpu="another")
    ran(results, "gpu_shapes", "shapes", [slow])
    pairs = 2 * 4 * 8192**2
    products, exponentials = 4 * 64 * pairs / 500e9, pairs / 16e8
    crossing = (4 * 2 * 4 * 8192 * 64 * 2 + 2 * 4 * 8192 * 4) / 4e9
    table = [line for line in performance_tables._floors() if line.startswith("| forward")]
    assert table == [
        f"| forward | bf16 | 64 | no | {products:.3f} | {exponentials:.3f} | {crossing:.3f} "
        f"| {2 * products:.3f} | {exponentials / (2 * products):.2f} | gpu_here |"
    ]


def test_without_a_clock_there_are_no_floors(results: Path) -> None:
    assert list(performance_tables._floors()) == []
    ran(results, "gpu_ceilings", "ceilings", CEILINGS, clock_mhz=None)
    assert list(performance_tables._floors()) == []


VERSIONS = ("driver", "cuda", "cupy", "torch", "cudnn", "python", "commit")
RAN = GPU | dict.fromkeys(VERSIONS, "1") | {"date": "today", "command": "python -m something"}


def test_calls_with_nan_are_multiples_of_the_clean_one(results: Path) -> None:
    call = {"case": "reference", "dtype": "fp16", "N": 4096, "D": 128, "pass": "forward"}
    rows = [
        call | {"values": "clean", "ms": 0.25, "multiple": 1.0},
        call | {"values": "one nan in k", "ms": 0.4, "multiple": 1.6},
        call | {"pass": "backward", "failed": "MemoryError: no"},
    ]
    found = {"machine": RAN, "limit": 2.0, "rows": rows}
    assert list(performance_tables._nonfinite()) == []
    (results / "nonfinite.json").write_text(json.dumps(found), encoding="utf-8")
    head, _, forward, backward = list(performance_tables._nonfinite())[2:-1]
    assert head == "| case | dtype | N | D | pass | clean, ms | one nan in k |"
    assert forward == "| reference | fp16 | 4096 | 128 | forward | 0.250 | 1.60 |"
    assert backward == "| reference | fp16 | 4096 | 128 | backward |  |  |"


def test_what_the_stress_test_ran_is_counted(results: Path) -> None:
    row = {"dtype": "float16", "D": 64, "Dv": 128, "variant": "stalls", "calls": 1000}
    found = {
        "machine": RAN,
        "rows": [row, row | {"dtype": "bfloat16", "calls": 500}],
        "processes": 8,
        "differing": ["a case"],
        "failures": [],
    }
    assert list(performance_tables._stress()) == []
    (results / "stress_gpu_stalls.json").write_text(json.dumps(found), encoding="utf-8")
    *_, line, _ = performance_tables._stress()
    assert line.startswith("| stalls | 1 | 8 | 1,500 | 1 | 0 | `python -m something`: A GPU, ")
