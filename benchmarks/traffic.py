"""FLOPs, bytes and time of a forward and backward pass: the model, and hardware counters.

    python -m tileattn bench traffic               N from 512 to 16384 at B N = 65536
    python -m tileattn bench traffic --density     time against the density of a block mask
    python -m tileattn bench traffic --blocks cpu  time of the NumPy backend against its tiles
    python -m tileattn bench traffic --blocks gpu  time and bytes of two kernels against theirs

The files are traffic.json, traffic_density.json, traffic_blocks_cpu.json and
traffic_blocks_gpu.json.

The first has 16 heads of 64 in half precision. Its row of N = 1024 has the setting of figure 2 of
FlashAttention (arXiv:2205.14135), and the printed figures. Bytes are modelled by
`tileattn.traffic`, and counted by Nsight Compute if there are a GPU and `ncu`; otherwise one line
says what is missing. GPU kernels choose their own tiles, except with `--blocks`.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from statistics import median

import numpy as np

import tileattn
from benchmarks import counters, cpu, gpu_tiles, memory, report
from benchmarks.configurations import DTYPES, PASSES, Configuration, draw, random_blocks
from benchmarks.device import AGREEMENT, Gpu, difference, measure
from benchmarks.implementations import Flex, Tileattn
from benchmarks.memory import Case
from benchmarks.report import Row, one_line
from tileattn import BlockMask
from tileattn.backends.numpy.backend import NumpyBackend
from tileattn.call.parse import parse
from tileattn.call.problem import Problem
from tileattn.traffic import ALGORITHMS, flops, modelled

TOKENS, HEADS, HEAD_DIM, DTYPE = 65536, 16, 64, "fp16"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
DENSITIES = (0.03125, 0.0625, 0.125, 0.25, 0.5, 1.0)
BLOCKS = (64, 128, 256, 512, 1024)
NAMES = ("naive", "pytorch", "tileattn")

# On an A100, as printed; the paper counts FLOPs differently from this file.
PAPER = {
    "source": "arXiv:2205.14135, figure 2 (left)",
    "gpu": "NVIDIA A100",
    "N": 1024,
    "standard": {"gflop": 66.6, "hbm_gbytes": 40.3, "ms": 41.7},
    "flash1": {"gflop": 75.2, "hbm_gbytes": 4.4, "ms": 7.3},
}

Tile = tuple[int, int]


def problem_of(one: Configuration) -> Problem:
    """Return the problem of a configuration, from arrays that take no memory."""
    zero = np.zeros((), DTYPES[one.dtype])
    q, k, v = (np.broadcast_to(zero, shape) for shape in one.shapes[:3])
    return parse(q, k, v, one.mask.options())[0]


def nbytes(
    one: Configuration, tile: Tile, algorithm: str = "flash2", density: float | None = None
) -> int:
    """Return the modelled HBM bytes of a pass, given the query rows and keys of a tile."""
    return modelled(problem_of(one), tile, algorithm, one.kind, density).nbytes


def model(sizes: Row, tile: Tile) -> Row:
    """Return the GFLOPs and bytes of both passes together, by algorithm."""
    both = [Configuration(kind, **sizes) for kind in PASSES]
    return {
        "gflop": {
            name: sum(flops(problem_of(one), one.kind, algorithm=name) for one in both) / 1e9
            for name in ALGORITHMS
        },
        "modelled_bytes": {
            name: sum(nbytes(one, tile, name) for one in both) for name in ALGORITHMS
        },
    }


def sizes_of(N: int) -> Row:
    return {"B": max(1, TOKENS // N), "H": HEADS, "N": N, "D": HEAD_DIM, "dtype": DTYPE}


def timed(case: Case, device: Gpu) -> float:
    inputs = draw(device.xp, case.configuration.shapes, case.configuration.dtype)
    return 1e3 * median(device.time([case.prepared(inputs, device.xp)]))


def counted(case: Case, device: Gpu, count: Callable[[Case], Row] | None) -> Row:
    """Measure the time of the passes by events, and their bytes by counters if available.

    What does not fit is refused before it is allocated.
    """
    if refusal := case.refusal(memory.gpu_free(device)):
        return refusal
    try:
        row: Row = {"ms": timed(case, device)}
    except Exception as error:
        return {"failed": one_line(error)}
    device.release()  # the process that is profiled needs the memory
    try:
        return row | (count(case) if count else {})
    except Exception as error:
        return row | {"not_counted": one_line(error)}


def lengths(
    Ns: Sequence[int],
    tile: Tile,
    device: Gpu | None,
    count: Callable[[Case], Row] | None,
    names: Sequence[str],
) -> Iterator[Row]:
    for N in Ns:
        sizes = sizes_of(N)
        row = sizes | {"tile": list(tile)} | model(sizes, tile)
        if device is not None:
            both = Configuration("both", **sizes)
            row |= {name: counted(Case("gpu", name, both), device, count) for name in names}
        yield row | ({"paper": PAPER} if PAPER["N"] == N else {})


def density(N: int, tile: Tile, device: Gpu | None, *, compare: bool) -> Iterator[Row]:
    """Measure the time by the density of a block mask, and model the bytes."""
    for target in DENSITIES:
        mask = random_blocks(N, target)
        for kind in PASSES:
            one = Configuration(kind, **sizes_of(N) | {"B": 1})
            bytes_there = nbytes(one, tile, density=mask.density)
            row = one.row() | {"density": mask.density, "modelled_bytes": bytes_there}
            yield row | ({} if device is None else sparse(mask, one, device, compare=compare))


def sparse(mask: BlockMask, one: Configuration, device: Gpu, *, compare: bool) -> Row:
    """Time a call with a block mask, and FlexAttention unless its results differ."""
    row: Row = {}
    try:
        times, expected = measure(Tileattn(block_mask=mask), one, device)
        row = {"ms": 1e3 * median(times)}
        if not compare:
            return row
        flex, found = measure(Flex(mask), one, device)
        distance = difference(found, expected, device.xp)
        agree = distance <= AGREEMENT[one.dtype]
        how = {"ms": 1e3 * median(flex)} if agree else {"failed": "another result"}
        return row | {"flex": how | {"difference": distance}}
    except Exception as error:
        failed = {"failed": one_line(error)}
        return row | {"flex": failed} if row else failed
    finally:
        device.release()


def tile_calls(one: Configuration, sides: Sequence[int]) -> cpu.Calls:
    """Return one pass of the NumPy backend for each size of square tiles."""
    calls: cpu.Calls = {}
    for side in sides:
        backend = NumpyBackend((side, side), (side, side))
        backend.name = f"tile{side}"
        tileattn.register_backend(backend)
        calls[backend.name] = cpu.prepared(one, Tileattn(reuse=False, backend=backend.name))
    return calls


def blocks(N: int, seconds: float) -> Iterator[Row]:
    """Measure the time of the NumPy backend by the side of its tiles, and model the bytes."""
    sides = [side for side in BLOCKS if side <= N]
    for kind in PASSES:
        one = Configuration(kind, "f32", 1, 8, N, HEAD_DIM)
        times = cpu.shortest_seconds(tile_calls(one, sides), seconds)
        for side, taken in zip(sides, times.values(), strict=True):
            bytes_there = nbytes(one, (side, side))
            yield one.row() | {"tile": side, "modelled_bytes": bytes_there, "ms": 1e3 * taken}


def gpu_blocks(N: int, device: Gpu | None, count: Callable[[Case], Row] | None) -> Iterator[Row]:
    """Measure the time and bytes of a GPU's forward kernels by their tiles."""
    tiles = [(kernel, tile) for kernel, tiles in gpu_tiles.TILES.items() for tile in tiles]
    for kernel, tile in tiles:
        one = Configuration("forward", **sizes_of(N))
        row = one.row() | {
            "kernel": kernel,
            "tile": tile[:2],
            "modelled_bytes": nbytes(one, tile[:2]),
        }
        if device is not None:
            row |= counted(Case("gpu", "tileattn", one, (kernel, *tile)), device, count)
        yield row


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = report.parser("traffic", __doc__)
    add = parser.add_argument
    add("--density", action="store_true", help="vary the density of a block mask (N 16384)")
    add("--blocks", choices=("cpu", "gpu"), help="vary the tiles of a backend (N 4096)")
    add("--length", type=int, nargs="+", help="(512 to 16384)")
    add("--tile", type=int, nargs=2, default=(128, 128), help="of the model (128 128)")
    add("--seconds", type=float, default=20.0, help="for each pass of --blocks (20)")
    return report.parsed(parser, argv)


def missing(arguments: argparse.Namespace) -> dict[str, str]:
    """Return what cannot be measured on this machine, and why."""
    absent: dict[str, str | None] = {}
    if arguments.blocks != "cpu":
        absent["GPU"] = tileattn.available_backends()["cupy"]
        if not arguments.density:
            absent["ncu"] = counters.unavailable()
    found = {name: f"{why}; the model is shown" for name, why in absent.items() if why}
    if not arguments.blocks and find_spec("torch") is None:
        found["pytorch"] = "PyTorch is not installed; CuPy and tileattn are measured without it"
    return found


def asked(
    arguments: argparse.Namespace, device: Gpu | None, absent: dict[str, str]
) -> tuple[str, Iterator[Row]]:
    """Return the stem of the file that the command line asks for, and its rows."""
    tile = (arguments.tile[0], arguments.tile[1])
    count = None if "ncu" in absent else counters.measure
    N: int | None = arguments.length[0] if arguments.length else None
    if arguments.blocks == "cpu":
        return "traffic_blocks_cpu", blocks(N or 4096, arguments.seconds)
    if arguments.blocks == "gpu":
        return "traffic_blocks_gpu", gpu_blocks(N or 4096, device, count)
    if arguments.density:
        compare = "pytorch" not in absent
        return "traffic_density", density(N or 16384, tile, device, compare=compare)
    names = [name for name in NAMES if name not in absent]
    return "traffic", lengths(arguments.length or LENGTHS, tile, device, count, names)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    absent = missing(arguments)
    device = None if arguments.blocks == "cpu" or "GPU" in absent else Gpu()
    machine = report.host if device is None else device.machine
    stem, made = asked(arguments, device, absent)
    report.show_missing(absent)
    path = arguments.to / f"{stem}.json"
    report.written(made, path, machine, arguments.ran, missing=absent)


if __name__ == "__main__":
    main()
