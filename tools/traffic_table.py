"""Write the counted bytes of docs/io.md from benchmarks/results, or check that they are fresh."""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.report import RESULTS, Row, load
from tools import pages
from tools.drawing import amount
from tools.pages import DOCS, paragraphs, shown, table

FILE = "traffic"
BEGIN = "<!-- traffic: python -m tools.traffic_table --write -->"
END = "<!-- end of traffic -->"
ALGORITHMS = {"flash2": "FlashAttention-2", "standard": "standard", "flash1": "FlashAttention"}
MODELS = ("flash2", "standard")
WITHOUT = {"not_run": "did not run", "failed": "failed", "not_counted": "was not counted"}
OPENING = """
## What a GPU moves

Hardware counters measured the HBM bytes that kernels read and write, and the bytes they request
from the L2 cache, forward and backward together. *Model* evaluates the formulas above; *HBM* and
*L2* are counted. Standard attention runs in PyTorch, step by step with autograd, and in CuPy, whose
batched 16-bit matmul converts to float32 and back.
"""
PAPER = """
GPT-2 medium, the setting of figure 2 of FlashAttention[^fa1], with the numbers of the paper. The
paper counts FLOPs differently. Here they are the FLOPs of the matmuls; the backward pass of
FlashAttention has one matmul more than standard attention.
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
    machine, rows = result["machine"], result["rows"]
    origin = f"`{machine['command'].strip()}`: {machine['gpu']}, {machine['date']}"
    yield from paragraphs(OPENING, f"Measured by {origin}. <!-- age: {FILE} -->")
    for row in rows:
        if "paper" in row:
            yield from paragraphs(PAPER)
            head = ["", "on", "GFLOP", "HBM, GB", "L2 cache, GB", "ms"]
            yield from table(head, _with_paper(row, machine["gpu"]))
    sizes = ", ".join(f"{name} = {rows[0][name]}" for name in ("H", "D"))
    same = "The same number of tokens in sequences of other lengths"
    yield from paragraphs(f"{same}, {sizes}, {rows[0]['dtype']}:")
    names = [who.name for who in COUNTED.values()]
    head = [f"{ALGORITHMS[name]}, model" for name in MODELS]
    head += ["tileattn, L2", *(f"{name}, HBM" for name in names)]
    yield from table(["B", "N", "tile", *head], ([*_setting(row), *_bytes(row)] for row in rows))
    times = ([*_setting(row), *(_ms(row.get(x, {})) for x in COUNTED)] for row in rows)
    yield from table(["B", "N", "tile", *(f"{name}, ms" for name in names)], times)
    for row in rows:
        for name, who in COUNTED.items():
            for how, said in WITHOUT.items():
                if how in row.get(name, {}):
                    why = row[name][how].partition(". ")[0]
                    yield f"{who.name} {said} at N = {row['N']}: `{why}`."


def _with_paper(row: Row, gpu: str) -> Iterator[list[Any]]:
    """Compare a row with the figures of the paper."""
    for name, title in (("standard", "standard attention"), ("flash1", "FlashAttention")):
        paper = row["paper"][name]
        numbers = [paper["gflop"], paper["hbm_gbytes"], None, paper["ms"]]
        yield [f"{title}, the paper", row["paper"]["gpu"], *numbers]
    for name, who in COUNTED.items():
        measured, gflop = row.get(name, {}), f"{row['gflop'][who.algorithm]:.1f}"
        sizes = (hbm_bytes(row, name), measured.get("l2_bytes"))
        gigabytes = (None if size is None else f"{size / 1e9:.3g}" for size in sizes)
        yield [who.name, gpu, gflop, *gigabytes, _ms(measured)]


def _setting(row: Row) -> list[Any]:
    return [row["B"], row["N"], " x ".join(map(str, row["tile"]))]


def _bytes(row: Row) -> Iterator[str | None]:
    sizes = [row["modelled_bytes"][name] for name in MODELS]
    sizes += [row.get("tileattn", {}).get("l2_bytes")]
    sizes += [hbm_bytes(row, name) for name in COUNTED]
    yield from (None if size is None else amount(size) for size in sizes)


def _ms(measured: Row) -> str:
    """Write three digits, and no power of ten."""
    ms = measured.get("ms")
    return shown(ms, ".3g" if ms is not None and ms < 1000 else ".0f")


def main(argv: list[str] | None = None) -> int:
    """Check or write the page; the exit status is 1 where a check finds it stale."""
    made = lines(load(RESULTS, FILE))
    return pages.main(argv, __doc__, pages.stale_part(DOCS / "io.md", BEGIN, END, made))


if __name__ == "__main__":
    sys.exit(main())
