"""`bench lived` measures calls that no earlier call equals; here on small NumPy arrays."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import lived, peers
from benchmarks.clock import Queue, deal
from benchmarks.endurance import PARTS, endurance, steps
from benchmarks.libraries import Arrays, Library, Step
from benchmarks.lived import Bench, child, compared
from benchmarks.lived_loops import Loop, Loops, Sizes

SMALL = Sizes("f32", 8, 1, 2, (2, 80), (2, 2, 2, 8), (4, 90), (3, 2, 1, 60))
LOOPS = Loops(np, SMALL)


def bench(*found: Library) -> Bench:
    return Bench(LOOPS, list(found), Queue(int, int), rounds=2, calls=3)


class Recorded(Arrays):
    """Remembers the steps that it prepares."""

    def __init__(self, name: str, steps: list[Step], off: float = 0.0) -> None:
        super().__init__(name, "numpy")
        self._steps, self._off = steps, off

    def prepare(self, step: Step) -> Any:
        self._steps.append(step)
        call = super().prepare(step)
        return lambda: call() + np.float32(self._off) if self._off else call()


def numbers_of(step: Step) -> str:
    """Return what tells a step from others: shapes, options, captured numbers."""
    options = {n: x for n, x in step.options.items() if not callable(x)}
    return repr(([x.shape for x in step.rows], options, step.number))


@pytest.mark.parametrize("loop", LOOPS.all(), ids=lambda loop: loop.name)
def test_no_step_of_a_loop_equals_another(loop: Loop) -> None:
    prepared: list[Step] = []
    row = compared(loop, bench(Recorded("one", prepared), Recorded("two", prepared)))
    assert row["failed"] == {}
    warm = [1 + row["calls"]] * 2  # each compares a step and warms up, on the same values
    measured = prepared[sum(warm) :]
    assert len(measured) == 2 * 2 * row["calls"]
    assert len({numbers_of(step) for step in prepared}) == len(measured) + row["calls"]


def test_hands_are_even_samples_of_the_range() -> None:
    hands = deal(1000, 12, 40)
    assert {len(hand) for hand in hands} == {40}
    assert len({value for hand in hands for value in hand}) == 12 * 40
    assert {hand == sorted(hand) for hand in hands} == {True}
    assert max(map(np.mean, hands)) - min(map(np.mean, hands)) < 1000 / 40


def test_a_library_with_other_results_does_not_take_part() -> None:
    growing = LOOPS.all()[0]
    row = compared(growing, bench(Arrays("numpy", "numpy"), Recorded("off", [], 0.5)))
    assert list(row["us"]) == ["numpy"]
    assert row["failed"]["off"].startswith("RuntimeError: the results differ by ")


def test_a_library_that_refuses_a_length_stops() -> None:
    class Refuses(Arrays):
        def prepare(self, step: Step) -> Any:
            asked.append(step)
            return super().prepare(step) if len(asked) < 6 else partial(int, "refused")

    asked: list[Step] = []
    row = compared(LOOPS.all()[0], bench(Arrays("numpy", "numpy"), Refuses("other", "numpy")))
    assert (list(row["us"]), list(row["repeated_us"])) == (["numpy"], ["numpy"])
    assert list(row["failed"]) == ["other"]


@pytest.mark.parametrize("loop", LOOPS.all(), ids=lambda loop: loop.name)
def test_pytorch_computes_the_same(loop: Loop) -> None:
    pytest.importorskip("torch")
    found, missing = peers.find(peers.ON_CPU)
    assert missing == {}
    both = bench(*peers.ours(on_gpu=False), *found.values())
    row = compared(loop, replace(both, rounds=1, calls=1))
    assert row["failed"] == {}
    has_function = "score_mod" in loop.name or "mask_mod" in loop.name
    assert list(row["us"]) == ["llvm", "numpy", "torch", "SDPA"][: 3 if has_function else 4]
    assert set(row["over_peers"]) == (set() if has_function else {"llvm", "numpy", "torch"})


def test_rows_are_written_with_their_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lived, "CPU", SMALL)
    monkeypatch.setattr(Queue, "of", lambda: Queue(int, int))
    name = "decoding, growing cache"
    lived.main(["--quick", "--only", "loops", "--loops", name, "--to", str(tmp_path)])
    result = json.loads((tmp_path / "lived_cpu.json").read_text(encoding="utf-8"))
    (row,) = result["rows"]
    assert (row["section"], row["loop"]) == ("loops", name)
    assert row["over_repeated"]["numpy"] == pytest.approx(
        row["repeated_us"]["numpy"] / row["us"]["numpy"], rel=1e-3
    )
    assert result["machine"]["command"].endswith("--only loops --loops 'decoding, growing cache'")


def test_the_first_call_of_both_passes_follows_that_of_one() -> None:
    assert len(child(json.dumps(["seed", "f32", 8, "numpy", False, []]))["seconds"]) == 2
    assert len(child(json.dumps(["growing", "f32", 8, "numpy", False, []]))["seconds"]) == 1


def test_endurance_never_repeats_a_call() -> None:
    made = [numbers_of(step) for step in steps(np, "f32", 0, 200)]
    assert len(set(made)) == 200
    rows = list(endurance(bench(Arrays("numpy", "numpy")), 2 * PARTS))
    assert [row["calls"] for row in rows] == [2 * n for n in range(1, PARTS + 1)]
    assert all(row["host_mb"] > 10 and row["entries"] > 0 for row in rows)
