"""Write the tables of speed from benchmarks/results, or check that they are fresh."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path

from benchmarks.report import RESULTS, Row
from tools import pages
from tools.comparisons import comparisons
from tools.pages import ROOT
from tools.performance_tables import cpu, gpu, loops, options, slower, summary
from tools.results import read

Results = Mapping[str, Row]
Parts = dict[str, Callable[[], Iterator[str]]]


def parts(results: Results) -> dict[str, Parts]:
    """Return a function for the lines of each part, by page."""
    found = list(comparisons(results))
    summaries = {name: partial(summary.part, name, found) for name in summary.TABLES}
    headline: Parts = {"headline": partial(summary.headline, results, found)}
    return {
        "README.md": headline,
        "docs/index.md": headline,
        "docs/performance.md": {
            **headline,
            **summaries,
            "origins": partial(summary.origins, results),
            "models": partial(summary.models, found),
            "slower": partial(slower.lines, found),
            "commands": summary.commands,
        },
        "docs/performance-gpu.md": {"gpu": partial(gpu.lines, results)},
        "docs/performance-options.md": {"options": partial(options.lines, results)},
        "docs/performance-cpu.md": {"cpu": partial(cpu.lines, results)},
        "docs/performance-loops.md": {"loops": partial(loops.lines, results)},
    }


def main(argv: list[str] | None = None, root: Path = ROOT, folder: Path = RESULTS) -> int:
    """Check or write the pages; the exit status is 1 if a check finds one stale."""
    stale = (
        pages.stale_parts(root / page, {name: make() for name, make in made.items()})
        for page, made in parts(read(folder)).items()
    )
    return pages.main(argv, __doc__, chain.from_iterable(stale))
