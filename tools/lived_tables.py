"""The tables of docs/performance-loops.md, from the results of `bench lived` and `end_to_end`."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import Row, load
from tools.pages import paragraphs, shown, table
from tools.tables import by_section, origin_of, table_of

DEVICES = {"gpu": "On a GPU", "cpu": "On a CPU"}
OURS = ("torch", "tileattn", "arrays")  # the first that is there is compared with other libraries


def lines(results: Path) -> Iterator[str]:
    """Make the tables of each device that was measured."""
    for device, title in DEVICES.items():
        if (results / f"lived_{device}.json").exists():
            yield from paragraphs(f"## {title}")
            yield from _lived(load(results, f"lived_{device}"))
        if (results / f"end_to_end_{device}.json").exists():
            yield from paragraphs(f"## Whole models {title[0].lower()}{title[1:]}")
            yield from _models(load(results, f"end_to_end_{device}"))
        if (results / f"lived_endurance_{device}.json").exists():
            yield from paragraphs(f"## Many distinct calls {title[0].lower()}{title[1:]}")
            yield from _endurance(load(results, f"lived_endurance_{device}"))


def _lived(result: Row) -> Iterator[str]:
    found = by_section(result)
    yield from paragraphs(f"Measured by {origin_of(result)}")
    rows = found.get("loops", [])
    if rows:
        yield from paragraphs("Microseconds of a step:")
        yield from table_of([_compared(row, "us") for row in rows])
        yield from paragraphs("Microseconds of a call on the CPU, median / 99th percentile / most:")
        yield from _hosts(rows)
        yield from paragraphs("\n".join(f"- {row['loop']}: {row['sizes']}" for row in rows))
    if "first_calls" in found:
        yield from paragraphs("Seconds of the first call in a process, with empty kernel caches:")
        yield from table_of(list(_first(found["first_calls"])))


def _compared(row: Row, unit: str) -> Row:
    """Return the times of a row, and the two speeds to look for."""
    who = next(name for name in OURS if name in row[unit])
    again = {f"{name}, repeated": time for name, time in row[f"repeated_{unit}"].items()}
    known = {name: row[name] for name in ("loop", "model", "dropout") if name in row}
    return known | {
        "times": row[unit] | again,
        "speeds": {
            "speed relative to repeated": again[f"{who}, repeated"] / row[unit][who],
            "speedup over the fastest of the others": row["over_peers"].get(who),
        },
    }


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
        ["loop", *names], ([row["loop"], *(cell(row, x) for x in names)] for row in rows)
    )


def _first(rows: list[Row]) -> Iterator[Row]:
    """Return a row for the forward pass, and one for both passes after it."""
    for row in rows:
        for kind, name in {"forward_s": "forward", "both_s": "both, after forward"}.items():
            if row[kind]:
                known = {"loop": row["loop"], "dtype": row["dtype"], "D": row["D"], "pass": name}
                yield known | {"seconds": row[kind]}


def _models(result: Row) -> Iterator[str]:
    captions = {"training": "a step of training", "generation": "a generated token"}
    yield from paragraphs(f"Measured by {origin_of(result)}")
    for section, rows in by_section(result).items():
        what = f"Milliseconds of {captions[section]}, {rows[0]['dtype']}, {rows[0]['sizes']}:"
        yield from paragraphs(what)
        yield from table_of([_compared(row, "ms") for row in rows])


def _endurance(result: Row) -> Iterator[str]:
    yield from paragraphs(
        f"Measured by {origin_of(result)}",
        "Microseconds of a call, megabytes of the process and of the pools on the GPU, entries of "
        "caches:",
    )
    yield from table_of(result["rows"])
