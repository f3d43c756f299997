"""Drawing library for the pictures of the docs: themes, axes, labels, SVG."""

import hashlib
import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

MARKERS = ("o", "s", "^", "D")
N_LABEL = "sequence length N (k = 1024)"
UNITS = {1e12: "TB", 1e9: "GB", 1e6: "MB", 1e3: "kB"}

Points = Sequence[Sequence[float]]


class Theme(NamedTuple):
    """Colours on one page background; the pictures themselves are transparent."""

    name: str
    background: str
    ink: str
    faint: str
    hues: tuple[str, str, str, str]  # vermilion, blue, green, purple: distinct to everyone
    tones: tuple[str, str, str]  # empty, partial, full tiles


LIGHT = Theme(
    name="light",
    background="#ffffff",
    ink="#24292f",
    faint="#d0d7de",
    hues=("#b84f00", "#0072b2", "#00795a", "#8a4a86"),
    tones=("#ffffff", "#a5cbe6", "#0072b2"),
)
DARK = Theme(
    name="dark",
    background="#1e2129",
    ink="#e6edf3",
    faint="#444c56",
    hues=("#f5934a", "#56b4e9", "#2bc49a", "#d79ad4"),
    tones=("#1e2129", "#2c5f80", "#8fd0f5"),
)
THEMES = (LIGHT, DARK)


class Picture(NamedTuple):
    """One picture: ``draw(figure, theme, values)`` draws the values and nothing else."""

    values: Any
    size: tuple[float, float]
    draw: Callable[[Any, Theme, Any], None]
    alt: str
    caption: str

    @property
    def digest(self) -> str:
        """Fingerprint of the values and the alternative text."""
        text = json.dumps([self.values, self.alt], sort_keys=True)
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def drawn_from(*names: str) -> str:
    """Last sentence of a caption: the results files."""
    return f"Drawn from {', '.join(f'`benchmarks/results/{name}.json`' for name in names)}."


def svg(picture: Picture, theme: Theme) -> str:
    """Draw a picture; the same values give the same text with the same matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_style(theme))
        figure = Figure(figsize=picture.size, layout="constrained")
        picture.draw(figure, theme, picture.values)
        text = io.StringIO()
        about = {"Date": None, "Creator": None, "Description": picture.digest, "Title": picture.alt}
        figure.savefig(text, format="svg", metadata=about)
    return "\n".join(line.strip() for line in text.getvalue().splitlines()) + "\n"


def digest_of(path: Path) -> str:
    """Digest recorded in an SVG file; empty without a file."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text.partition("<dc:description>")[2].partition("</dc:description>")[0]


def plot(axis: Any, theme: Theme, place: int, points: Points, **look: Any) -> None:
    """Draw a line in the hue and with the marker of its place in the legend."""
    given = {"color": theme.hues[place], "marker": MARKERS[place], **look}
    axis.plot(*zip(*points, strict=True), **given)


def log_axes(
    axis: Any,
    ticks: Sequence[float],
    names: Iterable[str],
    *,
    margin: float,
    unit: Callable[[float], str],
    subs: tuple[int, ...] = (1,),
) -> None:
    """Make both axes logarithmic: named ticks below, a unit on the left, a margin for labels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ticks, list(names))
    axis.set_xlim(0.85 * ticks[0], margin * ticks[-1])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_locator(LogLocator(subs=subs))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: unit(value)))
    axis.yaxis.set_minor_locator(NullLocator())


def label_ends(axis: Any, x: float, ends: dict[str, tuple[float, str]], gap: float) -> None:
    """Write names at the heights of their lines' ends, at least a gap (on log axes, a ratio) apart.

    Each name has a height and a colour; the axis must have its final scale.
    """
    log = axis.get_yscale() == "log"
    heights = [math.log(height) if log else height for height, _ in ends.values()]
    placed = apart(heights, math.log(gap) if log else gap)
    for (name, (_, colour)), height in zip(ends.items(), placed, strict=True):
        y = math.exp(height) if log else height
        axis.text(x, y, name, color=colour, fontsize=7.5, fontweight="bold", va="center")


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Move heights until neighbours are a gap apart; their order and mean stay."""
    placed = list(heights)
    for below, above in pairwise(sorted(range(len(placed)), key=placed.__getitem__)):
        placed[above] = max(placed[above], placed[below] + gap)
    shift = fmean(placed) - fmean(heights) if placed else 0.0
    return [height - shift for height in placed]


def amount(size: float) -> str:
    """Write bytes with the largest unit that leaves at least one."""
    for unit, name in UNITS.items():
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.3g} B"


def short(n: int) -> str:
    """Write a length with k for 1024."""
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def _style(theme: Theme) -> dict[str, Any]:
    inked = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    return {
        **dict.fromkeys(inked, theme.ink),
        "axes.edgecolor": theme.faint,
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 9,
        "axes.labelsize": 9,
        "figure.facecolor": "none",
        "font.size": 8,
        "grid.color": theme.faint,
        "grid.linewidth": 0.5,
        "legend.frameon": False,
        "lines.linewidth": 1.6,
        "lines.markersize": 4,
        "savefig.facecolor": "none",
        "svg.fonttype": "none",
        "svg.hashsalt": "tileattn",
        "xtick.bottom": False,
        "ytick.left": False,
    }
