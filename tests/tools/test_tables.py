"""The tables of the docs hold what benchmarks/results and the backends say."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import RESULTS
from tileattn.backends.numpy.backend import NumpyBackend
from tileattn.call.options import Options
from tileattn.call.problem import Problem
from tools import pages, performance_tables, support_table
from tools.comparisons import comparisons
from tools.performance_tables import gpu, loops, options, summary
from tools.results import read

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
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = {"section": "grid", "pass": "forward", "dtype": "f32", "B": 1, "H": 8, "N": 256, "D": 64}
    rows: list[Any] = [
        one | {"causal": False, "gflops": {"llvm": 1288.0, "torch": 644.0}},
        one | {"causal": True, "gflops": {"llvm": 8.125, "torch": 1.015625}},
        {"section": "options", "option": "mask", "ms": {"llvm": 3.0}, "over_plain": {"llvm": 1.5}},
    ]
    machine = MACHINE | {"processor": "A CPU", "threads": 2, "numpy": "2", "llvm": "20"}
    del machine["gpu"]
    text = json.dumps({"machine": machine, "rows": rows})
    (results / "cpu_of_another.json").write_text(text, encoding="utf-8")
    (tmp_path / "docs").mkdir()
    for page in performance_tables.parts(read()):
        shutil.copy(pages.ROOT / page, tmp_path / page)
    assert performance_tables.main(["--check"], tmp_path, results) == 1
    stale = [line.partition(" is stale")[0] for line in capsys.readouterr().out.splitlines()]
    assert [Path(page).name for page in stale] == ["performance.md", "performance-cpu.md"]
    assert performance_tables.main(["--write"], tmp_path, results) == 0
    assert performance_tables.main(["--check"], tmp_path, results) == 0
    main, tables = (Path(page).read_text(encoding="utf-8") for page in stale)
    assert "| `llvm`, A CPU, 2 threads, forward | 4.00 | 2.00 | 8.00 | 0 | 2 | PyTorch |" in main
    assert "- today, A CPU, 2 threads, PyTorch 1, commit 1: `cpu_of_another`." in main
    origin = "Measured by `python -m something`: A CPU, 2 threads, NumPy 2, LLVM 20,"
    assert f"## A CPU, 2 threads\n\n{origin}" in tables
    assert "| f32 | forward | 256 | 2 | 4 |" in tables
    assert '???+ note "GFLOP/s, B = 1, H = 8"' in tables  # open: it is short
    # Columns of numbers are aligned at the right.
    head = "    | causal | llvm | PyTorch |\n    | --- | ---: | ---: |\n    | no | 1288 | 644 |"
    assert head in tables
    assert "| yes | 8.12 | 1.02 |" in tables
    assert "| options | mask | 3 | 1.5 |" in tables


def test_a_page_without_a_part_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    part = "<!-- tables: one, by python -m tools.x --write -->\n<!-- end of tables -->"
    page.write_text(part, encoding="utf-8")
    assert [path for path, _ in pages.stale_parts(page, {"one": [""]})] == [page]
    with pytest.raises(ValueError, match=r"must have the parts \['one', 'two'\]; it has \['one'\]"):
        pages.stale_parts(page, {"one": [""], "two": [""]})


def row(us: dict[str, float], **axes: Any) -> Any:
    """A row of a benchmark with these times."""
    own = us["tileattn"]
    known = {"pass": "forward", "dtype": "bf16", "B": 2, "H": 8, "Hkv": 2, "N": 9, "Nk": 9}
    known |= {"D": 64, "Dv": 64, "causal": True, "options": "", "us": us, "spread": {}}
    speedups = {name: time / own for name, time in us.items() if name != "tileattn"}
    return known | {"speedup_over": speedups, "mismatch": {}, "failed": {}} | axes


def test_a_model_has_a_row_with_both_passes() -> None:
    rows = [
        row({"tileattn": 10.0, "cudnn": 12.0, "fa3": 20.0}, case="A model"),
        row({"tileattn": 20.0, "cudnn": 30.0, "fa3": 10.0}, case="A model") | {"pass": "backward"},
        row({"tileattn": 1.0, "fa3": 2.0}, case="Another", Hkv=8, Nk=50, Dv=32),
    ]
    result = {"machine": MACHINE | {"peers": {"fa3": "3"}}, "section": "models", "rows": rows}
    found = list(comparisons({"gpu_models": result}))
    lines = list(summary.models(found))
    assert "| A model | bf16 | 2, 8/2, 9, 64 | 1.20 | cuDNN | 0.50 | FlashAttention-3 |" in lines
    assert "| Another | bf16 | 2, 8, 9/50, 64/32 | 2.00 | FlashAttention-3 |  |  |" in lines
    results = read() | {"gpu_models": result}
    page = "\n".join(gpu.lines(results))
    assert "## Models\n\nMeasured by `python -m something`: A GPU," in page
    assert "FlashAttention-3 3, Python 1, commit 1, today. <!-- age: gpu_models -->" in page
    title = "Forward: 2 configurations; speedup over cuDNN 1.20; speedup over FlashAttention-3 2.00"
    assert f'??? note "{title}"' in page
    assert "    | Another | 2 | 8 | 8 | 9 | 50 | 64 | 32 | yes | 1 |  | 2.00 | 2.00 |" in page


def test_the_headline_names_each_version_with_its_pass() -> None:
    versions = {"forward": {"cudnn": "9.1", "fa3": "3"}, "backward": {"cudnn": "9.2", "fa3": "3"}}
    results = {
        f"gpu_{kind}_bf16": {
            "machine": MACHINE | {"peers": peers},
            "section": "grid",
            "rows": [row({"tileattn": 10.0, "cudnn": 12.0, "fa3": 20.0}) | {"pass": kind}],
        }
        for kind, peers in versions.items()
    }
    said = " ".join(summary.headline(results, list(comparisons(results))))
    assert "cuDNN 9.1 (forward) or cuDNN 9.2 (backward) and FlashAttention-3 3:" in said


def test_libraries_without_a_speedup_say_why() -> None:
    failed = {"flex": "MemoryError: no room"}
    rows = [
        row({"tileattn": 10.0}, option="plain", failed=failed),
        row({"tileattn": 10.0, "fa4": 20.0}, option="bias", failed=failed, mismatch={"fa4": "0.5"}),
    ]
    result = {"machine": MACHINE, "section": "options", "rows": rows}
    lines = list(options.lines(read() | {"gpu_options": result}))
    assert "    - FlexAttention failed: `MemoryError: no room` (2 times)." in lines
    assert "    - FlashAttention-4 had other results: 0.5 away (once)." in lines


def test_loops_are_compared_with_repeated_calls_and_other_libraries() -> None:
    machine = MACHINE | {"processor": "A CPU", "threads": 2}
    loop = {"section": "loops", "loop": "growing", "sizes": "D = 64", "calls": 3}
    loop |= {"us": {"torch": 20.0, "SDPA": 25.0}, "repeated_us": {"torch": 15.0}}
    loop |= {"failed": {"torch": "OSError: no"}}
    loop |= {f"host_{x}us": {"torch": 7.0, "SDPA": 8.0} for x in ("", "p99_", "max_")}
    first = {"section": "first_calls", "loop": "growing", "dtype": "bf16", "D": 64}
    rows = [
        loop | {"over_peers": {"torch": 1.25}},
        loop
        | {"loop": "new seed", "us": {"torch": 30.0}, "over_peers": {}}
        | {"repeated_us": {"torch": 24.0}},
    ]
    first |= {"forward_s": {"torch": 0.5}, "both_s": {"torch": 0.25}, "failed": {}}
    waits = {"section": "waits", "loop": "growing", "who": "arrays", "calls": 3, "waited": False}
    waits |= {"synchronisations": {"cudaMalloc": 2}}
    made = {"lived_gpu": rows, "first_calls_gpu": [first], "waits_gpu": [waits]}
    lines = list(
        loops.lines({name: {"machine": machine, "rows": found} for name, found in made.items()})
    )
    assert "| loop | `tileattn.torch` | SDPA |" in "\n".join(lines)
    assert "| growing | 20 | 25 | 15 | 0.75 | 1.25 |" in lines
    assert "| new seed | 30 |  | 24 | 0.8 |  |" in lines
    assert "| growing | 7 / 7 / 7 | 8 / 8 / 8 |" in lines
    assert "| new seed | 7 / 7 / 7 |  |" in lines
    assert "| both, after forward | 0.25 |" in lines
    assert "- growing: D = 64" in lines
    assert "- PyTorch failed: `OSError: no` (2 times)." not in lines
    assert "- `tileattn.torch` failed: `OSError: no` (2 times)." in lines
    assert "| growing | arrays | 3 | no | cudaMalloc 2 |" in lines


def test_steps_of_training_are_compared_without_their_rest_if_it_was_timed() -> None:
    row = {
        "section": "training",
        "sizes": "8 heads, batches of 2",
        "dropout": 0.0,
        "dtype": "float32",
    }
    row |= {"ms": {"tileattn": 20.0, "SDPA": 25.0}, "repeated_ms": {"tileattn": 20.0}}
    row |= {"over_peers": {"tileattn": 1.25}, "failed": {}}
    rest = {"tokens": 64, "rest_ms": 15.0, "attention_over_peers": {"tileattn": 2.0}}
    within = {
        "tokens": 96,
        "sizes": "8 heads, batches of 1",
        "rest_ms": 22.0,
        "attention_over_peers": {},
    }
    made = {"end_to_end_gpu": [row], "end_to_end_gpu_f32": [row | rest, row | within]}
    results = {name: {"machine": MACHINE, "rows": rows} for name, rows in made.items()}
    old, new = "\n".join(loops.lines(results)).split("## Whole models on a GPU in float32")
    assert "| dropout | tileattn | SDPA | tileattn, repeated | speed relative to repeated |" in old
    assert "rest" not in old
    assert (
        "Milliseconds of a step of training, float32, 8 heads, batches of 2, batches of 1:" in new
    )
    assert "| tokens | rest | speedup of attention over the fastest of the others |" in new
    assert "| 64 | 15 | 2 |" in new
    assert "| 96 | 22 |  |" in new
    titles = {one.what for one in comparisons(results)}
    assert titles == {"Whole models: a step of training, float32, A GPU"}


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
