"""Speed by the length of the sequence, beside the peers."""

from pathlib import Path
from typing import Any

from benchmarks import gpu_report
from tools.drawing import Picture, Theme, apart, load, short

FILES = ("gpu_forward_bf16", "gpu_backward_bf16")
NAMES = {"tileattn": "tileattn", "cudnn": "cuDNN", "fa4": "FA-4"}
MARKERS = ("o", "s", "^")

Row = dict[str, Any]


def picture(results: Path) -> Picture:
    """Make the picture of the grid in bfloat16, one panel for each pass, mask and width."""
    loaded = [load(results, name) for name in FILES]
    rows = [row for result in loaded for row in result["rows"]]
    panels: dict[tuple[str, bool, int], dict[str, list[list[float]]]] = {}
    for row in rows:
        lines = panels.setdefault((row["pass"], row["causal"], row["D"]), {})
        for name, speed in gpu_report.quoted(row).items():
            if name in NAMES:
                lines.setdefault(name, []).append([row["N"], speed])
    gpu = loaded[0]["machine"]["gpu"]
    return Picture(
        values=[[*key, lines] for key, lines in panels.items()],
        size=(8.6, 8.2),
        draw=draw,
        alt=f"Line charts of TFLOP/s against the length of the sequence, in bfloat16 on an {gpu}, "
        f"one for each pass, mask and head dimension. {_wins(rows)}",
        caption=f"Forward and backward in bfloat16 on an {gpu}; higher is faster, and FA-4 is "
        "FlashAttention-4. Drawn from "
        + " and ".join(f"`benchmarks/results/{name}.json`" for name in FILES)
        + ".",
    )


def _wins(rows: list[Row]) -> str:
    """Say in how many cells tileattn is ahead of both peers."""
    said = []
    for name in dict.fromkeys(row["pass"] for row in rows):
        ratios = [gpu_report.best(row) for row in rows if row["pass"] == name]
        ahead = sum(ratio is not None and ratio > 1 for ratio in ratios)
        said.append(f"in {ahead} of {len(ratios)} points {name}")
    return f"The line of tileattn is the highest {' and '.join(said)}."


def draw(figure: Any, theme: Theme, values: Any) -> None:
    """Draw a row of panels for each pass and mask, a column for each width."""
    widths = sorted({D for _, _, D, _ in values})
    kinds = list(dict.fromkeys((name, causal) for name, causal, _, _ in values))
    axes = figure.subplots(len(kinds), len(widths), sharey="row", sharex=True, squeeze=False)
    for name, causal, D, lines in values:
        place = kinds.index((name, causal)), widths.index(D)
        _panel(axes[place], theme, lines)
        axes[place].set_title(f"{name}{', causal' if causal else ''}, D = {D}")
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("length of the sequence N (k = 1024)")


def _panel(axis: Any, theme: Theme, lines: dict[str, list[list[float]]]) -> None:
    highest = max(speed for line in lines.values() for _, speed in line)
    top = max(1.2 * highest, axis.get_ylim()[1])  # the panels of a row share it
    here = [name for name in NAMES if name in lines]
    heights = apart([lines[name][-1][1] for name in here], 0.1 * top)
    for name, height in zip(here, heights, strict=True):
        place = list(NAMES).index(name)
        xs, speeds = zip(*lines[name], strict=True)
        look = {"color": theme.hues[place], "marker": MARKERS[place], "zorder": 5 - place}
        axis.plot(xs, speeds, **look)
        weight = "bold" if name == "tileattn" else "normal"
        style = {"color": theme.hues[place], "fontsize": 7.5, "fontweight": weight, "va": "center"}
        axis.text(1.18 * xs[-1], height, NAMES[name], **style)
    lengths = sorted({int(N) for line in lines.values() for N, _ in line})
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [short(N) for N in lengths])
    axis.set_xlim(0.8 * lengths[0], 4.5 * lengths[-1])
    axis.set_ylim(0, top)
