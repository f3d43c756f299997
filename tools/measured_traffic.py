"""What ``python -m tileattn bench traffic`` leaves behind: bytes in the model and as counted."""

from pathlib import Path
from typing import Any, NamedTuple

from tools.drawing import load

FILE = "traffic"
ALGORITHMS = {"flash2": "FlashAttention-2", "standard": "standard", "flash1": "FlashAttention"}

Row = dict[str, Any]


class Counted(NamedTuple):
    """A contestant whose bytes a GPU counts.

    Parameters
    ----------
    name : str
        As readers know it.
    algorithm : str
        What it runs.
    """

    name: str
    algorithm: str


COUNTED = {
    "tileattn": Counted("tileattn", "flash2"),
    "pytorch": Counted("PyTorch", "standard"),
    "plain": Counted("CuPy", "standard"),
}


def results_of(results: Path) -> Any:
    """Read the file, or nothing where it is missing or no GPU counted."""
    if not (results / f"{FILE}.json").exists():
        return None
    result = load(results, FILE)
    counted = any(device_bytes(row, name) is not None for row in result["rows"] for name in COUNTED)
    return result if counted else None


def device_bytes(row: Row, contestant: str) -> int | None:
    """Bytes of device memory that a contestant read and wrote in both passes, if counted."""
    counts = row.get(contestant, {})
    if "dram_read_bytes" not in counts:
        return None
    return int(counts["dram_read_bytes"]) + int(counts["dram_write_bytes"])
