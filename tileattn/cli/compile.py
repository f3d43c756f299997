"""The command ``compile``: compile CUDA kernels into the cache ahead of time."""

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import MISSING, fields
from typing import Any

from tileattn.cli import kernel_cache
from tileattn.cli.arguments import COUNT, refused
from tileattn.cli.progress import Progress
from tileattn.dtypes import DTYPES
from tileattn.errors import BackendUnavailableError
from tileattn.kernels import disk_cache as cache
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit.compile import Compiled, checked_arch, compiled
from tileattn.kernels.cuda.jit.load import arch_of


def add_to(commands: Any) -> None:
    """Add the command."""
    about = "compile CUDA kernels into the cache ahead of time"
    parser = commands.add_parser("compile", help=about, description=about)
    add, names = parser.add_argument, [dtype.name for dtype in DTYPES]
    add("--arch", nargs="+", help="sm_80, sm_90a, ... (default: that of this machine's GPU)")
    add("--dtype", nargs="+", default=names, choices=names, help="dtypes (default: all)")
    head_dims = "head dimensions (default 64 128)"
    add("--head-dim", nargs="+", type=COUNT, default=[64, 128], help=head_dims)
    add("--force", action="store_true", help="recompile kernels that are in the cache")
    jobs = "kernels compiled at the same time (default: the number of cores)"
    add("--jobs", type=COUNT, default=os.cpu_count(), help=jobs)
    add("--clear", action="store_true", help="empty the cache and compile nothing")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compile the common kernels; return the exit status, 1 if one did not compile."""
    try:
        if arguments.clear:
            print(kernel_cache.cleared())
            return 0
        cache.limit()  # raises
        place = cache.prepare()
        archs = [checked_arch(arch) for arch in arguments.arch or [arch_of(0)]]
    except BackendUnavailableError as error:
        return refused(f"{error}; --arch sm_90a compiles without a GPU")
    except ValueError as error:
        return refused(error)
    except OSError as error:
        return refused(f"no kernel cache: {error}; set TILEATTN_CACHE_DIR to another folder")
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

    pool, progress, done = ThreadPoolExecutor(workers), Progress(sys.stderr), 0
    try:
        waiting = {pool.submit(run, *job): job for job in jobs}
        for done, _ in enumerate(as_completed(waiting), 1):
            progress(done / len(jobs), f"{done} of {len(jobs)} kernels")
    except KeyboardInterrupt:
        progress.end()
        print(f"{done} of {len(jobs)} kernels are done; those that have started are finished")
        raise
    finally:
        pool.shutdown(cancel_futures=True)  # after an interrupt, start no more compilations
    progress.end()
    print(f"{'arch':10} {'seconds':>7} {'registers':>9} {'spilled':>7}  kernel")
    failures = []
    for future, job in waiting.items():
        if error := future.exception():
            failures.append(f"{type(error).__name__}: {error}")
        else:
            print(_row(*job, *future.result()))
    for failure in dict.fromkeys(failures):
        print(failure, file=sys.stderr)
    return len(failures)


def _row(key: KernelKey, arch: str, seconds: float, result: Compiled) -> str:
    """Return a line of the table, with the fields of the key that differ from their defaults."""
    named = (
        f"{field.name}={value}"
        for field in fields(key)
        if field.default not in (MISSING, value := getattr(key, field.name))
    )
    numbers = f"{'cached' if result.cached else f'{seconds:.2f}':>7} {result.registers or '-':>9}"
    spilled = "-" if result.spill_bytes is None else result.spill_bytes
    return f"{arch:10} {numbers} {spilled:>7}  {' '.join((key.kernel, key.dtype, *named))}"
