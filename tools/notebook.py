"""Write docs/tutorial.ipynb, the tutorial as a Jupyter notebook with its outputs, or check it."""

import ast
import doctest
import json
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tools import pages
from tools.pages import ROOT

Cell = dict[str, Any]

_SESSION = re.compile(r"^```pycon\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_REFERENCE = re.compile(r"\[(`[^`]+`)\]\[[\w.]+\]")  # a link that only the site resolves


def notebook(page: str) -> str:
    """Return the JSON of a notebook: a cell for each text of the page, and for each output."""
    cells: list[Cell] = []
    for place, text in enumerate(_SESSION.split(page)):
        cells += _code(text) if place % 2 else _text(text)
    named = [{"id": f"cell-{n}", **cell} for n, cell in enumerate(cells)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {
        "cells": named,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _text(text: str) -> Iterator[Cell]:
    if text.strip():
        source = _REFERENCE.sub(r"\1", text.strip())
        yield {"cell_type": "markdown", "metadata": {}, "source": source.splitlines(keepends=True)}


def _code(session: str) -> Iterator[Cell]:
    """Yield a cell for the lines up to each output."""
    source = ""
    for example in doctest.DocTestParser().get_examples(session):
        source += example.source
        if example.want:
            yield _cell(source, [_output(example)])
            source = ""
    if source:
        yield _cell(source, [])


def _cell(source: str, outputs: list[Cell]) -> Cell:
    lines = source.strip().splitlines(keepends=True)
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": outputs,
        "source": lines,
    }


def _output(example: doctest.Example) -> Cell:
    """Return what an example prints, or its value."""
    text = example.want.splitlines(keepends=True)
    last = ast.parse(example.source).body[-1]
    if isinstance(last, ast.Expr) and not ast.unparse(last).startswith("print("):
        return {
            "output_type": "execute_result",
            "execution_count": None,
            "metadata": {},
            "data": {"text/plain": [*text[:-1], text[-1].rstrip("\n")]},
        }
    return {"output_type": "stream", "name": "stdout", "text": text}


def stale(root: Path = ROOT) -> pages.Stale:
    """Return the notebook unless it shows what the page shows."""
    path = root / "docs" / "tutorial.ipynb"
    new = notebook(path.with_suffix(".md").read_text(encoding="utf-8"))
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    return [] if new == old else [(path, partial(str, new))]


if __name__ == "__main__":
    sys.exit(pages.main(None, __doc__, stale()))
