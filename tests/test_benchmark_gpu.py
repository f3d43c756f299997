"""The GPU benchmark measures what it says; here on NumPy arrays, with a clock that is made up."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tileattn
from benchmarks import gpu, gpu_cells, gpu_peers, gpu_report
from benchmarks.gpu_cells import HEAD_DIMS, LENGTHS, PASSES, Cell, cells_of, window_share
from benchmarks.gpu_device import DTYPES, Call, Gpu, Inputs
from benchmarks.gpu_peers import Contestant, Mask, Plain, Tileattn
from tests.fake_gpu import MACHINE, Fake
from tools import pages, performance_tables

CELL = Cell("forward", "f32", 2, 3, 20, 8, causal=False)
BACK = Cell("backward", "f64", 2, 3, 20, 8, causal=True)


class Bent(Plain):
    """Plain NumPy whose results pass through a function; its calls may raise."""

    def __init__(self, name: str, bend: Callable[[Any], Any]) -> None:
        super().__init__(np)
        self.name, self._bend = name, bend

    def forward(self, x: Inputs, mask: Mask) -> Call:
        """Bend the output."""
        call = super().forward(x, mask)
        return lambda: self._bend(call())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems that NumPy computes at once."""
    monkeypatch.setattr(gpu_cells, "TOKENS", 512)
    monkeypatch.setattr(gpu_cells, "HIDDEN", dict.fromkeys(DTYPES, 16))


# --- what is counted ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "causal", "flops"),
    [
        ("forward", False, 4 * 2 * 3 * 20 * 20 * 8),
        ("forward", True, 2 * 2 * 3 * 20 * 20 * 8),
        ("backward", False, 10 * 2 * 3 * 20 * 20 * 8),
        ("backward", True, 5 * 2 * 3 * 20 * 20 * 8),
    ],
)
def test_operations_are_counted_as_the_papers_do(kind: str, causal: bool, flops: int) -> None:
    assert Cell(kind, "bf16", 2, 3, 20, 8, causal).flops == flops


def test_the_grid_keeps_tokens_and_width() -> None:
    cells = cells_of(DTYPES, HEAD_DIMS, LENGTHS, PASSES, (False, True))
    assert len(set(cells)) == len(cells) == 4 * 3 * 6 * 2 * 2
    assert {cell.B * cell.N for cell in cells} == {16384}
    assert {cell.H * cell.D for cell in cells if cell.dtype != "f64"} == {2048}
    assert {cell.H * cell.D for cell in cells if cell.dtype == "f64"} == {512}


def test_cells_with_the_same_inputs_stand_together() -> None:
    cells = cells_of(DTYPES, HEAD_DIMS, LENGTHS, PASSES, (False, True))
    keys = [(cell.dtype, cell.shapes) for cell in cells]
    changes = sum(a != b for a, b in pairwise(keys))
    assert changes == len(set(keys)) - 1


@pytest.mark.parametrize("window", [(3, 0), (4, 3), (19, 0), (19, 19)])
def test_the_share_of_a_window_is_that_of_its_pairs(window: tuple[int, int]) -> None:
    i, j = np.arange(20)[:, None], np.arange(20)
    seen = (j >= i - window[0]) & (j <= i + window[1])
    assert window_share(20, *window) == pytest.approx(seen.mean())


# --- a race -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", [CELL, BACK])
def test_who_agrees_gets_a_ratio(cell: Cell) -> None:
    again = Tileattn("deterministic", ("backward",), deterministic=True)
    row = gpu.race(cell, [Tileattn(), again, Plain(np)], Fake())
    assert row["tflops"]["cupy"] == round(cell.flops / 0.002 / 1e12, 2)
    assert row["ratio_to"] == {"cupy": 1.0}
    assert row["off"] == row["failed"] == {}
    assert row["spread"]["tileattn"] == 0.5
    assert ("deterministic" in row["tflops"]) is (cell.kind == "backward")


@pytest.mark.parametrize("bend", [lambda x: 1.01 * x, lambda x: np.where(x > 1, np.nan, x)])
def test_who_differs_is_named_and_gets_no_ratio(bend: Callable[[Any], Any]) -> None:
    row = gpu.race(CELL, [Tileattn(), Bent("wrong", bend), Plain(np)], Fake())
    assert set(row["off"]) == {"wrong"}
    assert set(row["ratio_to"]) == {"cupy"}
    assert set(gpu_report.quoted(row)) == {"tileattn", "cupy"}
    assert "differs: wrong" in gpu_report.grid_line(row, ["tileattn", "wrong", "cupy"])


@pytest.mark.parametrize("factor", [1.01, np.nan])
def test_a_wrong_result_of_ours_gets_no_ratio_at_all(factor: float) -> None:
    ours = Bent("tileattn", lambda x: x * np.float32(factor))
    row = gpu.race(CELL, [ours, Plain(np)], Fake())
    assert row["ratio_to"] == {}
    assert "cupy" in row["off"]
    assert gpu_report.quoted(row) == {}


def test_a_failure_is_recorded_and_the_race_goes_on() -> None:
    def fail(_: Any) -> Any:
        raise MemoryError("no room for 8 GB\nof scores")

    row = gpu.race(CELL, [Tileattn(), Bent("big", fail), Plain(np)], Fake())
    assert row["failed"] == {"big": "MemoryError: no room for 8 GB"}
    assert set(row["ratio_to"]) == {"cupy"}
    assert "failed: big" in gpu_report.grid_line(row, ["tileattn", "big", "cupy"])


def test_what_a_peer_cannot_do_is_blank() -> None:
    peer = Plain(np)
    peer.dtypes = ("bf16",)
    row = gpu.race(CELL, [Tileattn(), peer], Fake())
    assert set(row["tflops"]) == {"tileattn"}
    assert row["failed"] == {}


def test_a_missing_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found, missing = gpu_peers.find(gpu_peers.PEERS, np)
    assert [peer.name for peer in found] == ["cupy"]
    assert set(missing) == {"flash", "cudnn", "efficient", "math", "fa4"}
    assert all("torch" in why for why in missing.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", PASSES)
def test_torch_gets_the_same_values(dtype: str, kind: str) -> None:
    pytest.importorskip("torch", reason="the peer is PyTorch, which dev leaves out")
    peers, missing = gpu_peers.find(["math"], np)
    assert missing == {}
    row = gpu.race(Cell(kind, dtype, 2, 3, 20, 8, True), [Tileattn(), *peers], Fake())
    assert row["ratio_to"] == {"math": 1.0}


def test_tensors_share_memory_with_arrays() -> None:
    torch = pytest.importorskip("torch", reason="the peer is PyTorch, which dev leaves out")
    for dtype in DTYPES:
        x = Fake().normal((2, 8), dtype)
        tensor = gpu_peers.to_torch(x)
        tensor[0, 0] = 2.0
        assert x[0, 0] == 2
        (back,) = gpu_peers.arrays(tensor.requires_grad_(), np)
        assert back.dtype == x.dtype
        assert np.shares_memory(back, x)
    assert torch.is_tensor(tensor)


# --- the other sections -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PASSES)
def test_each_option_is_set_against_the_plain_call(kind: str) -> None:
    rows = {row["option"]: row for row in gpu.options([replace(CELL, kind=kind)], Fake())}
    assert len(rows) == 9
    assert all(row["overhead_percent"] == 0 and "failed" not in row for row in rows.values())
    scores = 2 * 3 * 20 * 20
    assert rows["mask"]["bytes_ms"] == pytest.approx(1e3 * scores / 1e12)
    passes = 2 if kind == "backward" else 1
    assert rows["bias"]["bytes_ms"] == pytest.approx(passes * 1e3 * 4 * scores / 1e12)
    assert rows["bias, one for the batch"]["dense_bytes"] == 4 * scores // 2
    assert rows["bias"]["beyond_bytes_percent"] < 0 == rows["sinks"]["beyond_bytes_percent"]


def test_sparse_patterns_are_set_against_full_attention() -> None:
    rows = list(gpu.sparse([Cell("forward", "f32", 1, 1, 1280, 8, causal=False)], Fake()))
    assert [row["speedup"] for row in rows] == [1.0] * 5
    assert [round(row["share"], 3) for row in rows] == [1, 0.5, 0.062, 0.061, 0.1]


def test_the_host_is_timed_for_everybody() -> None:
    cells = [replace(CELL, kind=kind) for kind in PASSES]
    contestants: list[Contestant] = [Tileattn(), Tileattn("new output", ("forward",), reuse=False)]
    rows = list(gpu.host(cells, contestants, Fake()))
    assert [(row["pass"], row["contestant"]) for row in rows] == [
        ("forward", "tileattn"),
        ("forward", "new output"),
        ("backward", "tileattn"),
    ]
    assert all(row["microseconds"] == pytest.approx(5) for row in rows)


def test_ceilings_count_products_and_bytes() -> None:
    product, copy = gpu.ceilings(["f32"], 16, Fake())
    assert product["tflops"] == pytest.approx(2 * 16**3 / 0.002 / 1e12)
    assert copy["gbytes_per_second"] == 1000


# --- a run --------------------------------------------------------------------------------------


def run(tmp_path: Path, *argv: str, device: Gpu | None = None) -> None:
    always = ["--to", str(tmp_path), "--head-dim", "8", "--length", "16", "--peers", "cupy"]
    gpu.run(gpu.parse([*always, *argv]), device or Fake())


@pytest.mark.usefixtures("small")
def test_every_section_writes_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(gpu_peers, "PEERS", ("cupy", "fa4"))
    run(tmp_path, *(f"--{name}" for name in gpu.SECTIONS), "--dtype", "f32", "--quick")
    names = {"gpu.json", *(f"gpu_{name}.json" for name in gpu.SECTIONS[1:])}
    assert {path.name for path in tmp_path.iterdir()} == names
    for name in names:
        result = json.loads((tmp_path / name).read_text(encoding="utf-8"))
        assert list(result) == ["machine", "section", "missing", "rows"]
        assert {"commit", "date", "command", *MACHINE} == set(result["machine"])
        assert result["rows"]
    grid = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["rows"]
    assert [(row["pass"], row["causal"]) for row in grid] == [
        ("forward", False),
        ("forward", True),
        ("backward", False),
        ("backward", True),
    ]
    out = capsys.readouterr()
    assert len([line for line in out.out.splitlines() if line.startswith("forward  f32    8")]) == 2
    assert "matplotlib is not installed" in out.err


@pytest.mark.usefixtures("small")
def test_a_chart_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(tmp_path, "--dtype", "f32,f64", "--causal", "--plot", str(tmp_path / "bars.png"))
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


class Interrupted(Fake):
    """A device that a user takes away after three cells."""

    def __init__(self) -> None:
        super().__init__()
        self.left = iter(range(6))  # two contestants a cell

    def time(self, calls: Sequence[Call]) -> list[float]:
        """Stop in the middle."""
        if next(self.left, None) is None:
            raise KeyboardInterrupt
        return super().time(calls)


@pytest.mark.usefixtures("small")
def test_what_was_measured_is_kept_when_a_run_is_broken_off(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "--dtype", "f32,f64", "--pass", "forward", device=Interrupted())
    assert len(json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["rows"]) == 3


def chosen(*argv: str) -> Iterator[str]:
    for name, _ in gpu.sections(gpu.parse(list(argv)), [], Fake()):
        yield name


def test_the_grid_is_what_is_run_unless_something_else_is_asked_for() -> None:
    assert list(chosen()) == ["grid"]
    assert list(chosen("--sparse")) == ["sparse"]
    assert list(chosen("--host", "--grid")) == ["grid", "host"]


def test_quick_takes_one_size() -> None:
    seen: list[Cell] = []

    def noted(cells: list[Cell], *_: Any) -> Iterator[Any]:
        seen.extend(cells)
        return iter(())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "grid", noted)
        list(chosen("--quick", "--dtype", "bf16,f64", "--no-causal", "--pass", "backward"))
    assert [(cell.dtype, cell.D, cell.N) for cell in seen] == [("bf16", 64, 512), ("f64", 64, 512)]
    assert {(cell.kind, cell.causal) for cell in seen} == {("backward", False)}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--dtype", "fp8"], "fp8 is none of bf16, fp16, f32, f64"),
        (["--peers", "flash,flash9"], "flash9 is none of flash, cudnn"),
        (["--length", "512,0"], "0 is below 1"),
        (["--head-dim", "wide"], "'wide'"),
    ],
)
def test_a_strange_selection_is_refused(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu.parse(argv)
    assert said in capsys.readouterr().err


def test_without_a_gpu_it_ends_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tileattn, "available_backends", lambda: {"cupy": "there is no device"})
    with pytest.raises(SystemExit) as stop:
        gpu.main([])
    assert str(stop.value).endswith("cannot run here: there is no device")
    assert "\n" not in str(stop.value)


# --- the tables of the documentation ------------------------------------------------------------


@pytest.mark.usefixtures("small")
def test_the_page_gets_a_section_with_the_first_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in performance_tables.RESULTS.glob("*cpu*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(performance_tables, "RESULTS", tmp_path)
    begin, end = performance_tables.GPU_BEGIN, performance_tables.GPU_END
    old, _, _ = performance_tables.PAGE.read_text(encoding="utf-8").partition("\n## On the GPU")
    assert performance_tables._updated(old) == old
    run(tmp_path, *(f"--{name}" for name in gpu.SECTIONS), "--dtype", "f32", "--causal", "--quick")
    page = performance_tables._updated(old)
    assert performance_tables._updated(page) == page
    assert page.startswith(old)
    assert page.count(begin) == page.count(end) == 1
    assert pages.updated(page, begin, end, []) != page
    section = page.partition(begin)[2]
    assert section.count("Measured by `python -m tileattn bench gpu") == len(gpu.SECTIONS)
    assert (
        "| pass | dtype | D | N | causal | TFLOP/s | deterministic | of the floor | cupy |"
        in section
    )
    assert "| forward | f32 | 8 | 16 | yes | 0 |  | 0.00 | 1.00 |" in section
    assert "| device copy |  |  | 1000 |" in section
    assert (
        "| pass | case | dtype | D | N | causal | TFLOP/s | deterministic | of the floor | cupy |"
        in section
    )
    assert "| forward | D 192, Dv 128 | f32 | 192 | 16 | yes | 0 |  | 0.00 | 1.00 |" in section
