"""The program that writes text from a cache writes what it would without one."""

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


@pytest.mark.slow
def test_both_ways_write_the_same(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "generate.py", "--seconds=1", "--tokens=40", "--samples=3"],
        env={**os.environ, "PYTHONPATH": str(Path(tileattn.__file__).parents[1])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The bytes are the same." in done.stdout
    assert "11 pages of 16 bytes; 15 if the samples shared none" in done.stdout
    speeds = re.findall(
        r"^(recomputed|from the cache) +([\d,]+) bytes/s$", done.stdout, re.MULTILINE
    )
    assert [name for name, _ in speeds] == ["recomputed", "from the cache"]


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program as a module; it imports another one beside it."""
    monkeypatch.syspath_prepend(EXAMPLES)
    for name in ("char_gpt", "generate"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("generate")


def model(generate: ModuleType) -> Any:
    """A model whose attention matters, untrained."""
    char_gpt = generate.char_gpt
    shape = char_gpt.Shape(layers=2, width=48, heads=3, context=80)
    made = char_gpt.Model(shape, char_gpt.tiled_attention(), 0)
    made.flat += np.random.default_rng(1).normal(0, 0.2, made.flat.size).astype(np.float32)
    return made


@pytest.mark.parametrize(("length", "samples"), [(1, 4), (15, 1), (16, 4), (17, 1), (40, 4)])
def test_any_prompt_and_number_of_samples(generate: ModuleType, length: int, samples: int) -> None:
    prompt = bytes(range(65, 65 + length))
    assert generate.compare(model(generate), prompt, samples, 40)


def test_a_wrong_cache_is_noticed(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    true = tileattn.append_kv

    def wrong(k: Any, v: Any, *new: Any, **places: Any) -> Any:
        lengths = true(k, v, *new, **places)
        v[...] *= 0.9
        return lengths

    monkeypatch.setattr(tileattn, "append_kv", wrong)
    assert not generate.compare(model(generate), b"abcdefgh", 3, 40)
