"""The recipes of the cookbook run, check themselves, and print what the page says."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.py"))
PRINTED = dict(
    re.findall(
        r'^--8<-- "examples/recipes/(\w+)\.py"\n```\n\n```text\n(.*?)^```$',
        (ROOT / "docs/cookbook.md").read_text("utf-8"),
        re.MULTILINE | re.DOTALL,
    )
)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_runs_and_prints_what_the_page_says(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "import torch" in recipe.read_text(encoding="utf-8"):
        pytest.importorskip("torch")
    runpy.run_path(str(recipe))
    assert capsys.readouterr().out == PRINTED[recipe.stem]
