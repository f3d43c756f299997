"""Write the counted bytes of docs/io.md from benchmarks/results, or check that they are fresh."""

import json
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from tools import pages
from tools.drawing import Row, amount
from tools.pages import shown, table

PAGE = pages.ROOT / "docs" / "io.md"
FILE = "traffic"
BEGIN = "<!-- traffic: python -m tools.traffic_table --write -->"
END = "<!-- end of traffic -->"
ALGORITHMS = {"flash2": "FlashAttention-2", "standard": "standard", "flash1": "FlashAttention"}
MODELS = ("flash2", "standard")
WITHOUT = {"not_run": "did not run", "failed": "failed", "not_counted": "was not counted"}
OPENING = """
## What a GPU moves

The hardware counters see what kernels read from and write to HBM, and what they ask of the L2
cache. *Model* is what the tables above come to; *counted* is what crossed, forward and backward
together. Standard attention is run in PyTorch, step by step with autograd, and in CuPy, which
multiplies batches of 16 bits in float32 and converts them before and after.
"""
BESIDE = """
The setting of the table beside figure 2 of FlashAttention[^fa1], GPT-2 medium, and that table. The
paper counts FLOPs in a way of its own; here they are those of the matmuls, of which the backward
pass of FlashAttention has one more than that of standard attention.
"""
LENGTHS = """
The same number of tokens, cut into sequences of other lengths:
"""


class Counted(NamedTuple):
    """An implementation whose bytes a GPU counts: its name, and what it runs."""

    name: str
    algorithm: str


COUNTED = {
    "tileattn": Counted("tileattn", "flash2"),
    "pytorch": Counted("PyTorch", "standard"),
    "naive": Counted("CuPy", "standard"),
}


def hbm_bytes(row: Row, implementation: str) -> int | None:
    """HBM bytes that an implementation read and wrote in both passes, if counted."""
    counts = row.get(implementation, {})
    if "dram_read_bytes" not in counts:
        return None
    return int(counts["dram_read_bytes"]) + int(counts["dram_write_bytes"])


def lines(result: Row) -> Iterator[str]:
    """Make the section."""
    machine, rows = result["machine"], result["rows"]
    yield from OPENING.strip().splitlines()
    yield ""
    yield f"Measured by `{machine['command'].strip()}`: {machine['gpu']}, {machine['date']}."
    yield ""
    for row in rows:
        if "paper" in row:
            yield from BESIDE.strip().splitlines()
            yield ""
            head = ["", "on", "GFLOP", "HBM, GB", "L2 cache, GB", "ms"]
            yield from table(head, _beside(row, machine["gpu"]))
            yield from LENGTHS.strip().splitlines()
            yield ""
    names = [who.name for who in COUNTED.values()]
    yield from table(
        [
            *("B", "H", "N", "D", "dtype", "tile"),
            *(f"{ALGORITHMS[name]}, model" for name in MODELS),
            "tileattn, L2 cache",
            *(f"{name}, counted" for name in names),
            *(f"{name}, ms" for name in names),
        ],
        map(_cells, rows),
    )
    for row in rows:
        for name, who in COUNTED.items():
            for how, said in WITHOUT.items():
                if how in row.get(name, {}):
                    why = row[name][how].partition(". ")[0]
                    yield f"{who.name} {said} at N = {row['N']}: `{why}`."


def _beside(row: Row, gpu: str) -> Iterator[list[Any]]:
    """Set a row beside the figures of the paper."""
    for name, title in (("standard", "standard attention"), ("flash1", "FlashAttention")):
        paper = row["paper"][name]
        numbers = [paper["gflop"], paper["hbm_gbytes"], None, paper["ms"]]
        yield [f"{title}, the paper", row["paper"]["gpu"], *numbers]
    for name, who in COUNTED.items():
        measured, gflop = row.get(name, {}), f"{row['gflop'][who.algorithm]:.1f}"
        sizes = (hbm_bytes(row, name), measured.get("l2_bytes"))
        gigabytes = (None if size is None else f"{size / 1e9:.3g}" for size in sizes)
        yield [who.name, gpu, gflop, *gigabytes, _ms(measured)]


def _cells(row: Row) -> Iterator[Any]:
    yield from (row[name] for name in ("B", "H", "N", "D", "dtype"))
    yield " x ".join(map(str, row["tile"]))
    sizes = [row["modelled_bytes"][name] for name in MODELS]
    sizes += [row.get("tileattn", {}).get("l2_bytes")]
    sizes += [hbm_bytes(row, name) for name in COUNTED]
    yield from (None if size is None else amount(size) for size in sizes)
    yield from (_ms(row.get(name, {})) for name in COUNTED)


def _ms(measured: Row) -> str:
    """Write three digits, and no power of ten."""
    ms = measured.get("ms")
    return shown(ms, ".3g" if ms is not None and ms < 1000 else ".0f")


def main(argv: list[str] | None = None) -> int:
    """Check or write the page; the exit status is 1 where a check finds it stale."""

    def update(text: str) -> str:
        result = json.loads((pages.RESULTS / f"{FILE}.json").read_text(encoding="utf-8"))
        return pages.updated(text, BEGIN, END, lines(result))

    return pages.main(argv, __doc__, PAGE, update)


if __name__ == "__main__":
    sys.exit(main())
