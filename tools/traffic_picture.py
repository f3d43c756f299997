"""Bytes between slow and fast memory: three algorithms in the model, and what was measured."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tileattn import traffic
from tileattn.problem import Problem, parse
from tools.drawing import Missing, Picture, Theme, amount, apart_by_ratio, load, short

ALGORITHMS = {"flash2": "FlashAttention-2", "standard": "standard", "flash1": "FlashAttention"}
MARKERS = ("o", "s", "^")
MEASURED = "traffic_gpu"
LENGTHS = tuple(2**power for power in range(9, 17))
PASSES = ("forward", "backward")
D = 128
TILE = (128, 128)

Row = dict[str, Any]


def problem(N: int) -> Problem:
    """Make one head in bfloat16, whose arrays take no memory."""
    x = np.broadcast_to(np.zeros((), ml_dtypes.bfloat16), (1, 1, N, D))
    return parse(x, x, x, {})[0]


def picture(results: Path) -> Picture:
    """Make the picture, with the measured bytes where their file exists."""
    modelled = getattr(traffic, "modelled", None)
    if modelled is None:
        raise Missing("tileattn.traffic has no modelled()")
    values: dict[str, Any] = {
        kind: {
            algorithm: [[N, modelled(problem(N), TILE, algorithm, kind).nbytes] for N in LENGTHS]
            for algorithm in ALGORITHMS
        }
        for kind in PASSES
    }
    there = (results / f"{MEASURED}.json").exists()
    rows = load(results, MEASURED)["rows"] if there else []
    measured = {kind: _measured(rows, kind) for kind in PASSES}
    seen = "dots are what a GPU was seen to move, by head" if any(measured.values()) else ""
    drawn = f", and `benchmarks/results/{MEASURED}.json`" if seen else ""
    return Picture(
        values={"modelled": values, "measured": measured},
        size=(8.6, 3.6),
        draw=draw,
        alt="Line charts of the bytes that one head moves against the length of the sequence, "
        f"both axes logarithmic, forward and backward. {_said(values)}",
        caption=f"One head in bfloat16, D = {D}, tiles of {TILE[0]} x {TILE[1]}"
        f"{'; ' if seen else ''}{seen}. Drawn from `tileattn.traffic.modelled`{drawn}.",
    )


def _measured(rows: list[Row], kind: str) -> list[list[Any]]:
    """Pick what the picture can show: length and bytes of a head, of the same width, unmasked."""
    return [
        [row["N"], row["bytes"] / (row["B"] * row["H"])]
        for row in rows
        if row["pass"] == kind and row["D"] == D and not row["causal"] and row["bytes"] is not None
    ]


def _said(values: dict[str, Any]) -> str:
    """Say how far apart the algorithms are where the sequence is longest."""
    said = []
    for kind, lines in values.items():
        standard, tiled = (lines[name][-1][1] for name in ("standard", "flash2"))
        said.append(f"{standard / tiled:.1f} times {kind}")
    return (
        f"At N = {LENGTHS[-1]}, what standard attention moves over what FlashAttention-2 moves is "
        f"{' and '.join(said)}."
    )


def draw(figure: Any, theme: Theme, values: Any) -> None:
    """Draw a panel for each pass."""
    axes = figure.subplots(1, len(PASSES), sharey=True)
    for axis, kind in zip(axes, PASSES, strict=True):
        _panel(axis, theme, values["modelled"][kind])
        marks = values["measured"][kind]
        look = {"color": theme.ink, "marker": "o", "linestyle": "none", "zorder": 6}
        axis.plot([N for N, _ in marks], [size for _, size in marks], **look)
        axis.set_title(kind)
        axis.set_xlabel("length of the sequence N (k = 1024)")
    axes[0].set_ylabel("bytes of one head")


def _panel(axis: Any, theme: Theme, lines: dict[str, list[list[Any]]]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    heights = apart_by_ratio([lines[name][-1][1] for name in ALGORITHMS], 1.8)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    for place, (name, height) in enumerate(zip(ALGORITHMS, heights, strict=True)):
        lengths, sizes = zip(*lines[name], strict=True)
        hue = theme.hues[place]
        axis.plot(lengths, sizes, color=hue, marker=MARKERS[place])
        axis.text(1.2 * lengths[-1], height, ALGORITHMS[name], color=hue, va="center", fontsize=7.5)
    axis.set_xticks(LENGTHS, [short(N) for N in LENGTHS])
    axis.set_xlim(0.8 * LENGTHS[0], 16 * LENGTHS[-1])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda size, _: amount(size)))
