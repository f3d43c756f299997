"""The roofline: how fast each cell of the grid could be by its bytes and by its products."""

import math
from pathlib import Path
from typing import Any

from benchmarks import roofline
from tools.drawing import Missing, Picture, Theme, load, short

GRIDS = ("gpu_forward_bf16", "gpu_backward_bf16")
SIZE = 2  # bytes of a number in bfloat16
MARKERS = {"forward": "o", "backward": "s"}

Row = dict[str, Any]


def intensity(row: Row) -> float:
    """Operations for each byte where every array crosses once."""
    cell = roofline.cell_of(row)
    return cell.flops / roofline.least_bytes(cell)


def standard_intensity(D: int) -> float:
    """Operations for each byte that standard attention cannot exceed forward, whatever N is.

    It writes and reads the scores, then the probabilities: four times N x N numbers.
    """
    return 4 * D / (4 * SIZE)


def picture(results: Path) -> Picture:
    """Make the picture of tileattn in bfloat16 under the ceilings of the same GPU."""
    ceilings = load(results, "gpu_ceilings")
    rows = [row for name in GRIDS for row in load(results, name)["rows"]]
    points = [
        [row["pass"], row["causal"], row["D"], row["N"], intensity(row), speed]
        for row in rows
        if (speed := row["tflops"].get("tileattn")) is not None
    ]
    top, bandwidth = _ceilings(ceilings["rows"])
    ridge = 1e12 * top / (1e9 * bandwidth)
    beyond = sum(point[4] > ridge for point in points)
    widths = sorted({point[2] for point in points})
    below = [D for D in widths if standard_intensity(D) < ridge]
    return Picture(
        values={
            "tflops": top,
            "gbytes_per_second": bandwidth,
            "points": points,
            "standard": [[D, standard_intensity(D)] for D in widths],
        },
        size=(8.6, 4.8),
        draw=draw,
        alt="A roofline: TFLOP/s against operations for each byte, both axes logarithmic. "
        "A slope, the bandwidth of the memory, meets a flat roof, the rate of a matrix product. "
        f"{beyond} of the {len(points)} points of tileattn lie to the right of where they meet. "
        f"Standard attention lies to the left of it for {len(below)} of {len(widths)} head "
        "dimensions.",
        caption=f"tileattn in bfloat16 on an {ceilings['machine']['gpu']}, each input read once "
        "and each result written once; the dotted lines are where standard attention "
        "ends. The roof is a product of matrices that was timed, which is not a limit of the "
        "hardware. Drawn from "
        + ", ".join(f"`benchmarks/results/{name}.json`" for name in ("gpu_ceilings", *GRIDS))
        + ".",
    )


def _ceilings(rows: list[Row]) -> tuple[float, float]:
    """Return TFLOP/s of the matrix product in bfloat16 and GB/s of a copy."""
    for row in rows:
        if row["ceiling"] == "matrix product" and row["dtype"] == "bf16":
            top = float(row["tflops"])
            break
    else:
        raise Missing("gpu_ceilings.json has no matrix product in bf16")
    for row in rows:
        if row["ceiling"] == "device copy":
            return top, float(row["gbytes_per_second"])
    raise Missing("gpu_ceilings.json has no device copy")


def draw(figure: Any, theme: Theme, values: Any) -> None:
    """Draw the roof, the cells under it and where standard attention ends."""
    axis = figure.subplots()
    top, slope = values["tflops"], values["gbytes_per_second"] / 1e3
    ridge = top / slope
    left, right = 10, 2 * max(point[4] for point in values["points"])
    axis.plot([left, ridge, right], [slope * left, top, top], color=theme.ink)
    axis.text(right, 1.06 * top, f"matrix product, {top:.0f} TFLOP/s", ha="right", va="bottom")
    start, above = 1.15 * left, 1.08 * slope
    along = math.degrees(math.atan(above))  # of a line through the origin, on any pair of scales
    style = {"rotation": along, "rotation_mode": "anchor", "transform_rotates_text": True}
    axis.text(start, above * start, f"copy, {values['gbytes_per_second']:.0f} GB/s", **style)
    for name, hue in zip(MARKERS, theme.hues, strict=False):
        for causal in (False, True):
            here = [point for point in values["points"] if point[:2] == [name, causal]]
            face = {"markerfacecolor": "none" if causal else hue, "markeredgecolor": hue}
            label = f"{name}, causal" if causal else name
            style = {"linestyle": "none", "marker": MARKERS[name], "label": label, **face}
            axis.plot([point[4] for point in here], [point[5] for point in here], **style)
    for D, intensity in values["standard"]:
        height = min(top, slope * intensity)
        look = {"color": theme.hues[2], "linestyle": ":"}
        axis.plot([intensity, intensity], [slope * left, height], **look)
        style = {"rotation": 90, "ha": "right", "va": "bottom", "color": theme.hues[2]}
        axis.text(0.98 * intensity, 1.05 * slope * left, f"standard, D = {D}", **style)
    _scales(axis, left, right, slope * left, 1.6 * top)
    axis.legend(loc="lower right", frameon=False)


def _scales(axis: Any, left: float, right: float, low: float, high: float) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlim(left, right)
    axis.set_ylim(low, high)
    ticks = [2**power for power in range(4, 24) if left <= 2**power <= right]
    axis.set_xticks(ticks, [short(n) for n in ticks])
    ticks = [n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000) if low <= n <= high]
    axis.set_yticks(ticks, [str(n) for n in ticks])
    axis.set_yticks([], minor=True)
    axis.set_xlabel("operations for each byte (k = 1024)")
    axis.set_ylabel("TFLOP/s")
