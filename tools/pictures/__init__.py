"""Draw the pictures of the docs from benchmarks/results, or check that they are fresh.

A picture is a light and a dark SVG file in docs/assets. A page shows it between the lines
``<!-- picture: name -->`` and ``<!-- end of picture -->``. A file names the digest of the values it
was drawn from, and a check compares that: it needs no matplotlib, whose versions draw differently.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.report import RESULTS
from tools import pages
from tools.drawing import THEMES, Picture, digest_of, svg
from tools.pages import ROOT
from tools.pictures import (
    blocks,
    density,
    masks,
    memory,
    ranks,
    roofline,
    schedules,
    speed,
    traffic,
)

MAKERS: dict[str, Callable[[Path], Picture]] = {
    module.__name__.rpartition(".")[2]: module.picture
    for module in (speed, memory, traffic, blocks, density, roofline, schedules, ranks, masks)
}
PLACE = re.compile(r"(<!-- picture: (\w+) -->\n).*?(<!-- end of picture -->)", re.DOTALL)


def shown(name: str, picture: Picture, *, html: bool) -> str:
    """Show a picture: as HTML on a repository's front page, or as the docs' theme does."""
    if html:
        folder = f"docs/assets/{name}"
        dark = f'media="(prefers-color-scheme: dark)" srcset="{folder}_dark.svg"'
        image = f'<img src="{folder}_light.svg" alt="{picture.alt}">'
        lines = ["<picture>", f"  <source {dark}>", f"  {image}", "</picture>"]
    else:
        files = [(theme.name, f"assets/{name}_{theme.name}.svg") for theme in THEMES]
        lines = [f"![{picture.alt}]({file}#only-{theme})" for theme, file in files]
    return "\n".join(["", *lines, "", f"*{picture.caption}*", "", ""])


def stale(root: Path, results: Path) -> pages.Stale:
    """List the files that do not show what the results hold, each with what makes its text."""
    pictures = {name: maker(results) for name, maker in MAKERS.items()}
    for name, picture in pictures.items():
        for theme in THEMES:
            path = root / "docs" / "assets" / f"{name}_{theme.name}.svg"
            if digest_of(path) != picture.digest:
                yield path, partial(svg, picture, theme)
    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        old = page.read_text(encoding="utf-8")
        new = filled(old, pictures, html=page.parent == root)
        if new != old:
            yield page, partial(str, new)


def filled(page: str, pictures: dict[str, Picture], *, html: bool) -> str:
    return PLACE.sub(lambda m: f"{m[1]}{shown(m[2], pictures[m[2]], html=html)}{m[3]}", page)


def main(argv: list[str] | None = None, root: Path = ROOT, results: Path = RESULTS) -> int:
    """Check or draw; the exit status is 1 where a check finds something stale."""
    return pages.main(argv, __doc__, stale(root, results))
