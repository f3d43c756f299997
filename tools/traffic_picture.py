"""Bytes between slow and fast memory: three algorithms in the model, and what was measured."""

from pathlib import Path
from typing import Any

import numpy as np

from tileattn.problem import Problem, parse
from tileattn.traffic import modelled
from tools.drawing import Picture, Theme, amount, apart_by_ratio, short
from tools.measured_traffic import ALGORITHMS, COUNTED, FILE, device_bytes, results_of

MARKERS = ("o", "s", "^")
HOLLOW = {"tileattn": "o", "pytorch": "s", "plain": "D"}
LENGTHS = tuple(2**power for power in range(9, 15))
D = 64
TILE = (128, 128)
PANELS = {"forward": ("forward",), "forward and backward": ("forward", "backward")}

Lines = dict[str, list[list[Any]]]


def problem(N: int) -> Problem:
    """Make one head in half precision, whose arrays take no memory."""
    x = np.broadcast_to(np.zeros((), np.float16), (1, 1, N, D))
    return parse(x, x, x, {})[0]


def picture(results: Path) -> Picture:
    """Make the picture, with the measured bytes where there are any."""

    def count(N: int, algorithm: str, kinds: tuple[str, ...]) -> int:
        return sum(modelled(problem(N), TILE, algorithm, kind).nbytes for kind in kinds)

    model: dict[str, Lines] = {
        title: {name: [[N, count(N, name, kinds)] for N in LENGTHS] for name in ALGORITHMS}
        for title, kinds in PANELS.items()
    }
    measured = _measured(results_of(results))
    alt = (
        "Line charts of the bytes that one head moves against the length of the sequence, both "
        f"axes logarithmic: standard attention, FlashAttention and FlashAttention-2. {_said(model)}"
        f"{_counted(measured)}"
    )
    caption = f"One head in half precision, D = {D}, tiles of {TILE[0]} x {TILE[1]}, in the model"
    sources = ["`tileattn.traffic.modelled`"]
    if measured:
        caption += "; hollow marks are bytes of device memory that a GPU counted"
        sources.append(f"`benchmarks/results/{FILE}.json`")
    return Picture(
        values={"model": model, "measured": measured},
        size=(8.6, 3.6),
        draw=draw,
        alt=alt,
        caption=f"{caption}. Drawn from {' and '.join(sources)}.",
    )


def _measured(result: Any) -> Lines:
    """Lengths and counted bytes of one head, both passes, of each contestant that was counted."""
    lines: Lines = {}
    for row in result["rows"] if result else ():
        for name in COUNTED:
            counted = device_bytes(row, name)
            if counted is not None and row["D"] == D:
                lines.setdefault(name, []).append([row["N"], counted / (row["B"] * row["H"])])
    return lines


def _said(model: dict[str, Lines]) -> str:
    """Say how far apart the algorithms are where the sequence is longest."""
    said = []
    for title, lines in model.items():
        standard, tiled = (lines[name][-1][1] for name in ("standard", "flash2"))
        said.append(f"{standard / tiled:.1f} {title}")
    return (
        f"At N = {LENGTHS[-1]}, what standard attention moves over what FlashAttention-2 moves is "
        f"{' and '.join(said)}."
    )


def _counted(measured: Lines) -> str:
    """Say what others moved over what tileattn moved, each where its longest sequence was."""
    ours = dict(measured.get("tileattn", ()))
    said = []
    for name, line in measured.items():
        N, size = line[-1]
        if name != "tileattn" and N in ours:
            said.append(f"{size / ours[N]:.0f} in {COUNTED[name].name} at N = {N}")
    if not said:
        return ""
    return (
        " As a GPU counted them, the bytes of standard attention over those of tileattn are "
        f"{' and '.join(said)}."
    )


def draw(figure: Any, theme: Theme, values: Any) -> None:
    """Draw a panel for the forward pass and one for both, where the measured bytes belong."""
    axes = figure.subplots(1, len(PANELS), sharey=True)
    for axis, title in zip(axes, PANELS, strict=True):
        _panel(axis, theme, values["model"][title])
        axis.set_title(title)
        axis.set_xlabel("length of the sequence N (k = 1024)")
    axes[0].set_ylabel("bytes of one head")
    for name, line in values["measured"].items():
        who = COUNTED[name]
        hue = theme.hues[list(ALGORITHMS).index(who.algorithm)]
        look = {"linestyle": "none", "marker": HOLLOW[name], "markeredgecolor": hue}
        fill = {"markerfacecolor": "none", "markersize": 7, "zorder": 6}
        axes[-1].plot(*zip(*line, strict=True), label=who.name, **look, **fill)
    if values["measured"]:
        axes[-1].legend(title="device memory, counted", fontsize=7.5, title_fontsize=7.5)


def _panel(axis: Any, theme: Theme, lines: Lines) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    heights = apart_by_ratio([lines[name][-1][1] for name in ALGORITHMS], 1.5)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    for place, (name, height) in enumerate(zip(ALGORITHMS, heights, strict=True)):
        lengths, sizes = zip(*lines[name], strict=True)
        hue = theme.hues[place]
        axis.plot(lengths, sizes, color=hue, marker=MARKERS[place])
        axis.text(1.2 * lengths[-1], height, ALGORITHMS[name], color=hue, va="center", fontsize=7.5)
    axis.set_xticks(LENGTHS, [short(N) for N in LENGTHS])
    axis.set_xlim(0.8 * LENGTHS[0], 10 * LENGTHS[-1])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda size, _: amount(size)))
