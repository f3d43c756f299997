"""What would run on a GPU, whether it is there or not, and how fast that is known."""

import os
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tileattn
from tests import fake_cupy
from tileattn.backends.cupy.explain import explain_on
from tileattn.cli import main
from tileattn.kernels.launch.device import device_of_arch
from tileattn.kernels.launch.layout import contiguous_inputs
from tileattn.problem import Operands, Problem, parse
from tileattn.traffic import compared, forward_traffic

ROOT = Path(__file__).parents[1]
H200 = device_of_arch("sm_90a")


def asked(
    shape: tuple[int, int, int, int, int, int], dtype: Any = np.float16, **options: Any
) -> tuple[Problem, Operands]:
    """Make a call of these sizes; nothing of it takes memory."""
    B, Hq, Hkv, Nq, Nk, D = shape
    q, k = (
        np.broadcast_to(np.zeros((), dtype), sizes) for sizes in ((B, Hq, Nq, D), (B, Hkv, Nk, D))
    )
    return parse(q, k, k, options)


@given(
    data=st.data(),
    Nq=st.integers(0, 500),
    Nk=st.integers(0, 700),
    dim=st.sampled_from([8, 64, 128, 300]),
)
def test_the_closed_form_is_the_count(data: st.DataObject, Nq: int, Nk: int, dim: int) -> None:
    """Also where queries attend to nothing, and under a mask, of which no tile is full."""
    side = st.none() | st.integers(0, 800)
    options: dict[str, Any] = {"window": (data.draw(side), data.draw(side))}
    if data.draw(st.booleans()):
        options["mask"] = np.ones((1, 1), np.bool_)
    problem, operands = asked((2, 6, 2, Nq, Nk, dim), **options)
    found = explain_on(
        H200, problem, contiguous_inputs(replace(problem, uses=frozenset())), operands
    )
    tiles = found.forward_tile, found.backward_tile
    assert (found.tiles, found.bytes_moved) == forward_traffic(problem, operands, tiles[0])
    assert found.traffic == compared(problem, operands, *tiles)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (4096, 0)}], ids=str)
@pytest.mark.parametrize("D", [128, 512])
def test_a_million_tokens_are_explained_within_a_second(D: int, options: dict[str, Any]) -> None:
    """Processor time: other work on the machine does not count."""
    start = time.process_time()
    problem, operands = asked((1, 32, 8, 1 << 20, 1 << 20, D), **options)
    found = explain_on(H200, problem, contiguous_inputs(problem), operands)
    assert time.process_time() - start < 1
    q, k = found.forward_tile
    assert sum(found.tiles.values()) == 32 * -(-(1 << 20) // q) * -(-(1 << 20) // k)


def test_a_gpu_that_is_there_is_explained_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for registers and occupancy, which a loaded kernel tells."""
    with fake_cupy.machine(monkeypatch) as gpu:
        gpu.arch = "sm_90a"
        x = gpu.array((2, 4, 1000, 64), np.float16)
        there = tileattn.explain(x, x, x, causal=True)
        problem, operands = asked((2, 4, 4, 1000, 1000, 64), causal=True)
        device = replace(gpu.described(0), name=H200.name)
        assert device == H200
        absent = explain_on(gpu.described(0), problem, contiguous_inputs(problem), operands)
    assert replace(there, kernels=()) == replace(absent, kernels=())
    for line, like in zip(there.kernels, absent.kernels, strict=True):
        assert line.split(" threads,")[0] == like.split(" threads,")[0]


def test_no_cupy_is_needed(tmp_path: Path) -> None:
    code = """
        import sys
        sys.modules["cupy"] = sys.modules["cupy_backends"] = None
        from tileattn.cli import main
        raise SystemExit(main(["explain", "--arch", "sm_90", "--plan", "--dtype", "bfloat16"]))
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "backend   cupy (forward_sm90)"
    assert lines.count("device     H200, sm_90a, 132 SMs") == 2
    assert any(line.startswith("launch     backward_sm90 128 x 128") for line in lines)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--arch sm_1", "ValueError: arch is 'sm_1'; sm_75, sm_80, "),
        ("--arch sm_90 --backend numpy", "ValueError: backend is 'numpy'; with --arch, 'cupy' is"),
        ("--arch sm_90 --Nk 2000000000", "UnsupportedError: backend 'cupy' does not serve this"),
    ],
)
def test_what_is_refused(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *line.split()]) == 2
    assert capsys.readouterr().err.startswith(said)
