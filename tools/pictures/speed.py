"""TFLOP/s by sequence length, with baselines."""

from pathlib import Path
from typing import Any

from benchmarks import gpu
from benchmarks.report import Row, load
from tools.comparisons import WIDE
from tools.drawing import N_LABEL, Picture, Theme, drawn_from, label_ends, plot, short

FILES = ("gpu_forward_bf16", "gpu_backward_bf16")
NAMES = {"tileattn": "tileattn", "cudnn": "cuDNN", "fa4": "FA-4", "fa3": "FA-3"}


def picture(results: Path) -> Picture:
    """Make the picture of the bfloat16 grid, one panel for each pass, mask and head dimension."""
    loaded = [load(results, name) for name in FILES]
    every = [row for result in loaded for row in result["rows"]]
    rows = [row for row in every if max(row["spread"].values(), default=0.0) <= WIDE]
    left_out = f"{len(every) - len(rows)} configurations whose times spread are left out. "
    panels: dict[tuple[str, bool, int], dict[str, list[list[float]]]] = {}
    for row in rows:
        lines = panels.setdefault((row["pass"], row["causal"], row["D"]), {})
        for name, speed in gpu.verified(row).items():
            if name in NAMES:
                lines.setdefault(name, []).append([row["N"], speed])
    machine = loaded[0]["machine"]["gpu"]
    return Picture(
        values=[[*key, lines] for key, lines in panels.items()],
        size=(8.6, 8.2),
        draw=draw,
        alt=f"Line charts of TFLOP/s against sequence length, in bfloat16 on an {machine}, one for "
        f"each pass, mask and head dimension. {_wins(rows)}",
        caption=f"Forward and backward in bfloat16 on an {machine}; higher is faster, and FA is "
        f"FlashAttention. {left_out if len(rows) < len(every) else ''}{drawn_from(*FILES)}",
    )


def _wins(rows: list[Row]) -> str:
    """Count the configurations where tileattn beats all baselines."""
    said = []
    for name in dict.fromkeys(row["pass"] for row in rows):
        speedups = [gpu.best(row) for row in rows if row["pass"] == name]
        ahead = sum(speedup is not None and speedup > 1 for speedup in speedups)
        said.append(f"in {ahead} of {len(speedups)} configurations {name}")
    return f"tileattn is fastest {' and '.join(said)}."


def draw(figure: Any, theme: Theme, values: Any) -> None:
    """Draw a row of panels for each pass and mask, a column for each head dimension."""
    head_dims = sorted({D for _, _, D, _ in values})
    kinds = list(dict.fromkeys((name, causal) for name, causal, _, _ in values))
    axes = figure.subplots(len(kinds), len(head_dims), sharey="row", sharex=True, squeeze=False)
    for name, causal, D, lines in values:
        place = kinds.index((name, causal)), head_dims.index(D)
        _panel(axes[place], theme, lines)
        axes[place].set_title(f"{name}{', causal' if causal else ''}, D = {D}")
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel(N_LABEL)


def _panel(axis: Any, theme: Theme, lines: dict[str, list[list[float]]]) -> None:
    highest = max(speed for line in lines.values() for _, speed in line)
    top = max(1.2 * highest, axis.get_ylim()[1])  # the panels of a row share it
    lengths = sorted({int(N) for line in lines.values() for N, _ in line})
    ends = {}
    for place, name in enumerate(NAMES):
        if name in lines:
            plot(axis, theme, place, lines[name], zorder=5 - place)
            ends[NAMES[name]] = lines[name][-1][1], theme.hues[place]
    label_ends(axis, 1.18 * lengths[-1], ends, 0.1 * top)
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [short(N) for N in lengths])
    axis.set_xlim(0.8 * lengths[0], 4.5 * lengths[-1])
    axis.set_ylim(0, top)
