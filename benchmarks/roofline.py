"""Lower bounds of the time of a pass on a GPU, and the % of roofline that it reached.

    python -m benchmarks.roofline benchmarks/results/gpu_forward_fp16.json [CEILINGS.json]

Three lower bounds, in milliseconds. Compute: the FLOPs at the rate of a large matmul that was
timed, which is no limit of the hardware, so that a row may exceed 100 %. Exp: one exponential for
each attended score, 16 a clock and SM. Memory: every array once, at the rate of a copy. The largest
is the roofline; % of roofline is it over the time.
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
from benchmarks.configurations import DTYPES, Configuration
from benchmarks.report import Row

EXPS = 16  # a clock and SM, from compute capability 7.0 on


class Ceilings(NamedTuple):
    """Rates that set the lower bounds, each in a second."""

    flops: dict[str, float]  # of a matmul, by dtype
    nbytes: float  # read and written by a copy
    exps: float


class Bounds(NamedTuple):
    compute_ms: float
    exp_ms: float
    memory_ms: float


def ceilings_of(result: Mapping[str, Any]) -> Ceilings:
    """Read the rates from a file of ``bench gpu --ceilings``."""
    rows, machine = result["rows"], result["machine"]
    flops = {row["dtype"]: 1e12 * row["tflops"] for row in rows if "tflops" in row}
    copies = [1e9 * row["gbytes_per_second"] for row in rows if "gbytes_per_second" in row]
    if not copies:
        raise ValueError("the ceilings have no copy rate; run `bench gpu --ceilings` again")
    exps = EXPS * machine["multiprocessors"] * 1e6 * machine["clock_mhz"]
    return Ceilings(flops, copies[0], exps)


def configuration_of(row: Row) -> Configuration:
    names = {field.name for field in fields(Configuration)}
    return Configuration(kind=row["pass"], **{name: row[name] for name in names & set(row)})


def least_bytes(configuration: Configuration) -> int:
    """Bytes of a pass where each array crosses once: all inputs are read, all results written.

    Forward these are q, k, v, out and lse; backward dout, dq, dk and dv come on top.
    """
    dtype = np.dtype(DTYPES[configuration.dtype])
    arrays = sum(map(math.prod, configuration.shapes)) * dtype.itemsize
    lse = configuration.B * configuration.H * configuration.N * max(dtype.itemsize, 4)
    return lse + arrays * (2 if configuration.kind == "backward" else 1)


def bounds(configuration: Configuration, ceilings: Ceilings) -> Bounds:
    """Least milliseconds of a pass by each resource."""
    if configuration.dtype not in ceilings.flops:
        raise ValueError(
            f"the ceilings have no {configuration.dtype}, got {sorted(ceilings.flops)}; "
            f"run `bench gpu --ceilings --dtype {configuration.dtype}`"
        )
    scores = configuration.B * configuration.H * configuration.N**2 * configuration.density
    return Bounds(
        1e3 * configuration.flops / ceilings.flops[configuration.dtype],
        1e3 * scores / ceilings.exps,
        1e3 * least_bytes(configuration) / ceilings.nbytes,
    )


def lines(rows: Sequence[Row], ceilings: Ceilings) -> Iterator[Row]:
    """Return where tileattn ran its time, its lower bounds, and % of roofline."""
    for row in rows:
        if "tileattn" not in row["tflops"]:
            continue
        configuration = configuration_of(row)
        least = bounds(configuration, ceilings)
        gflop_per_ms = row["tflops"]["tileattn"]  # rounded, and 0 where a pass is that slow
        ms = configuration.flops / 1e9 / gflop_per_ms if gflop_per_ms else math.inf
        found = {"ms": ms} | least._asdict() | {"percent": 100 * max(least) / ms}
        yield configuration.row() | found


def percents(result: Mapping[str, Any], measured: Mapping[str, Any]) -> list[float | None]:
    """Say for each row of a comparison the % of roofline that tileattn reached.

    None where tileattn did not run, and everywhere if the ceilings are of another GPU or have no
    rate of the dtype.
    """
    rows = result["rows"]
    ceilings = ceilings_of(measured)
    known = result["machine"].get("gpu") == measured["machine"].get("gpu")
    if not known or any(row["dtype"] not in ceilings.flops for row in rows):
        return [None] * len(rows)
    return [next((line["percent"] for line in lines([row], ceilings)), None) for row in rows]


def main(argv: list[str] | None = None) -> None:
    """Print the lower bounds of a results file."""
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
    try:
        for row in lines(grid["rows"], ceilings_of(measured)):
            print(report.line(row))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
