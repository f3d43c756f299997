"""The pictures of the docs show what benchmarks/results and the schedules hold."""

import copy
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import test_blocks_picture, test_density_picture
from tileattn.algorithm.block_mask import EMPTY, FULL, PARTIAL
from tileattn.algorithm.tiles import Tile
from tools import drawing, memory_picture, pictures, schedule_picture

CASES = ("plain", "tileattn")
Change = Callable[[str, Callable[[Any], None]], None]


def memory_rows() -> list[dict[str, Any]]:
    """Rows as ``bench memory`` writes them, of which the longest were not run."""
    rows: list[dict[str, Any]] = []
    for N in (512, 1024, 2048):
        for name in CASES:
            size = N * (N if name == "plain" else 64)
            row = {"contestant": name, "kind": "forward", "N": N, "inputs_bytes": 100}
            row |= {"needs_bytes": 100 + size}
            rows.append(row | ({"peak_bytes": size} if N < 2048 else {"not_run": "too long"}))
    return rows


def traffic_row() -> dict[str, Any]:
    """Row as ``bench traffic`` writes it."""
    counts = {"dram_read_bytes": 3000, "dram_write_bytes": 1000}
    return {"B": 2, "H": 4, "N": 512, "D": 64, "tileattn": counts, "plain": {"not_run": "no room"}}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the results, which a test may change, and look at the copy."""
    folder = tmp_path / "results"
    shutil.copytree(pictures.RESULTS, folder)
    monkeypatch.setattr(pictures, "RESULTS", folder)
    return folder


@pytest.fixture
def everything(results: Path) -> Path:
    """Results for every picture, those too that the project may not have."""
    made = {
        "memory_cpu": memory_rows(),
        "traffic": [traffic_row()],
        "traffic_blocks_gpu": test_blocks_picture.rows(),
        "traffic_density": test_density_picture.rows(),
    }
    for name, rows in made.items():
        result = {"machine": {"gpu": "NVIDIA H200"}, "rows": rows}
        (results / f"{name}.json").write_text(json.dumps(result), "utf-8")
    return results


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Copy the pages and their pictures, which a test may write."""
    folder = tmp_path / "root"
    shutil.copytree(pictures.ROOT / "docs", folder / "docs")
    shutil.copy(pictures.ROOT / "README.md", folder)
    return folder


def change(path: Path, how: Callable[[Any], None]) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    how(result["rows"])
    path.write_text(json.dumps(result), encoding="utf-8")


def slower(name: str) -> Callable[[Any], None]:
    """Change the speed of one contestant in one cell."""

    def how(rows: Any) -> None:
        rows[0]["tflops"][name] -= 0.01

    return how


def test_the_pictures_and_pages_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # a check needs none
    assert pictures.main(["--check"]) == 0


def test_a_changed_speed_makes_its_picture_stale(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(results / "gpu_backward_bf16.json", slower("cudnn"))
    assert pictures.main(["--check"]) == 1
    stale = [line for line in capsys.readouterr().out.splitlines() if "stale" in line]
    again = "is stale: python -m tools.pictures --write"
    assert stale == [f"docs/assets/speed_{name}.svg {again}" for name in ("dark", "light")]


def test_a_changed_ceiling_makes_the_roofline_stale(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lower(rows: Any) -> None:
        rows[-1]["gbytes_per_second"] -= 1

    change(results / "gpu_ceilings.json", lower)
    assert pictures.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert "roofline_light.svg is stale" in said
    assert "speed_light.svg" not in said


def test_words_that_the_results_no_longer_hold_make_the_pages_stale(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose(rows: Any) -> None:
        for row in rows:
            row["ratio_to"] = dict.fromkeys(row["ratio_to"], 0.5)

    change(results / "gpu_forward_bf16.json", lose)
    assert pictures.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert "README.md is stale" in said
    assert "docs/index.md is stale" in said


@pytest.mark.usefixtures("matplotlib_figure")
def test_writing_draws_what_is_stale_and_nothing_else(results: Path, root: Path) -> None:
    fresh = {path: path.stat().st_mtime_ns for path in (root / "docs").rglob("*.*")}
    change(results / "gpu_backward_bf16.json", slower("cudnn"))
    assert pictures.main(["--write"], root) == 0
    assert pictures.main(["--check"], root) == 0
    written = [path.name for path, time in fresh.items() if path.stat().st_mtime_ns != time]
    assert sorted(written) == ["speed_dark.svg", "speed_light.svg"]


def test_a_picture_without_data_is_left_out_and_said(
    results: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (results / "gpu_backward_bf16.json").unlink()
    assert pictures.main(["--check"], root) == 1
    assert pictures.main(["--write"], root) == 0
    assert "speed (there is no gpu_backward_bf16.json)" in capsys.readouterr().out.splitlines()[-1]
    assert pictures.main(["--check"], root) == 0
    assert not list((root / "docs" / "assets").glob("speed*"))
    assert "<!-- picture: speed -->\n<!-- end of picture -->" in (root / "README.md").read_text(
        "utf-8"
    )


@pytest.mark.usefixtures("matplotlib_figure")
def test_a_new_file_brings_its_pictures(everything: Path, root: Path) -> None:
    assert everything.exists()
    assert pictures.main(["--write"], root) == 0
    names = {path.name for path in (root / "docs" / "assets").glob("*.svg")}
    assert names == {f"{name}_{tone}.svg" for name in pictures.MAKERS for tone in ("dark", "light")}
    assert 'src="docs/assets/memory_light.svg"' in (root / "README.md").read_text("utf-8")
    for name in ("traffic", "blocks", "density"):
        shown = f"(assets/{name}_dark.svg#only-dark)"
        assert shown in (root / "docs" / "io.md").read_text("utf-8")


@pytest.mark.usefixtures("matplotlib_figure")
@pytest.mark.parametrize("name", pictures.MAKERS)
def test_the_same_values_give_the_same_file_and_others_another(everything: Path, name: str) -> None:
    picture = pictures.made(everything)[0][name]
    first, again = (drawing.svg(picture, drawing.LIGHT) for _ in range(2))
    assert first == again
    assert "<dc:date>" not in first
    assert drawing.digest_of(first) == picture.digest
    moved = picture._replace(values=nudged(picture.values))
    assert moved.digest != picture.digest
    assert drawing.svg(moved, drawing.LIGHT).replace(moved.digest, picture.digest) != first


def nudged(values: Any) -> Any:
    """Change one value: a number by a little, the kind of a tile to another."""
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


def test_an_unknown_place_is_refused() -> None:
    page = "<!-- picture: nothing -->\n<!-- end of picture -->"
    with pytest.raises(ValueError, match="there is no picture 'nothing'"):
        pictures.with_pictures(page, {}, "", html=True)


# --- each picture's values ----------------------------------------------------------------------


def test_a_result_that_differs_from_the_others_is_not_drawn(results: Path) -> None:
    def differ(rows: Any) -> None:
        rows[0]["off"] = {"fa4": 0.3}

    def lengths(name: str) -> list[float]:
        lines = pictures.made(results)[0]["speed"].values[0][-1]
        return [N for N, _ in lines[name]]

    before = copy.copy(lengths("fa4"))
    change(results / "gpu_forward_bf16.json", differ)
    assert lengths("fa4") == before[1:]
    assert lengths("cudnn") == before


def test_memory_that_was_not_measured_is_what_plain_attention_would_make(everything: Path) -> None:
    panel = dict(memory_picture.picture(everything).values)["CPU, forward"]
    assert panel["plain"][-2:] == [[1024, 1024**2, True], [2048, 2048**2, False]]
    assert panel["tileattn"][-1] == [1024, 64 * 1024, True]
    assert "CPU, forward: 16 times at N = 1024" in memory_picture.picture(everything).alt


def test_measured_bytes_are_those_of_one_head(everything: Path) -> None:
    assert pictures.made(everything)[0]["traffic"].values["measured"] == {"tileattn": [[512, 500]]}


def test_counted_bytes_are_compared_where_both_were_counted(everything: Path) -> None:
    def count(rows: Any) -> None:
        rows[0]["pytorch"] = {"dram_read_bytes": 30_000, "dram_write_bytes": 10_000}
        rows.append(rows[0] | {"N": 1024, "tileattn": {}})

    change(everything / "traffic.json", count)
    said = pictures.made(everything)[0]["traffic"].alt
    assert "over those of tileattn" not in said  # the longest of PyTorch is not one of tileattn
    change(everything / "traffic.json", lambda rows: rows.pop())
    said = pictures.made(everything)[0]["traffic"].alt
    assert said.endswith("over those of tileattn are 10 in PyTorch at N = 512.")


@pytest.mark.parametrize("name", ["causal", "block-sparse"])
def test_the_drawn_tiles_are_those_of_the_mask(name: str) -> None:
    attn_mask, N, block = (
        schedule_picture.sights()[name],
        schedule_picture.N,
        schedule_picture.BLOCK,
    )
    seen = attn_mask.visible(Tile(0, N, 0, N, PARTIAL))[0]
    side = N // block
    blocks = seen.reshape(side, block, side, block).swapaxes(1, 2)
    some, every = blocks.any((2, 3)), blocks.all((2, 3))
    kinds = np.where(every, FULL, np.where(some, PARTIAL, EMPTY))
    drawn = schedule_picture.tiles(attn_mask)
    assert drawn["kinds"] == kinds.tolist()
    assert {EMPTY, PARTIAL, FULL} == set(kinds.ravel())
    assert drawn["row"] == np.flatnonzero(kinds[schedule_picture.ROW]).tolist()
    assert drawn["column"] == np.flatnonzero(kinds[:, schedule_picture.COLUMN]).tolist()


# --- how they look ------------------------------------------------------------------------------


def contrast(one: str, other: str) -> float:
    """Contrast of two colours, as the Web Content Accessibility Guidelines define it."""

    def luminance(colour: str) -> float:
        parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ (0.2126, 0.7152, 0.0722))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", drawing.THEMES, ids=lambda theme: theme.name)
def test_lines_and_labels_stand_out_from_the_page(theme: drawing.Theme) -> None:
    for colour in (*theme.hues, theme.ink):
        assert contrast(colour, theme.background) >= 4.5
    assert contrast(theme.ink, theme.tones[PARTIAL]) >= 4.5
    assert contrast(theme.background, theme.tones[FULL]) >= 4.5
    for kind in (EMPTY, PARTIAL):
        assert contrast(theme.tones[kind], theme.tones[kind + 1]) >= 1.5


def test_labels_keep_their_order_their_mean_and_their_distance() -> None:
    assert drawing.apart([3.0, 1.0, 1.5], 1.0) == pytest.approx([17 / 6, 5 / 6, 11 / 6])
    assert drawing.apart([1.0, 5.0], 1.0) == [1.0, 5.0]
    assert drawing.apart_by_ratio([10.0, 10.0], 4.0) == pytest.approx([5.0, 20.0])
    assert drawing.apart([], 1.0) == []


def test_units() -> None:
    sizes = (12, 1500, 2.5e6, 999e9, 3e12)
    assert [drawing.amount(x) for x in sizes] == ["12 B", "1.5 kB", "2.5 MB", "999 GB", "3 TB"]
    assert [drawing.short(n) for n in (512, 1024, 65536, 1536)] == ["512", "1k", "64k", "1536"]
