"""The page about the kernels quotes code as it is, and names every file and kernel."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
ALGORITHM = ROOT / "tileattn" / "algorithm"
KERNELS = ROOT / "tileattn" / "kernels" / "cuda" / "src"
SOURCES = sorted(KERNELS.iterdir())
QUOTES = re.findall(r"<!-- from: (\S+) -->\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


CELL = re.compile(r"((?:`\w+`, )*`\w+`) in `(\w+\.\w+)`")
COUNTERPARTS = sorted(
    {(name, file) for names, file in CELL.findall(PAGE) for name in re.findall(r"\w+", names)}
)
# Starts tasks, or is another order of the loops, which no kernel has.
GLUE = {"forward", "forward_by_keys", "update_tile", "finalize", "_multiply", "_row_blocks"}


def missing(quote: str, text: str) -> list[str]:
    """Lines of a quote that a text does not have, in their order; comments are the quote's own."""
    at, absent = 0, []
    for line in map(str.strip, quote.splitlines()):
        if line and not line.startswith(("#", "//")):
            part = line.removesuffix(";")  # the text may use the expression within another
            found = text.find(part, at)
            at = at if found < 0 else found + len(part)
            absent += [line] if found < 0 else []
    return absent


@pytest.mark.parametrize(("path", "quote"), QUOTES, ids=[path for path, _ in QUOTES])
def test_what_is_quoted_stands_in_the_file(path: str, quote: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert missing(quote, text) == []
    assert quote.count("\n") > 1


def test_both_sides_are_quoted() -> None:
    quoted = {path.rpartition("/")[2] for path, _ in QUOTES}
    assert {"spec.py", "scores.py", "mask.py", "softmax.py", "philox.py"} <= quoted
    assert {"forward.cu", "backward_dkdv.cu", "forward_sm90.cu", "backward_sm90.cu"} <= quoted


@pytest.mark.parametrize(("name", "file"), COUNTERPARTS, ids=map(" in ".join, COUNTERPARTS))
def test_a_counterpart_is_in_its_file(name: str, file: str) -> None:
    if file.endswith(".py"):
        text = (ALGORITHM / file).read_text(encoding="utf-8")
        assert re.search(rf"^\s*(def|class) {name}\b", text, re.MULTILINE)
    else:
        assert re.search(rf"\b{name}\b", (KERNELS / file).read_text(encoding="utf-8"))


def test_every_function_of_the_specification_has_a_counterpart() -> None:
    text = (ALGORITHM / "spec.py").read_text(encoding="utf-8")
    functions = set(re.findall(r"^def (\w+)", text, re.MULTILINE)) - GLUE
    assert functions <= {name for name, file in COUNTERPARTS if file == "spec.py"}


def test_every_module_of_the_page_exists() -> None:
    folders = [ROOT / "tileattn", ROOT / "tileattn" / "kernels" / "cuda", ROOT]
    modules = set(re.findall(r"`((?:\w+/)+\w+\.py)`", PAGE))
    assert len(modules) > 10
    assert [x for x in sorted(modules) if not any((f / x).exists() for f in folders)] == []


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_every_source_is_named(source: Path) -> None:
    name = source.name if source.suffix == ".cuh" else source.stem
    assert f"`{name}`" in PAGE
