"""Generated parts of the docs, between two markers of a page."""

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

_NUMBER = re.compile(r"([-+]?[\d,.]+( %)?)?")

Stale = Iterable[tuple[Path, Callable[[], str]]]
"""Stale files, each with a function that returns its new text."""


def updated(page: str, begin: str, end: str, lines: Iterable[str]) -> str:
    """Replace the lines between the markers of a page, each of which must occur once, in order."""
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end or begin in rest or end in after:
        raise ValueError(f"the page must have one line {begin!r} and, after it, one line {end!r}")
    return "\n".join([before + begin, "", *lines, "", end + after])


def stale_part(path: Path, begin: str, end: str, lines: Iterable[str]) -> Stale:
    """Return the file unless it has exactly these lines between its markers."""
    old = path.read_text(encoding="utf-8")
    new = updated(old, begin, end, lines)
    return [] if new == old else [(path, lambda: new)]


_PART = re.compile(
    r"(<!-- tables: (\w+), by python -m [\w.]+ --write -->\n).*?(<!-- end of tables -->)",
    re.DOTALL,
)


def stale_parts(path: Path, parts: Mapping[str, Iterable[str]]) -> Stale:
    """Return the file unless it has exactly these parts, each with these lines."""
    old = path.read_text(encoding="utf-8")
    found = [name for _, name, _ in _PART.findall(old)]
    if sorted(found) != sorted(parts):
        raise ValueError(f"{path} must have the parts {sorted(parts)}; it has {sorted(found)}")
    new = _PART.sub(lambda m: "\n".join([m[1], *parts[m[2]], m[3]]), old)
    return [] if new == old else [(path, lambda: new)]


def folded(title: str, lines: Iterable[str], *, is_open: bool = False) -> Iterator[str]:
    """Yield a part of a page that opens and closes by a click."""
    yield f'???{"+" * is_open} note "{title}"'
    yield ""
    yield from (f"    {line}" if line else "" for line in lines)


def paragraphs(*texts: str) -> list[str]:
    """Return the lines of paragraphs, with an empty line after each."""
    return [line for text in texts for line in (*text.strip().splitlines(), "")]


def table(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> Iterator[str]:
    """Yield the lines of a table, and an empty line; None is an empty cell.

    Columns of numbers are aligned at the right.
    """
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    numeric = (all(map(_NUMBER.fullmatch, column)) for column in zip(*cells, strict=True))
    marks = [" ---: |" if right else " --- |" for right in numeric] or [" --- |"] * len(head)
    yield f"| {' | '.join(head)} |"
    yield "|" + "".join(marks)
    for row in cells:
        yield f"| {' | '.join(row)} |"
    yield ""


def shown(value: Any, form: str = "") -> str:
    """Format a value: None is empty, a bool is yes or no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else format(value, form)


def main(argv: list[str] | None, description: str | None, stale: Stale) -> int:
    """Check or write; the exit status is 1 if a check finds a stale file."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="name the stale files")
    what.add_argument("--write", action="store_true", help="bring them up to date")
    arguments = parser.parse_args(argv)
    found = list(stale)
    for path, text in found:
        if arguments.write:
            path.write_text(text(), encoding="utf-8", newline="\n")
        else:
            print(f"{path} is stale; --write brings it up to date")
    return int(bool(found) and arguments.check)
