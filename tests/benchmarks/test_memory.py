"""Peaks of memory are those of the arrays, and what does not fit is refused before it is made."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import memory
from benchmarks.configurations import Configuration, Inputs
from benchmarks.memory import NAMES, PASSES, Case
from benchmarks.report import Row
from tests.benchmarks.fake_gpu import Fake

linux = pytest.mark.skipif(memory.unavailable() is not None, reason="peaks need Linux")


def case(
    name: str = "naive", kind: str = "forward", N: int = 100, device: str = "cpu", **other: Any
) -> Case:
    sizes: dict[str, Any] = {"dtype": "f32", "B": 1, "H": 2, "N": N, "D": 8}
    return Case(device, name, Configuration(kind, **sizes | other))


@pytest.mark.parametrize(
    ("one", "outputs", "beyond"),
    [
        (case(), 1, 4 * 2 * 100**2),
        (case(kind="both"), 4, 2 * 4 * 2 * 100**2),
        (case(kind="both", device="gpu"), 4, 3 * 4 * 2 * 100**2),
        (case("naive", "both", device="gpu", dtype="fp16"), 4, 4 * 2 * 2 * 100**2),
        (case("pytorch", device="gpu", dtype="fp16"), 1, 2 * 2 * 2 * 100**2),
        (case(B=3), 1, 3 * 4 * 2 * 100**2),
        (case("tileattn"), 1, 4 * 2 * 100),
        (case("tileattn", "both", dtype="f64"), 4, 8 * 2 * 100),
    ],
)
def test_what_a_case_needs_is_worked_out(one: Case, outputs: int, beyond: int) -> None:
    array = (
        one.configuration.B * 2 * 100 * 8 * {"f64": 8, "f32": 4, "fp16": 2}[one.configuration.dtype]
    )
    assert one.inputs == 4 * array
    assert one.needs == (4 + outputs) * array + beyond


@linux
@pytest.mark.parametrize("kind", PASSES)
def test_naive_attention_holds_its_squares_and_tileattn_does_not(kind: str) -> None:
    """The child measures itself; a large N makes the squares outweigh everything else.

    The system hands out memory by pages, and BLAS has buffers of its own.
    """
    naive = case("naive", kind, N=1536)
    peak = memory.cpu_peak(naive)["peak_bytes"]
    beyond = naive.needs - naive.inputs
    assert 0.9 * beyond < peak < 1.4 * beyond
    assert memory.cpu_peak(case("tileattn", kind, N=1536))["peak_bytes"] < beyond / 2


# --- what is refused ----------------------------------------------------------------------------


def test_what_does_not_fit_or_takes_too_long_is_never_started() -> None:
    def peak(one: Case) -> Row:
        measured.append(one)
        if one.configuration.kind == "both":
            raise MemoryError("no room")
        return {"peak_bytes": 1, "seconds": 1e-4 * one.configuration.N**2}  # 1, 4, 64 seconds

    measured: list[Case] = []
    cases = [case(N=N) for N in (100, 200, 800, 1600)] + [case(kind="both"), case(N=50)]
    needs = cases[3].needs
    rows = list(memory.rows(cases, lambda: needs - 1, peak, 4.1))
    assert measured == [*cases[:2], *cases[4:]]
    assert rows[2]["not_run"] == "would take about 64 s, more than --limit-seconds 4.1"
    assert (rows[3]["needs_bytes"], rows[3]["free_bytes"]) == (needs, needs - 1)
    assert rows[3]["not_run"] == f"needs {needs / 1e9:.1f} GB and {needs / 1e9:.1f} GB are free"
    assert rows[4]["failed"] == "MemoryError: no room"
    assert all(rows[n]["peak_bytes"] == 1 for n in (0, 1, 5))


@linux
def test_the_file_holds_every_case(tmp_path: Path) -> None:
    argv = ["--device", "cpu", "--length", "128", "4194304", "--head-dim", "8"]
    memory.main([*argv, "--to", str(tmp_path)])
    result = json.loads((tmp_path / "memory_cpu.json").read_text(encoding="utf-8"))
    assert result["machine"]["command"].startswith("python -m tileattn bench memory --device cpu")
    rows = {(row["implementation"], row["pass"], row["N"]): row for row in result["rows"]}
    assert len(rows) == 8
    assert all("peak_bytes" in row for (_, _, N), row in rows.items() if N == 128)
    assert "not_run" in rows["naive", "forward", 4194304]
    assert rows["naive", "forward", 4194304]["needs_bytes"] > 4 * 4194304**2


# --- the allocator of the GPU -------------------------------------------------------------------


class Pool:
    """Stand in for ``cupy.cuda.MemoryPool``; it rounds up, as that does."""

    def __init__(self) -> None:
        self.used = 0
        self.freed = False

    def malloc(self, nbytes: int) -> int:
        rounded = -(-nbytes // 512) * 512
        self.used += rounded
        return rounded

    def used_bytes(self) -> int:
        return self.used

    def free_all_blocks(self) -> None:
        self.freed = True


def test_the_most_that_was_in_use_is_remembered() -> None:
    pool = Pool()
    counting = memory.Counting(pool)
    first = counting.malloc(1000)
    counting.malloc(1)
    assert counting.peak == 1024 + 512
    pool.used -= first
    counting.malloc(1)
    assert counting.peak == 1024 + 512
    counting.malloc(600)
    assert counting.peak == 512 + 512 + 1024


def test_inputs_are_apart_from_the_peak_and_the_pool_is_emptied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, device = Pool(), Fake()
    entered: list[Any] = []

    def using(malloc: Any) -> Any:
        entered.append(malloc)
        return nullcontext()

    monkeypatch.setattr(
        device,
        "xp",
        SimpleNamespace(
            float32=np.float32,
            random=np.random,
            cuda=SimpleNamespace(
                MemoryPool=lambda: pool,
                Device=lambda: SimpleNamespace(synchronize=lambda: None, mem_info=(7, 9)),
                using_allocator=using,
            ),
        ),
    )

    def run(self: Case, inputs: Inputs, xp: Any) -> None:
        assert [x.shape for x in inputs] == list(self.configuration.shapes)
        for malloc in entered:
            malloc(700 * self.configuration.N)
        assert xp is device.xp

    monkeypatch.setattr(Case, "run", run)
    row = memory.gpu_peak(device, case(device="gpu", N=128))
    assert row["peak_bytes"] == 175 * 512 == 700 * 128
    assert pool.freed
    assert memory.gpu_free(device) == 7


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_the_peak_on_a_gpu_is_at_least_the_outputs(name: str) -> None:
    from benchmarks.device import Gpu

    one = case(name, device="gpu", N=1024, dtype="fp16", D=64)
    peak = memory.gpu_peak(Gpu(), one)["peak_bytes"]
    assert one.needs - one.inputs <= peak < 1.1 * (one.needs - one.inputs) + (1 << 20)
