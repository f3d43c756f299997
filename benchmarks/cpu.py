"""Speed on the CPU, beside PyTorch and plain NumPy, as ratios in one run.

    python -m tileattn bench cpu             every cell, as a table
    python -m tileattn bench cpu --sweep     tile sizes

The files are cpu.json and cpu_tiles.json.

Contestants take turns in one process, with the same number of threads; a cell is the median of its
rounds. ``floor`` is what NumPy's own matrix products and exponentials take on tiles of that size,
with nothing else: no pass built on them is faster. Work is counted as 4 B H Nq Nk D operations
forward, half of it for causal, and 2.5 times that backward.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import threadpoolctl

import tileattn
from benchmarks import memory, report
from tileattn.backends.numpy import backend as numpy_backend
from tileattn.backends.numpy import threads

PAUSE = 0.004  # lets the threads of the last contestant go to sleep

Contestants = dict[str, Callable[[], Any]]


def plain_forward(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """Attention as a NumPy user writes it; stores the N x N probabilities."""
    s = q @ k.swapaxes(-1, -2)
    s *= q.dtype.type(q.shape[-1] ** -0.5)
    if causal:
        s[..., ~np.tri(s.shape[-2], s.shape[-1], dtype=bool)] = -np.inf
    s -= s.max(axis=-1, keepdims=True)
    np.exp(s, out=s)
    s /= s.sum(axis=-1, keepdims=True)
    return s @ v


def forward_contestants(
    shape: tuple[int, ...], causal: bool, torch: Any, backend: str = "auto"
) -> Contestants:
    """Forward passes on the same inputs."""
    q, k, v = _inputs(shape, 3)
    contestants: Contestants = {
        "tileattn": lambda: tileattn.forward(q, k, v, causal=causal, backend=backend),
        "numpy": lambda: plain_forward(q, k, v, causal),
    }
    if torch is not None:
        tensors = [torch.from_numpy(x) for x in (q, k, v)]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        contestants["torch"] = lambda: sdpa(*tensors, is_causal=causal)
    return contestants


def backward_contestants(
    shape: tuple[int, ...], causal: bool, torch: Any, backend: str = "auto"
) -> Contestants:
    """Backward passes on the same inputs."""
    q, k, v, dout = _inputs(shape, 4)
    out, lse = tileattn.forward(q, k, v, causal=causal)
    contestants: Contestants = {
        "tileattn": lambda: tileattn.backward(
            dout, q, k, v, out, lse, causal=causal, backend=backend
        )
    }
    if torch is not None:
        leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
        result = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
        arriving = torch.from_numpy(dout)
        contestants["torch"] = lambda: torch.autograd.grad(
            result, leaves, arriving, retain_graph=True
        )
    return contestants


def floor(shape: tuple[int, ...], causal: bool, products: int) -> Callable[[], Any]:
    """Only the matrix products and exponentials that a pass cannot do without, on all threads.

    ``products`` is 2 forward and 5 backward. A causal pass is counted as half the tiles.
    """
    _, H, N, D = shape
    rows, keys = min(384, N), min(1024, N)
    tiles = H * N * N / (rows * keys) * (0.5 if causal else 1.0)
    q, k = _inputs((rows, D), 1)[0] / D, _inputs((keys, D), 1)[0]

    def work(count: int) -> None:
        s, out = np.empty((rows, keys), np.float32), np.empty((rows, D), np.float32)
        for _ in range(count):
            for product in range(products):
                if product % 2:
                    np.matmul(s, k, out=out)
                else:
                    np.matmul(q, k.T, out=s)
            np.exp(s, out=s)

    workers = threads.worker_count()
    share = max(1, round(tiles / workers))
    return lambda: threads.run([lambda: work(share)] * workers)


def race(contestants: Contestants, seconds: float) -> dict[str, float]:
    """Median seconds of each contestant, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for call in contestants.values():
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, times.values())) < 5:
        for name, call in contestants.items():
            time.sleep(PAUSE)
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in times.items()}


def speed(seconds: float, path: Path, ran: str) -> None:
    """Time every cell and write the ratios."""
    torch, missing = peers()
    report.show_missing(missing)
    cells = [
        (kind, 8, N, D, causal)
        for kind in ("forward", "backward")
        for D in (64, 128)
        for N in (1024, 4096)
        for causal in (False, True)
    ]
    cells += [("forward", 4, 64, 64, causal) for causal in (False, True)]
    rows = []
    print(f"{'':8} {'H':>2} {'N':>5} {'D':>4} {'causal':6}   GFLOP/s   x torch   x numpy   x floor")
    for kind, H, N, D, causal in report.tracked(cells, "cpu"):
        make = forward_contestants if kind == "forward" else backward_contestants
        contestants = make((1, H, N, D), causal, torch)
        if N >= 1024:
            contestants["floor"] = floor((1, H, N, D), causal, 2 if kind == "forward" else 5)
        times = race(contestants, seconds)
        work = 4 * H * N * N * D * (0.5 if causal else 1.0) * (1 if kind == "forward" else 2.5)
        ratios = {name: t / times["tileattn"] for name, t in times.items() if name != "tileattn"}
        rows.append(
            {"pass": kind, "B": 1, "H": H, "N": N, "D": D, "causal": causal}
            | {"gflops": {name: round(work / t / 1e9, 1) for name, t in times.items()}}
            | {"ratio_to": {name: round(ratio, 3) for name, ratio in ratios.items()}}
        )
        names = ("torch", "numpy", "floor")
        columns = (f"{report.number(ratios.get(name), '.2f'):>9}" for name in names)
        report.show(
            f"{kind:8} {H:2} {N:5} {D:4} {causal!s:6} {work / times['tileattn'] / 1e9:9.0f} "
            + " ".join(columns)
        )
    report.write(path, machine(torch), rows, ran, missing=missing, core=core_rates())


def tile_contestants(
    kind: str, shape: tuple[int, ...], causal: bool, tiles: list[tuple[int, int]]
) -> Contestants:
    """One pass of the NumPy backend for each size of its tiles."""
    make = forward_contestants if kind == "forward" else backward_contestants
    contestants: Contestants = {}
    for tile in tiles:
        backend = numpy_backend.NumpyBackend(tile, tile)
        backend.name = f"tile{tile[0]}x{tile[1]}"
        tileattn.register_backend(backend)
        contestants[backend.name] = make(shape, causal, None, backend.name)["tileattn"]
    return contestants


def sweep(seconds: float, folder: Path, ran: str) -> None:
    """Time tile sizes against each other."""
    tiles = [(q, k) for q in (128, 192, 256, 384, 512) for k in (128, 256, 512, 1024)]
    rows = []
    for kind in ("forward", "backward"):
        for N, D, causal in ((1024, 64, True), (4096, 64, False), (4096, 128, True)):
            contestants = tile_contestants(kind, (1, 8, N, D), causal, tiles)
            times = race(contestants, seconds)
            best = min(times.values())
            ranked = {name: round(best / t, 3) for name, t in times.items()}
            rows.append({"pass": kind, "N": N, "D": D, "causal": causal, "share_of_best": ranked})
            order = sorted(ranked, key=lambda name: -ranked[name])[:6]
            print(kind, N, D, causal, *(f"{name} {ranked[name]:.2f}" for name in order), flush=True)
    report.write(folder / "cpu_tiles.json", machine(None), rows, ran)


def core_rates() -> list[dict[str, float]]:
    """Rate of the matrix products of a tile and time of one exponential, on one core alone."""
    rows, keys = 384, 1024
    rates = []
    for D in (64, 128):
        q, k = _inputs((rows, D), 1)[0] / D, _inputs((keys, D), 1)[0]
        s, out = np.empty((rows, keys), np.float32), np.empty((rows, D), np.float32)
        contestants: Contestants = {
            "scores": partial(np.matmul, q, k.T, out=s),
            "exp": partial(np.exp, s, out=np.empty_like(s)),
            "values": partial(np.matmul, np.ones_like(s), k, out=out),
        }
        with threadpoolctl.threadpool_limits(1, "blas"):
            times = race(contestants, 2.0)
        work = 4 * rows * keys * D
        gflops = work / (times["scores"] + times["values"]) / 1e9
        rates.append({"D": D, "gflops": gflops, "exp_ns": times["exp"] / (rows * keys) * 1e9})
    return rates


def machine(torch: Any) -> report.Row:
    """Describe the processor and what was raced."""
    return report.host() | {"torch": None if torch is None else torch.__version__}


def _inputs(shape: tuple[int, ...], count: int) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, np.float32) for _ in range(count)]


def peers() -> tuple[Any, dict[str, str]]:
    """PyTorch with as many threads as tileattn, or None and what is missing."""
    try:
        import torch
    except ImportError:
        return None, {"torch": "it is not installed: pip install torch"}
    torch.set_num_threads(threads.worker_count())
    return torch, {}


def main(argv: list[str] | None = None) -> None:
    """Run what the command line asks for."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m tileattn bench cpu",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--sweep", action="store_true", help="compare tile sizes")
    parser.add_argument("--memory", action="store_true", help="the same as `bench memory`")
    parser.add_argument("--name", default="cpu", help="file of the speed results (cpu)")
    parser.add_argument("--seconds", type=float, default=6.0, help="time for each cell (6)")
    report.add_target(parser)
    arguments = parser.parse_args(argv)
    ran = report.command("python -m tileattn bench cpu", argv)
    if arguments.sweep:
        sweep(arguments.seconds, arguments.to, ran)
    elif arguments.memory:
        memory.main(["--device", "cpu", "--to", str(arguments.to)])
    else:
        speed(arguments.seconds, arguments.to / f"{arguments.name}.json", ran)


if __name__ == "__main__":
    main()
