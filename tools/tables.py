"""Markdown tables of results: columns with headings and formats, and their origin."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks import cpu
from benchmarks.report import Row
from tools.comparisons import NAMES, machine_of
from tools.pages import folded, shown, table

# Fields whose column has another heading than their name, or a format.
HEADINGS = {
    "times_plain": "slowdown over the plain call",
    "times_bf16": "speedup over a cache in bf16",
    "fastest": "speedup over the fastest of these",
    "of_batch": "speed relative to a batch",
    "of_plain": "speed relative to the plain call",
    "speedup": "speedup over full",
    "one_rank_ms": "one rank, ms",
    "fraction_of_linear": "fraction of linear",
    "launch_overhead_us": "CPU launch overhead, us",
    "tflops": "TFLOP/s",
    "gflops": "GFLOP/s",
    **cpu.TITLES,
    "gbytes_per_second": "GB/s",
    "compute_ms": "compute, ms",
    "exp_ms": "exp, ms",
    "memory_ms": "memory, ms",
    "percent": "% of roofline",
    "spread": "uncertain: spread, %",
}
FORMATS = {
    **dict.fromkeys(("ms", "density", "compute_ms", "exp_ms", "memory_ms"), ".3f"),
    **dict.fromkeys(("speedup", "launch_overhead_us"), ".1f"),
    **dict.fromkeys(("percent", "tflops", "gbytes_per_second"), ".0f"),
}


def columns(names: Iterable[str], rows: list[Row]) -> Iterator[str]:
    """Tabulate some fields; numbers without a format, such as speedups, get two decimals."""
    names = list(names)

    def cell(row: Row, name: str) -> str:
        value = row.get(name)
        return shown(value, FORMATS.get(name, ".2f" if isinstance(value, float) else ""))

    head = [HEADINGS.get(name, name) for name in names]
    yield from table(head, ([cell(row, name) for name in names] for row in rows))


def by_section(result: Row) -> dict[str, list[Row]]:
    """Group the rows by section."""
    found: dict[str, list[Row]] = {}
    for row in result["rows"]:
        found.setdefault(row["section"], []).append(row)
    return found


SHORT = 20  # rows of a table that is open at first


def sections(found: Mapping[str, list[Row]], captions: Mapping[str, str]) -> Iterator[str]:
    """Tabulate each section below its caption; a long table opens by a click."""
    for name, rows in found.items():
        yield from folded(captions[name], table_of(rows), is_open=len(rows) <= SHORT)


def table_of(rows: list[Row]) -> Iterator[str]:
    """Tabulate every measured number; leave out fields that all rows share."""
    flat: list[Row] = []
    for row in rows:
        ratios = {f"{name}, ratio": value for name, value in row.get("over_plain", {}).items()}
        numbers = (x for name, x in row.items() if isinstance(x, dict) and name != "over_plain")
        flat.append(dict(itertools.chain(row.items(), *(x.items() for x in numbers))) | ratios)
    every = dict.fromkeys(n for row in flat for n, x in row.items() if not isinstance(x, dict))
    names = [n for n in every if len({row.get(n) for row in flat}) > 1 or len(flat) == 1]
    head = [HEADINGS.get(name, name) for name in names]
    yield from table(head, ([_digits(row.get(name)) for name in names] for row in flat))


def _digits(value: Any) -> str:
    """Format a measured number with three digits, or its whole part if that has more."""
    return shown(value, (".0f" if value >= 100 else ".3g") if isinstance(value, float) else "")


def exclusions(rows: list[Row]) -> Iterator[str]:
    """List the libraries that failed, or had other results, and how often."""
    found: dict[str, int] = {}
    for row in rows:
        failed, other = row.get("failed", {}), row.get("mismatch", {})
        said = [f"{NAMES.get(x, x)} failed: `{why}`" for x, why in failed.items()]
        said += [f"{NAMES.get(x, x)} had other results: {far} away" for x, far in other.items()]
        for text in said:
            found[text] = found.get(text, 0) + 1
    for text, times in found.items():
        yield f"- {text} ({'once' if times == 1 else f'{times} times'})."
    yield from ("",) * bool(found)


def libraries_of(machine: Row) -> str:
    """List the versions of the libraries that took part; a results file names those it loaded."""
    known = {"PyTorch": machine.get("torch")}
    known |= {NAMES.get(name, name): version for name, version in machine.get("peers", {}).items()}
    return ", ".join(versioned(name, version) for name, version in known.items() if version)


def versioned(name: str, version: str) -> str:
    """Add a version to a name: a number, or the package that brings this build."""
    return f"{name} of {version}" if " " in version else f"{name} {version}"


def origin_of(name: str, result: Row) -> str:
    """Describe the command, machine, versions, commit and date, with the mark of a file's age."""
    machine = result["machine"]
    versions = {"driver": "driver", "CUDA": "cuda", "CuPy": "cupy"}
    if "gpu" not in machine:
        versions = {"NumPy": "numpy", "LLVM": "llvm"}
    known = [f"{label} {machine[key]}" for label, key in versions.items() if machine.get(key)]
    known += filter(None, [libraries_of(machine), f"Python {machine['python']}"])
    known.append(f"commit {machine['commit'][:8]}")
    command = f"`{machine['command'].strip()}`"
    what = f"{command}: {machine_of(result)}, {', '.join(known)}, {machine['date']}"
    return f"Measured by {what}. <!-- age: {name} -->"
