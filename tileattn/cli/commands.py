"""Command line: ``python -m tileattn {info,check,explain,compile,bench}``."""

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
from tileattn.cli.progress import Progress
from tileattn.dtypes import DTYPES
from tileattn.errors import BackendUnavailableError
from tileattn.kernels import disk_cache as cache
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit.compile import (
    Compiled,
    checked_arch,
    compiled,
    known_archs,
    nvrtc_version,
)
from tileattn.kernels.cuda.jit.load import arch_of

BENCHMARKS = {
    "cpu": "speed of NumPy arrays, on both backends, beside PyTorch and plain NumPy",
    "decode": "speed of few queries over caches on the GPU, beside cuDNN and FlashAttention-4",
    "distributed": "speed of ranks that share a sequence, beside one rank",
    "distributed_gpu": "speed of GPUs that share a sequence, beside one GPU",
    "frameworks": "speed of attention inside PyTorch, beside the library's own calls",
    "functions": "speed of functions of scores and masks on the GPU, beside FlexAttention",
    "gpu": "speed of the CuPy backend beside PyTorch, FlashAttention-4 and plain CuPy",
    "packed": "speed of packed sequences on the GPU, beside FlashAttention-4",
    "options": "speed of options on the GPU, beside PyTorch and FlashAttention-4",
    "traffic": "operations and bytes: the model, and a GPU's counters",
    "tuning": "what each tuned number of the CUDA kernels is worth, on the GPU at hand",
    "memory": "peak memory against the number of tokens, beside plain attention",
    "nonfinite": "time of calls that meet NaN and infinity, as multiples of clean ones",
}
"""Modules of ``benchmarks``, and the question that each answers."""

_LIBRARIES = "numpy", "ml_dtypes", "threadpoolctl", "llvmlite", "cupy", "torch", "jax"

DTYPE_NAMES = [dtype.name for dtype in DTYPES]

ABOUT = """Exact attention, the FlashAttention way: tile by tile, in O(N) memory, forward and
backward, on NumPy and CuPy arrays."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the exit status is 0 where all is well."""
    parser = argparse.ArgumentParser(prog="python -m tileattn", description=ABOUT)
    parser.add_argument("--version", action="version", version=f"tileattn {tileattn.__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(metavar="command")
    info = commands.add_parser("info", help="versions, backends, threads, GPU")
    info.set_defaults(run=_info)
    check = commands.add_parser("check", help="random problems against the float64 oracle")
    check.add_argument("--seconds", type=_SECONDS, default=45.0, help="how long to go on (45)")
    check.add_argument("--seed", type=_SIZE, default=0, help="of the random problems (0)")
    backends = "auto", "numpy", "llvm", "cupy"
    check.add_argument("--backend", default="auto", choices=backends, help="(auto)")
    check.add_argument("--problems", type=_COUNT, help="how many, however long it takes")
    check.set_defaults(run=_check)
    explain = commands.add_parser("explain", help="what would run for given sizes and options")
    for size, default in (("B", 1), ("Hq", 8), ("Nq", 4096), ("D", 64)):
        explain.add_argument(f"--{size}", type=_SIZE, default=default, help=f"({default})")
    for size, other in (("Hkv", "Hq"), ("Nk", "Nq"), ("Dv", "D")):
        explain.add_argument(f"--{size}", type=_SIZE, help=f"({other})")
    explain.add_argument("--dtype", default="float32", choices=DTYPE_NAMES)
    explain.add_argument("--backend", default="auto")
    explain.add_argument("--causal", action="store_true")
    explain.add_argument("--window", type=_side, nargs=2, metavar=("LEFT", "RIGHT"))
    explain.add_argument("--softcap", type=_REAL)
    explain.add_argument("--dropout-p", type=_REAL, default=0.0)
    explain.add_argument("--arch", help="on a GPU that need not be here: sm_80, sm_90, ...")
    explain.add_argument("--plan", action="store_true", help="with --arch, print the plans too")
    explain.set_defaults(run=_explain)
    fill = commands.add_parser("compile", help="fill the cache of CUDA kernels ahead of time")
    fill.add_argument("--arch", nargs="+", help="sm_80, sm_90a, ... (that of the GPU here)")
    fill.add_argument("--dtype", nargs="+", default=DTYPE_NAMES, choices=DTYPE_NAMES, help="(all)")
    fill.add_argument("--head-dim", nargs="+", type=_COUNT, default=[64, 128], help="(64 128)")
    fill.add_argument("--force", action="store_true", help="compile what the cache has, too")
    fill.add_argument("--jobs", type=_COUNT, default=os.cpu_count(), help="at a time (all cores)")
    fill.add_argument("--clear", action="store_true", help="only empty the cache")
    fill.set_defaults(run=_compile)
    bench = commands.add_parser("bench", help="measure, in a checkout of the repository")
    bench.add_argument("section", nargs="?", choices=BENCHMARKS, help="(lists them)")
    bench.add_argument("rest", nargs=argparse.REMAINDER, help="what the section takes; try --help")
    bench.set_defaults(run=_bench)
    arguments = parser.parse_args(argv)
    if arguments.run is None:
        parser.print_help()
        return 0
    return int(arguments.run(arguments))


def _refused(message: object) -> int:
    """Say why nothing was done, and give the exit status."""
    print(message, file=sys.stderr)
    return 2


def _number(kind: Callable[[str], Any], least: float) -> Callable[[str], Any]:
    """Make a type of argument: a number that is finite and not below the least."""
    what = f"a{' whole' if kind is int else ''} number"
    what = f"{what} from {least} on" if least > -math.inf else f"a finite{what[1:]}"

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be {what}; got {text!r}")
        return value

    return read


_MOST_HEADS, _MOST_ROWS = 1 << 17, 1 << 26  # of which ``explain`` counts the tiles

_SIZE, _COUNT, _SECONDS = _number(int, 0), _number(int, 1), _number(float, 0)
_REAL = _number(float, -math.inf)


def _side(text: str) -> int | None:
    """Read a side of the window: a number of keys, or None where it is open."""
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
        ("GPU", _gpu()),
        ("kernel cache", _cache()),
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
    from tileattn.testing import (
        selfcheck,  # the oracle and the bounds, which only this command needs
    )

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
            print(f"FAILED after {count} problems: {failure}")
            return 1
        count += 1
        elapsed = time.monotonic() - start
        done = count / problems if problems else elapsed / max(arguments.seconds, 1e-9)
        progress(done, f"{count} problems  {case}")
        if done >= 1:
            break
    progress.end()
    print(
        f"all {count} problems on backend {backend!r} agree with the float64 oracle, forward and "
        "every gradient"
    )
    return 0


def _check_sizes(B: int, Hq: int, Nq: int, Nk: int) -> None:
    """Raise ValueError for sizes whose tiles take more than some seconds and 1 GB to count."""
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
        return _refused("--plan must come with --arch: it prints the plans of a GPU")
    try:
        _check_sizes(a.B, a.Hq, a.Nq, Nk)
        q, k, v = (
            np.broadcast_to(np.zeros((), dtype), shape)  # of any size, and no memory
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
    """Print what would run for contiguous arrays of these sizes on a GPU of an architecture."""
    # Only this command needs them.
    from tileattn.backends.cupy.explain import explain_on
    from tileattn.kernels.cuda.plan.device import device_of_arch
    from tileattn.kernels.cuda.plan.layout import contiguous_inputs
    from tileattn.kernels.cuda.plan.plan import plans_of

    if backend not in ("auto", "cupy"):
        raise ValueError(f"backend is {backend!r}; with --arch, 'cupy' is accepted")
    problem, operands = parse(q, k, v, options)
    registry.supporting([registry.get("cupy")], problem)
    # What is compiled for compute capability 9.0 is sm_90a.
    device = device_of_arch("sm_90a" if arch == "sm_90" else arch)
    inputs = contiguous_inputs(problem)
    print(explain_on(device, problem, inputs, operands))
    if plans:
        forward, backward, _ = plans_of(problem, inputs, device)
        print(f"\n{forward}\n\n{backward}")


def _compile(arguments: argparse.Namespace) -> int:
    try:
        if arguments.clear:
            print(f"removed {cache.clear()} files from {cache.folder()}")
            return 0
        place = cache.prepare()
        archs = [checked_arch(arch) for arch in arguments.arch or [arch_of(0)]]
    except BackendUnavailableError as error:
        return _refused(f"{error}; --arch sm_90a compiles for a GPU that is elsewhere")
    except ValueError as error:
        return _refused(error)
    except OSError as error:
        return _refused(f"no kernel cache: {error}; TILEATTN_CACHE_DIR names a folder")
    from tileattn.kernels.cuda.plan import catalog  # only this command needs it

    jobs = [
        (key, arch)
        for arch in archs
        for key in catalog.common_keys(arch, arguments.dtype, arguments.head_dim)
    ]
    failures = _compile_all(jobs, max(1, arguments.jobs), arguments.force)
    print(f"{len(jobs) - failures} of {len(jobs)} kernels are in {place}")
    return 1 if failures else 0


def _compile_all(jobs: list[tuple[KernelKey, str]], workers: int, force: bool) -> int:
    """Compile on threads, which NVRTC runs side by side; print a table, count what failed."""

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
        pool.shutdown(cancel_futures=True)  # an interrupt does not wait for what has not begun
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
    """Write a line of the table; only what the key says beyond its defaults is named."""
    named = (
        f"{field.name}={value}"
        for field in fields(key)
        if field.default not in (MISSING, value := getattr(key, field.name))
    )
    numbers = f"{'cached' if result.cached else f'{seconds:.2f}':>7} {result.registers or '-':>9}"
    spilled = "-" if result.spill_bytes is None else result.spill_bytes
    return f"{arch:10} {numbers} {spilled:>7}  {' '.join((key.kernel, key.dtype, *named))}"


def _bench(arguments: argparse.Namespace) -> int:
    """Hand the rest of the command line to a module that is not part of the wheel."""
    if arguments.section is None:
        print("python -m tileattn bench SECTION [--help], where SECTION is one of")
        for name, question in BENCHMARKS.items():
            print(f"  {name:11} {question}")
        return 0
    try:
        found = importlib.import_module("benchmarks")
    except ModuleNotFoundError:
        found = None
    if getattr(found, "MEASURES", None) != "tileattn":
        what = "is not installed"
        if found is not None:
            what = f"is another one, {found.__file__ or list(found.__path__)}"
        return _refused(
            f"bench: the package benchmarks {what}, and the wheel has none; run "
            "`python -m tileattn bench` in a checkout of the repository"
        )
    section = importlib.import_module(f"benchmarks.{arguments.section}")
    return section.main(arguments.rest) or 0


def _workers() -> str:
    try:
        return f"{threads.worker_count()} (TILEATTN_NUM_THREADS sets another number)"
    except ValueError as error:
        return str(error)


def _default() -> str:
    name = os.environ.get("TILEATTN_BACKEND")
    if not name:
        of_numpy = registry.candidates("auto", {"q": np.zeros(0)})[0].name
        return f"from the arrays, {of_numpy} for those of NumPy (TILEATTN_BACKEND unset)"
    if name in ("auto", *tileattn.available_backends()):
        return name
    accepted = ", ".join(("auto", *tileattn.available_backends()))
    return f"TILEATTN_BACKEND is {name!r}, which is no backend; accepted are {accepted}"


def _version(name: str) -> str:
    for distribution in (name, f"{name}-cuda13x", f"{name}-cuda12x"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def processor() -> str:
    """Name the processor, and count its cores."""
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


def _cache() -> str:
    try:
        place = cache.folder()
    except OSError as error:
        return f"none: {error}; TILEATTN_CACHE_DIR names a folder"
    sizes = [path.stat().st_size for path in cache.entries()]
    size = f"{len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB"
    return f"{place}, {size} (TILEATTN_CACHE_DIR sets another folder)"


def _gpu() -> str:
    if shutil.which("nvidia-smi") is None:
        return "none found (no nvidia-smi)"
    asked = "name,compute_cap,driver_version,memory.total"
    query = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    return answer.stdout.strip() or f"nvidia-smi failed: {answer.stderr.strip()}"
