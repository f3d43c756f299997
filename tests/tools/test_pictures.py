"""The pictures of the docs show what benchmarks/results and the schedules hold."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tileattn.algorithm.block_mask import EMPTY, FULL, PARTIAL
from tileattn.algorithm.tiles import Tile
from tools import drawing, pictures
from tools.pictures import blocks, density, memory, schedules, speed, traffic


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Copy the results, which a test may change."""
    return shutil.copytree(pictures.RESULTS, tmp_path / "results")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Copy the pages and their pictures, which a test may write."""
    shutil.copytree(pictures.ROOT / "docs", tmp_path / "docs")
    shutil.copy(pictures.ROOT / "README.md", tmp_path)
    return tmp_path


def change(folder: Path, name: str, how: Callable[[Any], None]) -> None:
    path = folder / f"{name}.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    how(result["rows"])
    path.write_text(json.dumps(result), encoding="utf-8")


def test_the_pictures_and_pages_are_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # a check needs none
    assert pictures.main(["--check"]) == 0


@pytest.mark.usefixtures("matplotlib_figure")
def test_a_changed_result_is_drawn_again_and_nothing_else(
    results: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def slower(rows: Any) -> None:
        rows[0]["tflops"]["cudnn"] -= 0.01

    fresh = {path: path.stat().st_mtime_ns for path in (root / "docs").rglob("*.*")}
    change(results, "gpu_backward_bf16", slower)
    assert pictures.main(["--check"], root, results) == 1
    again = "is stale: python -m tools.pictures --write"
    assert capsys.readouterr().out.splitlines() == [
        f"docs/assets/speed_{theme}.svg {again}" for theme in ("light", "dark")
    ]
    assert pictures.main(["--write"], root, results) == 0
    assert pictures.main(["--check"], root, results) == 0
    written = [path.name for path, time in fresh.items() if path.stat().st_mtime_ns != time]
    assert sorted(written) == ["speed_dark.svg", "speed_light.svg"]


def test_words_that_the_results_no_longer_hold_make_the_pages_stale(
    results: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose(rows: Any) -> None:
        for row in rows:
            row["speedup_over"] = dict.fromkeys(row["speedup_over"], 0.5)

    change(results, "gpu_forward_bf16", lose)
    assert pictures.main(["--check"], root, results) == 1
    said = capsys.readouterr().out
    assert "README.md is stale" in said
    assert "docs/index.md is stale" in said


@pytest.mark.usefixtures("matplotlib_figure")
@pytest.mark.parametrize("name", pictures.MAKERS)
def test_the_values_alone_decide_what_is_drawn(name: str) -> None:
    picture = pictures.MAKERS[name](pictures.RESULTS)
    first, again = (drawing.svg(picture, drawing.LIGHT) for _ in range(2))
    assert first == again
    assert picture.digest in first
    moved = picture._replace(values=nudged(picture.values))
    assert moved.digest != picture.digest
    assert drawing.svg(moved, drawing.LIGHT).replace(moved.digest, picture.digest) != first


def nudged(values: Any) -> Any:
    """Change the last number, or the mask of the last tile."""
    values = json.loads(json.dumps(values))
    places: list[tuple[Any, Any]] = []

    def walk(x: Any) -> None:
        for key, value in x.items() if isinstance(x, dict) else enumerate(x):
            if isinstance(value, dict | list):
                walk(value)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                places.append((x, key))

    walk(values)
    where, key = places[-1]
    where[key] = where[key] * 1.5 if where[key] > 10 else where[key] - 1
    return values


def test_an_unverified_result_is_not_drawn(results: Path) -> None:
    def lengths(name: str) -> list[float]:
        return [N for N, _ in speed.picture(results).values[0][-1][name]]

    before = lengths("fa4")
    change(results, "gpu_forward_bf16", lambda rows: rows[0]["mismatch"].update(fa4=0.3))
    assert lengths("fa4") == before[1:]
    assert lengths("cudnn") == before


def test_memory_that_was_not_measured_is_that_of_the_arrays() -> None:
    row = {"implementation": "naive", "inputs_bytes": 100, "needs_bytes": 300, "not_run": ""}
    assert memory.peak(row) == 200
    assert memory.peak(row | {"peak_bytes": 250}) == 250
    assert memory.peak(row | {"implementation": "tileattn"}) is None


def test_counted_bytes_are_those_of_one_head(results: Path) -> None:
    counts = {"dram_read_bytes": 3000, "dram_write_bytes": 1000}
    row = {"B": 2, "H": 4, "N": 512, "D": 64, "tileattn": counts, "naive": {"not_run": "too big"}}

    def only(rows: Any) -> None:
        rows[:] = [row]

    change(results, "traffic", only)
    assert traffic.picture(results).values["counted"] == {"tileattn": [[512, 500]]}


def test_each_tile_is_drawn_with_what_was_measured(results: Path) -> None:
    counts = {"dram_read_bytes": 700, "dram_write_bytes": 100, "l2_bytes": 8400}
    sizes = {"dtype": "fp16", "B": 2, "H": 3, "N": 4096, "D": 64, "modelled_bytes": 8000}
    row = sizes | {"kernel": "forward", "tile": [16, 32], "ms": 32.0}

    def some(rows: Any) -> None:
        rows[:] = [
            row | counts,
            row | {"ms": 24.0, "not_counted": "no permission"},
            sizes | {"kernel": "forward_sm90", "tile": [64, 64], "failed": "no room"},
            row | {"kernel": "backward"},
        ]

    change(results, "traffic_blocks_gpu", some)
    assert blocks.picture(results).values == {
        "model": [[16, 8000]],
        "counted": {"L2 cache": {"forward": [[16, 8400]]}, "HBM": {"forward": [[16, 800]]}},
        "ms": {"forward": [[16, 32.0], [16, 24.0]]},
    }
    points = [[64.0, 8.0], [16.0, 32.0], [16.0, 24.0], [64.0, 9.0]]
    assert blocks.fastest(points) == [[16.0, 24.0], [64.0, 8.0]]


def test_densities_that_failed_are_left_out(results: Path) -> None:
    def values() -> Any:
        return density.picture(results).values

    def fail(rows: Any) -> None:
        rows[0].pop("ms")
        rows[1]["flex"] = {"failed": "another result"}

    whole = values()
    change(results, "traffic_density", fail)
    assert values()["tileattn"] == whole["tileattn"] | {"forward": whole["tileattn"]["forward"][1:]}
    assert values()["flex"]["backward"] == whole["flex"]["backward"][1:]


@pytest.mark.parametrize("name", ["causal", "block-sparse"])
def test_the_drawn_tiles_are_those_of_the_mask(name: str) -> None:
    attn_mask, N, block = schedules.attention_masks()[name], schedules.N, schedules.BLOCK
    seen = attn_mask.visible(Tile(0, N, 0, N, PARTIAL))[0]
    side = N // block
    tiles = seen.reshape(side, block, side, block).swapaxes(1, 2)
    some, every = tiles.any((2, 3)), tiles.all((2, 3))
    kinds = np.where(every, FULL, np.where(some, PARTIAL, EMPTY))
    drawn = schedules.tiles(attn_mask)
    assert drawn["kinds"] == kinds.tolist()
    assert {EMPTY, PARTIAL, FULL} == set(kinds.ravel())
    assert drawn["row"] == np.flatnonzero(kinds[schedules.ROW]).tolist()
    assert drawn["column"] == np.flatnonzero(kinds[:, schedules.COLUMN]).tolist()


def test_labels_and_units() -> None:
    assert drawing.apart([3.0, 1.0, 1.5], 1.0) == pytest.approx([17 / 6, 5 / 6, 11 / 6])
    sizes = (12, 1500, 2.5e6, 999e9, 3e12)
    assert [drawing.amount(x) for x in sizes] == ["12 B", "1.5 kB", "2.5 MB", "999 GB", "3 TB"]
    assert [drawing.short(n) for n in (512, 65536, 1536)] == ["512", "64k", "1536"]
