"""Write the measured bytes of docs/io.md from benchmarks/results, or check that they are fresh."""

import sys
from collections.abc import Iterator
from pathlib import Path

from tools import pages
from tools.drawing import amount
from tools.measured_traffic import ALGORITHMS, COUNTED, Row, device_bytes, results_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "io.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- traffic: python -m tools.traffic_table --write -->"
END = "<!-- end of traffic -->"
OPENING = """
## What a GPU moves

The counters of the GPU see what its kernels read from device memory and write to it. *Model* is
what the tables above come to, for the tile that is named; *counted* is what crossed, forward and
backward together. Caches that the model leaves out explain where less crossed than it says.
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
    yield ""
    models = (f"{name}, model" for name in ALGORITHMS.values())
    counted = (f"{name}, counted" for name in COUNTED)
    head = ["B", "H", "N", "D", "dtype", "tile", *models, *counted]
    yield f"| {' | '.join(head)} |"
    yield "|" + " --- |" * len(head)
    for row in rows:
        yield f"| {' | '.join(_cells(row))} |"


def _cells(row: Row) -> Iterator[str]:
    yield from (str(row[name]) for name in ("B", "H", "N", "D", "dtype"))
    yield " x ".join(map(str, row["tile"]))
    yield from (amount(row["modelled_bytes"][name]) for name in ALGORITHMS)
    for name in COUNTED:
        counted = device_bytes(row, name)
        yield "" if counted is None else amount(counted)


def main(argv: list[str] | None = None) -> int:
    """Check or write the page; the exit status is 1 where a check finds it stale."""
    return pages.main(argv, __doc__, PAGE, lambda page: pages.updated(page, BEGIN, END, lines()))


if __name__ == "__main__":
    sys.exit(main())
