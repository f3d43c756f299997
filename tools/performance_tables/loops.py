"""The tables of docs/performance-loops.md, from `bench lived` and `bench end_to_end`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.report import Row
from tools.comparisons import WAYS
from tools.pages import paragraphs, shown, table
from tools.tables import by_section, exclusions, origin_of, table_of

DEVICES = {"gpu": "a GPU", "gpu_f32": "a GPU in float32", "cpu": "a CPU"}
SPEEDUPS = {
    "over_peers": "speedup over the fastest of the others",
    "attention_over_peers": "speedup of attention over the fastest of the others",
}
OURS = ("torch", "tileattn", "arrays")  # the first that is there is compared with other libraries


def lines(results: Mapping[str, Row]) -> Iterator[str]:
    """Make the tables of each device that was measured."""
    for name, (title, tables) in TABLES.items():
        for device, where in DEVICES.items():
            file = f"{name}_{device}"
            if (result := results.get(file)) is not None:
                yield from paragraphs(f"## {title} on {where}", origin_of(file, result))
                yield from tables(result)


def _loops(result: Row) -> Iterator[str]:
    rows = result["rows"]
    yield from paragraphs("Microseconds of a step:")
    yield from table_of([_compared(row, "us") for row in rows])
    yield from paragraphs("Microseconds of a call on the CPU, median / 99th percentile / most:")
    yield from _hosts(rows)
    yield from _failures(rows)
    yield from paragraphs("\n".join(f"- {row['loop']}: {row['sizes']}" for row in rows))


def _compared(row: Row, unit: str) -> Row:
    """Return the times of a row, and the speeds to look for."""
    who = next((name for name in OURS if name in row[unit]), "")
    repeated = row[f"repeated_{unit}"]
    ratio = repeated[who] / row[unit][who] if who in repeated else None
    again = {f"{name}, repeated": x for name, x in _named(repeated).items()}
    rest = {"rest": row["rest_ms"]} if "rest_ms" in row else {}
    known = {name: row[name] for name in ("loop", "model", "tokens", "dropout") if name in row}
    speedups = {title: row[name].get(who) for name, title in SPEEDUPS.items() if name in row}
    return known | {
        "times": _named(row[unit]) | again | rest,
        "speeds": {"speed relative to repeated": ratio} | speedups,
    }


def _named(times: Mapping[str, Any]) -> dict[str, Any]:
    """Name tileattn's ways as the other tables do: "torch" is not PyTorch itself."""
    return {WAYS.get(name, name): x for name, x in times.items()}


def _failures(rows: list[Row]) -> Iterator[str]:
    yield from exclusions([{"failed": _named(row["failed"])} for row in rows])


def _hosts(rows: list[Row]) -> Iterator[str]:
    names = list(dict.fromkeys(name for row in rows for name in row["us"]))
    keys = "host_us", "host_p99_us", "host_max_us"

    def cell(row: Row, name: str) -> str:
        return (
            " / ".join(shown(row[key].get(name), ".0f") for key in keys)
            if name in row["us"]
            else ""
        )

    yield from table(
        ["loop", *(WAYS.get(x, x) for x in names)],
        ([row["loop"], *(cell(row, x) for x in names)] for row in rows),
    )


def _first_calls(result: Row) -> Iterator[str]:
    yield from paragraphs("Seconds of the first call in a process, with empty caches of kernels:")
    yield from table_of(list(_by_pass(result["rows"])))
    yield from _failures(result["rows"])


def _by_pass(rows: list[Row]) -> Iterator[Row]:
    """Return a row for the forward pass, and one for both passes after it."""
    for row in rows:
        for kind, name in {"forward_s": "forward", "both_s": "both, after forward"}.items():
            if row[kind]:
                known = {"loop": row["loop"], "dtype": row["dtype"], "D": row["D"], "pass": name}
                yield known | {"seconds": _named(row[kind])}


def _models(result: Row) -> Iterator[str]:
    captions = {"training": "a step of training", "generation": "a generated token"}
    for section, rows in by_section(result).items():
        sizes = ", ".join(dict.fromkeys(x for row in rows for x in row["sizes"].split(", ")))
        what = f"Milliseconds of {captions[section]}, {rows[0]['dtype']}, {sizes}:"
        yield from paragraphs(what)
        yield from table_of([_compared(row, "ms") for row in rows])
        yield from _failures(rows)


def _waits(result: Row) -> Iterator[str]:
    yield from paragraphs(
        "Whether a loop of calls waited for a GPU that was busy for three seconds, and how often "
        "it called a function of the CUDA runtime that may wait:"
    )
    head = ["loop", "calls of", "calls", "waited", "may wait"]
    rows = (
        [row["loop"], row["who"], row["calls"], shown(row["waited"]), _counts(row)]
        for row in result["rows"]
    )
    yield from table(head, rows)


def _counts(row: Row) -> str:
    return ", ".join(f"{name} {count}" for name, count in row["synchronisations"].items())


def _endurance(result: Row) -> Iterator[str]:
    yield from paragraphs(
        "Microseconds of a call, megabytes of the process and of the pools on the GPU, entries of "
        "caches:",
    )
    yield from table_of(result["rows"])


TABLES: dict[str, tuple[str, Callable[[Row], Iterator[str]]]] = {
    "lived": ("Loops", _loops),
    "end_to_end": ("Whole models", _models),
    "first_calls": ("First calls", _first_calls),
    "waits": ("Waits", _waits),
    "endurance": ("Many distinct calls", _endurance),
}
