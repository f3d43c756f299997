"""Bytes and run time by the query rows of a tile, after figure 2 (middle) of FlashAttention."""

from pathlib import Path
from typing import Any

from benchmarks.report import Row, load
from tools.drawing import Picture, Points, Theme, amount, drawn_from, label_ends, log_axes, plot

FILE = "traffic_blocks_gpu"
KERNELS = {"forward": "generic", "forward_sm90": "Hopper"}
MEMORIES = {"L2 cache": ("l2_bytes",), "HBM": ("dram_read_bytes", "dram_write_bytes")}


def picture(results: Path) -> Picture:
    result = load(results, FILE)
    rows = [row for row in result["rows"] if row["kernel"] in KERNELS and "ms" in row]
    ms, model = _lines(rows, ("ms",)), {row["tile"][0]: row["modelled_bytes"] for row in rows}
    counted = {name: _lines(rows, fields) for name, fields in MEMORIES.items()}
    best = (f"{KERNELS[k]} {min((ms, Br) for Br, ms in x)[1]}" for k, x in ms.items())
    sizes = ", ".join(f"{name} = {rows[0][name]}" for name in "BHND")
    return Picture(
        values={"model": sorted(map(list, model.items())), "counted": counted, "ms": ms},
        size=(8.6, 3.6),
        draw=draw,
        alt="Two charts, one of bytes and one of milliseconds, against the query rows of a tile, "
        f"all axes logarithmic. Fastest rows of each kernel: {', '.join(best)}.",
        caption=f"Forward in {rows[0]['dtype']} on an {result['machine']['gpu']}, {sizes}; filled "
        "marks on the left are bytes counted at the L2 cache, hollow ones at HBM. Tiles with the "
        "same rows differ in their keys; the lines on the right go through the fastest. "
        f"{drawn_from(FILE)}",
    )


def _lines(rows: list[Row], fields: tuple[str, ...]) -> dict[str, list[list[float]]]:
    """Return each kernel its points: rows of the tile, and a sum of fields where all were taken."""
    lines: dict[str, list[list[float]]] = {}
    for row in rows:
        if all(field in row for field in fields):
            point = [row["tile"][0], sum(row[field] for field in fields)]
            lines.setdefault(row["kernel"], []).append(point)
    return lines


def fastest(points: Points) -> list[list[float]]:
    """Keep the fastest tile for each number of query rows."""
    best: dict[float, float] = {}
    for Br, ms in points:
        best[Br] = min(ms, best.get(Br, ms))
    return [[Br, best[Br]] for Br in sorted(best)]


def draw(figure: Any, theme: Theme, values: Any) -> None:
    left, right = figure.subplots(1, 2)
    ticks = [Br for Br, _ in values["model"]]
    log_axes(left, ticks, map(str, ticks), margin=3.6, unit=amount)
    log_axes(right, ticks, map(str, ticks), margin=3.6, unit="{:g}".format, subs=(1, 2, 5))
    left.plot(*zip(*values["model"], strict=True), color=theme.ink, linewidth=1)
    ends = {"model": (values["model"][-1][1], theme.ink)}
    for name, lines in values["counted"].items():
        for kernel, points in lines.items():
            place = list(KERNELS).index(kernel)
            face = theme.hues[place] if name == "L2 cache" else "none"
            plot(left, theme, place, points, linestyle="none", markerfacecolor=face)
            ends[name] = max(points)[1], theme.ink
    label_ends(left, 1.15 * ticks[-1], ends, 1.4)
    ends = {}
    for kernel, points in values["ms"].items():
        place, line = list(KERNELS).index(kernel), fastest(points)
        plot(right, theme, place, line, marker="")
        plot(right, theme, place, points, linestyle="none")
        ends[KERNELS[kernel]] = line[-1][1], theme.hues[place]
    label_ends(right, 1.15 * ticks[-1], ends, 1.2)
    left.set_ylabel("bytes of a call")
    right.set_ylabel("milliseconds")
    for axis in (left, right):
        axis.set_xlabel("query rows of a tile")
