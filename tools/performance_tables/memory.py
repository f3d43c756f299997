"""Tables of peak memory, for the pages of both devices."""

from collections.abc import Iterator

from benchmarks.report import Row
from tools.pages import paragraphs, table
from tools.tables import origin_of


def lines(name: str, result: Row) -> Iterator[str]:
    """Peak memory beyond the inputs, a line for each sequence length."""
    first = result["rows"][0]
    heads = "one head" if first["H"] == 1 else f"{first['H']} heads"
    sizes = f"{heads} of {first['D']}, {first['dtype']}"
    yield from paragraphs(origin_of(name, result), f"Peak memory in MB, {sizes}:")
    peaks: dict[int, dict[str, str]] = {}
    for row in result["rows"]:
        peaks.setdefault(row["N"], {})[f"{row['implementation']}, {row['pass']}"] = peak(row)
    columns = list(next(iter(peaks.values())))
    yield from table(["N", *columns], ([N, *map(x.get, columns)] for N, x in peaks.items()))


def peak(row: Row) -> str:
    """Return the megabytes, or why there are none."""
    if "peak_bytes" in row:
        return f"{row['peak_bytes'] / 1e6:.1f}"
    if "free_bytes" in row:
        return f"needs {row['needs_bytes'] / 1e6:,.0f}"
    return "failed" if "failed" in row else "too long"
