"""The picture of blocks shows the rows of its file, each with what it has."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools import blocks_picture, drawing

COUNTS = {"dram_read_bytes": 700, "dram_write_bytes": 100, "l2_bytes": 8400}


def row(kernel: str, tile: tuple[int, int], **more: Any) -> dict[str, Any]:
    """Row whose bytes halve where the queries of its tile double."""
    sizes = {"pass": "forward", "dtype": "fp16", "B": 2, "H": 3, "N": 4096, "D": 64}
    return sizes | {"kernel": kernel, "tile": tile, "modelled_bytes": 128_000 // tile[0], **more}


def rows() -> list[dict[str, Any]]:
    """Rows of both kernels; one was not counted and one failed."""
    return [
        row("forward", (16, 32), ms=32.0, **COUNTS),
        row("forward", (16, 64), ms=24.0, not_counted="no permission"),
        row("forward", (64, 32), ms=8.0, **COUNTS | {"l2_bytes": 1800}),
        row("forward_sm90", (128, 64), ms=6.0, **COUNTS | {"dram_read_bytes": 400}),
        row("forward_sm90", (128, 32), ms=5.0),
        row("forward_sm90", (256, 64), failed="no room"),
        row("backward", (512, 64), ms=1.0, **COUNTS),
    ]


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    text = json.dumps({"machine": {"gpu": "NVIDIA H200"}, "rows": rows})
    (folder / f"{blocks_picture.FILE}.json").write_text(text, encoding="utf-8")


@pytest.fixture
def picture(tmp_path: Path) -> drawing.Picture:
    write(tmp_path, rows())
    return blocks_picture.picture(tmp_path)


def test_each_row_is_drawn_with_what_it_has(picture: drawing.Picture) -> None:
    assert picture.values == {
        "model": [[16, 8000], [64, 2000], [128, 1000], [256, 500]],
        "counted": {
            "l2": {"forward": [[16, 8400], [64, 1800]], "forward_sm90": [[128, 8400]]},
            "device": {"forward": [[16, 800], [64, 800]], "forward_sm90": [[128, 500]]},
        },
        "ms": {
            "forward": [[16, 32.0], [16, 24.0], [64, 8.0]],
            "forward_sm90": [[128, 6.0], [128, 5.0]],
        },
    }


def test_the_line_takes_the_fastest_keys_for_each_number_of_queries() -> None:
    points = [[64.0, 8.0], [16.0, 32.0], [16.0, 24.0], [64.0, 9.0]]
    assert blocks_picture.fastest(points) == [[16.0, 24.0], [64.0, 8.0]]


def test_the_words_follow_from_the_rows(picture: drawing.Picture) -> None:
    assert picture.alt.endswith(
        "With 16 queries the model has 16.0 times the bytes of 256. "
        "Bytes of the level-2 cache are 0.90 to 8.40 times those of the model. "
        "Bytes of the device memory are 0.10 to 0.50 times those of the model. "
        "The portable kernel is fastest with 64 queries, 3.00 times as fast as with 16. "
        "The Hopper kernel is fastest with 128 queries."
    )
    for said in (
        "fp16 on an NVIDIA H200, B = 2, H = 3, N = 4096, D = 64",
        "filled marks on the left are bytes that the GPU counted",
        "`benchmarks/results/traffic_blocks_gpu.json`",
    ):
        assert said in picture.caption


def test_more_queries_that_are_slower_are_said_to_be(tmp_path: Path) -> None:
    write(tmp_path, [row("forward", (16, 32), ms=2.0), row("forward", (64, 32), ms=3.0)])
    said = "The portable kernel is fastest with 16 queries, 1.50 times as fast as with 64."
    assert blocks_picture.picture(tmp_path).alt.endswith(said)


def test_counts_that_nobody_made_are_not_spoken_of(tmp_path: Path) -> None:
    write(tmp_path, [row("forward", (16, 32), ms=2.0)])
    picture = blocks_picture.picture(tmp_path)
    assert picture.values["counted"] == {"l2": {}, "device": {}}
    assert "cache" not in picture.alt + picture.caption
    assert "times" not in picture.alt  # of one number of queries there is nothing to compare


def test_without_a_time_there_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(drawing.Missing, match=r"there is no traffic_blocks_gpu\.json"):
        blocks_picture.picture(tmp_path)
    for left in ([], [row("forward", (16, 32), failed="no room")], rows()[-1:]):
        write(tmp_path, left)
        with pytest.raises(drawing.Missing, match="has no time of a kernel"):
            blocks_picture.picture(tmp_path)


def test_marks_of_the_cache_are_filled_and_lines_are_those_of_the_model_and_the_fastest(
    picture: drawing.Picture, matplotlib_figure: Any
) -> None:
    figure = matplotlib_figure()
    picture.draw(figure, drawing.LIGHT, picture.values)
    shown: tuple[list[Any], list[Any]] = ([], [])
    for axis, lines in zip(figure.axes, shown, strict=True):
        for line in axis.lines:
            marks = line.get_linestyle() == "None"
            look = line.get_markerfacecolor() if marks else "line"
            lines.append((look, line.get_xydata().tolist()))
    values, (portable, hopper) = picture.values, drawing.LIGHT.hues[:2]
    l2, device = values["counted"]["l2"], values["counted"]["device"]
    assert shown[0] == [
        ("line", values["model"]),
        (portable, l2["forward"]),
        (hopper, l2["forward_sm90"]),
        ("none", device["forward"]),
        ("none", device["forward_sm90"]),
    ]
    assert shown[1] == [
        ("line", [[16, 24.0], [64, 8.0]]),
        (portable, values["ms"]["forward"]),
        ("line", [[128, 5.0]]),
        (hopper, values["ms"]["forward_sm90"]),
    ]


@pytest.mark.usefixtures("matplotlib_figure")
@pytest.mark.parametrize("theme", drawing.THEMES, ids=lambda theme: theme.name)
@pytest.mark.parametrize("kept", [slice(None), slice(2, 3), slice(3, 5)])
def test_what_there_is_of_the_rows_is_drawn_and_labelled(
    tmp_path: Path, theme: drawing.Theme, kept: slice
) -> None:
    write(tmp_path, rows()[kept])
    picture = blocks_picture.picture(tmp_path)
    drawn = drawing.svg(picture, theme)
    for label in ("model", "level-2 cache", "device memory", "queries of a tile"):
        assert f">{label}</text>" in drawn
    for kernel, name in blocks_picture.KERNELS.items():
        assert (f">{name}</text>" in drawn) is (kernel in picture.values["ms"])
