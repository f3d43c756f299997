"""The pictures of the docs show what benchmarks/results and the schedules hold."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.report import RESULTS, load
from tileattn.algorithm.tiles import Tile
from tileattn.call.block_mask import EMPTY, FULL, PARTIAL
from tools import drawing, pages, pictures
from tools.pictures import roofline, schedules, speed


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
    named = [line.partition(" is stale")[0] for line in capsys.readouterr().out.splitlines()]
    assert [Path(path).name for path in named] == ["speed_light.svg", "speed_dark.svg"]
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
    assert f"{root / 'README.md'} is stale" in said
    assert f"{root / 'docs' / 'index.md'} is stale" in said


@pytest.mark.usefixtures("matplotlib_figure")
@pytest.mark.parametrize("name", pictures.MAKERS)
def test_the_values_alone_decide_what_is_drawn(name: str) -> None:
    picture = pictures.MAKERS[name](RESULTS)
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


def test_the_roofline_is_of_one_gpu(results: Path) -> None:
    """That of the ceilings: in another dtype if need be, and not at all if no grid is of it."""
    gpu = "accelerator"
    ours = ["gpu_ceilings"]
    for dtype, name in reversed(roofline.DTYPES.items()):
        ours += roofline.grids_of(dtype)
        for measured in ours:
            result = load(results, measured)
            result["machine"]["gpu"] = gpu
            (results / f"{measured}.json").write_text(json.dumps(result), encoding="utf-8")
        picture = roofline.picture(results)
        assert f"tileattn in {name} on an {gpu}" in picture.caption
        assert all(f"{grid}.json" in picture.caption for grid in roofline.grids_of(dtype))
    with pytest.raises(ValueError, match="no grid of both passes is"):
        roofline.measured_on(results, "another GPU")
