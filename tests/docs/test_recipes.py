"""The recipes of the cookbook run, check themselves, and are shown."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.py"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_runs_and_is_shown(recipe: Path) -> None:
    if "import torch" in recipe.read_text(encoding="utf-8"):
        pytest.importorskip("torch")
    assert f"examples/recipes/{recipe.name}" in (ROOT / "docs/cookbook.md").read_text("utf-8")
    runpy.run_path(str(recipe))
