"""Command line: ``python -m tileattn {info,check,explain,compile,cache,bench}``."""

import argparse
import importlib
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import MISSING, fields
from importlib import metadata
from typing import Any

import numpy as np
import threadpoolctl

import tileattn
from tileattn.backends import registry, threads
from tileattn.call.parse import parse
from tileattn.cli import kernel_cache
from tileattn.cli.progress import Progress
from tileattn.dtypes import DTYPES
from tileattn.errors import BackendUnavailableError
from tileattn.kernels import disk_cache as cache
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit import shipped
from tileattn.kernels.cuda.jit.compile import (
    Compiled,
    checked_arch,
    compiled,
    known_archs,
    nvrtc_version,
)
from tileattn.kernels.cuda.jit.load import arch_of

BENCHMARKS = {
    "cpu": "speed on NumPy arrays, both backends; baselines: PyTorch, naive NumPy",
    "decode": "speed of decoding on the GPU; baselines: cuDNN, FlashAttention-4",
    "distributed": "speed of ranks that share a sequence; baseline: one rank",
    "distributed_gpu": "speed of GPUs that share a sequence; baseline: one GPU",
    "end_to_end": "speed of whole models, training and generating; baseline: PyTorch",
    "frameworks": "speed of attention inside PyTorch; baseline: PyTorch's own",
    "functions": "speed of score_mod and mask_mod on the GPU; baseline: FlexAttention",
    "gpu": "speed on CuPy arrays; baselines: PyTorch, FlashAttention-4, naive CuPy",
    "packed": "speed of packed sequences on the GPU; baseline: FlashAttention-4",
    "options": "speed of options on the GPU; baselines: PyTorch, FlashAttention-4",
    "traffic": "FLOPs and bytes: the model, and hardware counters of a GPU",
    "memory": "peak memory by sequence length; baseline: naive attention",
    "lived": "speed of loops in which no call repeats; baselines: PyTorch, FlashAttention",
    "nonfinite": "slowdown of calls with NaN or infinity in the inputs",
    "tuning": "what each tuned number of the CUDA kernels is worth, on the GPU at hand",
}
"""Modules of ``benchmarks``, and what each measures."""

_LIBRARIES = "numpy", "ml_dtypes", "threadpoolctl", "llvmlite", "cupy", "torch", "jax"

DTYPE_NAMES = [dtype.name for dtype in DTYPES]

ABOUT = """Exact attention tile by tile, in O(N) memory, forward and backward, on NumPy and CuPy
arrays."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit status, 0 on success."""
    parser = argparse.ArgumentParser(prog="python -m tileattn", description=ABOUT)
    parser.add_argument("--version", action="version", version=f"tileattn {tileattn.__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(metavar="command")
    info = commands.add_parser("info", help="versions, backends, threads, GPU")
    info.set_defaults(run=_info)
    check = commands.add_parser("check", help="compare random problems with the float64 oracle")
    add = check.add_argument
    add("--seconds", type=_SECONDS, default=45.0, help="time budget (default 45)")
    add("--seed", type=_SIZE, default=0, help="seed of the random problems (default 0)")
    backends = "auto", "numpy", "llvm", "cupy"
    add("--backend", default="auto", choices=backends, help="backend to check (default auto)")
    add("--problems", type=_COUNT, help="number of problems, in place of a time budget")
    check.set_defaults(run=_check)
    explain = commands.add_parser("explain", help="show what would run for given sizes and options")
    add = explain.add_argument
    for size, default in (("B", 1), ("Hq", 8), ("Nq", 4096), ("D", 64)):
        add(f"--{size}", type=_SIZE, default=default, help=f"{_AXES[size]} (default {default})")
    for size, other in (("Hkv", "Hq"), ("Nk", "Nq"), ("Dv", "D")):
        add(f"--{size}", type=_SIZE, help=f"{_AXES[size]} (default {other})")
    add("--dtype", default="float32", choices=DTYPE_NAMES, help="dtype of q, k and v")
    add("--backend", default="auto", help="name of a backend (default auto)")
    add("--causal", action="store_true", help="causal mask")
    window = "keys attended to each side of a query; None leaves a side open"
    add("--window", type=_side, nargs=2, metavar=("LEFT", "RIGHT"), help=window)
    add("--softcap", type=_REAL, help="soft cap of the scores")
    add("--dropout-p", type=_REAL, default=0.0, help="dropout probability")
    add("--arch", help="plan for this GPU architecture: sm_80, sm_90, ... (no GPU needed)")
    add("--plan", action="store_true", help="with --arch, print the launch plans too")
    explain.set_defaults(run=_explain)
    fill = commands.add_parser("compile", help="compile CUDA kernels into the cache ahead of time")
    add = fill.add_argument
    add("--arch", nargs="+", help="sm_80, sm_90a, ... (default: that of this machine's GPU)")
    every = "dtypes (default: all)"
    add("--dtype", nargs="+", default=DTYPE_NAMES, choices=DTYPE_NAMES, help=every)
    head_dims = "head dimensions (default 64 128)"
    add("--head-dim", nargs="+", type=_COUNT, default=[64, 128], help=head_dims)
    add("--force", action="store_true", help="recompile kernels that are in the cache")
    jobs = "kernels compiled at the same time (default: the number of cores)"
    add("--jobs", type=_COUNT, default=os.cpu_count(), help=jobs)
    add("--clear", action="store_true", help="empty the cache and compile nothing")
    fill.set_defaults(run=_compile)
    about = "show the disk cache of kernels: its folder, its limit, and what is in it"
    kept = commands.add_parser(
        "cache",
        help=about,
        description=f"{about}. TILEATTN_CACHE_DIR sets the folder, TILEATTN_CACHE_BYTES the limit "
        "(default 1 GiB). A kernel that is added removes those that were not used for longest.",
    )
    kept.add_argument("--clear", action="store_true", help="remove all kernels")
    kept.set_defaults(run=kernel_cache.run)
    bench = commands.add_parser("bench", help="run a benchmark, in a checkout of the repository")
    bench.add_argument("section", nargs="?", choices=BENCHMARKS, help="without it: list them")
    rest = "options of the benchmark; --help lists them"
    bench.add_argument("rest", nargs=argparse.REMAINDER, help=rest)
    bench.set_defaults(run=_bench)
    arguments = parser.parse_args(argv)
    if arguments.run is None:
        parser.print_help()
        return 0
    return int(arguments.run(arguments))


def _refused(message: object) -> int:
    """Print why nothing was done; return the exit status."""
    print(message, file=sys.stderr)
    return 2


def _number(kind: Callable[[str], Any], least: float) -> Callable[[str], Any]:
    """Return a type for argparse: a finite number of at least ``least``."""
    what = f"a{' whole' if kind is int else ''} number"
    what = f"{what} of at least {least}" if least > -math.inf else f"a finite{what[1:]}"

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be {what}; got {text!r}")
        return value

    return read


_AXES = {
    "B": "batch size", "Hq": "query heads", "Hkv": "key and value heads", "Nq": "queries",
    "Nk": "keys", "D": "head dimension", "Dv": "value head dimension",
}  # fmt: skip
_MOST_HEADS = 1 << 17  # B * Hq for which ``explain`` counts tiles in seconds and 1 GB
_MOST_ROWS = 1 << 26  # Nq or Nk, as above

_SIZE, _COUNT, _SECONDS = _number(int, 0), _number(int, 1), _number(float, 0)
_REAL = _number(float, -math.inf)


def _side(text: str) -> int | None:
    """Read a side of the window: a number of keys, or None for an open side."""
    if text == "None":
        return None
    try:
        return int(_SIZE(text))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; None leaves a side open") from None


def _info(_: argparse.Namespace) -> int:
    rows = [
        ("tileattn", tileattn.__version__),
        ("Python", f"{platform.python_version()} on {platform.platform()}"),
        *((name, _version(name)) for name in _LIBRARIES),
        ("processor", processor()),
        ("workers", _workers()),
        *(
            ("BLAS", f"{pool['internal_api']} {pool['version']}, {pool.get('architecture', '')}")
            for pool in threadpoolctl.threadpool_info()
            if pool["user_api"] == "blas"
        ),
        ("NVRTC", _nvrtc()),
        ("CUDA kernels", _shipped()),
        ("GPU", _gpu()),
        ("kernel cache", kernel_cache.summary()),
        *(
            (f"backend {name}", "ready" if reason is None else f"not available: {reason}")
            for name, reason in tileattn.available_backends().items()
        ),
        ("default", _default()),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {value}")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from tileattn.testing import selfcheck  # only this command needs the oracle and the bounds

    try:
        threads.worker_count()
        backend = registry.candidates(arguments.backend, {})[0].name
    except (BackendUnavailableError, ValueError) as error:
        return _refused(error)
    rng, problems = np.random.default_rng(arguments.seed), arguments.problems
    families = max(1, (problems or 500) // 25)
    progress = Progress(sys.stdout)
    start, count = time.monotonic(), 0
    for case in selfcheck.cases(rng, backend, families, progress):
        try:
            selfcheck.check(case, backend)
        except AssertionError as failure:
            progress.end()
            print(f"FAILED: {failure}\n({count} problems passed before)")
            return 1
        count += 1
        elapsed = time.monotonic() - start
        done = count / problems if problems else elapsed / max(arguments.seconds, 1e-9)
        progress(done, f"{count} problems  {case}")
        if done >= 1:
            break
    progress.end()
    print(f"{count} problems on backend {backend!r} match the float64 oracle in both passes")
    return 0


def _check_sizes(B: int, Hq: int, Nq: int, Nk: int) -> None:
    """Raise ValueError for sizes whose tiles take too long to count."""
    for name, size, most in (
        ("--B times --Hq", B * Hq, _MOST_HEADS),
        ("--Nq", Nq, _MOST_ROWS),
        ("--Nk", Nk, _MOST_ROWS),
    ):
        if size > most:
            raise ValueError(f"{name} must be at most {most:,}; got {size:,}")


def _explain(arguments: argparse.Namespace) -> int:
    a = arguments
    dtype = next(dtype for dtype in DTYPES if dtype.name == a.dtype)
    Hkv, Nk, Dv = (
        n if own is None else own for own, n in ((a.Hkv, a.Hq), (a.Nk, a.Nq), (a.Dv, a.D))
    )
    options: dict[str, Any] = {"causal": a.causal, "softcap": a.softcap, "dropout_p": a.dropout_p}
    options["window"] = None if a.window is None else tuple(a.window)
    if a.plan and a.arch is None:
        return _refused("--plan needs --arch: it prints the launch plans of a GPU")
    try:
        _check_sizes(a.B, a.Hq, a.Nq, Nk)
        q, k, v = (
            np.broadcast_to(np.zeros((), dtype), shape)  # takes no memory
            for shape in ((a.B, a.Hq, a.Nq, a.D), (a.B, Hkv, Nk, a.D), (a.B, Hkv, Nk, Dv))
        )
        if a.arch is not None:
            _explain_on(a.arch, a.backend, q, k, v, options, plans=a.plan)
        else:
            print(tileattn.explain(q, k, v, backend=a.backend, **options))
    except (TypeError, ValueError, RuntimeError) as error:
        return _refused(f"{type(error).__name__}: {error}")
    return 0


def _explain_on(
    arch: str, backend: str, q: Any, k: Any, v: Any, options: dict[str, Any], *, plans: bool
) -> None:
    """Print what would run for contiguous arrays on a GPU of this architecture."""
    from tileattn.backends.cupy.explain import explain_on
    from tileattn.kernels.cuda.plan.device import device_of_arch
    from tileattn.kernels.cuda.plan.layout import contiguous_inputs
    from tileattn.kernels.cuda.plan.plan import plans_of

    if backend not in ("auto", "cupy"):
        raise ValueError(f"--backend must be 'cupy' with --arch; got {backend!r}")
    problem, operands = parse(q, k, v, options)
    registry.supporting([registry.get("cupy")], problem)
    # Kernels for compute capability 9.0 are compiled for sm_90a.
    device = device_of_arch("sm_90a" if arch == "sm_90" else arch)
    inputs = contiguous_inputs(problem)
    print(explain_on(device, problem, inputs, operands))
    if plans:
        forward, backward, _ = plans_of(problem, inputs, device)
        print(f"\n{forward}\n\n{backward}")


def _compile(arguments: argparse.Namespace) -> int:
    try:
        if arguments.clear:
            print(kernel_cache.cleared())
            return 0
        cache.limit()  # raises
        place = cache.prepare()
        archs = [checked_arch(arch) for arch in arguments.arch or [arch_of(0)]]
    except BackendUnavailableError as error:
        return _refused(f"{error}; --arch sm_90a compiles without a GPU")
    except ValueError as error:
        return _refused(error)
    except OSError as error:
        return _refused(f"no kernel cache: {error}; set TILEATTN_CACHE_DIR to another folder")
    from tileattn.kernels.cuda.plan import catalog  # only this command needs it

    jobs = [
        (key, arch)
        for arch in archs
        for key in catalog.common_keys(arch, arguments.dtype, arguments.head_dim)
    ]
    failures = _compile_all(jobs, max(1, arguments.jobs), arguments.force)
    print(f"{len(jobs) - failures} of {len(jobs)} kernels are in {place}, or came with tileattn")
    return 1 if failures else 0


def _compile_all(jobs: list[tuple[KernelKey, str]], workers: int, force: bool) -> int:
    """Compile on threads, print a table, and return the number of failures."""

    def run(key: KernelKey, arch: str) -> tuple[float, Compiled]:
        start = time.perf_counter()
        result = compiled(key, arch, force=force)
        return time.perf_counter() - start, result

    pool, progress = ThreadPoolExecutor(workers), Progress(sys.stderr)
    try:
        waiting = {pool.submit(run, *job): job for job in jobs}
        for done, _ in enumerate(as_completed(waiting), 1):
            progress(done / len(jobs), f"{done} of {len(jobs)} kernels")
    finally:
        pool.shutdown(cancel_futures=True)  # after an interrupt, start no more compilations
        progress.end()
    print(f"{'arch':10} {'seconds':>7} {'registers':>9} {'spilled':>7}  kernel")
    failures = []
    for future, job in waiting.items():
        if error := future.exception():
            failures.append(f"{type(error).__name__}: {error}")
        else:
            print(_compile_row(*job, *future.result()))
    for failure in dict.fromkeys(failures):
        print(failure, file=sys.stderr)
    return len(failures)


def _compile_row(key: KernelKey, arch: str, seconds: float, result: Compiled) -> str:
    """Return a line of the table, with the fields of the key that differ from their defaults."""
    named = (
        f"{field.name}={value}"
        for field in fields(key)
        if field.default not in (MISSING, value := getattr(key, field.name))
    )
    numbers = f"{'cached' if result.cached else f'{seconds:.2f}':>7} {result.registers or '-':>9}"
    spilled = "-" if result.spill_bytes is None else result.spill_bytes
    return f"{arch:10} {numbers} {spilled:>7}  {' '.join((key.kernel, key.dtype, *named))}"


def _bench(arguments: argparse.Namespace) -> int:
    """Pass the rest of the command line to a module of ``benchmarks``, which the wheel lacks."""
    if arguments.section is None:
        print("python -m tileattn bench BENCHMARK [--help]")
        for name, measured in BENCHMARKS.items():
            print(f"  {name:15} {measured}")
        return 0
    try:
        found = importlib.import_module("benchmarks")
    except ModuleNotFoundError:
        found = None
    if getattr(found, "MEASURES", None) != "tileattn":
        what = "is not installed"
        if found is not None:
            what = f"is a different one, {found.__file__ or list(found.__path__)}"
        return _refused(
            f"bench: the package benchmarks {what}; the wheel does not contain it, so run "
            "`python -m tileattn bench` in a checkout of the repository"
        )
    section = importlib.import_module(f"benchmarks.{arguments.section}")
    return section.main(arguments.rest) or 0


def _workers() -> str:
    try:
        return f"{threads.worker_count()} (set TILEATTN_NUM_THREADS to change)"
    except ValueError as error:
        return str(error)


def _default() -> str:
    name = os.environ.get("TILEATTN_BACKEND")
    if not name:
        of_numpy = registry.candidates("auto", {"q": np.zeros(0)})[0].name
        return f"by array type, {of_numpy} for NumPy arrays (set TILEATTN_BACKEND to change)"
    if name in ("auto", *tileattn.available_backends()):
        return name
    accepted = ", ".join(("auto", *tileattn.available_backends()))
    return f"TILEATTN_BACKEND must be one of {accepted}; got {name!r}"


def _version(name: str) -> str:
    for distribution in (name, f"{name}-cuda13x", f"{name}-cuda12x"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def processor() -> str:
    """Return the processor's name and number of cores."""
    name = platform.processor() or platform.machine()
    with suppress(OSError), open("/proc/cpuinfo") as lines:  # noqa: PTH123 - no path of ours
        name = next((line.split(":")[1].strip() for line in lines if "model name" in line), name)
    return f"{name}, {os.cpu_count()} cores"


def _nvrtc() -> str:
    try:
        major, minor = nvrtc_version()
    except BackendUnavailableError as error:
        return str(error)
    return f"{major}.{minor}, compiles for {', '.join(f'sm_{arch}' for arch in known_archs())}"


def _shipped() -> str:
    archs = sorted(path.stem for path in shipped.FOLDER.glob("*.json"))
    counts = [f"{len(shipped.index(shipped.FOLDER, arch))} for {arch}" for arch in archs]
    return f"came compiled: {', '.join(counts) or 'none'}"


def _gpu() -> str:
    if shutil.which("nvidia-smi") is None:
        return "none found (no nvidia-smi)"
    asked = "name,compute_cap,driver_version,memory.total"
    query = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    return answer.stdout.strip() or f"nvidia-smi failed: {answer.stderr.strip()}"
