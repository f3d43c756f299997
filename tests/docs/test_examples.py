"""The example programs run, learn and agree with themselves."""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tileattn

Array = NDArray[Any]

CHAR_GPT = Path(__file__).parents[2] / "examples" / "char_gpt.py"
SMALL = ["--layers=2", "--width=48", "--heads=2", "--context=40", "--batch=4", "--seconds=60"]


@pytest.fixture(scope="module")
def char_gpt() -> ModuleType:
    spec = importlib.util.spec_from_file_location("char_gpt", CHAR_GPT)
    if spec is None or spec.loader is None:
        pytest.fail(f"cannot import {CHAR_GPT}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*options: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the program from another folder, as a reader would with only the package installed."""
    return subprocess.run(
        [sys.executable, CHAR_GPT, *SMALL, *options],
        env={**os.environ, "PYTHONPATH": str(Path(tileattn.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.slow
def test_training_lowers_the_loss_and_leaves_a_sample_and_two_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the example draws: pip install matplotlib")
    folder = tmp_path / "made" / "when needed"
    done = run("--steps=80", "--out", folder)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"([\d.]+) bits/byte", done.stdout)]
    held_out = re.search(r"Held-out files: ([\d.]+) bits per byte", done.stdout)
    assert held_out is not None
    assert len(losses) == 10
    assert max(losses[-1], float(held_out[1])) < losses[0] - 1
    sample = done.stdout.partition("Sample:\n\n")[2].partition(" \n\nPictures:")[0]
    assert re.fullmatch(r"def [ -~\n]{400}", sample)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert files.keys() == {"loss.png", "attention.png"}
    assert all(data.startswith(b"\x89PNG") for data in files.values())


def test_plain_attention_and_tileattn_train_alike() -> None:
    done = run("--check", "--steps=5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The losses agree." in done.stdout
    rows = re.findall(r"^ +\d+ +([\d.]+) +([\d.]+) +([\d.e+-]+)$", done.stdout, re.MULTILINE)
    assert len(rows) == 5
    # Losses of training, not attention: they are printed to four digits.
    assert all(abs(float(plain) - float(tiled)) < 1e-4 for plain, tiled, _ in rows)


def options(char_gpt: ModuleType) -> tuple[Any, Any, argparse.Namespace]:
    """A shape, a text and arguments for `check`."""
    args = argparse.Namespace(seed=0, steps=8, batch=3, context=21, rate=3e-3, backend="numpy")
    text = (np.arange(5000) ** 2 % 97 + 30).astype(np.uint8)
    return char_gpt.Shape(layers=2, width=24, heads=3, context=args.context), text, args


@pytest.mark.parametrize(
    ("wrong", "error"), [("out", np.nan), ("dq", 0.03), ("dk", 0.03), ("dv", np.nan)]
)
def test_the_check_finds_a_wrong_attention(
    char_gpt: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wrong: str,
    error: float,
) -> None:
    """One result gets some of another row's; Adam would hide a mere factor."""

    def spoiled(name: str, array: Array) -> Array:
        return array + np.float32(error) * array[:, :, ::-1] if name == wrong else array

    def wrong_attention(*arrays: Array) -> tuple[Array, Any]:
        out, backward = char_gpt.plain_attention(*arrays)
        names = ("dq", "dk", "dv")
        return spoiled("out", out), lambda dout: tuple(map(spoiled, names, backward(dout)))

    monkeypatch.setattr(char_gpt, "tiled_attention", lambda _: wrong_attention)
    shape, text, args = options(char_gpt)
    assert not char_gpt.check(shape, text, args, np)
    assert "THE LOSSES DISAGREE." in capsys.readouterr().out


def float64_model(char_gpt: ModuleType, core: Any) -> Any:
    """A tiny model away from its start, where some weights are zero and hide others."""
    shape = char_gpt.Shape(layers=2, width=12, heads=3, context=9)
    model = char_gpt.Model(shape, core, 0, np, np.float64)
    model.flat += 0.2 * np.random.default_rng(1).standard_normal(model.flat.size)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("core", ["tiled", "plain"])
def test_the_gradient_of_the_whole_model(char_gpt: ModuleType, core: str) -> None:
    """Central differences, for each weight: single entries, and a direction that has them all."""
    attention = char_gpt.tiled_attention() if core == "tiled" else char_gpt.plain_attention
    model = float64_model(char_gpt, attention)
    rng = np.random.default_rng(2)
    texts = rng.integers(0, 256, (2, 8))  # shorter than the context
    model.loss(texts, with_gradient=True)
    step = 1e-5
    for name, weight in model.weights.items():
        gradient = model.gradients[name].copy()
        directions = [rng.standard_normal(weight.shape)]
        for place in (int(np.abs(gradient).argmax()), *rng.integers(0, weight.size, 5)):
            directions.append(np.zeros(weight.shape))
            directions[-1].flat[place] = 1
        before = weight.copy()
        for direction in directions:
            ends = []
            for sign in (1, -1):
                weight[...] = before + sign * step * direction
                ends.append(model.loss(texts))
            weight[...] = before
            numeric = (ends[0] - ends[1]) / (2 * step)
            analytic = float((gradient * direction).sum())
            # A central difference is off by about step**2 and eps / step, 1e-10 each.
            assert abs(numeric - analytic) <= 1e-7 * (1 + abs(analytic)), name


def test_beside_the_plain_formula() -> None:
    program = CHAR_GPT.with_name("beside_plain.py")
    done = subprocess.run(
        [sys.executable, program, "--tokens=700"], capture_output=True, text=True, check=True
    )
    found = re.search(r"Largest difference: ([\d.e-]+)", done.stdout)
    assert found is not None
    # A whole program's output in float32, which prints the difference.
    assert float(found[1]) < 1e-4
    memory = [float(x.replace(",", "")) for x in re.findall(r"([\d,]+) MiB", done.stdout)]
    assert memory[1] < memory[0]
