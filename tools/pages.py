"""Generated parts of the docs: what stands between two markers of a page."""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"


def updated(page: str, begin: str, end: str, lines: Iterable[str]) -> str:
    """Put lines between the markers of a page, which must have each once, in order."""
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end or begin in rest or end in after:
        raise ValueError(f"the page must have one line {begin!r} and, after it, one line {end!r}")
    return "\n".join([before + begin, "", *lines, "", end + after])


def table(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> Iterator[str]:
    """Make the lines of a table, and an empty one; a cell without a value is empty."""
    yield f"| {' | '.join(head)} |"
    yield "|" + " --- |" * len(head)
    for row in rows:
        yield f"| {' | '.join('' if cell is None else str(cell) for cell in row)} |"
    yield ""


def shown(value: Any, form: str = "") -> str:
    """Format a value; nothing for None, yes and no for a bool."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else format(value, form)


def main(
    argv: list[str] | None,
    description: str | None,
    updates: Mapping[str, Callable[[str], str]],
    folder: Path = DOCS,
) -> int:
    """Check or write some files of a folder; the exit status is 1 where a check finds one stale."""
    parser = argparse.ArgumentParser(description=description)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="say which files are stale")
    what.add_argument("--write", action="store_true", help="bring the files up to date")
    parser.add_argument("--folder", type=Path, default=folder, help=f"of the files ({folder.name})")
    arguments = parser.parse_args(argv)
    stale = False
    for name, update in updates.items():
        page = arguments.folder / name
        old = page.read_text(encoding="utf-8")
        new = update(old)
        if arguments.write:
            page.write_text(new, encoding="utf-8", newline="\n")
        elif new != old:
            print(f"{name} is stale: run the command in its marker")
            stale = True
    return int(stale)
