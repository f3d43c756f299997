"""Write the table of docs/performance.md that lists where tileattn is slower, or check it."""

import sys
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import NamedTuple

from benchmarks import cpu, gpu
from benchmarks.report import RESULTS, Row, load
from tools import pages
from tools.pages import DOCS, table
from tools.performance_tables import BASELINES, COMPARISONS, NAMES
from tools.tables import HEADINGS

BEGIN = "<!-- slower: python -m tools.slower_table --write -->"
END = "<!-- end of slower -->"

OTHERS = {
    "gpu_packed": ("Packed sequences", "FlashAttention-4"),
    "gpu_decode": ("Decoding", "cuDNN or FlashAttention-4"),
    "gpu_options": ("Options", "the fastest that has the option"),
}
"""Results files whose rows have a speedup: what was measured, and the baseline."""

FRAMEWORKS = ("frameworks_gpu", "frameworks_amd")
AXES = ("option", "lengths", "case", "section", "B", "N", "D", "dtype")
SECTIONS = {"host": "CPU time of a call of 16 tokens", "passes": "both passes", "grid": None}


class Case(NamedTuple):
    """A configuration, and the speed of tileattn relative to the baseline."""

    where: str
    speed: float


SPEED = attrgetter("speed")
SLOWER = 0.995  # what two digits show as less than 1


def where(row: Row) -> str:
    """Name a configuration by its axes."""
    row = {**row, "section": SECTIONS.get(row.get("section", ""), row.get("section"))}
    known = [f"{x} = {row[x]}" if x in "BND" else str(row[x]) for x in AXES if row.get(x)]
    causal = ["causal"] if row.get("causal") else []
    return ", ".join([*([row["pass"]] if "pass" in row else []), *known, *causal])


def measurements() -> Iterator[tuple[str, str, list[Case]]]:
    """Yield what was measured, the baseline and the cases."""
    for name, title in COMPARISONS.items():
        baseline = BASELINES.get(name)
        speedups = (
            (row, row["speedup_over"].get(baseline) if baseline else gpu.best(row))
            for row in load(RESULTS, name)["rows"]
        )
        yield title, NAMES[baseline or "best"], _cases(speedups)
    for name, (title, baseline) in OTHERS.items():
        rows = load(RESULTS, name)["rows"]
        yield title, baseline, _cases((row, row.get("speedup")) for row in rows)
    for name in FRAMEWORKS:
        found = load(RESULTS, name)
        device = found["machine"].get("gpu") or found["machine"]["processor"]
        timed = ((row, row.get("us") or row["ms"]) for row in found["rows"])
        pairs = ((row, x["PyTorch"] / x["tileattn"]) for row, x in timed if "PyTorch" in x)
        yield f"Inside PyTorch, {device}", "PyTorch", _cases(pairs)
    for path in sorted(RESULTS.glob("cpu*.json")):
        found = load(RESULTS, path.stem)
        grid = [row for row in found["rows"] if row["section"] == "grid"]
        for ours, baseline in cpu.PAIRS:
            pairs = (
                (row, row["gflops"][ours] / row["gflops"][baseline])
                for row in grid
                if {ours, baseline} <= row["gflops"].keys()
            )
            processor = found["machine"]["processor"]
            yield f"`{ours}`, {processor}", HEADINGS.get(baseline, baseline), _cases(pairs)


def _cases(speedups: Iterable[tuple[Row, float | None]]) -> list[Case]:
    return [Case(where(row), speed) for row, speed in speedups if speed is not None]


def lines() -> Iterator[str]:
    """Make a table of the measurements, and a list of their slower cases, folded."""
    found = [
        (title, baseline, cases, sorted((x for x in cases if x.speed < SLOWER), key=SPEED))
        for title, baseline, cases in measurements()
    ]
    found = [x for x in found if x[3]]
    head = ["", "baseline", "cases", "slower", "least", "where"]
    yield from table(
        head,
        (
            [title, baseline, len(cases), len(slower), f"{slower[0].speed:.2f}", slower[0].where]
            for title, baseline, cases, slower in found
        ),
    )
    yield f'??? note "All {sum(len(slower) for *_, slower in found)} slower cases"'
    yield ""
    for title, baseline, _, slower in found:
        yield f"    **{title}**, of the speed of {baseline}:"
        yield "    " + "; ".join(f"{case.where}: {case.speed:.2f}" for case in slower) + "."
        yield ""


def stale() -> pages.Stale:
    """Return the page unless it has this table."""
    return pages.stale_part(DOCS / "performance.md", BEGIN, END, lines())


if __name__ == "__main__":
    sys.exit(pages.main(None, __doc__, stale()))
