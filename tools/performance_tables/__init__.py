"""Write the tables of docs/performance*.md from benchmarks/results, or check them."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path

from benchmarks.report import RESULTS, Row
from tools import pages
from tools.comparisons import comparisons
from tools.pages import DOCS
from tools.performance_tables import cpu, gpu, loops, options, slower, summary
from tools.results import read

Results = Mapping[str, Row]


def parts(results: Results) -> dict[str, dict[str, Callable[[], Iterator[str]]]]:
    """Return a function for the lines of each part, by page."""
    found = list(comparisons(results))
    summaries = {name: partial(summary.part, name, found) for name in summary.TABLES}
    return {
        "performance.md": {
            "origins": partial(summary.origins, results),
            "grid": partial(summary.grid, results, found),
            "models": partial(summary.models, found),
            **summaries,
            "slower": partial(slower.lines, found),
            "commands": summary.commands,
        },
        "performance-gpu.md": {"gpu": partial(gpu.lines, results)},
        "performance-options.md": {"options": partial(options.lines, results)},
        "performance-cpu.md": {"cpu": partial(cpu.lines, results)},
        "performance-loops.md": {"loops": partial(loops.lines, results)},
    }


def main(argv: list[str] | None = None, docs: Path = DOCS, folder: Path = RESULTS) -> int:
    """Check or write the pages; the exit status is 1 if a check finds one stale."""
    stale = (
        pages.stale_parts(docs / page, {name: make() for name, make in made.items()})
        for page, made in parts(read(folder)).items()
    )
    return pages.main(argv, __doc__, chain.from_iterable(stale))
