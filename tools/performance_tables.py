"""Write the tables of docs/performance.md from benchmarks/results, or check that they are fresh."""

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks import gpu, roofline
from benchmarks.report import Row
from tools import pages
from tools.pages import RESULTS, shown, table

PAGE = pages.ROOT / "docs" / "performance.md"
BEGIN = "<!-- tables: python -m tools.performance_tables --write -->"
END = "<!-- end of tables -->"
GPU_BEGIN = BEGIN.replace("tables:", "GPU tables:")
GPU_END = END.replace("tables", "GPU tables")

# Fields whose column has another heading than their name, or a format.
HEADINGS = {
    "bytes_ms": "its bytes alone, ms",
    "overhead_percent": "overhead, %",
    "beyond_bytes_percent": "overhead beyond its bytes, %",
    "speedup": "speedup over full",
    "launch_overhead_us": "CPU launch overhead, us",
    "tflops": "TFLOP/s",
    "gbytes_per_second": "GB/s",
    "compute_ms": "compute bound, ms",
    "exp_ms": "exp bound, ms",
    "memory_ms": "memory bound, ms",
    "percent": "% of roofline",
}
FORMATS = {
    **dict.fromkeys(("ms", "bytes_ms", "density", "compute_ms", "exp_ms", "memory_ms"), ".3f"),
    **dict.fromkeys(("speedup", "launch_overhead_us"), ".1f"),
    **dict.fromkeys(("overhead_percent", "beyond_bytes_percent", "percent"), ".0f"),
    **dict.fromkeys(("tflops", "deterministic", "gbytes_per_second"), ".0f"),
}
COLUMNS = {
    "options": "pass dtype N D option ms bytes_ms overhead_percent beyond_bytes_percent",
    "sparse": "pass dtype N D case density ms speedup",
    "host": "pass implementation launch_overhead_us",
    "ceilings": "ceiling dtype tflops gbytes_per_second",
    "bounds": "pass dtype D causal compute_ms exp_ms memory_ms ms percent file",
    "comparison": "pass case dtype D N causal tflops deterministic percent best",
}
BOUNDS_AT = 8192  # keys, in all grids of the GPU


def lines() -> Iterator[str]:
    """Make the tables of the CPU."""
    for name in ("cpu", "cpu_avx512"):
        yield from _speed(_load(name))
    yield from _memory(_load("memory_cpu"))


def gpu_lines() -> Iterator[str]:
    """Make the tables of the GPU, one for each results file of ``bench gpu``."""
    yield from _memory(_load("memory_gpu"))
    results = {path.stem: _load(path.stem) for path in sorted(RESULTS.glob("gpu*.json"))}
    ceilings = results["gpu_ceilings"]
    yield from bounds(results, ceilings)
    yield from nonfinite(_load("nonfinite"))
    yield from _stress()
    for result in results.values():
        yield f"Measured by {_origin(result)}"
        yield ""
        if result["section"] in gpu.COMPARISONS:
            yield from _comparison(result, ceilings)
        else:
            yield from columns(COLUMNS[result["section"]].split(), result["rows"])


def columns(names: Iterable[str], rows: list[Row]) -> Iterator[str]:
    """Make a table of some fields; numbers without a format, as speedups, get two decimals."""
    names = list(names)

    def cell(row: Row, name: str) -> str:
        value = row.get(name)
        return shown(value, FORMATS.get(name, ".2f" if isinstance(value, float) else ""))

    head = [HEADINGS.get(name, name) for name in names]
    yield from table(head, ([cell(row, name) for name in names] for row in rows))


def _speed(result: Row) -> Iterator[str]:
    yield f"Measured by {_origin(result)}"
    yield ""
    core = ", ".join(f"{row['gflops']:.0f} GFLOP/s at D = {row['D']}" for row in result["core"])
    yield f"One core alone: matmul {core}; {result['core'][0]['exp_ns']:.2f} ns for one `np.exp`."
    yield ""
    head = ["pass", "H", "N", "D", "causal", "GFLOP/s", "PyTorch", "naive NumPy", "lower bound"]
    yield from table(
        head,
        (
            [*(row["pass"], row["H"], row["N"], row["D"], shown(row["causal"]))]
            + [f"{row['gflops']['tileattn']:.0f}"]
            + [shown(row["speedup_over"].get(x), ".2f") for x in ("torch", "numpy", "lower_bound")]
            for row in result["rows"]
        ),
    )


def _memory(result: Row) -> Iterator[str]:
    """Peak memory beyond the inputs, a line for each sequence length."""
    yield f"Measured by {_origin(result)}"
    yield ""
    first = result["rows"][0]
    heads = "one head" if first["H"] == 1 else f"{first['H']} heads"
    yield f"Peak memory in MB, {heads} of {first['D']}, {first['dtype']}:"
    yield ""
    peaks: dict[int, dict[str, str]] = {}
    for row in result["rows"]:
        peaks.setdefault(row["N"], {})[f"{row['implementation']}, {row['pass']}"] = _peak(row)
    columns = list(next(iter(peaks.values())))
    yield from table(["N", *columns], ([N, *map(x.get, columns)] for N, x in peaks.items()))


def _peak(row: Row) -> str:
    """Megabytes, or in a few words why there are none."""
    if "peak_bytes" in row:
        return f"{row['peak_bytes'] / 1e6:.1f}"
    if "free_bytes" in row:
        return f"needs {row['needs_bytes'] / 1e6:,.0f}"
    return "failed" if "failed" in row else "too long"


def bounds(results: dict[str, Row], measured: Row) -> Iterator[str]:
    """Set the time of each kernel beside its lower bounds, at one sequence length."""
    ceilings = roofline.ceilings_of(measured)
    yield f"Lower bound by each resource, and the time of tileattn, at N = {BOUNDS_AT}:"
    yield ""
    found = []
    for name, result in results.items():
        if result["section"] == "grid" and result["machine"]["gpu"] == measured["machine"]["gpu"]:
            rows = (row for row in result["rows"] if row["N"] == BOUNDS_AT)
            known = [row for row in rows if row["dtype"] in ceilings.flops]
            found += [row | {"file": name} for row in roofline.lines(known, ceilings)]
    yield from columns(COLUMNS["bounds"].split(), found)


def nonfinite(result: Row) -> Iterator[str]:
    """Set the times of calls that meet NaN and infinity beside those of clean ones."""
    faults = list(dict.fromkeys(row["values"] for row in result["rows"] if "values" in row))[1:]
    yield f"Slowdown of calls that meet NaN and infinity. Measured by {_origin(result)}"
    yield ""
    names = ("case", "dtype", "N", "D", "pass")
    calls: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in result["rows"]:
        call = tuple(row[name] for name in names)
        calls.setdefault(call, {})[row.get("values", "failed")] = row
    yield from table(
        [*names, "clean, ms", *faults],
        (
            [*call, shown(found.get("clean", {}).get("ms"), ".3f")]
            + [shown(found.get(fault, {}).get("slowdown"), ".2f") for fault in faults]
            for call, found in calls.items()
        ),
    )


def _stress() -> Iterator[str]:
    """Say how often the stress test of the GPU ran, and what differed."""
    yield "What `tools.stress_gpu` has run: calls of both passes whose bits were compared."
    yield ""
    head = ["variant", "pairs of D, Dv", "processes", "calls", "differ", "failures", "measured"]
    yield from table(head, (stress_row(_load(p.stem)) for p in sorted(RESULTS.glob("stress_gpu*"))))


def stress_row(result: Row) -> Iterator[Any]:
    """Count what one run of the stress test compared, and what differed."""
    rows = result["rows"]
    yield rows[0]["variant"]
    yield len({(row["D"], row["Dv"]) for row in rows})
    yield result["processes"]
    yield f"{sum(row['calls'] for row in rows):,}"
    yield len(result["differing"])
    yield len(result["failures"])
    yield _origin(result)


def _comparison(result: Row, ceilings: Row) -> Iterator[str]:
    """Make a table of TFLOP/s, % of roofline and speedups; columns without values are left out."""
    rows = []
    for row, percent in zip(result["rows"], roofline.percents(result, ceilings), strict=True):
        speeds = gpu.verified(row)
        ours = {"tflops": speeds.get("tileattn"), "deterministic": speeds.get("deterministic")}
        rows.append(row | ours | {"percent": percent, "best": gpu.best(row)} | row["speedup_over"])
    baselines = dict.fromkeys(name for row in rows for name in row["speedup_over"])
    names = [*COLUMNS["comparison"].split(), *baselines]
    yield from columns((x for x in names if any(row.get(x) is not None for row in rows)), rows)
    for line in gpu.means(result["rows"]):
        yield f"{line[0].upper()}{line[1:]}."
        yield ""


def _origin(result: Row) -> str:
    """Name the command, the machine, the versions, the commit and the day."""
    machine = result["machine"]
    versions = {"driver": "driver", "CUDA": "cuda", "CuPy": "cupy"}
    if "gpu" not in machine:
        versions = {"NumPy": "numpy"}
    versions |= {"PyTorch": "torch", "cuDNN": "cudnn", "Python": "python", "commit": "commit"}
    known = [f"{label} {machine[name]}" for label, name in versions.items() if machine.get(name)]
    what = machine.get("gpu") or f"{machine['processor']}, {machine['threads']} threads"
    return f"`{machine['command'].strip()}`: {what}, {', '.join(known)}, {machine['date']}."


def _load(name: str) -> Row:
    loaded: Row = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def main(argv: list[str] | None = None) -> int:
    """Check or write the page; the exit status is 1 where a check finds it stale."""

    def update(text: str) -> str:
        text = pages.updated(text, BEGIN, END, lines())
        return pages.updated(text, GPU_BEGIN, GPU_END, gpu_lines())

    return pages.main(argv, __doc__, PAGE, update)


if __name__ == "__main__":
    sys.exit(main())
