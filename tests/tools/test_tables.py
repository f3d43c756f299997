"""The tables of the docs hold what benchmarks/results and the backends say."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import RESULTS, load
from tileattn.backends.numpy.backend import NumpyBackend
from tileattn.call.options import Options
from tileattn.call.problem import Problem
from tools import pages, performance_tables, support_table, traffic_table

VERSIONS = ("driver", "cuda", "cupy", "torch", "cudnn", "python", "commit")
MACHINE = {"gpu": "A GPU", "multiprocessors": 100, "clock_mhz": 1000.0}
MACHINE |= dict.fromkeys(VERSIONS, "1") | {"date": "today", "command": "python -m something"}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return shutil.copytree(RESULTS, tmp_path / "results")


@pytest.mark.parametrize("tool", ["performance_tables", "traffic_table", "support_table"])
def test_the_pages_are_fresh(tool: str) -> None:
    """In a process of its own, which knows the built-in backends only."""
    command = [sys.executable, "-m", f"tools.{tool}", "--check"]
    done = subprocess.run(command, cwd=pages.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_new_result_makes_pages_stale_and_writing_repairs_them(
    results: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = {"section": "grid", "pass": "forward", "dtype": "f32", "H": 8, "N": 256, "causal": False}
    rows: list[Any] = [
        one | {"gflops": {"llvm": 1288.0, "torch": 644.0}},
        one | {"causal": True, "gflops": {"llvm": 8.125, "torch": 1.015625}},
        {"section": "options", "option": "mask", "ms": {"llvm": 3.0}, "over_plain": {"llvm": 1.5}},
    ]
    machine = MACHINE | {"processor": "A CPU", "threads": 2, "numpy": "2", "llvm": "20"}
    del machine["gpu"]
    text = json.dumps({"machine": machine, "rows": rows})
    (results / "cpu_of_somebody.json").write_text(text, encoding="utf-8")
    monkeypatch.setattr(performance_tables, "RESULTS", results)
    for page in performance_tables.PAGES:
        shutil.copy(pages.DOCS / page, tmp_path)
    assert performance_tables.main(["--check"], tmp_path) == 1
    stale = [line.partition(" is stale")[0] for line in capsys.readouterr().out.splitlines()]
    assert [Path(page).name for page in stale] == ["performance.md", "performance-cpu.md"]
    assert performance_tables.main(["--write"], tmp_path) == 0
    assert performance_tables.main(["--check"], tmp_path) == 0
    summary, tables = (Path(page).read_text(encoding="utf-8") for page in stale)
    assert "| A CPU, llvm, forward | PyTorch | 2 | 4.00 | 2.00 | 8.00 | 1288 |" in summary
    origin = "Measured by `python -m something`: A CPU, 2 threads, NumPy 2, LLVM 20,"
    assert f"## A CPU, 2 threads\n\n{origin}" in tables
    assert "| f32 | forward | 256 | 2 | 4 |" in tables
    assert "| causal | llvm | PyTorch |\n| --- | --- | --- |\n| no | 1288 | 644 |" in tables
    assert "| yes | 8.12 | 1.02 |" in tables
    assert "| options | mask | 3 | 1.5 |" in tables


@pytest.mark.parametrize("page", ["", "B", "E", "E\nB", "BEBE", "BEE"])
def test_a_page_without_its_two_markers_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="must have one line"):
        pages.updated(page, "B", "E", [])


# --- performance ----------------------------------------------------------------------------------


def test_the_summary_has_mean_and_extremes_of_the_speedups(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(performance_tables, "RESULTS", results)
    result = load(results, "gpu_f64")
    rows = [row for row in result["rows"] if row["pass"] == "backward"][:3]
    for row, speedup in zip(rows, (0.5, 2.0, None), strict=True):
        row["speedup_over"] = {} if speedup is None else {"math": speedup}
        row["tflops"]["tileattn"] = 30.0
    (results / "gpu_f64.json").write_text(json.dumps(result | {"rows": rows}), encoding="utf-8")
    (line,) = performance_tables._summary("gpu_f64", load(results, "gpu_ceilings"))
    title, baseline, *numbers = line
    assert (title, baseline) == ("Float64, backward", "PyTorch, unfused")
    assert numbers[:5] == [2, "1.00", "0.50", "2.00", "30"]


def test_several_gpus_and_frameworks_have_tables_where_they_were_measured(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(performance_tables, "RESULTS", results)
    frameworks, gpus = (results / f"{name}.json" for name in ("frameworks_gpu", "distributed_gpu"))
    for path in (frameworks, gpus):
        path.unlink(missing_ok=True)
    lines = list(performance_tables.option_lines())
    assert not {"## Inside PyTorch", "## GPUs that share a sequence"} & {*lines}
    rows: list[Any] = [
        {"section": "passes", "N": 512, "ms": {"tileattn": 1.5, "PyTorch": 2.5}},
        {"section": "passes", "N": 1024, "ms": {"tileattn": 6.0, "PyTorch": 9.0}},
    ]
    frameworks.write_text(json.dumps({"machine": MACHINE, "rows": rows}), encoding="utf-8")
    call = {"pass": "both", "dtype": "bf16", "B": 1, "H": 16, "N": 64, "D": 128, "causal": True}
    rows = [
        call | {"schedule": "ring", "one_gpu_ms": 8.25, "fraction_of_linear": 0.75},
        call | {"schedule": "heads", "failed": "a reason"},
        call | {"Hkv": 2, "schedule": "heads", "one_gpu_ms": 4.5, "fraction_of_linear": 0.5},
    ]
    machine = MACHINE | {"ranks": 2, "nccl": "(2, 28, 9)"}
    gpus.write_text(json.dumps({"machine": machine, "rows": rows}), encoding="utf-8")
    text = "\n".join(performance_tables.option_lines())
    assert "| N | tileattn | PyTorch |\n| --- | --- | --- |\n| 512 | 1.5 | 2.5 |\n" in text
    assert "today. 2 GPUs, NCCL 2.28.9." in text
    assert "| 16 | 8.25 | 0.75 |  |\n| 2 | 4.5 |  | 0.5 |" in text
    rows[0] |= {"share_of_memory": 1.125, "each_gpu_ms": 9.5, "fraction_of_each_gpu": 0.875}
    gpus.write_text(json.dumps({"machine": machine, "rows": rows}), encoding="utf-8")
    text = "\n".join(performance_tables.option_lines())
    assert "| 16 | 8.25 | 1.12 |\n| 2 | 4.5 |  |" in text
    assert "| 16 | 9.5 | 0.875 |\n| 2 |  |  |" in text


def test_each_kernel_stands_beside_its_lower_bounds() -> None:
    row: dict[str, Any] = {"pass": "forward", "dtype": "bf16", "B": 2, "H": 4, "N": 8192, "D": 64}
    row |= {"causal": False, "tflops": {"tileattn": 250.0}}
    rates: list[dict[str, Any]] = [{"dtype": "bf16", "tflops": 500.0}, {"gbytes_per_second": 4e3}]
    grid = {"section": "grid", "machine": MACHINE}
    found = performance_tables.bounds(
        {
            "here": grid | {"rows": [row, row | {"N": 512}, row | {"dtype": "f64"}]},
            "there": grid | {"machine": MACHINE | {"gpu": "another"}, "rows": [row]},
            "shapes": grid | {"section": "shapes", "rows": [row]},
        },
        {"machine": MACHINE, "rows": rates},
    )
    scores = 2 * 4 * 8192**2
    compute, exp = 4 * 64 * scores / 500e9, scores / 16e8
    crossing = (4 * 2 * 4 * 8192 * 64 * 2 + 2 * 4 * 8192 * 4) / 4e9
    assert [line for line in found if line.startswith("| forward")] == [
        f"| forward | bf16 | 64 | no | {compute:.3f} | {exp:.3f} | {crossing:.3f} "
        f"| {2 * compute:.3f} | {100 * exp / (2 * compute):.0f} | here |"
    ]


# --- traffic --------------------------------------------------------------------------------------


def test_counted_bytes_stand_beside_the_model_and_the_paper() -> None:
    told = {"gflop": 66.6, "hbm_gbytes": 40.3, "ms": 41.7}
    counts = {"dram_read_bytes": 4_000_000, "dram_write_bytes": 500_000, "l2_bytes": 8000}
    row = {"B": 2, "H": 16, "N": 512, "D": 64, "dtype": "fp16", "tile": [128, 64]}
    row |= {"gflop": {"standard": 60.0, "flash1": 70.0, "flash2": 70.0}}
    row |= {"modelled_bytes": {"standard": 9e9, "flash1": 7e6, "flash2": 5e6}}
    row |= {"tileattn": counts | {"ms": 1.234}, "naive": {"not_run": "too big"}}
    row |= {"paper": {"gpu": "its GPU", "standard": told, "flash1": told | {"ms": 7.3}}}
    lines = list(traffic_table.lines({"machine": MACHINE, "rows": [row]}))
    for line in (
        "| standard attention, the paper | its GPU | 66.6 | 40.3 |  | 41.7 |",
        "| FlashAttention, the paper | its GPU | 66.6 | 40.3 |  | 7.3 |",
        "| tileattn | A GPU | 70.0 | 0.0045 | 8e-06 | 1.23 |",
        "| CuPy | A GPU | 60.0 |  |  |  |",
        "| 2 | 512 | 128 x 64 | 5 MB | 9 GB | 8 kB | 4.5 MB |  |  |",
        "| 2 | 512 | 128 x 64 | 1.23 |  |  |",
        "CuPy did not run at N = 512: `too big`.",
    ):
        assert line in lines


# --- support --------------------------------------------------------------------------------------


class Short(NumpyBackend):
    """Supports up to 100 keys, without softcap."""

    name = "short"

    def why_not(self, problem: Problem) -> str | None:
        if problem.softcap is not None:
            return "it has no softcap"
        return "there are more than 100 keys" if problem.Nk > 100 else None


def test_a_refusal_is_numbered_and_its_reason_stands_below() -> None:
    problems = support_table.representative()
    lines = list(support_table.lines([NumpyBackend(), Short()], problems))
    assert "| float32 | yes | yes |" in lines
    assert "| one query, many keys | yes | no (1) |" in lines
    assert "| `softcap` | yes | no (2) |" in lines
    assert "| several options together | yes | no (2) |" in lines
    assert lines[-3:] == ["", "1. there are more than 100 keys", "2. it has no softcap"]


def test_every_option_has_a_row() -> None:
    problems = support_table.representative().values()
    used = frozenset().union(*(problem.enabled_options for problem in problems))
    assert used == set(Options.__annotations__) - {"scale"}  # any finite number: nothing to refuse
