"""The program that serves many requests gives each the bytes that it gets alone."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import tileattn

EXAMPLES = Path(__file__).parents[2] / "examples"
PREFIX = b"abcabcabd" * 3


@pytest.mark.slow
def test_the_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "serve.py", "--seconds=1", "--tokens=24", "--requests=5"],
        env={**os.environ, "PYTHONPATH": str(Path(tileattn.__file__).parents[1])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The bytes are the same." in done.stdout
    assert re.search(r"^served +[\d,]+ bytes/s, 5 requests in 4 slots$", done.stdout, re.MULTILINE)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program as a module; it imports another one beside it."""
    monkeypatch.syspath_prepend(EXAMPLES)
    for name in ("char_gpt", "serve"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("serve")


def model(serve: ModuleType, noise: float = 0.2) -> Any:
    """A model whose attention matters, untrained."""
    char_gpt = serve.char_gpt
    shape = char_gpt.Shape(layers=2, width=48, heads=3, context=120)
    made = char_gpt.Model(shape, char_gpt.tiled_attention(), 0)
    made.flat += np.random.default_rng(1).normal(0, noise, made.flat.size).astype(np.float32)
    return made


ASKED = [(b"x", 5), (b"abcabc", 40), (bytes(range(65, 98)), 1), (b"hello", 17), (b"abab", 30)]


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_requests_that_join_and_leave(serve: ModuleType, slots: int) -> None:
    assert serve.compare(model(serve), PREFIX, ASKED, slots)


def test_drafts_that_are_right(serve: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """With little noise the model repeats bytes, as drafts do."""
    assert serve.compare(model(serve, 0.01), PREFIX, ASKED, 2)
    found = re.search(r"^drafts +([\d.]+) bytes", capsys.readouterr().out, re.MULTILINE)
    assert found
    assert float(found[1]) > 1


@pytest.mark.parametrize("name", ["append_kv", "merge"])
def test_a_wrong_step_is_noticed(
    serve: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = getattr(tileattn, name)

    def wrong(*given: Any, **options: Any) -> Any:
        found = true(*given, **options)
        if name == "merge":
            return tileattn.Attention(0.8 * found.out, found.lse)
        given[1][...] *= 0.9
        return found

    monkeypatch.setattr(tileattn, name, wrong)
    assert not serve.compare(model(serve), PREFIX, ASKED, 2)
