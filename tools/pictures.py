"""Draw the pictures of the docs from benchmarks/results, or check that they are fresh.

Each picture is one SVG file for light and one for dark pages in docs/assets, and stands in every
page that has a pair of lines ``<!-- picture: name -->`` and ``<!-- end of picture -->``. A file
names the digest of the values it was drawn from, which is what a check compares: it needs no
matplotlib, and another version of it changes nothing.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tools import (
    blocks_picture,
    density_picture,
    memory_picture,
    roofline_picture,
    schedule_picture,
    speed_picture,
    traffic_picture,
)
from tools.drawing import THEMES, Missing, Picture, digest_of, svg

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MAKERS: dict[str, Callable[[Path], Picture]] = {
    "speed": speed_picture.picture,
    "memory": memory_picture.picture,
    "traffic": traffic_picture.picture,
    "blocks": blocks_picture.picture,
    "density": density_picture.picture,
    "roofline": roofline_picture.picture,
    "schedules": schedule_picture.picture,
}
PLACE = re.compile(r"(<!-- picture: (\w+) -->\n).*?(<!-- end of picture -->)", re.DOTALL)


def made(results: Path) -> tuple[dict[str, Picture], dict[str, str]]:
    """Make every picture that has data; of the others, say why not."""
    pictures: dict[str, Picture] = {}
    without: dict[str, str] = {}
    for name, maker in MAKERS.items():
        try:
            pictures[name] = maker(results)
        except Missing as why:
            without[name] = str(why)
    return pictures, without


def with_pictures(page: str, pictures: dict[str, Picture], folder: str, *, html: bool) -> str:
    """Fill the places of a page; the place of a picture that has no data is empty."""

    def filled(place: re.Match[str]) -> str:
        name = place[2]
        if name not in MAKERS:
            raise ValueError(f"there is no picture {name!r}; there are {', '.join(MAKERS)}")
        lines = _shown(name, pictures[name], folder, html=html) if name in pictures else []
        return place[1] + "".join(f"{line}\n" for line in lines) + place[3]

    return PLACE.sub(filled, page)


def _shown(name: str, picture: Picture, folder: str, *, html: bool) -> Iterator[str]:
    """Show a picture: as HTML that a repository's front page knows, or in the theme's own way."""
    yield ""
    if html:
        dark = f'media="(prefers-color-scheme: dark)" srcset="{folder}/{name}_dark.svg"'
        yield "<picture>"
        yield f"  <source {dark}>"
        yield f'  <img src="{folder}/{name}_light.svg" alt="{picture.alt}">'
        yield "</picture>"
    else:
        for theme in THEMES:
            yield f"![{picture.alt}]({folder}/{name}_{theme.name}.svg#only-{theme.name})"
    yield ""
    yield f"*{picture.caption}*"
    yield ""


def pages(root: Path) -> list[Path]:
    """List the pages that have a place for a picture."""
    every = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return [page for page in every if PLACE.search(page.read_text(encoding="utf-8"))]


def stale(root: Path, pictures: dict[str, Picture]) -> Iterator[str]:
    """Name each picture and each page that does not show what the results hold."""
    assets = root / "docs" / "assets"
    wanted = {
        f"{name}_{theme.name}.svg": picture.digest
        for name, picture in pictures.items()
        for theme in THEMES
    }
    there = {path.name: digest_of(path.read_text("utf-8")) for path in assets.glob("*.svg")}
    for name in sorted(wanted.keys() | there.keys()):
        if wanted.get(name) != there.get(name):
            yield f"docs/assets/{name}"
    for page in pages(root):
        old = page.read_text(encoding="utf-8")
        if _page(page, old, root, pictures) != old:
            yield page.relative_to(root).as_posix()


def _page(page: Path, text: str, root: Path, pictures: dict[str, Picture]) -> str:
    front = page.parent == root
    folder = "docs/assets" if front else "assets"
    return with_pictures(text, pictures, folder, html=front)


def write(root: Path, pictures: dict[str, Picture]) -> None:
    """Draw the pictures that are stale, remove those that have no data, and fill the pages."""
    for name in list(stale(root, pictures)):
        path = root / name
        if path.suffix == ".md":
            new = _page(path, path.read_text(encoding="utf-8"), root, pictures)
            path.write_text(new, encoding="utf-8", newline="\n")
            continue
        picture, _, theme_name = path.stem.rpartition("_")
        if picture not in pictures:
            path.unlink()
            continue
        theme = next(theme for theme in THEMES if theme.name == theme_name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(svg(pictures[picture], theme), encoding="utf-8", newline="\n")


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Check or draw; the exit status is 1 where a check finds something stale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="say whether the pictures are fresh")
    what.add_argument("--write", action="store_true", help="draw the pictures that are not")
    arguments = parser.parse_args(argv)
    pictures, without = made(RESULTS)
    if without:
        reasons = (f"{name} ({why})" for name, why in without.items())
        print(f"left out: {', '.join(reasons)}")
    if arguments.write:
        write(root, pictures)
        return 0
    found = list(stale(root, pictures))
    for name in found:
        print(f"{name} is stale: python -m tools.pictures --write")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
