"""Operations, bytes and time of a forward and backward pass: the model, and a GPU's counters.

    python -m tileattn bench traffic               N from 512 to 16384 at B N = 65536
    python -m tileattn bench traffic --density     time against the density of a block mask
    python -m tileattn bench traffic --blocks cpu  time of the NumPy backend against its tiles
    python -m tileattn bench traffic --blocks gpu  time and bytes of two kernels against theirs

The files are traffic.json, traffic_density.json, traffic_blocks_cpu.json and
traffic_blocks_gpu.json.

The first has 16 heads of 64 in half precision; its row of N = 1024 is the setting of the table
beside figure 2 of FlashAttention (arXiv:2205.14135), whose figures stand beside it as they are
printed there. Bytes are modelled by `tileattn.traffic`, and counted by Nsight Compute where there
are a GPU and `ncu`. Without them one line says what is missing, and the model is shown alone. A
GPU's kernels choose their tiles themselves, unless they are held to some for `--blocks`.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from statistics import median

import tileattn
from benchmarks import (
    cpu,
    gpu,
    gpu_counters,
    gpu_tiles,
    memory_gpu,
    report,
    traffic_model,
)
from benchmarks.gpu_cells import Cell, random_blocks
from benchmarks.gpu_device import Gpu
from benchmarks.gpu_flex import Flex
from benchmarks.gpu_peers import Tileattn
from benchmarks.memory_case import Case
from benchmarks.report import Row, one_line
from tileattn import BlockMask

TOKENS, HEADS, WIDTH, DTYPE = 65536, 16, 64, "fp16"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
DENSITIES = (0.03125, 0.0625, 0.125, 0.25, 0.5, 1.0)
BLOCKS = (64, 128, 256, 512, 1024)
CONTESTANTS = ("plain", "pytorch", "tileattn")

# On an A100, as printed: its operations are not those of the products that this file counts.
PAPER = {
    "source": "arXiv:2205.14135, figure 2 (left)",
    "gpu": "NVIDIA A100",
    "N": 1024,
    "standard": {"gflop": 66.6, "hbm_gbytes": 40.3, "ms": 41.7},
    "flash1": {"gflop": 75.2, "hbm_gbytes": 4.4, "ms": 7.3},
}


def case_of(contestant: str, N: int) -> Case:
    """Both passes of a contestant on the GPU."""
    return Case("gpu", contestant, "both", DTYPE, HEADS, N, WIDTH, B=max(1, TOKENS // N))


def timed(case: Case, device: Gpu) -> float:
    """Milliseconds of the passes."""
    inputs = memory_gpu.inputs_of(device, case)
    return 1e3 * median(device.time([case.prepared(inputs, device.xp)]))


def counted(case: Case, device: Gpu, counters: Callable[[Case], Row] | None) -> Row:
    """Measure the time of the passes by events, and their bytes by counters where there are any.

    What does not fit is refused before it is allocated.
    """
    if refusal := case.refusal(memory_gpu.room(device)):
        return refusal
    try:
        row: Row = {"ms": timed(case, device)}
    except Exception as error:
        return {"failed": one_line(error)}
    device.release()  # the process that is profiled needs the memory
    try:
        return row | (counters(case) if counters else {})
    except Exception as error:
        return row | {"not_counted": one_line(error)}


def lengths(
    Ns: Sequence[int],
    tile: tuple[int, int],
    device: Gpu | None,
    counters: Callable[[Case], Row] | None,
    contestants: Sequence[str],
) -> Iterator[Row]:
    """Model each length, and measure it where there is a device."""
    for N in report.tracked(Ns, "traffic"):
        cell = Cell("forward", DTYPE, max(1, TOKENS // N), HEADS, N, WIDTH, causal=False)
        sizes = {"B": cell.B, "H": HEADS, "N": N, "D": WIDTH, "dtype": DTYPE, "tile": list(tile)}
        row = sizes | traffic_model.row((cell, replace(cell, kind="backward")), tile)
        if device is not None:
            row |= {who: counted(case_of(who, N), device, counters) for who in contestants}
        yield row | ({"paper": PAPER} if PAPER["N"] == N else {})


def density(N: int, tile: tuple[int, int], device: Gpu | None, *, beside: bool) -> Iterator[Row]:
    """Time against the share of the blocks that a mask shows, and the modelled bytes."""
    for share in report.tracked(DENSITIES, "density"):
        mask = random_blocks(N, share)
        for kind in traffic_model.KINDS:
            cell = Cell(kind, DTYPE, 1, HEADS, N, WIDTH, causal=False)
            modelled = traffic_model.nbytes(cell, tile, share=mask.density)
            row = cell.row() | {"density": mask.density, "modelled_bytes": modelled}
            yield row | ({} if device is None else sparse(mask, cell, device, beside=beside))


def sparse(mask: BlockMask, cell: Cell, device: Gpu, *, beside: bool) -> Row:
    """Time a call with a block mask, and FlexAttention beside it, unless its results differ."""
    row: Row = {}
    try:
        times, expected = gpu.measure(Tileattn(block_mask=mask), cell, device)
        row = {"ms": 1e3 * median(times)}
        if not beside:
            return row
        flex, found = gpu.measure(Flex(mask), cell, device)
        distance = gpu.difference(found, expected, device.xp)
        alike = distance <= gpu.AGREEMENT[cell.dtype]
        how = {"ms": 1e3 * median(flex)} if alike else {"failed": "another result"}
        return row | {"flex": how | {"difference": distance}}
    except Exception as error:
        failed = {"failed": one_line(error)}
        return row | {"flex": failed} if row else failed
    finally:
        device.release()


def blocks(N: int, seconds: float) -> Iterator[Row]:
    """Time of the NumPy backend against the side of its tiles, and the modelled bytes."""
    sides = [side for side in BLOCKS if side <= N]
    for kind in traffic_model.KINDS:
        cell = Cell(kind, "f32", 1, 8, N, WIDTH, causal=False)
        tiles = [(side, side) for side in sides]
        times = cpu.race(cpu.tile_contestants(kind, (1, 8, N, WIDTH), False, tiles), seconds)
        for tile, measured in zip(tiles, times.values(), strict=True):
            modelled = traffic_model.nbytes(cell, tile)
            yield cell.row() | {"tile": tile[0], "modelled_bytes": modelled, "ms": 1e3 * measured}


def gpu_blocks(N: int, device: Gpu | None, counters: Callable[[Case], Row] | None) -> Iterator[Row]:
    """Time and bytes of a GPU's forward kernels against their tiles."""
    sizes = [(kernel, tile) for kernel, tiles in gpu_tiles.TILES.items() for tile in tiles]
    for kernel, tile in report.tracked(sizes, "blocks"):
        cell = Cell("forward", DTYPE, max(1, TOKENS // N), HEADS, N, WIDTH, causal=False)
        modelled = traffic_model.nbytes(cell, tile[:2])
        row = cell.row() | {"kernel": kernel, "tile": tile[:2], "modelled_bytes": modelled}
        if device is not None:
            held = (kernel, *tile)
            case = Case("gpu", "tileattn", "forward", DTYPE, HEADS, N, WIDTH, cell.B, held)
            row |= counted(case, device, counters)
        yield row


def line(row: Row) -> str:
    """Values of a row beside their names; of what is nested, each on a line of its own."""
    nested = {name: value for name, value in row.items() if isinstance(value, dict)}
    flat = {name: value for name, value in row.items() if name not in nested}
    inner = (f"  {name}: {report.plain_line(value)}" for name, value in nested.items())
    return "\n".join([report.plain_line(flat), *inner])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tileattn bench traffic",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    add("--density", action="store_true", help="vary the density of a block mask (N 16384)")
    add("--blocks", choices=("cpu", "gpu"), help="vary the tiles of a backend (N 4096)")
    add("--length", type=int, nargs="+", help="(512 to 16384)")
    add("--tile", type=int, nargs=2, default=(128, 128), help="of the model (128 128)")
    add("--seconds", type=float, default=20.0, help="for each pass of --blocks (20)")
    report.add_target(parser)
    return parser.parse_args(argv)


def missing(arguments: argparse.Namespace) -> dict[str, str]:
    """Say which part of what is asked for cannot be had here."""
    absent: dict[str, str | None] = {}
    if arguments.blocks != "cpu":
        absent["GPU"] = tileattn.available_backends()["cupy"]
        if not arguments.density:
            absent["ncu"] = gpu_counters.unavailable()
    found = {name: f"{why}; the model is shown" for name, why in absent.items() if why}
    if not arguments.blocks and find_spec("torch") is None:
        found["pytorch"] = "PyTorch is not installed; CuPy and tileattn are measured without it"
    return found


def asked(
    arguments: argparse.Namespace, device: Gpu | None, absent: dict[str, str]
) -> tuple[str, Iterator[Row]]:
    """Give the stem of the file that the command line asks for, and its rows."""
    tile = (arguments.tile[0], arguments.tile[1])
    counters = None if "ncu" in absent else gpu_counters.measure
    N: int | None = arguments.length[0] if arguments.length else None
    if arguments.blocks == "cpu":
        return "traffic_blocks_cpu", blocks(N or 4096, arguments.seconds)
    if arguments.blocks == "gpu":
        return "traffic_blocks_gpu", gpu_blocks(N or 4096, device, counters)
    if arguments.density:
        beside = "pytorch" not in absent
        return "traffic_density", density(N or 16384, tile, device, beside=beside)
    contestants = [who for who in CONTESTANTS if who not in absent]
    return "traffic", lengths(arguments.length or LENGTHS, tile, device, counters, contestants)


def main(argv: list[str] | None = None) -> None:
    """Run what the command line asks for; what was measured is kept where a run is broken off."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse(argv)
    absent = missing(arguments)
    device = None if arguments.blocks == "cpu" or "GPU" in absent else Gpu()
    if device is not None and not arguments.blocks and "pytorch" not in absent:
        importlib.import_module("torch")  # whose version the machine record has then
    machine = report.host() if device is None else device.machine()
    stem, made = asked(arguments, device, absent)
    report.show_missing(absent)
    rows: list[Row] = []
    try:
        for row in made:
            rows.append(row)
            report.show(line(row))
    finally:
        if rows:
            ran = report.command("python -m tileattn bench traffic", argv)
            report.write(arguments.to / f"{stem}.json", machine, rows, ran, missing=absent)


if __name__ == "__main__":
    main()
