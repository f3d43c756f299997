"""Run time by the density of a block mask, after figure 2 (right) of FlashAttention."""

from pathlib import Path
from typing import Any

from benchmarks.report import load
from tools.drawing import Picture, Theme, drawn_from, label_ends, log_axes, plot

FILE = "traffic_density"
PASSES = ("forward", "backward")


def picture(results: Path) -> Picture:
    result = load(results, FILE)
    rows = sorted((row for row in result["rows"] if "ms" in row), key=lambda row: row["density"])
    values: dict[str, Any] = {"tileattn": {}, "flex": {}}
    for row in rows:
        for name, timed in (("tileattn", row), ("flex", row.get("flex", {}))):
            if "ms" in timed:
                points = values[name].setdefault(row["pass"], [])
                points.append([row["density"], timed["ms"]])
    sizes = ", ".join(f"{name} = {rows[0][name]}" for name in "BHND")
    said = []
    for name in PASSES:
        (low, short), (high, long) = (values["tileattn"][name][end] for end in (0, -1))
        said.append(f"{long / short:.1f} times faster at {low:.3g} than at {high:.3g} {name}")
    return Picture(
        values=values,
        size=(8.6, 3.6),
        draw=draw,
        alt="A line chart of milliseconds against the density of a block mask, both axes "
        f"logarithmic, one line for each pass. tileattn is {' and '.join(said)}.",
        caption=f"Random blocks, in {rows[0]['dtype']} on an {result['machine']['gpu']}, {sizes}. "
        "The dotted lines are proportional to the density; hollow marks are FlexAttention, "
        f"compiled by PyTorch. {drawn_from(FILE)}",
    )


def draw(figure: Any, theme: Theme, values: Any) -> None:
    """Draw both passes, and below each a time proportional to the density."""
    axis, lines = figure.subplots(), values["tileattn"]
    densities = sorted({density for line in lines.values() for density, _ in line})
    percents = [f"{100 * density:.3g}%" for density in densities]
    log_axes(axis, densities, percents, margin=1.6, unit="{:g}".format, subs=(1, 2, 5))
    ends = {}
    for place, name in enumerate(PASSES):
        (low, _), (high, ms) = lines[name][0], lines[name][-1]
        proportional = [[low, ms * low / high], [high, ms]]
        plot(axis, theme, place, proportional, marker="", linestyle=":", linewidth=1)
        plot(axis, theme, place, lines[name])
        plot(axis, theme, place, values["flex"][name], markerfacecolor="none", linestyle="none")
        ends[name] = ms, theme.hues[place]
    label_ends(axis, 1.1 * densities[-1], ends, 1.35)
    axis.set_xlabel("density of the block mask")
    axis.set_ylabel("milliseconds")
