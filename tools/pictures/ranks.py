"""Predicted scaling of a long sequence over many ranks, from ``tileattn.distributed.predict``."""

from functools import cache
from pathlib import Path
from typing import Any

from tileattn.distributed import Cost, Link, Rates, predict
from tools.drawing import Picture, Theme, label_ends, plot

TOKENS, RANKS = 1 << 20, (8, 64, 256, 512, 1000, 2000, 4000, 10_000)
HQ, HKV, D = 64, 8, 128
SCHEDULES = {"ring": "ring", "groups of 8": ("heads", 8), "gather": "gather"}
RATES = Rates(5e14, Link(1e-5, 4e10), host_link=Link(5e-6, 3e11), ranks_per_host=8, on_gpu=True)


def costs(ranks: int) -> dict[Any, Cost]:
    """Predict what each schedule costs."""
    q, k = (1, HQ, TOKENS, D), (1, HKV, TOKENS, D)
    options: dict[str, Any] = {"dtype": "float16", "layout": "zigzag", "causal": True}
    return {cost.schedule: cost for cost in predict(q, k, k, ranks, rates=RATES, **options).costs}


@cache
def fractions() -> dict[str, list[list[float]]]:
    """Return the fraction of linear scaling of both passes by the number of ranks."""
    alone, lines = costs(1)["ring"].seconds, {name: list[list[float]]() for name in SCHEDULES}
    for ranks in RANKS:
        found = costs(ranks)
        for name, schedule in SCHEDULES.items():
            cost = found.get(schedule) or found["heads"]  # one group
            lines[name].append([ranks, round(alone / ranks / cost.seconds, 4)])
    return lines


def picture(results: Path) -> Picture:  # noqa: ARG001  # nothing here is measured
    lines = fractions()
    said = [f"{name} {line[-1][1]:.0%}" for name, line in lines.items()]
    return Picture(
        values=lines,
        size=(8.6, 3.2),
        draw=draw,
        alt="A line chart of the predicted fraction of linear scaling against the number of ranks, "
        f"from {RANKS[0]} to {RANKS[-1]:,}, one line for each schedule. All fall; on the most "
        f"ranks they are at: {', '.join(said)}.",
        caption=f"Predicted, not measured: both passes, causal, zigzag, {TOKENS:,} tokens, {HQ} "
        f"query heads and {HKV} key heads of {D}, float16, on hosts of eight GPUs as below.",
    )


def draw(figure: Any, theme: Theme, values: Any) -> None:
    """Draw a line for each schedule."""
    from matplotlib.ticker import PercentFormatter

    axis = figure.subplots()
    axis.set_xscale("log")
    axis.set_xticks(RANKS, [f"{ranks:,}" for ranks in RANKS])
    axis.minorticks_off()
    axis.set_xlim(0.85 * RANKS[0], 2.2 * RANKS[-1])
    axis.set_ylim(-0.08, 1.05)
    axis.yaxis.set_major_formatter(PercentFormatter(1))
    ends = {}
    for place, (name, line) in enumerate(values.items()):
        plot(axis, theme, place, line)
        ends[name] = line[-1][1], theme.hues[place]
    label_ends(axis, 1.1 * RANKS[-1], ends, 0.07)
    axis.set_xlabel("ranks")
    axis.set_ylabel("fraction of linear scaling")
