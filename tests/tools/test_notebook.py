"""The notebook of the tutorial shows what Jupyter would show."""

import ast
import contextlib
import io
import json

import numpy as np

from tools import notebook
from tools.pages import DOCS


def run(code: str, names: dict[str, object]) -> str:
    """Run a cell, and return what Jupyter shows below it."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        value = last and eval(ast.unparse(last), names)
    return printed.getvalue() + ("" if value is None else repr(value))


def test_the_cells_run_and_show_their_outputs() -> None:
    made = json.loads((DOCS / "tutorial.ipynb").read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    codes = [cell for cell in made["cells"] if cell["cell_type"] == "code"]
    assert len(codes) > 20
    with np.printoptions():
        for cell in codes:
            shown = "".join(
                "".join(output.get("text", output.get("data", {}).get("text/plain")))
                for output in cell["outputs"]
            )
            assert run("".join(cell["source"]), names) == shown


def test_the_notebook_is_that_of_the_page() -> None:
    assert list(notebook.stale()) == []


def test_values_and_prints_are_told_apart() -> None:
    page = "Text.\n\n```pycon\n>>> x = 2\n>>> print(x)\n2\n>>> x + 1\n3\n```\n"
    text, printed, value = json.loads(notebook.notebook(page))["cells"]
    assert text["source"] == ["Text."]
    assert printed["source"] == ["x = 2\n", "print(x)"]
    assert printed["outputs"][0]["text"] == ["2\n"]
    assert value["outputs"][0]["data"] == {"text/plain": ["3"]}
