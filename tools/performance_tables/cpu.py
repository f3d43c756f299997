"""The tables of docs/performance-cpu.md."""

from collections.abc import Iterator, Mapping

from benchmarks import cpu
from benchmarks.report import Row
from tools.pages import folded, paragraphs
from tools.performance_tables import memory
from tools.tables import by_section, origin_of, sections, table_of

SPEEDUPS = "Geometric means of the speedups in the grid"
CPU_SECTIONS = {
    "grid": "GFLOP/s, B = 1, H = 8",
    "small": "Microseconds of a call of 16 tokens, H = 8, D = 64",
    "decoding": "GB/s of k and v, one query over 4096 keys of D = 128, float32",
    "options": "Milliseconds of a call with one option, and ratio to the call without, H = 8",
    "scaling": "GFLOP/s by number of threads, H = 16, D = 64",
    "ceilings": "Ceilings",
}
FRAMEWORK_SECTIONS = {
    "host": "Microseconds of a call of 16 tokens, B = 1, H = 8, D = 64, float32",
    "passes": "Milliseconds of both passes of attention, B = 1, H = 8, D = 64, float32",
    "block": "Milliseconds of both passes of a block of width 1024, compiled by PyTorch",
    "training": "Milliseconds of a step of training, width 384, B = 2, float32",
}


def lines(results: Mapping[str, Row]) -> Iterator[str]:
    """Make the tables of each processor, of PyTorch, of ranks and of memory."""
    for name, result in results.items():
        if name.startswith("cpu"):
            machine = result["machine"]
            title = f"## {machine['processor']}, {machine['threads']} threads"
            yield from paragraphs(title, _origin(name, result))
            found = by_section(result)
            if "grid" in found:
                yield from folded(SPEEDUPS, table_of(list(cpu.speedups(found["grid"]))))
            yield from sections(found, CPU_SECTIONS)
    for name, result in results.items():
        if name.startswith("frameworks") and "gpu" not in result["machine"]:
            yield from paragraphs("## Inside PyTorch", _origin(name, result))
            yield from sections(by_section(result), FRAMEWORK_SECTIONS)
    if "distributed_cpu" in results:
        result = results["distributed_cpu"]
        machine = result["machine"]
        known = f"{machine['ranks']} ranks, started by {machine['started_by']}."
        origin = f"{_origin('distributed_cpu', result)} {known}"
        yield from paragraphs("## Ranks that share a sequence", origin)
        yield from folded(f"{len(result['rows'])} rows", table_of(result["rows"]))
    yield from paragraphs("## Peak memory on the CPU")
    yield from memory.lines("memory_cpu", results["memory_cpu"])


def _origin(name: str, result: Row) -> str:
    """Describe the run, and the instructions of the processor."""
    machine = result["machine"]
    known = f" LLVM calls it {machine['cpu']}: {machine['features']}." if "cpu" in machine else ""
    return f"{origin_of(name, result)}{known}"
