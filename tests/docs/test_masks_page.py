"""The page about functions of one's own quotes the gallery, and names all of it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "masks-and-scores.md").read_text(encoding="utf-8")
QUOTES = re.findall(r"<!-- from: (\S+) -->\n```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def without_docstrings(text: str) -> dict[str, str]:
    """Functions of a module by name, as they are unparsed."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            if ast.get_docstring(node):
                node.body = node.body[1:]
            found[node.name] = ast.unparse(node)
    return found


@pytest.mark.parametrize(
    ("path", "quote"), QUOTES, ids=[quote.split("(")[0] for _, quote in QUOTES]
)
def test_what_is_quoted_is_the_function_of_the_file(path: str, quote: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    ((name, function),) = without_docstrings(quote).items()
    assert without_docstrings(text)[name] == function


def test_every_function_of_the_gallery_is_named() -> None:
    gallery = (ROOT / "examples" / "score_functions.py").read_text(encoding="utf-8")
    assert len(QUOTES) > 2
    assert [name for name in without_docstrings(gallery) if f"`{name}`" not in PAGE] == []
