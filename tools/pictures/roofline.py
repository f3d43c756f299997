"""The roofline: TFLOP/s of each configuration by its arithmetic intensity."""

import math
from pathlib import Path
from typing import Any

from benchmarks import roofline
from benchmarks.report import Row, load
from tools.drawing import Picture, Theme, drawn_from, short

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
MARKERS = {"forward": "o", "backward": "s"}


def intensity(row: Row) -> float:
    """FLOP/byte where every array crosses HBM once."""
    configuration = roofline.configuration_of(row)
    return configuration.flops / roofline.least_bytes(configuration)


def standard_intensity(D: int) -> float:
    """FLOP/byte that standard attention cannot exceed forward, whatever N is.

    It writes and reads the scores, then the probabilities: 4 N^2 numbers of 2 bytes for 4 N^2 D
    FLOPs.
    """
    return D / 2


def grids_of(dtype: str) -> tuple[str, ...]:
    """Name the files of both passes in a dtype."""
    return tuple(f"gpu_{name}_{dtype}" for name in MARKERS)


def measured_on(results: Path, gpu: str) -> str:
    """Choose the first dtype whose files are of this GPU."""
    for dtype in DTYPES:
        if all(load(results, x)["machine"]["gpu"] == gpu for x in grids_of(dtype)):
            return dtype
    raise ValueError(
        f"gpu_ceilings.json is of an {gpu}, and no grid of both passes is; "
        "run `bench gpu --ceilings` on the GPU of the grids"
    )


def picture(results: Path) -> Picture:
    """Make the picture of tileattn in 16 bits under the ceilings of the same GPU."""
    result = load(results, "gpu_ceilings")
    gpu = result["machine"]["gpu"]
    dtype = measured_on(results, gpu)
    grids = grids_of(dtype)
    ceilings = roofline.ceilings_of(result)
    points = [
        [row["pass"], row["causal"], row["D"], row["N"], intensity(row), row["tflops"]["tileattn"]]
        for name in grids
        for row in load(results, name)["rows"]
        if "tileattn" in row["tflops"]
    ]
    ridge = ceilings.flops[dtype] / ceilings.nbytes
    compute_bound = sum(point[4] > ridge for point in points)
    standard = [[D, standard_intensity(D)] for D in sorted({point[2] for point in points})]
    memory_bound = sum(x < ridge for _, x in standard)
    return Picture(
        values={
            "tflops": ceilings.flops[dtype] / 1e12,
            "gbytes_per_second": ceilings.nbytes / 1e9,
            "points": points,
            "standard": standard,
        },
        size=(8.6, 4.8),
        draw=draw,
        alt="A roofline: TFLOP/s against arithmetic intensity, both axes logarithmic. "
        f"{compute_bound} of the {len(points)} points of tileattn are compute-bound. Standard "
        f"attention is memory-bound for {memory_bound} of {len(standard)} head dimensions.",
        caption=f"tileattn in {DTYPES[dtype]} on an {gpu}, each input read once and "
        "each result written once; the dotted lines are where standard attention ends. The roof is "
        "a matmul that was timed, which is not a limit of the hardware. "
        f"{drawn_from('gpu_ceilings', *grids)}",
    )


def draw(figure: Any, theme: Theme, values: Any) -> None:
    """Draw the roof, the configurations under it and where standard attention ends."""
    axis = figure.subplots()
    top, slope = values["tflops"], values["gbytes_per_second"] / 1e3
    ridge = top / slope
    left, right = 10, 2 * max(point[4] for point in values["points"])
    axis.plot([left, ridge, right], [slope * left, top, top], color=theme.ink)
    axis.text(right, 1.06 * top, f"matmul, {top:.0f} TFLOP/s", ha="right", va="bottom")
    start, above = 1.15 * left, 1.08 * slope
    along = math.degrees(math.atan(above))  # of a line through the origin, on any pair of scales
    style = {"rotation": along, "rotation_mode": "anchor", "transform_rotates_text": True}
    axis.text(start, above * start, f"copy, {values['gbytes_per_second']:.0f} GB/s", **style)
    for name, hue in zip(MARKERS, theme.hues, strict=False):
        for causal in (False, True):
            here = [point[4:] for point in values["points"] if point[:2] == [name, causal]]
            face = {"markerfacecolor": "none" if causal else hue, "markeredgecolor": hue}
            label = f"{name}, causal" if causal else name
            style = {"linestyle": "none", "marker": MARKERS[name], "label": label, **face}
            axis.plot(*zip(*here, strict=True), **style)
    for D, x in values["standard"]:
        axis.plot([x, x], [slope * left, min(top, slope * x)], color=theme.hues[2], linestyle=":")
        style = {"rotation": 90, "ha": "right", "va": "bottom", "color": theme.hues[2]}
        axis.text(0.98 * x, 1.05 * slope * left, f"standard, D = {D}", **style)
    _scales(axis, (left, right), (slope * left, 1.6 * top))
    axis.legend(loc="lower right")


def _scales(axis: Any, across: tuple[float, float], up: tuple[float, float]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlim(*across)
    axis.set_ylim(*up)
    ticks = [2**power for power in range(4, 24) if across[0] <= 2**power <= across[1]]
    axis.set_xticks(ticks, [short(n) for n in ticks])
    ticks = [n for n in (20, 50, 100, 200, 500, 1000, 2000) if up[0] <= n <= up[1]]
    axis.set_yticks(ticks, [str(n) for n in ticks])
    axis.set_yticks([], minor=True)
    axis.set_xlabel("arithmetic intensity, FLOP/byte (k = 1024)")
    axis.set_ylabel("TFLOP/s")
