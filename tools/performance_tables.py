"""Write the tables of docs/performance.md from benchmarks/results, or check that they are fresh."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import gpu_report, roofline
from benchmarks.report import Row
from tools import pages

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- tables: python -m tools.performance_tables --write -->"
END = "<!-- end of tables -->"
GPU_BEGIN = BEGIN.replace("tables:", "GPU tables:")
GPU_END = END.replace("tables", "GPU tables")
GPU_OPENING = """
## On the GPU

`python -m tileattn bench gpu` times all contestants in one process, on the same data, by CUDA
events. Work is counted as 4 B H N N D operations forward, half of it for causal, and 2.5 times that
backward. A column with the name of a peer says how many times as long as tileattn it takes: above
1, tileattn is faster. It is blank where the peer cannot run the cell, or gives another result.
*best* is the fastest of cuDNN and FlashAttention-4. *of the floor* is the share that tileattn
reaches of the floors of `benchmarks.roofline`: the rate of a large matrix product that was timed,
every array once at the rate of a copy and, where the clock is known, exponentials. The product is
no limit of the hardware: a kernel that draws less power than it does may come above 1.

"""

# Of every section that is not a race: heading, field and format of each column.
GPU_COLUMNS = {
    "options": (
        *(("pass", "pass", ""), ("dtype", "dtype", ""), ("N", "N", ""), ("D", "D", "")),
        *(("option", "option", ""), ("ms", "ms", ".3f"), ("bytes alone, ms", "bytes_ms", ".3f")),
        ("over the plain call, %", "overhead_percent", ".0f"),
        ("without the bytes, %", "beyond_bytes_percent", ".0f"),
    ),
    "sparse": (
        *(("pass", "pass", ""), ("dtype", "dtype", ""), ("N", "N", ""), ("D", "D", "")),
        *(("what is seen", "case", ""), ("share of the pairs", "share", ".3f")),
        *(("ms", "ms", ".3f"), ("times as fast as full", "speedup", ".1f")),
    ),
    "host": (
        *(("pass", "pass", ""), ("contestant", "contestant", "")),
        ("microseconds of the host", "microseconds", ".1f"),
    ),
    "ceilings": (
        *(("ceiling", "ceiling", ""), ("dtype", "dtype", ""), ("TFLOP/s", "tflops", ".0f")),
        ("GB/s", "gbytes_per_second", ".0f"),
    ),
}

FLOORS_AT = 8192  # keys, in all grids of the GPU
FLOOR_COLUMNS = (
    *(("pass", "pass", ""), ("dtype", "dtype", ""), ("D", "D", ""), ("causal", "causal", "")),
    *(("products", "products_ms", ".3f"), ("exponentials", "exponentials_ms", ".3f")),
    *(("bytes", "bytes_ms", ".3f"), ("tileattn", "ms", ".3f"), ("of the floor", "reached", ".2f")),
    ("file", "file", ""),
)


def lines() -> Iterator[str]:
    """Make the lines between the markers."""
    for name in ("cpu", "cpu_avx512"):
        yield from _speed(_load(name))
    yield from _memory("memory_cpu")


def _memory(name: str) -> Iterator[str]:
    """Peak memory beyond the inputs, a line for each number of tokens; nothing without a file."""
    if not (RESULTS / f"{name}.json").exists():
        return
    result = _load(name)
    origin = _gpu if "gpu" in result["machine"] else _machine
    yield f"Measured by `{result['machine']['command']}`: {origin(result['machine'])}"
    yield ""
    first = result["rows"][0]
    heads = "one head" if first["H"] == 1 else f"{first['H']} heads"
    yield f"Peak memory in MB, {heads} of {first['D']}, {first['dtype']}:"
    yield ""
    peaks: dict[int, dict[str, str]] = {}
    for row in result["rows"]:
        peak = row.get("peak_bytes")
        shown = f"{peak / 1e6:.1f}" if peak is not None else _why_not(row)
        peaks.setdefault(row["N"], {})[f"{row['contestant']}, {row['kind']}"] = shown
    columns = list(dict.fromkeys(column for cells in peaks.values() for column in cells))
    yield f"| {' | '.join(['N', *columns])} |"
    yield "|" + " --- |" * (1 + len(columns))
    for N, cells in peaks.items():
        yield f"| {N} | {' | '.join(cells.get(column, '') for column in columns)} |"
    yield ""


def _why_not(row: dict[str, Any]) -> str:
    """Say in a few words why there is no peak."""
    if "free_bytes" in row:
        return f"needs {row['needs_bytes'] / 1e6:,.0f}"
    return "failed" if "failed" in row else "too long"


def _speed(speed: dict[str, Any]) -> Iterator[str]:
    yield f"Measured by `{speed['machine']['command'].strip()}`: {_machine(speed['machine'])}"
    yield ""
    core = ", ".join(
        f"{row['gflops']:.0f} GFLOP/s in the products at D = {row['D']}" for row in speed["core"]
    )
    yield f"One core of it alone: {core}; {speed['core'][0]['exp_ns']:.2f} ns for one `np.exp`."
    yield ""
    head = ["pass", "H", "N", "D", "causal", "GFLOP/s", "PyTorch", "plain NumPy", "the floor"]
    yield f"| {' | '.join(head)} |"
    yield "|" + " --- |" * len(head)
    for row in speed["rows"]:
        ratio = row["ratio_to"]
        cells = [_ratio(ratio.get(name)) for name in ("torch", "numpy", "floor")]
        causal = "yes" if row["causal"] else "no"
        yield (
            f"| {row['pass']} | {row['H']} | {row['N']} | {row['D']} | {causal} "
            f"| {row['gflops']['tileattn']:.0f} | {' | '.join(cells)} |"
        )
    yield ""


def gpu_lines() -> Iterator[str]:
    """Make the lines between the markers of the GPU, one table for each file of results."""
    yield from _memory("memory_gpu")
    yield from _floors()
    yield from _nonfinite()
    yield from _stress()
    for path in _gpu_results():
        result = _load(path.stem)
        raced = result["section"] in gpu_report.RACES
        rows = list(_flat(result)) if raced else result["rows"]
        columns = _race_columns(rows) if raced else GPU_COLUMNS[result["section"]]
        yield f"Measured by `{result['machine']['command'].strip()}`: {_gpu(result['machine'])}"
        yield ""
        yield f"| {' | '.join(head for head, _, _ in columns)} |"
        yield "|" + " --- |" * len(columns)
        for row in rows:
            cells = (_cell(row.get(field), form) for _, field, form in columns)
            yield f"| {' | '.join(cells)} |"
        yield ""
        for line in gpu_report.means(result["rows"]) if raced else ():
            yield f"{line[0].upper()}{line[1:]}."
            yield ""


def _floors() -> Iterator[str]:
    """Set each kernel's time beside its floors at one length; nothing where a rate is missing."""
    if not (RESULTS / "gpu_ceilings.json").exists():
        return
    measured = _load("gpu_ceilings")
    if roofline.absent(measured["machine"]):
        return
    ceilings = roofline.ceilings_of(measured, measured["machine"])
    yield f"Milliseconds at N = {FLOORS_AT}: the floors by each resource, and the time of tileattn:"
    yield ""
    yield f"| {' | '.join(head for head, _, _ in FLOOR_COLUMNS)} |"
    yield "|" + " --- |" * len(FLOOR_COLUMNS)
    for path in _gpu_results():
        result = _load(path.stem)
        alike = result["machine"]["gpu"] == measured["machine"]["gpu"]
        if result["section"] != "grid" or not alike:
            continue
        rows = (row for row in result["rows"] if row["N"] == FLOORS_AT)
        for row in roofline.lines(
            [row for row in rows if row["dtype"] in ceilings.flops], ceilings
        ):
            cells = (
                _cell((row | {"file": path.stem}).get(name), form)
                for _, name, form in FLOOR_COLUMNS
            )
            yield f"| {' | '.join(cells)} |"
    yield ""


def _nonfinite() -> Iterator[str]:
    """Set the times of calls that meet NaN and infinity beside those of clean ones."""
    if not (RESULTS / "nonfinite.json").exists():
        return
    result = _load("nonfinite")
    faults = list(dict.fromkeys(row["values"] for row in result["rows"] if "values" in row))[1:]
    yield (
        "Calls that meet NaN and infinity, as multiples of the clean call. Measured by "
        f"`{result['machine']['command'].strip()}`: {_gpu(result['machine'])}"
    )
    yield ""
    yield f"| case | dtype | N | D | pass | clean, ms | {' | '.join(faults)} |"
    yield "|" + " --- |" * (6 + len(faults))
    calls: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in result["rows"]:
        call = tuple(row[name] for name in ("case", "dtype", "N", "D", "pass"))
        calls.setdefault(call, {})[row.get("values", "failed")] = row
    for call, found in calls.items():
        cells = [_cell(found.get("clean", {}).get("ms"), ".3f")]
        cells += [_cell(found.get(fault, {}).get("multiple"), ".2f") for fault in faults]
        yield f"| {' | '.join([*map(str, call), *cells])} |"
    yield ""


def _stress() -> Iterator[str]:
    """Say how often the stress test of the GPU ran, and what differed."""
    found = [_load(path.stem) for path in sorted(RESULTS.glob("stress_gpu*.json"))]
    if not found:
        return
    yield "What `tools.stress_gpu` has run: calls of both passes whose bits were compared."
    yield ""
    yield "| variant | pairs of D, Dv | processes | calls | differ | failures | measured |"
    yield "|" + " --- |" * 7
    for result in found:
        rows = result["rows"]
        pairs = len({(row["D"], row["Dv"]) for row in rows})
        calls = sum(row["calls"] for row in rows)
        differ, failures = len(result["differing"]), len(result["failures"])
        counts = f"{pairs} | {result['processes']} | {calls:,} | {differ} | {failures}"
        machine = f"`{result['machine']['command'].strip()}`: {_gpu(result['machine'])}"
        yield f"| {rows[0]['variant']} | {counts} | {machine} |"
    yield ""


def _gpu_results() -> list[Path]:
    return sorted(RESULTS.glob("gpu*.json"))


def _flat(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of a race with a field for each speed and each ratio."""
    reached: list[float | None] = [None] * len(result["rows"])
    if (RESULTS / "gpu_ceilings.json").exists():
        reached = roofline.shares(result, _load("gpu_ceilings"))
    for row, share in zip(result["rows"], reached, strict=True):
        ratios = {f"x {name}": ratio for name, ratio in row["ratio_to"].items()}
        speeds = {f"= {name}": value for name, value in gpu_report.quoted(row).items()}
        yield row | speeds | {"best": gpu_report.best(row), "reached": share} | ratios


def _race_columns(rows: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Heading, field and format of each column; what no row of the race has is left out."""
    speeds = (("TFLOP/s", "= tileattn"), ("deterministic", "= deterministic"))
    peers = dict.fromkeys(field for row in rows for field in row if field.startswith("x "))
    columns = [
        *((name, name, "") for name in ("pass", "case", "dtype", "D", "N", "causal")),
        *((head, field, ".0f") for head, field in speeds),
        ("of the floor", "reached", ".2f"),
        ("best", "best", ".2f"),
        *((field.removeprefix("x "), field, ".2f") for field in peers),
    ]
    return [column for column in columns if any(row.get(column[1]) is not None for row in rows)]


def _cell(value: Any, form: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else format(value, form)


def _gpu(machine: dict[str, Any]) -> str:
    versions = (
        ("driver", "driver"),
        ("CUDA", "cuda"),
        ("CuPy", "cupy"),
        ("PyTorch", "torch"),
        ("cuDNN", "cudnn"),
        ("Python", "python"),
        ("commit", "commit"),
    )
    known = (f"{label} {machine[name]}" for label, name in versions if machine[name])
    return f"{machine['gpu']}, {', '.join(known)}, {machine['date']}."


def _load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def _machine(machine: dict[str, Any]) -> str:
    torch = f"PyTorch {machine['torch']}, " if machine.get("torch") else ""
    return (
        f"{machine['processor']}, {machine['threads']} threads, Python {machine['python']}, "
        f"NumPy {machine['numpy']}, {torch}commit {machine['commit']}, {machine['date']}."
    )


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def main(argv: list[str] | None = None) -> int:
    """Check or write the page; the exit status is 1 where a check finds it stale."""
    return pages.main(argv, __doc__, PAGE, _updated)


def _updated(page: str) -> str:
    """Both sets of tables; the section of the GPU comes with its first results."""
    page = pages.updated(page, BEGIN, END, lines())
    if GPU_BEGIN not in page:
        if not _gpu_results():
            return page
        page += f"{GPU_OPENING}{GPU_BEGIN}\n{GPU_END}\n"
    return pages.updated(page, GPU_BEGIN, GPU_END, gpu_lines())


if __name__ == "__main__":
    sys.exit(main())
