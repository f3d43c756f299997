"""What would run on a GPU, whether it is there or not."""

import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.backends.cupy import fake_cupy
from tileattn.backends.cupy.explain import explain_on
from tileattn.call.parse import parse
from tileattn.call.problem import Operands, Problem
from tileattn.cli.commands import main
from tileattn.kernels.cuda.plan.device import device_of_arch
from tileattn.kernels.cuda.plan.layout import contiguous_inputs
from tileattn.kernels.cuda.plan.plan import plans_of

ROOT = Path(__file__).parents[3]
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


LENGTHS = [(1 << 20) - 999 * n for n in range(8)]


@pytest.mark.parametrize("D", [128, 512])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (4096, 0)}], ids=str)
def test_a_million_tokens_are_explained(D: int, options: dict[str, Any]) -> None:
    explain_a_million_tokens(D, options)


@pytest.mark.parametrize(
    "options",
    [
        {"window": (4096, 0), "kv_lengths": LENGTHS},
        {"causal": True, "q_offset": [5 - n for n in LENGTHS]},
    ],
    ids=["lengths", "offsets"],
)
def test_so_are_a_million_tokens_of_each_sequence(options: dict[str, Any]) -> None:
    explain_a_million_tokens(128, options)


def explain_a_million_tokens(D: int, options: dict[str, Any]) -> None:
    problem, operands = asked((8, 32, 8, 1 << 20, 1 << 20, D), **options)
    found = explain_on(H200, problem, contiguous_inputs(problem), operands)
    q, k = found.forward_tile
    assert sum(found.tiles.values()) == 8 * 32 * -(-(1 << 20) // q) * -(-(1 << 20) // k)


def test_few_queries_share_tiles_and_split_the_keys() -> None:
    problem, operands = asked((16, 32, 8, 1, 8192, 128))
    found = explain_on(H200, problem, contiguous_inputs(problem), operands)
    rows, keys = found.forward_tile
    assert rows >= 4
    assert found.tiles == {"skipped": 0, "partial": 0, "full": 16 * 8 * 8192 // keys}
    assert found.bytes_moved["k"] == found.bytes_moved["v"] == 16 * 8 * 8192 * 128 * 2
    sums = 16 * 32 * 8 * (128 + 2) * 4
    assert found.bytes_moved["sums"] == 2 * sums
    for line in (
        "forward_decode_sm90: few queries, cut into splits of 1,024 keys",
        "forward_combine: one warp for each query, which joins its splits",
        f"the sums of the splits take {sums / 1e6:.2f} MB besides the results",
    ):
        assert line in found.reasons


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ((1, 8, 8, 4096, 4096, 128), "query blocks are assigned in advance, the longest first"),
        ((8, 32, 32, 512, 512, 128), "query blocks are claimed one by one, head by head"),
    ],
)
def test_the_order_of_query_blocks_is_told(sizes: Any, line: str) -> None:
    problem, operands = asked(sizes, causal=True)
    found = explain_on(H200, problem, contiguous_inputs(problem), operands)
    assert [x for x in found.reasons if x.startswith("query blocks")] == [line]


@pytest.mark.parametrize(
    ("N", "options", "told"),
    [
        (4096, {"causal": True}, True),
        (4096, {"mask_mod": lambda _b, _h, i, j: i >= j}, True),
        (512, {"causal": True}, False),
        (512, {}, False),
    ],
)
def test_plans_of_first_calls_are_told(N: int, options: dict[str, Any], told: bool) -> None:
    """The workspace is enough for the plan of a first call, whose lists the GPU makes."""
    problem, operands = asked((8, 32, 32, N, N, 128), **options)
    layout = contiguous_inputs(problem)
    found = explain_on(H200, problem, layout, operands)
    lines = [x for x in found.reasons if x.startswith("tables are made when a call repeats")]
    assert len(lines) == told
    first = plans_of(problem, layout, H200, tables=False)
    assert max(plan.workspace.nbytes for plan in first[1:]) <= found.workspace_bytes


def test_keys_in_pages_have_no_backward_pass() -> None:
    q, pages = np.zeros((1, 8, 4, 64), np.float16), np.zeros((16, 2, 16, 64), np.float16)
    options = {"block_table": np.arange(16).reshape(1, 16), "kv_lengths": [256]}
    problem, operands = parse(q, pages, pages, options)
    found = explain_on(H200, problem, contiguous_inputs(problem), operands)
    assert len(found.kernels) == 1
    assert found.kernels[0].startswith("forward_decode_sm90")
    assert "pages" in " ".join(found.reasons)


def test_a_gpu_that_is_there_is_explained_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for registers and occupancy, which a loaded kernel tells."""
    with fake_cupy.machine(monkeypatch) as gpu:
        gpu.arch = "sm_90a"
        x = gpu.array((2, 4, 1000, 64), np.float16)
        there = tileattn.explain(x, x, x, causal=True)
        problem, operands = asked((2, 4, 4, 1000, 1000, 64), causal=True)
        device = replace(gpu.device_of(0), name=H200.name)
        assert device == H200
        absent = explain_on(gpu.device_of(0), problem, contiguous_inputs(problem), operands)
    assert replace(there, kernels=()) == replace(absent, kernels=())
    for line, like in zip(there.kernels, absent.kernels, strict=True):
        assert line.split(" threads,")[0] == like.split(" threads,")[0]


def test_why_the_hopper_kernels_do_not_run() -> None:
    problem, operands = asked((2, 4, 4, 1000, 1000, 60))
    found = explain_on(H200, problem, contiguous_inputs(problem), operands)
    why = "not the Hopper kernel, because the head dimension of v is not a multiple of 8; tiles"
    for kernel in ("forward", "backward_dkdv"):
        assert any(r.startswith(f"{kernel}: {why}") for r in found.reasons)
    assert "sm90" not in str(found)


def test_no_cupy_is_needed(tmp_path: Path) -> None:
    code = """
        import sys
        sys.modules["cupy"] = sys.modules["cupy_backends"] = None
        from tileattn.cli.commands import main
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
        ("--arch sm_1", "ValueError: arch must be one of sm_75, sm_80, "),
        (
            "--arch sm_90 --backend numpy",
            "ValueError: --backend must be 'cupy' with --arch; got 'numpy'",
        ),
        ("--arch sm_90 --Nk 2000000000", "ValueError: --Nk must be at most 67,108,864; got 2,000,"),
    ],
)
def test_what_is_refused(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *line.split()]) == 2
    assert capsys.readouterr().err.startswith(said)
