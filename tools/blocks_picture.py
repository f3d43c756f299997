"""Bytes and run time by the queries of a tile, after figure 2 (middle) of FlashAttention."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools.drawing import Missing, Picture, Theme, amount, apart_by_ratio, load

FILE = "traffic_blocks_gpu"
KERNELS = {"forward": "portable", "forward_sm90": "Hopper"}
MARKERS = ("o", "s")
MEMORIES = {"l2": "level-2 cache", "device": "device memory"}

Row = dict[str, Any]
Points = list[list[float]]
Lines = dict[str, Points]


def picture(results: Path) -> Picture:
    """Make the picture of one problem: the model, what each kernel moved, and its time."""
    result = load(results, FILE)
    rows = [row for row in result["rows"] if row["kernel"] in KERNELS]
    model = {(row["tile"][0], row["modelled_bytes"]) for row in rows}
    values: dict[str, Any] = {
        "model": [list(point) for point in sorted(model)],
        "counted": {name: _lines(rows, COUNTS[name]) for name in MEMORIES},
        "ms": _lines(rows, lambda row: row.get("ms")),
    }
    if not values["ms"]:
        raise Missing(f"{FILE}.json has no time of a kernel")
    caption = f"Forward in {rows[0]['dtype']} on an {result['machine']['gpu']}, "
    caption += ", ".join(f"{name} = {rows[0][name]}" for name in "BHND")
    if any(values["counted"].values()):
        caption += (
            "; filled marks on the left are bytes that the GPU counted at its level-2 cache, "
            "hollow ones those of device memory"
        )
    return Picture(
        values=values,
        size=(8.6, 3.6),
        draw=draw,
        alt="Two charts, one of bytes and one of milliseconds, against the queries of a tile, all "
        f"axes logarithmic. {' '.join(_said(values, rows))}",
        caption=f"{caption}. Tiles with the same number of queries differ in their keys; the lines "
        f"on the right go through the fastest. Drawn from `benchmarks/results/{FILE}.json`.",
    )


def _l2_bytes(row: Row) -> int | None:
    return row.get("l2_bytes")


def _device_bytes(row: Row) -> int | None:
    """Bytes that a kernel read and wrote."""
    if "dram_read_bytes" not in row:
        return None
    return int(row["dram_read_bytes"]) + int(row["dram_write_bytes"])


COUNTS: dict[str, Callable[[Row], int | None]] = {"l2": _l2_bytes, "device": _device_bytes}


def _lines(rows: list[Row], value: Callable[[Row], float | None]) -> Lines:
    """Pair the queries of each row with its value, where it has one, for each kernel."""
    lines: Lines = {}
    for row in rows:
        found = value(row)
        if found is not None:
            lines.setdefault(row["kernel"], []).append([row["tile"][0], found])
    return lines


def fastest(points: Points) -> Points:
    """Keep the least time for each number of queries."""
    least: dict[float, float] = {}
    for queries, ms in sorted(points):
        least.setdefault(queries, ms)
    return [list(point) for point in least.items()]


def _said(values: Any, rows: list[Row]) -> Iterator[str]:
    """Say what more queries are worth in the model and in time, and how the counts compare."""
    (few, most), (many, least) = values["model"][0], values["model"][-1]
    if few < many:
        yield f"With {few} queries the model has {most / least:.1f} times the bytes of {many}."
    for name, memory in MEMORIES.items():
        pairs = [(COUNTS[name](row), row["modelled_bytes"]) for row in rows]
        ratios = [counted / modelled for counted, modelled in pairs if counted is not None]
        if ratios:
            span = f"{min(ratios):.2f} to {max(ratios):.2f}"
            yield f"Bytes of the {memory} are {span} times those of the model."
    for name, points in values["ms"].items():
        line = sorted((ms, queries) for queries, ms in fastest(points))
        (best, at), (worst, slow) = line[0], line[-1]
        gain = f", {worst / best:.2f} times as fast as with {slow}" if slow != at else ""
        yield f"The {KERNELS[name]} kernel is fastest with {at} queries{gain}."


def draw(figure: Any, theme: Theme, values: Any) -> None:
    """Draw bytes on the left and time on the right."""
    left, right = figure.subplots(1, 2)
    _bytes(left, theme, values["model"], values["counted"])
    _times(right, theme, values["ms"])
    ticks = sorted({queries for queries, _ in values["model"]})
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(queries) for queries in ticks])
        axis.set_xticks([], minor=True)
        axis.set_xlim(0.85 * ticks[0], 3.6 * ticks[-1])
        axis.set_xlabel("queries of a tile")


def _look(theme: Theme, kernel: str, *, filled: bool = True) -> dict[str, Any]:
    place = list(KERNELS).index(kernel)
    hue = theme.hues[place]
    face = hue if filled else "none"
    return {"marker": MARKERS[place], "markeredgecolor": hue, "markerfacecolor": face}


def _bytes(axis: Any, theme: Theme, model: Points, counted: dict[str, Lines]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axis.set_yscale("log")
    axis.plot(*zip(*model, strict=True), color=theme.ink, linewidth=1)
    ends = {"model": model[-1][1]}
    for name, lines in counted.items():
        for kernel, points in lines.items():
            look = _look(theme, kernel, filled=name == "l2")
            axis.plot(*zip(*points, strict=True), linestyle="none", **look)
            ends[MEMORIES[name]] = max(points)[1]
    heights = apart_by_ratio(list(ends.values()), 1.4)
    for label, height in zip(ends, heights, strict=True):
        axis.text(1.15 * model[-1][0], height, label, va="center", fontsize=7.5)
    axis.set_ylabel("bytes of a call")
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda size, _: amount(size)))


def _times(axis: Any, theme: Theme, times: Lines) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_yscale("log")
    end = max(queries for points in times.values() for queries, _ in points)
    lines = {name: fastest(points) for name, points in times.items()}
    heights = apart_by_ratio([line[-1][1] for line in lines.values()], 1.2)
    for (name, line), height in zip(lines.items(), heights, strict=True):
        look = _look(theme, name)
        hue = look["markeredgecolor"]
        axis.plot(*zip(*line, strict=True), color=hue)
        axis.plot(*zip(*times[name], strict=True), linestyle="none", **look)
        style = {"color": hue, "fontsize": 7.5, "fontweight": "bold", "va": "center"}
        axis.text(1.15 * end, height, KERNELS[name], **style)
    axis.set_ylabel("milliseconds")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
    axis.yaxis.set_minor_locator(NullLocator())
