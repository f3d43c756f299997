"""Run time by the density of a block-sparse mask, after figure 2 (right) of FlashAttention."""

from pathlib import Path
from typing import Any

from tools.drawing import Missing, Picture, Theme, apart_by_ratio, load

FILE = "traffic_density"
PASSES = ("forward", "backward")
MARKERS = ("o", "s")

Lines = dict[str, list[list[float]]]


def picture(results: Path) -> Picture:
    """Make the picture of one problem, a line for each pass that was timed twice or more."""
    result = load(results, FILE)
    rows = [row for row in result["rows"] if "ms" in row]
    lines = {
        name: sorted([row["density"], row["ms"]] for row in rows if row["pass"] == name)
        for name in PASSES
    }
    lines = {name: line for name, line in lines.items() if len(line) > 1}
    if not lines:
        raise Missing(f"{FILE}.json has no pass that was timed at two densities")
    sizes = ", ".join(f"{name} = {rows[0][name]}" for name in "BHND")
    return Picture(
        values=lines,
        size=(8.6, 3.6),
        draw=draw,
        alt="A line chart of milliseconds against the density of a block-sparse mask, both axes "
        f"logarithmic, one line for each pass. {_said(lines)}",
        caption=f"Blocks drawn at random, in {rows[0]['dtype']} on an {result['machine']['gpu']}, "
        f"{sizes}; the dotted lines are time in proportion to the density, from the densest mask "
        f"down. Drawn from `benchmarks/results/{FILE}.json`.",
    )


def percent(share: float) -> str:
    """Write a share with three digits."""
    return f"{100 * share:.3g}%"


def _said(lines: Lines) -> str:
    """Say what the sparsest mask saves of the time of the densest."""
    said = []
    for name, line in lines.items():
        (low, short), (high, long) = line[0], line[-1]
        said.append(
            f"With {percent(low)} of the blocks a {name} pass is {long / short:.1f} times as fast "
            f"as with {percent(high)}, where in proportion it would be {high / low:.1f} times."
        )
    return " ".join(said)


def draw(figure: Any, theme: Theme, values: Any) -> None:
    """Draw each pass, and below it what a mask would take that costs nothing."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis = figure.subplots()
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    heights = apart_by_ratio([line[-1][1] for line in values.values()], 1.35)
    for (name, line), height in zip(values.items(), heights, strict=True):
        place = PASSES.index(name)
        hue = theme.hues[place]
        (low, _), (high, ms) = line[0], line[-1]
        axis.plot([low, high], [ms * low / high, ms], color=hue, linestyle=":", linewidth=1)
        axis.plot(*zip(*line, strict=True), color=hue, marker=MARKERS[place])
        axis.text(1.1 * high, height, name, color=hue, va="center", fontweight="bold")
    densities = sorted({density for line in values.values() for density, _ in line})
    axis.set_xticks(densities, [percent(density) for density in densities])
    axis.set_xticks([], minor=True)
    axis.set_xlim(0.9 * densities[0], 1.6 * densities[-1])
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("share of the blocks that are seen")
    axis.set_ylabel("milliseconds")
