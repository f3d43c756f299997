"""What benchmarks/gpu.py shows of a race: lines of a table, means, a bar chart."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean

from benchmarks.report import Row, number

RACES = ("grid", "shapes")  # sections that set peers against one another
SHOWN_RATIOS = ("flash", "efficient", "math")
RIVALS = ("cudnn", "fa4")  # whose kernels are made for this GPU


def best(row: Row) -> float | None:
    """Time of the fastest of the rivals over that of tileattn, where one of them took part."""
    ratios = row["ratio_to"]
    return min((ratios[name] for name in RIVALS if name in ratios), default=None)


def means(rows: Iterable[Row]) -> Iterator[str]:
    """Say for each pass how tileattn stands to the fastest rival over all rows that have one."""
    passes: dict[str, list[Row]] = {}
    for row in rows:
        if best(row) is not None:
            passes.setdefault(row["pass"], []).append(row)
    for name, raced in passes.items():
        there = [rival for rival in RIVALS if any(rival in row["ratio_to"] for row in raced)]
        ratios = [ratio for ratio in map(best, raced) if ratio is not None]
        to = f"the fastest of {' and '.join(there)}" if len(there) > 1 else there[0]
        yield (
            f"{name}, ratio to {to} over {len(ratios)} rows: "
            f"geometric mean {geometric_mean(ratios):.2f}, smallest {min(ratios):.2f}"
        )


def quoted(row: Row) -> dict[str, float]:
    """TFLOP/s of the results that agree; tileattn's own counts where a peer confirms it."""
    alone = {"tileattn"} if row["off"] and not row["ratio_to"] else set()
    return {name: x for name, x in row["tflops"].items() if name not in {*row["off"], *alone}}


def grid_head(names: Sequence[str]) -> str:
    """Head of the table of the grid: TFLOP/s of each contestant, then the ratios."""
    columns = "".join(f"{name[:9]:>10}" for name in names)
    ratios = "".join(f"{'x ' + name:>12}" for name in ("best", *SHOWN_RATIOS))
    return f"{'pass':8} {'':4} {'D':>3} {'N':>5} {'causal':6}{columns}{ratios}"


def grid_line(row: Row, names: Sequence[str]) -> str:
    """Line of that table, with notes: what case it is, what differs and what failed."""
    tflops, off, failed = row["tflops"], row["off"], row["failed"]
    columns = "".join(f"{number(tflops.get(name), '.1f'):>10}" for name in names)
    ratios = (best(row), *(row["ratio_to"].get(name) for name in SHOWN_RATIOS))
    lines = [
        f"{row['pass']:8} {row['dtype']:4} {row['D']:3} {row['N']:5} {row['causal']!s:6}{columns}"
        + "".join(f"{number(ratio, '.2f'):>12}" for ratio in ratios)
        + (f"  {row['case']}" if "case" in row else "")
    ]
    lines += [f"  differs: {name} and tileattn by {off[name]}, relative" for name in off]
    lines += [f"  failed: {name}: {text}" for name, text in failed.items()]
    return "\n".join(lines)


def chart(rows: Iterable[Row], names: Sequence[str], path: Path) -> None:
    """Draw TFLOP/s as bars, one panel for each dtype and pass; says so without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no chart: matplotlib is not installed: pip install matplotlib", file=sys.stderr)
        return
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        panels.setdefault((row["dtype"], row["pass"]), []).append(row)
    widest = max(len(cells) for cells in panels.values())
    size = (max(8, 0.09 * (len(names) + 1) * widest), 1 + 3 * len(panels))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for axis, ((dtype, kind), cells) in zip(axes, panels.items(), strict=True):
        width = 0.9 / len(names)
        for place, name in enumerate(names):
            heights = [quoted(row).get(name, float("nan")) for row in cells]
            left = [i + (place - (len(names) - 1) / 2) * width for i in range(len(cells))]
            axis.bar(left, heights, width, label=name)
        labels = [f"D {r['D']}\nN {r['N']}\n{'causal' if r['causal'] else 'all'}" for r in cells]
        axis.set_xticks(range(len(cells)), labels, fontsize=6)
        axis.set_ylabel("TFLOP/s")
        axis.set_title(f"{dtype}, {kind}")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(names)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")
