"""What a pass on a GPU is set against, and how near to that it came.

    python -m benchmarks.roofline benchmarks/results/gpu_forward_fp16.json [CEILINGS.json]

Three floors, in milliseconds. By products: the operations at the rate of a large matrix product
that was timed, which is no limit of the hardware, so that a row may come above. By exponentials:
one for each pair that is seen, 16 a clock and multiprocessor. By bytes: every array once, at the
rate of a copy. The largest of them is the floor; a row reaches floor over time of it.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import report
from benchmarks.gpu_cells import Cell
from benchmarks.gpu_device import DTYPES
from benchmarks.report import Row

EXPONENTIALS = 16  # a clock and multiprocessor, from compute capability 7.0 on
CLOCK = ("multiprocessors", "clock_mhz")  # fields of the machine record


class Ceilings(NamedTuple):
    """Rates that set the floors.

    Attributes
    ----------
    flops : dict of str to float
        Operations of a matrix product in a second, by dtype.
    nbytes : float
        Bytes read and written in a second by a copy.
    exponentials : float or None
        Exponentials in a second; None where the record does not say how fast the clock is.
    """

    flops: dict[str, float]
    nbytes: float
    exponentials: float | None


class Floors(NamedTuple):
    """Least milliseconds of a pass by each resource; None where its rate is not known."""

    products_ms: float
    exponentials_ms: float | None
    bytes_ms: float

    @property
    def largest(self) -> float:
        """The floor."""
        return max(floor for floor in self if floor is not None)


def absent(machine: Mapping[str, Any]) -> list[str]:
    """Fields that the rate of exponentials needs and the machine record lacks."""
    return [name for name in CLOCK if machine.get(name) is None]


def ceilings_of(result: Mapping[str, Any], machine: Mapping[str, Any]) -> Ceilings:
    """Read the rates from a file of ceilings.

    Parameters
    ----------
    result : mapping
        What ``bench gpu --ceilings`` wrote.
    machine : mapping
        A machine record, for the clock.

    Returns
    -------
    Ceilings
        The rates.
    """
    rows = result["rows"]
    flops = {row["dtype"]: 1e12 * row["tflops"] for row in rows if "tflops" in row}
    copies = [1e9 * row["gbytes_per_second"] for row in rows if "gbytes_per_second" in row]
    if not copies:
        raise ValueError("the ceilings have no copy rate; run `bench gpu --ceilings` again")
    exponentials = None
    if not absent(machine):
        exponentials = EXPONENTIALS * machine["multiprocessors"] * 1e6 * machine["clock_mhz"]
    return Ceilings(flops, copies[0], exponentials)


def cell_of(row: Row) -> Cell:
    """Read the cell of a row of a grid."""
    names = {field.name for field in fields(Cell)}
    return Cell(kind=row["pass"], **{name: row[name] for name in names & set(row)})


def least_bytes(cell: Cell) -> int:
    """Bytes of a pass where each array crosses once: all inputs are read, all results written.

    Forward these are q, k, v, out and lse; backward dout, dq, dk and dv come on top.
    """
    dtype = np.dtype(DTYPES[cell.dtype])
    arrays = sum(math.prod(shape) for shape in cell.shapes) * dtype.itemsize
    lse = cell.B * cell.H * cell.N * max(dtype.itemsize, 4)
    return lse + arrays * (2 if cell.kind == "backward" else 1)


def floors(cell: Cell, ceilings: Ceilings) -> Floors:
    """Least milliseconds of a pass by each resource."""
    if cell.dtype not in ceilings.flops:
        raise ValueError(
            f"the ceilings have no {cell.dtype}, got {sorted(ceilings.flops)}; "
            f"run `bench gpu --ceilings --dtype {cell.dtype}`"
        )
    pairs = cell.B * cell.H * cell.N**2 * cell.share
    rate = ceilings.exponentials
    return Floors(
        1e3 * cell.flops / ceilings.flops[cell.dtype],
        None if rate is None else 1e3 * pairs / rate,
        1e3 * least_bytes(cell) / ceilings.nbytes,
    )


def lines(rows: Sequence[Row], ceilings: Ceilings, name: str = "tileattn") -> Iterator[Row]:
    """Add to each row that a contestant ran its time, its floors, and the share it reached."""
    for row in rows:
        if name not in row["tflops"]:
            continue
        cell = cell_of(row)
        least = floors(cell, ceilings)
        gflop_per_ms = row["tflops"][name]  # rounded, and 0 where a pass is that slow
        ms = cell.flops / 1e9 / gflop_per_ms if gflop_per_ms else math.inf
        yield cell.row() | {"ms": ms} | least._asdict() | {"reached": least.largest / ms}


def shares(result: Mapping[str, Any], measured: Mapping[str, Any]) -> list[float | None]:
    """Say for each row of a grid which share of its floor tileattn reached.

    Parameters
    ----------
    result, measured : mapping
        Files of a grid and of ceilings.

    Returns
    -------
    list of float or None
        None where tileattn did not run, and everywhere if the ceilings are of another GPU or have
        no rate of the dtype.
    """
    rows = result["rows"]
    ceilings = ceilings_of(measured, {**measured["machine"], **result["machine"]})
    known = result["machine"].get("gpu") == measured["machine"].get("gpu")
    if not known or any(row["dtype"] not in ceilings.flops for row in rows):
        return [None] * len(rows)
    return [next((line["reached"] for line in lines([row], ceilings)), None) for row in rows]


def main(argv: list[str] | None = None) -> None:
    """Print the floors of a file of results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.roofline",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("grid", type=Path, help="a file of `bench gpu --grid`")
    known = report.RESULTS / "gpu_ceilings.json"
    parser.add_argument("ceilings", type=Path, nargs="?", default=known, help="(gpu_ceilings.json)")
    arguments = parser.parse_args(argv)
    grid, measured = (
        json.loads(path.read_text(encoding="utf-8"))
        for path in (arguments.grid, arguments.ceilings)
    )
    of, beside = (result["machine"].get("gpu", "no GPU") for result in (grid, measured))
    if of != beside:
        sys.exit(f"the grid is of {of}, the ceilings are of {beside}; give a file of the same GPU")
    if any("tflops" not in row for row in grid["rows"]):
        sys.exit(f"{arguments.grid} has rows without tflops; give a file of `bench gpu --grid`")
    machine = {**measured["machine"], **grid["machine"]}
    if lacking := absent(machine):
        print(
            f"no floor by exponentials: the machine records have no {' and no '.join(lacking)}; "
            "`bench gpu --ceilings` writes them"
        )
    try:
        for row in lines(grid["rows"], ceilings_of(measured, machine)):
            print(report.plain_line(row))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
