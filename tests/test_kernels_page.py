"""The page about the kernels quotes code as it is, and names every file and kernel."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
SOURCES = sorted((ROOT / "tileattn" / "kernels" / "src").iterdir())
QUOTES = re.findall(r"<!-- from: (\S+) -->\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def missing(quote: str, text: str) -> list[str]:
    """Lines of a quote that a text does not have, in their order; comments are the quote's own."""
    at, absent = 0, []
    for line in map(str.strip, quote.splitlines()):
        if line and not line.startswith("#"):
            part = line.removesuffix(";")  # the text may use the expression within another
            found = text.find(part, at)
            at = at if found < 0 else found + len(part)
            absent += [line] if found < 0 else []
    return absent


@pytest.mark.parametrize(("path", "quote"), QUOTES, ids=[path for path, _ in QUOTES])
def test_what_is_quoted_stands_in_the_file(path: str, quote: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert missing(quote, text) == []
    assert quote.count("\n") > 5


def test_the_loops_are_quoted() -> None:
    kernels = ("forward.cu", "forward_sm90.cu")
    wanted = ["tileattn/spec.py", *(f"tileattn/kernels/src/{name}" for name in kernels)]
    assert [path for path, _ in QUOTES] == wanted


def test_a_line_that_is_not_in_the_file_is_found() -> None:
    assert missing("a = b\n# a comment\nc = d\n", "x\na = b\n") == ["c = d"]
    assert missing("a = b\nc = d\n", "c = d\na = b\n") == ["c = d"]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_every_source_is_named(source: Path) -> None:
    name = source.name if source.suffix == ".cuh" else source.stem
    assert f"`{name}`" in PAGE
