"""Write the measured bytes of docs/io.md from benchmarks/results, or check that they are fresh."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tools import pages
from tools.drawing import amount
from tools.measured_traffic import ALGORITHMS, COUNTED, Row, device_bytes, results_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "io.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- traffic: python -m tools.traffic_table --write -->"
END = "<!-- end of traffic -->"
MODELS = ("flash2", "standard")
WITHOUT = {"not_run": "did not run", "failed": "failed", "not_counted": "was not counted"}
OPENING = """
## What a GPU moves

The counters of the GPU see what its kernels read from device memory and write to it, and what they
ask of the level-2 cache. *Model* is what the tables above come to; *counted* is what crossed,
forward and backward together. Standard attention is run in PyTorch, step by step and with
automatic gradients, and in CuPy, which multiplies batches of 16 bits in float32 and converts them
before and after.
"""
BESIDE = """
The setting of the table that stands beside figure 2 of FlashAttention[^fa1], GPT-2 medium, and that
table. The paper counts operations in a way of its own; here they are those of the products, of
which the backward pass of FlashAttention has one more than that of standard attention.
"""
LENGTHS = """
The same number of tokens, cut into sequences of other lengths:
"""


def lines() -> Iterator[str]:
    """Make the section; nothing where nothing was counted."""
    result = results_of(RESULTS)
    if result is None:
        return
    machine, rows = result["machine"], result["rows"]
    yield from OPENING.strip().splitlines()
    yield ""
    yield f"Measured by `{machine['command'].strip()}`: {machine['gpu']}, {machine['date']}."
    for row in rows:
        if "paper" in row:
            yield ""
            yield from BESIDE.strip().splitlines()
            yield ""
            yield from _beside(row, machine["gpu"])
            yield ""
            yield from LENGTHS.strip().splitlines()
    yield ""
    models = [f"{ALGORITHMS[name]}, model" for name in MODELS]
    counted = [f"{who.name}, counted" for who in COUNTED.values()]
    times = [f"{who.name}, ms" for who in COUNTED.values()]
    cache = "tileattn, level-2 cache"
    yield from _head(["B", "H", "N", "D", "dtype", "tile", *models, cache, *counted, *times])
    for row in rows:
        yield _line(_cells(row))
    yield ""
    for row in rows:
        for name, who in COUNTED.items():
            for how, said in WITHOUT.items():
                if how in row.get(name, {}):
                    why = row[name][how].partition(". ")[0]
                    yield f"{who.name} {said} at N = {row['N']}: `{why}`."


def _beside(row: Row, gpu: str) -> Iterator[str]:
    """Set a row beside the figures of the paper."""
    yield from _head(["", "on", "GFLOP", "device memory, GB", "level-2 cache, GB", "ms"])
    for name, title in (("standard", "standard attention"), ("flash1", "FlashAttention")):
        told = row["paper"][name]
        there = row["paper"]["gpu"]
        yield _line(
            [f"{title}, the paper", there, told["gflop"], told["hbm_gbytes"], "", told["ms"]]
        )
    for name, who in COUNTED.items():
        measured = row.get(name, {})
        yield _line(
            [
                who.name,
                gpu,
                f"{row['gflop'][who.algorithm]:.1f}",
                _gigabytes(device_bytes(row, name)),
                _gigabytes(measured.get("l2_bytes")),
                _three(measured.get("ms")),
            ]
        )


def _cells(row: Row) -> Iterator[str]:
    yield from (str(row[name]) for name in ("B", "H", "N", "D", "dtype"))
    yield " x ".join(map(str, row["tile"]))
    yield from (amount(row["modelled_bytes"][name]) for name in MODELS)
    cache = row.get("tileattn", {}).get("l2_bytes")
    yield "" if cache is None else amount(cache)
    for name in COUNTED:
        counted = device_bytes(row, name)
        yield "" if counted is None else amount(counted)
    for name in COUNTED:
        yield _three(row.get(name, {}).get("ms"))


def _head(names: Sequence[str]) -> Iterator[str]:
    yield _line(names)
    yield "|" + " --- |" * len(names)


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _gigabytes(size: float | None) -> str:
    return "" if size is None else f"{size / 1e9:.3g}"


def _three(value: float | None) -> str:
    """Write three digits, and no power of ten."""
    if value is None:
        return ""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def main(argv: list[str] | None = None) -> int:
    """Check or write the page; the exit status is 1 where a check finds it stale."""
    return pages.main(argv, __doc__, PAGE, lambda page: pages.updated(page, BEGIN, END, lines()))


if __name__ == "__main__":
    sys.exit(main())
