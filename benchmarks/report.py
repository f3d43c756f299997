"""Output of the benchmarks: lines on the terminal, and a JSON file with its origin."""

import argparse
import importlib.util
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tileattn.backends import threads
from tileattn.cli.info import processor

RESULTS = Path(__file__).parent / "results"

Row = dict[str, Any]


def command(program: str, argv: Sequence[str]) -> str:
    """Return the command that repeats a measurement, without folders."""
    kept, ahead = [], iter(argv)
    for word in ahead:
        option, _, value = word.partition("=")
        if option not in ("--to", "--record", "--site", "--update"):
            kept.append(word)
        elif option != "--update" and not value:
            next(ahead, None)
    return shlex.join([*program.split(), *kept])


def parser(benchmark: str, about: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark, with the options for the folder of its files."""
    made = argparse.ArgumentParser(
        prog=f"python -m tileattn bench {benchmark}",
        description=about,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = made.add_mutually_exclusive_group().add_argument
    add(
        "--to",
        type=Path,
        default=Path(),
        metavar="FOLDER",
        help="folder of the files (default: the current one)",
    )
    add(
        "--update",
        dest="to",
        action="store_const",
        const=RESULTS,
        help="write to benchmarks/results, the source of the documentation",
    )
    return made


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; keep it as ``ran`` for the files."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = parser.parse_args(argv)
    arguments.ran = command(parser.prog, argv)
    return arguments


def names(allowed: Sequence[str], text: str) -> list[str]:
    """Parse a comma-separated list."""
    values = text.split(",")
    for value in values:
        if value not in allowed:
            raise argparse.ArgumentTypeError(f"must be among {', '.join(allowed)}; got {value}")
    return values


def numbers(allowed: range, text: str) -> list[int]:
    """Parse a comma-separated list of integers."""
    values = text.split(",")
    for value in values:
        if not value.isdecimal() or int(value) not in allowed:
            about = f"must be integers from {allowed[0]} to {allowed[-1]}"
            raise argparse.ArgumentTypeError(f"{about}, separated by commas; got {value!r}")
    return [*map(int, values)]


def show_missing(missing: Mapping[str, str]) -> None:
    """Print the missing implementations, and why."""
    for name, why in missing.items():
        print(f"{name} is missing: {why}")


def load(folder: Path, name: str) -> Row:
    result: Row = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return result


def line(row: Row) -> str:
    """Format a row as names and values; nested rows get their own lines."""
    shown, nested = [], []
    for name, value in row.items():
        if isinstance(value, dict):
            nested += [f"  {name}: {line(value)}"] if value else []
        elif value is not None:
            shown.append(f"{name} {f'{value:.4g}' if isinstance(value, float) else value}")
    return "\n".join(["  ".join(shown), *nested])


def one_line(error: Exception) -> str:
    """Return the type and first line of an error, at most 160 characters."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:160]


def of_process(module: str, text: str, variables: Mapping[str, str] | None = None) -> Row:
    """Run ``python -m module --child text``; return the row that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", module, "--child", text],
        cwd=Path(__file__).parents[1],
        env=os.environ | (variables or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"the process ended with status {done.returncode}: {said}")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


@contextmanager
def empty_caches() -> Iterator[dict[str, str]]:
    """Return variables for a process that finds no compiled kernel."""
    names = ["TILEATTN_CACHE_DIR", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH", "TRITON_CACHE_DIR"]
    names += ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"]
    with TemporaryDirectory() as folder:
        yield {name: str(Path(folder) / name.lower()) for name in names}


def host() -> Row:
    """Return the processor and the versions of libraries."""
    return {
        "processor": processor(),
        "threads": threads.worker_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        **_llvm(),
    }


def _llvm() -> Row:
    """Return LLVM's name of the processor, and its vector and matrix instructions."""
    if importlib.util.find_spec("llvmlite") is None:
        return {}
    from llvmlite import binding

    kinds = ("avx", "amx", "fma", "f16c", "neon", "dotprod", "bf16", "sve")
    features = binding.get_host_cpu_features()
    wide = sorted(name for name, there in features.items() if there and name.startswith(kinds))
    version = ".".join(map(str, binding.llvm_version_info))
    return {"cpu": binding.get_host_cpu_name(), "features": " ".join(wide), "llvm": version}


def written(
    rows: Iterable[Row], path: Path, machine: Callable[[], Row], ran: str, **more: Any
) -> list[Row]:
    """Print each row as it comes, and write all of them even after an interrupt.

    The machine is described last, when it is known which libraries ran.
    """
    done: list[Row] = []
    try:
        for row in rows:
            done.append(row)
            print(line(row), flush=True)
    finally:
        if done:
            write(path, machine(), done, ran, **more)
    return done


def write(path: Path, machine: Row, rows: list[Row], ran: str, **more: Any) -> None:
    """Write rows with their machine, versions, commit and command."""
    origin = {"commit": _commit(), "date": time.strftime("%Y-%m-%d"), "command": ran}
    result = {"machine": machine | origin, **more, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")


def _commit() -> str:
    """Return the commit: from the variable COMMIT, for copies of the sources, or from git."""
    ask = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    try:
        answer = subprocess.run(
            ask, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return answer.stdout.strip()
