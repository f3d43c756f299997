"""Write the tables of docs/performance.md from benchmarks/results, or check that they are fresh."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools import pages

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- tables: python -m tools.performance_tables --write -->"
END = "<!-- end of tables -->"


def lines() -> Iterator[str]:
    """Make the lines between the markers."""
    for name in ("cpu", "cpu_avx512"):
        yield from _speed(_load(name))
    memory = _load("cpu_memory")
    yield f"Measured by `{memory['machine']['command'].strip()}`: {_machine(memory['machine'])}"
    yield ""
    head = ["N", "D", "inputs", "outputs", "peak beyond both, forward", "forward and backward"]
    yield f"| {' | '.join(head)} |"
    yield "|" + " --- |" * len(head)
    for row in memory["rows"]:
        sizes = ("inputs_mb", "outputs_mb", "forward_extra_mb", "extra_mb")
        yield f"| {row['N']} | {row['D']} | {' | '.join(f'{row[name]:.1f}' for name in sizes)} |"


def _speed(speed: dict[str, Any]) -> Iterator[str]:
    yield f"Measured by `{speed['machine']['command'].strip()}`: {_machine(speed['machine'])}"
    yield ""
    core = ", ".join(
        f"{row['gflops']:.0f} GFLOP/s in the products at D = {row['D']}" for row in speed["core"]
    )
    yield f"One core of it alone: {core}; {speed['core'][0]['exp_ns']:.2f} ns for one `np.exp`."
    yield ""
    head = ["pass", "H", "N", "D", "causal", "GFLOP/s", "PyTorch", "plain NumPy", "the floor"]
    yield f"| {' | '.join(head)} |"
    yield "|" + " --- |" * len(head)
    for row in speed["rows"]:
        ratio = row["ratio_to"]
        cells = [_ratio(ratio.get(name)) for name in ("torch", "numpy", "floor")]
        causal = "yes" if row["causal"] else "no"
        yield (
            f"| {row['pass']} | {row['H']} | {row['N']} | {row['D']} | {causal} "
            f"| {row['gflops']['tileattn']:.0f} | {' | '.join(cells)} |"
        )
    yield ""


def _load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def _machine(machine: dict[str, Any]) -> str:
    return (
        f"{machine['processor']}, {machine['threads']} threads, Python {machine['python']}, "
        f"NumPy {machine['numpy']}, PyTorch {machine['torch']}, commit {machine['commit']}, "
        f"{machine['date']}."
    )


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def main(argv: list[str] | None = None) -> int:
    """Check or write the page; the exit status is 1 where a check finds it stale."""
    return pages.main(argv, __doc__, PAGE, lambda page: pages.updated(page, BEGIN, END, lines()))


if __name__ == "__main__":
    sys.exit(main())
