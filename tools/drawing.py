"""How the pictures of the docs look, light and dark, and how one becomes an SVG file."""

import hashlib
import io
import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

UNITS = {1e12: "TB", 1e9: "GB", 1e6: "MB", 1e3: "kB"}


class Theme(NamedTuple):
    """Colours on one background, which is that of the page: the pictures are transparent."""

    name: str
    background: str
    ink: str
    faint: str
    hues: tuple[str, str, str]  # vermilion, blue, green: apart for every kind of colour blindness
    tones: tuple[str, str, str]  # of tiles that are skipped, partly seen, seen in full


LIGHT = Theme(
    name="light",
    background="#ffffff",
    ink="#24292f",
    faint="#d0d7de",
    hues=("#b84f00", "#0072b2", "#00795a"),
    tones=("#ffffff", "#a5cbe6", "#0072b2"),
)
DARK = Theme(
    name="dark",
    background="#1e2129",
    ink="#e6edf3",
    faint="#444c56",
    hues=("#f5934a", "#56b4e9", "#2bc49a"),
    tones=("#1e2129", "#2c5f80", "#8fd0f5"),
)
THEMES = (LIGHT, DARK)


class Missing(Exception):  # noqa: N818  # nothing went wrong: the picture is left out
    """Why a picture has no data; the message is shown."""


class Picture(NamedTuple):
    """What is drawn: ``draw(figure, theme, values)`` sees the values and nothing else."""

    values: Any
    size: tuple[float, float]
    draw: Callable[[Any, Theme, Any], None]
    alt: str
    caption: str

    @property
    def digest(self) -> str:
        """Fingerprint of all that the file says: the values and the words."""
        text = json.dumps([self.values, self.alt], sort_keys=True)
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def load(results: Path, name: str) -> Any:
    """Read a file of results, or raise Missing."""
    path = results / f"{name}.json"
    if not path.exists():
        raise Missing(f"there is no {path.name}")
    return json.loads(path.read_text(encoding="utf-8"))


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


def digest_of(text: str) -> str:
    """Digest that an SVG file names, or nothing."""
    _, _, rest = text.partition("<dc:description>")
    return rest.partition("</dc:description>")[0]


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Move labels up or down until neighbours are a gap apart; their order and mean stay."""
    placed = list(heights)
    for below, above in pairwise(sorted(range(len(placed)), key=placed.__getitem__)):
        placed[above] = max(placed[above], placed[below] + gap)
    shift = fmean(placed) - fmean(heights) if placed else 0.0
    return [height - shift for height in placed]


def apart_by_ratio(heights: Sequence[float], ratio: float) -> list[float]:
    """Do the same on a logarithmic axis."""
    return [math.exp(x) for x in apart([math.log(h) for h in heights], math.log(ratio))]


def amount(size: float) -> str:
    """Write a number of bytes with the unit that leaves at least one before the point."""
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
        "figure.labelsize": 9,
        "font.size": 8,
        "grid.color": theme.faint,
        "grid.linewidth": 0.5,
        "hatch.linewidth": 0.8,
        "lines.linewidth": 1.6,
        "lines.markersize": 4,
        "savefig.facecolor": "none",
        "svg.fonttype": "none",
        "svg.hashsalt": "tileattn",
        "xtick.bottom": False,
        "ytick.left": False,
    }
