"""Command line: ``python -m tileattn {info,check,explain,compile,cache,bench}``."""

import argparse
import os
import sys

import tileattn
from tileattn.cli import bench, check, compile, explain, info, kernel_cache
from tileattn.cli.arguments import INTERRUPTED

ABOUT = """Exact attention tile by tile, in O(N) memory, forward and backward, on NumPy and CuPy
arrays."""

PIPE_CLOSED = 141
"""Exit status if the reader of the output has gone: 128 plus the number of SIGPIPE."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m tileattn", description=ABOUT)
    made.add_argument("--version", action="version", version=f"tileattn {tileattn.__version__}")
    made.set_defaults(run=None)
    commands = made.add_subparsers(metavar="command")
    for command in (info, check, explain, compile, kernel_cache, bench):
        command.add_to(commands)
    return made


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit status, 0 on success."""
    try:
        made = parser()
        arguments = made.parse_args(argv)
        status = 0
        if arguments.run is None:
            made.print_help()
        else:
            status = int(arguments.run(arguments))
        sys.stdout.flush()  # raises here, not at exit, if the reader has gone
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # What is left in the buffer has nowhere to go, and would raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return status
