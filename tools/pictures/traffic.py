"""HBM bytes by sequence length: three algorithms in the model, and what a GPU counted."""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import load
from tileattn.call.parse import parse
from tileattn.call.problem import Problem
from tileattn.traffic import modelled
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
from tools.traffic_table import ALGORITHMS, COUNTED, FILE, hbm_bytes

HOLLOW = {"tileattn": "o", "pytorch": "s", "naive": "D"}
LENGTHS = tuple(2**power for power in range(9, 15))
D = 64
TILE = (128, 128)
PANELS = {"forward": ("forward",), "forward and backward": ("forward", "backward")}


def problem(N: int) -> Problem:
    """Make one head in half precision, whose arrays take no memory."""
    x = np.broadcast_to(np.zeros((), np.float16), (1, 1, N, D))
    return parse(x, x, x, {})[0]


def picture(results: Path) -> Picture:

    def count(N: int, algorithm: str, kinds: tuple[str, ...]) -> int:
        return sum(modelled(problem(N), TILE, algorithm, kind).nbytes for kind in kinds)

    model = {
        title: {name: [[N, count(N, name, kinds)] for N in LENGTHS] for name in ALGORITHMS}
        for title, kinds in PANELS.items()
    }
    counted: dict[str, list[list[float]]] = {}
    for row in load(results, FILE)["rows"]:
        for name in COUNTED:
            size = hbm_bytes(row, name)
            if size is not None and row["D"] == D:
                counted.setdefault(name, []).append([row["N"], size / (row["B"] * row["H"])])
    said = []
    for title, lines in model.items():
        standard, flash = (lines[name][-1][1] for name in ("standard", "flash2"))
        said.append(f"{standard / flash:.1f} times {title}")
    return Picture(
        values={"model": model, "counted": counted},
        size=(8.6, 3.6),
        draw=draw,
        alt="Line charts of the HBM bytes of one head against sequence length, both axes "
        "logarithmic: standard attention, FlashAttention and FlashAttention-2. At N = "
        f"{LENGTHS[-1]} standard attention moves more than FlashAttention-2, {' and '.join(said)}.",
        caption=f"One head in half precision, D = {D}, tiles of {TILE[0]} x {TILE[1]}, in the "
        "model of `tileattn.traffic.modelled`; hollow marks are HBM bytes that a GPU counted. "
        f"{drawn_from(FILE)}",
    )


def draw(figure: Any, theme: Theme, values: Any) -> None:
    """Draw a panel for the forward pass and one for both, where the counted bytes belong."""
    axes = figure.subplots(1, len(PANELS), sharey=True)
    for axis, (title, lines) in zip(axes, values["model"].items(), strict=True):
        log_axes(axis, LENGTHS, map(short, LENGTHS), margin=10, unit=amount)
        ends = {}
        for place, name in enumerate(ALGORITHMS):
            plot(axis, theme, place, lines[name])
            ends[ALGORITHMS[name]] = lines[name][-1][1], theme.hues[place]
        label_ends(axis, 1.2 * LENGTHS[-1], ends, 1.7)
        axis.set_title(title)
        axis.set_xlabel(N_LABEL)
    axes[0].set_ylabel("HBM bytes of one head")
    for name, points in values["counted"].items():
        label, algorithm = COUNTED[name]
        place = list(ALGORITHMS).index(algorithm)
        look = {"linestyle": "none", "markerfacecolor": "none", "markersize": 7, "zorder": 6}
        plot(axes[-1], theme, place, points, marker=HOLLOW[name], label=label, **look)
    axes[-1].legend(title="counted", fontsize=7.5, title_fontsize=7.5)
