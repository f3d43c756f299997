"""The lower bounds of a pass, with numbers that were worked out by hand."""

from typing import Any

import pytest

from benchmarks import roofline
from benchmarks.report import Row

MACHINE = {"gpu": "A GPU", "multiprocessors": 100, "clock_mhz": 1000.0}
MEASURED: dict[str, Any] = {
    "machine": MACHINE,
    "rows": [
        {"ceiling": "matmul", "dtype": "fp16", "n": 8192, "tflops": 500.0},
        {"ceiling": "matmul", "dtype": "f64", "failed": "no room"},
        {"ceiling": "copy", "gbytes_per_second": 4000.0},
    ],
}


def row(kind: str = "forward", D: int = 64, causal: bool = False, tflops: float = 250.0) -> Row:
    sizes = {"pass": kind, "dtype": "fp16", "B": 4, "H": 32, "N": 4096, "D": D, "causal": causal}
    return sizes | {"tflops": {"tileattn": tflops}}


def reached(one: Row) -> Row:
    (line,) = roofline.lines([one], roofline.ceilings_of(MEASURED))
    return line


def test_forward_is_exp_bound() -> None:
    line = reached(row())
    # 4 * 4 * 32 * 4096^2 * 64 = 549,755,813,888 FLOPs at 5e14 in a second
    assert line["compute_ms"] == pytest.approx(1.099511627776)
    # 4 * 32 * 4096^2 = 2,147,483,648 exponentials at 16 * 100 * 1e9 in a second
    assert line["exp_ms"] == pytest.approx(1.34217728)
    # q, k, v, out: 4 * 4 * 32 * 4096 * 64 * 2 = 268,435,456 bytes, and lse 2,097,152, at 4e12
    assert line["memory_ms"] == pytest.approx(0.067633152)
    assert line["ms"] == pytest.approx(549755813888 / 250e12 * 1e3)
    assert line["percent"] == pytest.approx(100 * 1.34217728 / 2.199023255552)


def test_backward_is_compute_bound() -> None:
    line = reached(row("backward", D=128))
    assert line["compute_ms"] == pytest.approx(5 * 1.099511627776)
    assert line["exp_ms"] == pytest.approx(1.34217728)
    assert line["percent"] == pytest.approx(100 * 0.5)


def test_each_row_has_its_percent_where_the_ceilings_fit() -> None:
    rows = [row(), row() | {"tflops": {"cudnn": 1.0}}]
    grid = {"machine": MACHINE | {"gpu": "A GPU"}, "rows": rows}
    assert roofline.percents(grid, MEASURED) == [pytest.approx(134.217728 / 2.199023255552), None]
    assert roofline.percents(grid | {"machine": MACHINE | {"gpu": "B"}}, MEASURED) == [None, None]
    other = [one | {"dtype": "bf16"} for one in rows]
    assert roofline.percents(grid | {"rows": other}, MEASURED) == [None, None]
