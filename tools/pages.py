"""Parts of the docs that a program writes: what stands between two markers of a page."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path


def updated(page: str, begin: str, end: str, lines: Iterable[str]) -> str:
    """Put lines between the markers of a page.

    Raises
    ------
    ValueError
        Where the page does not have each marker once, in order.
    """
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end or begin in rest or end in after:
        raise ValueError(f"the page must have one line {begin!r} and, after it, one line {end!r}")
    return "\n".join([before + begin, "", *lines, "", end + after])


def main(
    argv: list[str] | None, description: str | None, page: Path, update: Callable[[str], str]
) -> int:
    """Check or write a page; the exit status is 1 where a check finds it stale."""
    parser = argparse.ArgumentParser(description=description)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="say whether the page is up to date")
    what.add_argument("--write", action="store_true", help="bring the page up to date")
    parser.add_argument("--page", type=Path, default=page, help=f"({page.name})")
    arguments = parser.parse_args(argv)
    old = arguments.page.read_text(encoding="utf-8")
    new = update(old)
    if arguments.write:
        arguments.page.write_text(new, encoding="utf-8", newline="\n")
        return 0
    if new != old:
        print(f"{arguments.page.name} is stale: run the command in its marker")
    return int(new != old)
