"""The GPU benchmark beside its grid: grouped heads, wide values, windows; and the best peer."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import gpu, gpu_peers, gpu_report
from benchmarks.gpu_cells import Cell, shapes_of
from benchmarks.gpu_peers import Plain, Tileattn
from tests.fake_gpu import Fake

OTHERS = {
    "grouped": Cell("forward", "f32", 2, 6, 20, 8, causal=True, Hkv=3),
    "wide": Cell("forward", "f32", 2, 3, 20, 8, causal=False, Dv=12),
    "window": Cell("forward", "f32", 2, 3, 20, 8, causal=False, window=6),
    "causal window": Cell("forward", "f32", 2, 3, 20, 8, causal=True, window=6),
}


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_shapes_keep_tokens_and_width(kind: str) -> None:
    cases = list(shapes_of(["bf16"], (2048, 8192), (8192, 16384), [kind], (False, True)))
    assert [name for name, _ in cases] == [
        name for name in ("GQA 4:1", "GQA 8:1", "D 192, Dv 128", "window of 1024") for _ in range(4)
    ]
    cells = [cell for _, cell in cases]
    assert len(set(cells)) == 16
    assert {cell.kind for cell in cells} == {kind}
    assert {cell.B * cell.N for cell in cells} == {16384}
    assert {(cell.H, cell.Hkv, cell.D, cell.Dv) for cell in cells} == {
        (16, 4, 128, None),
        (16, 2, 128, None),
        (10, None, 192, 128),
        (16, None, 128, None),
    }
    assert {(cell.causal, cell.mask.window) for cell in cells[12:]} == {
        (False, (512, 511)),
        (True, (1023, 0)),
    }
    assert {cell.N for cell in cells[12:]} == {8192, 16384}


def test_operations_of_other_shapes_are_those_of_their_products() -> None:
    cell = Cell("forward", "bf16", 2, 6, 20, 8, causal=True, Hkv=3, Dv=4)
    assert cell.flops == 2 * 6 * 20 * 20 * (8 + 4)
    assert cell.shapes == ((2, 6, 20, 8), (2, 3, 20, 8), (2, 3, 20, 4), (2, 6, 20, 4))
    shown = sum(min(i + 1, 5) for i in range(20))
    assert replace(cell, window=5).flops == pytest.approx(2 * 2 * 6 * shown * (8 + 4))


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("name", OTHERS)
def test_shapes_are_raced_as_the_grid_is(name: str, kind: str) -> None:
    cell = replace(OTHERS[name], kind=kind)
    (row,) = gpu.shapes([(name, cell)], [Tileattn(), Plain(np)], Fake())
    assert row["case"] == name
    assert row["failed"] == {}
    assert row["ratio_to"] == {"cupy": 1.0}
    assert gpu_report.grid_line(row, ["tileattn", "cupy"]).endswith(f"  {name}")


@pytest.mark.parametrize("name", OTHERS)
def test_torch_races_over_shapes_but_not_over_windows(name: str) -> None:
    pytest.importorskip("torch", reason="the peer is PyTorch, which dev leaves out")
    peers, _ = gpu_peers.find(["math"], np)
    (row,) = gpu.shapes([(name, OTHERS[name])], [Tileattn(), *peers], Fake())
    if "window" in name:
        why = "NotImplementedError: scaled_dot_product_attention has no window"
        assert row["failed"] == {"math": why}
        assert row["ratio_to"] == {}
    else:
        assert row["failed"] == {}
        assert row["ratio_to"] == {"math": 1.0}


@pytest.mark.parametrize("name", OTHERS)
def test_flash_attention_4_is_told_the_window(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="the peer is PyTorch, which dev leaves out")
    asked: list[Any] = []

    def attend(q: Any, k: Any, v: Any, causal: bool, window_size: Any) -> Any:
        asked.append((causal, window_size))
        i, j = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
        left, right = (q.shape[1] if side is None else side for side in window_size)
        seen = (j >= i - left) & (j <= i + (0 if causal else right))
        heads = (x.transpose(1, 2) for x in (q, k, v))
        function = torch.nn.functional.scaled_dot_product_attention
        return function(*heads, attn_mask=seen, enable_gqa=True).transpose(1, 2), None

    package = SimpleNamespace(flash_attn_func=attend)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(cute=package))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package)
    monkeypatch.setattr(gpu_peers.FlashAttention4, "dtypes", ("f32",))
    peers, missing = gpu_peers.find(["fa4"], np)
    assert missing == {}
    (row,) = gpu.shapes([(name, OTHERS[name])], [Tileattn(), *peers], Fake())
    assert row["ratio_to"] == {"fa4": 1.0}
    windows = {"window": (3, 2), "causal window": (5, 0)}
    assert set(asked) == {(OTHERS[name].causal, windows.get(name, (None, None)))}


@pytest.mark.parametrize(
    ("ratios", "best"),
    [
        ({"flash": 0.5, "cudnn": 0.9, "fa4": 0.8}, 0.8),
        ({"cudnn": 0.9}, 0.9),
        ({"flash": 0.5, "math": 0.1}, None),
        ({}, None),
    ],
)
def test_the_best_is_the_faster_of_cudnn_and_flash_attention_4(
    ratios: dict[str, float], best: float | None
) -> None:
    assert gpu_report.best({"ratio_to": ratios}) == best


def test_means_are_geometric_and_one_for_each_pass() -> None:
    ratios = [("forward", 0.5), ("backward", 3.0), ("forward", 2.0), ("backward", 3.0)]
    rows = [{"pass": name, "ratio_to": {"cudnn": ratio, "fa4": 9.0}} for name, ratio in ratios]
    alone = {"pass": "forward", "ratio_to": {"flash": 7.0}}
    said = "ratio to the fastest of cudnn and fa4 over 2 rows: geometric mean"
    assert list(gpu_report.means([*rows, alone])) == [
        f"forward, {said} 1.00, smallest 0.50",
        f"backward, {said} 3.00, smallest 3.00",
    ]
    assert list(gpu_report.means([alone])) == []
    one = {"pass": "forward", "ratio_to": {"cudnn": 2.0, "flash": 7.0}}
    assert list(gpu_report.means([alone, one])) == [
        "forward, ratio to cudnn over 1 rows: geometric mean 2.00, smallest 2.00"
    ]
