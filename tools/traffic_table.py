"""Write the measured bytes of docs/io.md from benchmarks/results, or check that they are fresh."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools import pages
from tools.drawing import amount

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "io.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- traffic: python -m tools.traffic_table --write -->"
END = "<!-- end of traffic -->"
OPENING = """## What a GPU moves

Bytes between device memory and the chip, as the counters of the GPU have them."""


def lines() -> Iterator[str]:
    """Make the section, a column for each field of the rows; nothing where nothing was measured."""
    path = RESULTS / "traffic_gpu.json"
    if not path.exists():
        return
    result = json.loads(path.read_text(encoding="utf-8"))
    machine, rows = result["machine"], result["rows"]
    yield from OPENING.splitlines()
    yield ""
    yield f"Measured by `{machine['command'].strip()}`: {machine['gpu']}, {machine['date']}."
    yield ""
    fields = list(dict.fromkeys(field for row in rows for field in row))
    yield f"| {' | '.join(field.replace('_', ' ') for field in fields)} |"
    yield "|" + " --- |" * len(fields)
    for row in rows:
        yield f"| {' | '.join(cell(field, row.get(field)) for field in fields)} |"


def cell(field: str, value: Any) -> str:
    """Write a value: bytes with their unit, truth as a word, nothing where there is none."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if "bytes" in field:
        return amount(value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(argv: list[str] | None = None) -> int:
    """Check or write the page; the exit status is 1 where a check finds it stale."""
    return pages.main(argv, __doc__, PAGE, lambda page: pages.updated(page, BEGIN, END, lines()))


if __name__ == "__main__":
    sys.exit(main())
