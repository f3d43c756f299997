"""Peak memory by sequence length, of naive attention and tileattn."""

from pathlib import Path
from typing import Any

from benchmarks.report import Row, load
from tools.drawing import (
    N_LABEL,
    Picture,
    Theme,
    amount,
    drawn_from,
    label_ends,
    log_axes,
    plot,
    short,
)

FILES = {"memory_cpu": "CPU", "memory_gpu": "GPU"}
PASSES = {"forward": "forward", "both": "forward and backward"}
NAMES = ("tileattn", "naive")

Panel = dict[str, list[list[Any]]]


def picture(results: Path) -> Picture:
    panels: dict[str, Panel] = {}
    for name, device in FILES.items():
        for row in load(results, name)["rows"]:
            size = peak(row)
            if size is not None:
                panel = panels.setdefault(f"{device}, {PASSES[row['pass']]}", {})
                point = [row["N"], size, "peak_bytes" in row]
                panel.setdefault(row["implementation"], []).append(point)
    return Picture(
        values=list(panels.items()),
        size=(8.6, 3.2 * -(-len(panels) // 2)),
        draw=draw,
        alt="Line charts of peak memory against sequence length, both axes logarithmic, naive "
        f"attention beside tileattn. {_said(panels)}",
        caption="Peak memory beyond the inputs; hollow marks are what naive attention would need "
        f"where it did not run. {drawn_from(*FILES)}",
    )


def peak(row: Row) -> int | None:
    """Bytes beyond the inputs: measured, or the arrays that naive attention would allocate.

    For tileattn, whose workspace is unknown without a run, only what was measured counts.
    """
    if "peak_bytes" in row:
        return int(row["peak_bytes"])
    if row["implementation"] == "naive":
        return int(row["needs_bytes"]) - int(row["inputs_bytes"])
    return None


def _said(panels: dict[str, Panel]) -> str:
    """Compare both at the greatest length that both have."""
    said = []
    for title, panel in panels.items():
        naive, tiled = ({N: size for N, size, _ in panel[name]} for name in ("naive", "tileattn"))
        N = max(naive.keys() & tiled.keys())
        said.append(f"{title}: {naive[N] / tiled[N]:.0f} times at N = {N}")
    return f"Naive attention needs, measured or computed, more memory: {'; '.join(said)}."


def draw(figure: Any, theme: Theme, values: Any) -> None:
    axes = figure.subplots(-(-len(values) // 2), 2, squeeze=False).ravel()
    for axis, (title, panel) in zip(axes, values, strict=True):
        _panel(axis, theme, panel)
        axis.set_title(title)
        axis.set_xlabel(N_LABEL)
        axis.set_ylabel("peak beyond the inputs")


def _panel(axis: Any, theme: Theme, panel: Panel) -> None:
    lengths = sorted({point[0] for points in panel.values() for point in points})
    ticks = lengths[:: 1 + len(lengths) // 8]
    log_axes(axis, ticks, map(short, ticks), margin=6, unit=amount)
    for place, name in enumerate(NAMES):
        points = sorted(panel[name])
        plot(axis, theme, place, [point[:2] for point in points], marker="")
        for measured, face in ((True, theme.hues[place]), (False, "none")):
            marked = [point[:2] for point in points if point[2] is measured]
            if marked:
                plot(axis, theme, place, marked, linestyle="none", markerfacecolor=face)
        N, size, _ = points[-1]
        label_ends(axis, 1.15 * N, {name: (size, theme.hues[place])}, 1)
