"""The picture of densities shows the rows of its file that were timed."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools import density_picture, drawing


def row(name: str, density: float, **more: Any) -> dict[str, Any]:
    sizes = {"pass": name, "dtype": "fp16", "B": 1, "H": 3, "N": 16384, "D": 64}
    return sizes | {"density": density, "modelled_bytes": 1000, **more}


def rows() -> list[dict[str, Any]]:
    """Rows of both passes, of which one failed and one was not timed."""
    return [
        row("forward", 1.0, ms=8.0, flex={"ms": 12.0, "difference": 1e-3}),
        row("forward", 0.125, ms=2.0, flex={"ms": 5.0, "difference": 1e-3}),
        row("forward", 0.5, failed="no room"),
        row("backward", 0.0625),
        row("backward", 0.25, ms=6.0),
        row("backward", 1.0, ms=21.0, flex={"failed": "no room"}),
    ]


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    text = json.dumps({"machine": {"gpu": "NVIDIA H200"}, "rows": rows})
    (folder / f"{density_picture.FILE}.json").write_text(text, encoding="utf-8")


def test_rows_that_were_timed_are_drawn_from_the_sparsest_on(tmp_path: Path) -> None:
    write(tmp_path, rows())
    assert density_picture.picture(tmp_path).values == {
        "tileattn": {
            "forward": [[0.125, 2.0], [1.0, 8.0]],
            "backward": [[0.25, 6.0], [1.0, 21.0]],
        },
        "flex": {"forward": [[0.125, 5.0], [1.0, 12.0]]},
    }


def test_the_words_follow_from_the_rows(tmp_path: Path) -> None:
    write(tmp_path, rows())
    picture = density_picture.picture(tmp_path)
    assert picture.alt.endswith(
        "With 12.5% of the blocks a forward pass is 4.0 times as fast as with 100%, where in "
        "proportion it would be 8.0 times. "
        "With 25% of the blocks a backward pass is 3.5 times as fast as with 100%, where in "
        "proportion it would be 4.0 times. "
        "FlexAttention takes 1.50 to 2.50 times as long in a forward pass."
    )
    assert "hollow marks are FlexAttention" in picture.caption
    assert "fp16 on an NVIDIA H200, B = 1, H = 3, N = 16384, D = 64" in picture.caption
    assert "`benchmarks/results/traffic_density.json`" in picture.caption


def test_a_pass_with_one_time_has_no_line(tmp_path: Path) -> None:
    write(tmp_path, rows()[1:])
    picture = density_picture.picture(tmp_path)
    assert list(picture.values["tileattn"]) == ["backward"]
    assert picture.values["flex"] == {}
    assert "forward" not in picture.alt
    assert "Flex" not in picture.alt + picture.caption


def test_without_two_times_there_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(drawing.Missing, match=r"there is no traffic_density\.json"):
        density_picture.picture(tmp_path)
    for left in ([], rows()[1:5], [row("forward", 1.0), row("forward", 0.5)]):
        write(tmp_path, left)
        with pytest.raises(drawing.Missing, match="no pass that was timed at two densities"):
            density_picture.picture(tmp_path)


@pytest.mark.parametrize("theme", drawing.THEMES, ids=lambda theme: theme.name)
def test_a_dotted_line_leads_from_the_densest_down_in_proportion(
    tmp_path: Path, theme: drawing.Theme, matplotlib_figure: Any
) -> None:
    figure = matplotlib_figure()
    write(tmp_path, rows())
    picture = density_picture.picture(tmp_path)
    picture.draw(figure, theme, picture.values)
    (axis,) = figure.axes
    drawn = [(line.get_linestyle(), line.get_xydata().tolist()) for line in axis.lines]
    assert drawn == [
        (":", [[0.125, 1.0], [1.0, 8.0]]),
        ("-", [[0.125, 2.0], [1.0, 8.0]]),
        (":", [[0.25, 5.25], [1.0, 21.0]]),
        ("-", [[0.25, 6.0], [1.0, 21.0]]),
        ("None", [[0.125, 5.0], [1.0, 12.0]]),
    ]
    assert [label.get_text() for label in axis.texts] == ["forward", "backward"]
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["12.5%", "25%", "100%"]
