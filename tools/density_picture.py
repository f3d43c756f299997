"""Run time by the density of a block-sparse mask, after figure 2 (right) of FlashAttention."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tools.drawing import Missing, Picture, Theme, apart_by_ratio, load

FILE = "traffic_density"
PASSES = ("forward", "backward")
MARKERS = ("o", "s")

Lines = dict[str, list[list[Any]]]


def picture(results: Path) -> Picture:
    """Make the picture of one problem, a line for each pass that was timed twice or more."""
    result = load(results, FILE)
    rows = [row for row in result["rows"] if "ms" in row]
    lines = _lines((row["pass"], row["density"], row["ms"]) for row in rows)
    if not lines:
        raise Missing(f"{FILE}.json has no pass that was timed at two densities")
    timed = [row for row in rows if "ms" in row.get("flex", {})]
    flex = _lines((row["pass"], row["density"], row["flex"]["ms"]) for row in timed)
    sizes = ", ".join(f"{name} = {rows[0][name]}" for name in "BHND")
    caption = f"Blocks drawn at random, in {rows[0]['dtype']} on an {result['machine']['gpu']}, "
    caption += f"{sizes}; the dotted lines are time in proportion to the density, from the densest "
    caption += "mask down"
    if flex:
        caption += ", hollow marks are FlexAttention, compiled by PyTorch"
    return Picture(
        values={"tileattn": lines, "flex": flex},
        size=(8.6, 3.6),
        draw=draw,
        alt="A line chart of milliseconds against the density of a block-sparse mask, both axes "
        f"logarithmic, one line for each pass. {' '.join((*_said(lines), *_beside(lines, flex)))}",
        caption=f"{caption}. Drawn from `benchmarks/results/{FILE}.json`.",
    )


def _lines(timed: Iterable[tuple[str, float, float]]) -> Lines:
    """Give each pass the line through its densities; nothing for one."""
    lines: Lines = {name: [] for name in PASSES}
    for name, density, ms in timed:
        lines[name].append([density, ms])
    return {name: sorted(line) for name, line in lines.items() if len(line) > 1}


def percent(share: float) -> str:
    """Write a share with three digits."""
    return f"{100 * share:.3g}%"


def _said(lines: Lines) -> Iterator[str]:
    """Say what the sparsest mask saves of the time of the densest."""
    for name, line in lines.items():
        (low, short), (high, long) = line[0], line[-1]
        yield (
            f"With {percent(low)} of the blocks a {name} pass is {long / short:.1f} times as fast "
            f"as with {percent(high)}, where in proportion it would be {high / low:.1f} times."
        )


def _beside(lines: Lines, flex: Lines) -> Iterator[str]:
    """Say how much longer FlexAttention takes."""
    for name, line in flex.items():
        ours = dict(lines.get(name, []))
        ratios = [ms / ours[density] for density, ms in line if density in ours]
        if ratios:
            span = f"{min(ratios):.2f} to {max(ratios):.2f}"
            yield f"FlexAttention takes {span} times as long in a {name} pass."


def draw(figure: Any, theme: Theme, values: Any) -> None:
    """Draw each pass, and below it what a mask would take that costs nothing."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis = figure.subplots()
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    lines = values["tileattn"]
    heights = apart_by_ratio([line[-1][1] for line in lines.values()], 1.35)
    for (name, line), height in zip(lines.items(), heights, strict=True):
        place = PASSES.index(name)
        hue = theme.hues[place]
        (low, _), (high, ms) = line[0], line[-1]
        axis.plot([low, high], [ms * low / high, ms], color=hue, linestyle=":", linewidth=1)
        axis.plot(*zip(*line, strict=True), color=hue, marker=MARKERS[place])
        axis.text(1.1 * high, height, name, color=hue, va="center", fontweight="bold")
    for name, line in values["flex"].items():
        place = PASSES.index(name)
        look = {"marker": MARKERS[place], "markerfacecolor": "none", "linestyle": "none"}
        axis.plot(*zip(*line, strict=True), markeredgecolor=theme.hues[place], **look)
    densities = sorted({density for line in lines.values() for density, _ in line})
    axis.set_xticks(densities, [percent(density) for density in densities])
    axis.set_xticks([], minor=True)
    axis.set_xlim(0.9 * densities[0], 1.6 * densities[-1])
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("share of the blocks that are seen")
    axis.set_ylabel("milliseconds")
