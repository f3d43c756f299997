"""Markdown tables of results: columns with headings and formats, and their origin."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks import cpu, decode, options
from benchmarks.report import Row
from tools.pages import paragraphs, shown, table

# Fields whose column has another heading than their name, or a format.
HEADINGS = {
    "times_plain": "slowdown over the plain call",
    "peers": "speedup over the fastest of these",
    "batch": "speed relative to a batch",
    "fa4, ms": "FlashAttention-4, ms",
    "over_fa4": "speedup over FlashAttention-4",
    "of_plain": "speed relative to the plain call",
    "over_flex": "speedup over FlexAttention",
    "flex, ms": "FlexAttention, ms",
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
}
FORMATS = {
    **dict.fromkeys((f"{name}, ms" for name in options.PEERS), ".3f"),
    **dict.fromkeys(("ms", "density", "compute_ms", "exp_ms", "memory_ms"), ".3f"),
    **dict.fromkeys(("speedup", "launch_overhead_us"), ".1f"),
    **dict.fromkeys(("us", *(f"{name}, us" for name in decode.PEERS)), ".1f"),
    **dict.fromkeys(("percent", "tflops", "deterministic", "gbytes_per_second"), ".0f"),
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


def sections(found: Mapping[str, list[Row]], captions: Mapping[str, str]) -> Iterator[str]:
    """Tabulate each section, with its caption."""
    for name, rows in found.items():
        yield from paragraphs(captions[name])
        yield from table_of(rows)


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


def origin_of(result: Row) -> str:
    """Describe the command, machine, versions, commit and date."""
    machine = result["machine"]
    versions = {"driver": "driver", "CUDA": "cuda", "CuPy": "cupy"}
    if "gpu" not in machine:
        versions = {"NumPy": "numpy", "LLVM": "llvm"}
    versions |= {"PyTorch": "torch", "cuDNN": "cudnn", "Python": "python", "commit": "commit"}
    known = [f"{label} {machine[name]}" for label, name in versions.items() if machine.get(name)]
    what = machine.get("gpu") or f"{machine['processor']}, {machine['threads']} threads"
    return f"`{machine['command'].strip()}`: {what}, {', '.join(known)}, {machine['date']}."
