"""Peak memory by the length of the sequence, plain attention beside tileattn."""

from pathlib import Path
from typing import Any

from tools.drawing import Missing, Picture, Theme, amount, load, short

FILES = {"memory_cpu": "CPU", "memory_gpu": "GPU"}
PASSES = {"forward": "forward", "both": "forward and backward"}
NAMES = {"tileattn": "tileattn", "plain": "plain"}
MARKERS = ("o", "s")

Panel = dict[str, list[list[Any]]]


def picture(results: Path) -> Picture:
    """Make the picture from the files that are there, one panel for each device and pass."""
    there = [name for name in FILES if (results / f"{name}.json").exists()]
    if not there:
        raise Missing(f"there is no {' and no '.join(f'{name}.json' for name in FILES)}")
    panels: dict[str, Panel] = {}
    for name in there:
        for row in load(results, name)["rows"]:
            size = needed(row)
            if row["contestant"] in NAMES and size is not None:
                panel = panels.setdefault(f"{FILES[name]}, {PASSES[row['kind']]}", {})
                point = [row["N"], size, "peak_bytes" in row]
                panel.setdefault(row["contestant"], []).append(point)
    panels = {title: panel for title, panel in panels.items() if set(panel) == set(NAMES)}
    if not panels:
        raise Missing(f"{' and '.join(there)} do not have both contestants")
    return Picture(
        values=list(panels.items()),
        size=(8.6, 3.2 * -(-len(panels) // 2)),
        draw=draw,
        alt="Line charts of peak memory against the length of the sequence, both axes "
        f"logarithmic, plain attention beside tileattn. {_said(panels)}",
        caption="Peak memory beyond the inputs; hollow marks are what plain attention would need "
        "where it did not run. Drawn from "
        + " and ".join(f"`benchmarks/results/{name}.json`" for name in there)
        + ".",
    )


def needed(row: dict[str, Any]) -> int | None:
    """Bytes beyond the inputs: as measured, or of the arrays that plain attention would make.

    For tileattn, whose arrays are its results alone, what was not measured is not known.
    """
    if "peak_bytes" in row:
        return int(row["peak_bytes"])
    if row["contestant"] == "plain":
        return int(row["needs_bytes"]) - int(row["inputs_bytes"])
    return None


def _said(panels: dict[str, Panel]) -> str:
    """Say how far apart the two are at the greatest length that both have."""
    said = []
    for title, panel in panels.items():
        plain, tiled = ({N: size for N, size, _ in panel[name]} for name in ("plain", "tileattn"))
        longest = max(plain.keys() & tiled.keys(), default=None)
        if longest is not None:
            times = plain[longest] / tiled[longest]
            said.append(f"{title}: {times:.0f} times at N = {longest}")
    return (
        "What plain attention takes, or would take where it did not run, over what tileattn takes: "
        f"{'; '.join(said)}."
    )


def draw(figure: Any, theme: Theme, values: Any) -> None:
    """Draw the panels, two beside each other."""
    columns = min(2, len(values))
    axes = figure.subplots(-(-len(values) // columns), columns, squeeze=False).ravel()
    for axis, (title, panel) in zip(axes, values, strict=False):
        _panel(axis, theme, panel)
        axis.set_title(title)
        axis.set_xlabel("length of the sequence N (k = 1024)")
        axis.set_ylabel("peak beyond the inputs")
    for axis in axes[len(values) :]:
        axis.set_visible(False)


def _panel(axis: Any, theme: Theme, panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    lengths = sorted({row[0] for rows in panel.values() for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    for place, name in enumerate(NAMES):
        rows = sorted(panel[name])
        hue = theme.hues[place]
        axis.plot([row[0] for row in rows], [row[1] for row in rows], color=hue)
        for measured, face in ((True, hue), (False, "none")):
            marked = [row for row in rows if row[2] is measured]
            look = {"marker": MARKERS[place], "linestyle": "none", "markerfacecolor": face}
            xs, ys = [row[0] for row in marked], [row[1] for row in marked]
            axis.plot(xs, ys, markeredgecolor=hue, **look)
        axis.text(
            1.15 * rows[-1][0], rows[-1][1], NAMES[name], color=hue, va="center", fontweight="bold"
        )
    ticks = lengths[:: 1 + len(lengths) // 8]
    axis.set_xticks(ticks, [short(N) for N in ticks])
    axis.set_xlim(0.8 * lengths[0], 4 * lengths[-1])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda size, _: amount(size)))
