"""The program that serves a Llama gives each request the tokens that transformers give it."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", "5.4")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program as a module."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "engine", raising=False)
    return importlib.import_module("engine")


BLOCK = list(range(1, 17))
ASKED: list[tuple[list[int], int]] = [
    ([5], 4),
    ([*BLOCK, 20, 21], 9),
    (BLOCK * 3, 1),  # its last block is not shared: its last token must be read
    ([7, 8] * 9, 20),
    (BLOCK * 3, 6),
    ([*BLOCK, 20, 22], 12),
]


@pytest.mark.parametrize("slots", [1, 2, 6])
def test_requests_that_join_and_leave(engine: ModuleType, slots: int) -> None:
    assert engine.compare(engine.model_of(), ASKED, slots)


def test_prefixes_are_shared(engine: ModuleType) -> None:
    """A request shares pages of one that has ended, but not the block with its own last token."""
    server = engine.Engine(engine.model_of(), pages=8, slots=1)
    server.serve([engine.Request(*each) for each in ASKED])
    assert server.shared == 16 + 32 + 16
    assert server.pages.available() == 8


def test_drafts_that_are_right(engine: ModuleType) -> None:
    """A model that repeats tokens writes what its drafts say, and fewer steps do."""
    model = engine.model_of()
    with torch.no_grad():
        for layer in model.model.layers:  # the next token follows from the last one
            layer.self_attn.o_proj.weight.zero_()
    asked = [([3, 4], 40)]
    server = engine.Engine(model, 8, 1)
    request = engine.Request(*asked[0])
    server.serve([request])
    assert request.tokens == engine.alone(model, *asked[0])
    assert server.drafted > 0
    assert server.steps == 40 - server.drafted


def test_a_request_that_is_too_long(engine: ModuleType) -> None:
    server = engine.Engine(engine.model_of(), pages=2, slots=2)
    with pytest.raises(ValueError, match="pages must be 3 for a request of 40 tokens"):
        server.serve([engine.Request([1, 2], 38)])


@pytest.mark.parametrize("name", ["append_kv", "rope"])
def test_a_wrong_step_is_noticed(
    engine: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = getattr(engine, name)

    def wrong(*given: Any, **options: Any) -> Any:
        found = true(*given, **options)
        if name == "rope":
            return -found
        given[1].mul_(0.9)
        return found

    monkeypatch.setattr(engine, name, wrong)
    assert not engine.compare(engine.model_of(), ASKED, 2)
