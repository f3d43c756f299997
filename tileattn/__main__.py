"""Command line: ``python -m tileattn {info,check,explain}``."""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib import metadata
from typing import Any

import numpy as np
import threadpoolctl

import tileattn
from tileattn.backends import threads
from tileattn.problem import DTYPES


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : list of str or None
        Arguments; those of the process by default.

    Returns
    -------
    int
        Exit status: 0 where all is well.
    """
    parser = argparse.ArgumentParser(prog="python -m tileattn", description=tileattn.__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    info = commands.add_parser("info", help="versions, backends, threads, GPU")
    info.set_defaults(run=_info)
    check = commands.add_parser("check", help="random problems against the float64 oracle")
    check.add_argument("--seconds", type=float, default=45.0, help="how long to go on (45)")
    check.add_argument("--seed", type=int, default=0, help="of the random problems (0)")
    check.set_defaults(run=_check)
    explain = commands.add_parser("explain", help="what would run for given sizes and options")
    for size, default in (("B", 1), ("Hq", 8), ("Nq", 4096), ("D", 64)):
        explain.add_argument(f"--{size}", type=int, default=default, help=f"({default})")
    for size, other in (("Hkv", "Hq"), ("Nk", "Nq"), ("Dv", "D")):
        explain.add_argument(f"--{size}", type=int, help=f"({other})")
    explain.add_argument("--dtype", default="float32", choices=[dtype.name for dtype in DTYPES])
    explain.add_argument("--backend", default="auto")
    explain.add_argument("--causal", action="store_true")
    explain.add_argument("--window", type=_side, nargs=2, metavar=("LEFT", "RIGHT"))
    explain.add_argument("--softcap", type=float)
    explain.add_argument("--dropout-p", type=float, default=0.0)
    explain.set_defaults(run=_explain)
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status


def _side(text: str) -> int | None:
    return None if text == "None" else int(text)


def _info(_: argparse.Namespace) -> int:
    rows = [
        ("tileattn", tileattn.__version__),
        ("Python", f"{platform.python_version()} on {platform.platform()}"),
        *((name, _version(name)) for name in ("numpy", "ml_dtypes", "threadpoolctl", "cupy")),
        ("processor", f"{_processor()}, {os.cpu_count()} cores"),
        ("workers", f"{threads.worker_count()} (TILEATTN_NUM_THREADS sets another number)"),
        *(
            ("BLAS", f"{pool['internal_api']} {pool['version']}, {pool.get('architecture', '')}")
            for pool in threadpoolctl.threadpool_info()
            if pool["user_api"] == "blas"
        ),
        ("GPU", _gpu()),
        ("kernel cache", "none: this version compiles no kernels"),
        *(
            (f"backend {name}", "ready" if reason is None else f"not available: {reason}")
            for name, reason in tileattn.available_backends().items()
        ),
        ("default", os.environ.get("TILEATTN_BACKEND", "from the arrays (TILEATTN_BACKEND unset)")),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {value}")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from tileattn import selfcheck  # the oracle and the bounds, which only this command needs

    rng = np.random.default_rng(arguments.seed)
    start, count, line = time.monotonic(), 0, ""
    while (elapsed := time.monotonic() - start) < arguments.seconds or count == 0:
        try:
            line = selfcheck.check_one(rng)
        except AssertionError as failure:
            print(f"\nFAILED after {count} problems: {failure}")
            return 1
        count += 1
        _progress(elapsed / max(arguments.seconds, 1e-9), f"{count} problems  {line}")
    _progress(1.0, f"{count} problems")
    print(f"\nall {count} problems agree with the float64 oracle, forward and every gradient")
    return 0


def _progress(done: float, text: str) -> None:
    """Draw a bar where there is a terminal."""
    if not sys.stdout.isatty():
        return
    bar = "#" * int(24 * min(done, 1.0))
    room = shutil.get_terminal_size().columns - 1
    print("\r" + f"[{bar:24}] {text}".ljust(room)[:room], end="", flush=True)


def _explain(arguments: argparse.Namespace) -> int:
    a = arguments
    dtype = next(dtype for dtype in DTYPES if dtype.name == a.dtype)
    Hkv, Nk, Dv = a.Hkv or a.Hq, a.Nk or a.Nq, a.Dv or a.D
    q, k, v = (
        np.empty(shape, dtype)
        for shape in ((a.B, a.Hq, a.Nq, a.D), (a.B, Hkv, Nk, a.D), (a.B, Hkv, Nk, Dv))
    )
    options: dict[str, Any] = {"causal": a.causal, "softcap": a.softcap, "dropout_p": a.dropout_p}
    options["window"] = None if a.window is None else tuple(a.window)
    try:
        print(tileattn.explain(q, k, v, backend=a.backend, **options))
    except (TypeError, ValueError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def _version(name: str) -> str:
    for distribution in (name, f"{name}-cuda13x", f"{name}-cuda12x"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:  # noqa: PTH123 - a device file, not a path of ours
            return next(line.split(":")[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _gpu() -> str:
    if shutil.which("nvidia-smi") is None:
        return "none found (no nvidia-smi)"
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    return answer.stdout.strip() or f"nvidia-smi failed: {answer.stderr.strip()}"


if __name__ == "__main__":
    sys.exit(main())
