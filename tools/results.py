"""The results files of the benchmarks, all with rows of one form."""

from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.report import RESULTS, Row, load

KINDS = ("forward", "backward", "backward, all gradients")


def read(folder: Path = RESULTS) -> dict[str, Row]:
    """Load all results files of a folder, by name."""
    names = sorted(path.stem for path in folder.glob("*.json"))
    return {name: _renewed(name, load(folder, name)) for name in names}


# --- rows of earlier benchmarks -------------------------------------------------------------------


def _renewed(name: str, result: Row) -> Row:
    """Give the rows and the machine of an earlier benchmark the form of today's."""
    machine = result["machine"]
    if isinstance(number := machine.pop("cudnn", None), int):
        version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        machine["peers"] = {"cudnn": version} | machine.get("peers", {})
    change = EARLIER.get(name)
    if change is not None and not all("speedup_over" in row for row in result["rows"]):
        result["rows"] = [new for row in result["rows"] for new in change(row)]
    return result


def _timed(row: Row, us: dict[str, float | None]) -> Row:
    """Add times in microseconds, and the speedups over other libraries."""
    known = {name: time for name, time in us.items() if time is not None}
    others = known.keys() - {"tileattn", "batch"}
    failed = row.get("failed") or {}
    return row | {
        "us": known,
        "speedup_over": {x: known[x] / known["tileattn"] for x in known if x in others},
        "spread": {},
        "mismatch": {},
        "failed": failed if isinstance(failed, dict) else {"flex": failed},
    }


def _functions(row: Row) -> Iterator[Row]:
    ours, flex, of_plain = row.pop("tileattn_ms"), row.pop("flex_ms"), row.pop("of_plain")
    for kind, ms, other, plain in zip(
        KINDS, ours, flex or [None] * len(ours), [*of_plain, None], strict=False
    ):
        us = {"tileattn": 1e3 * ms, "flex": other and 1e3 * other}
        yield _timed({"pass": kind, **row, "of_plain": plain}, us)


EARLIER: dict[str, Callable[[Row], Iterator[Row]]] = {
    "gpu_functions": _functions,
}
