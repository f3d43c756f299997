"""The command ``check``: compare random problems with the float64 oracle."""

import argparse
import sys
import time
from typing import Any

import numpy as np

from tileattn.backends import registry, threads
from tileattn.cli.arguments import (
    COUNT,
    INTERRUPTED,
    SECONDS,
    SIZE,
    add_backend,
    add_json,
    backend_named,
    print_json,
    refused,
)
from tileattn.cli.progress import Progress
from tileattn.errors import BackendUnavailableError

MOST_PASSED_OVER = 1000
"""Problems in a row that a backend does not support, after which the check gives up."""


def add_to(commands: Any) -> None:
    """Add the command."""
    about = "compare random problems with the float64 oracle, in both passes"
    parser = commands.add_parser("check", help=about, description=about)
    add = parser.add_argument
    add("--seconds", type=SECONDS, default=45.0, help="time budget in seconds (default 45)")
    add("--seed", type=SIZE, default=0, help="seed of the random problems (default 0)")
    add("--problems", type=COUNT, help="number of problems, in place of a time budget")
    add_backend(parser, "backend to check")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check a backend; return the exit status, 1 if a result is wrong."""
    try:
        threads.worker_count()
        name = backend_named(arguments.backend)
        backend = registry.candidates(name, {})[0].name
    except (BackendUnavailableError, ImportError, TypeError, ValueError) as error:
        return refused(error)
    found = {"backend": backend, "seed": arguments.seed, "problems": 0, "not_supported": 0}
    found |= {"failure": None, "interrupted": False}
    progress = Progress(sys.stderr if arguments.json else sys.stdout)
    try:
        _check_all(arguments, found, progress)
    except KeyboardInterrupt:
        found["interrupted"] = True
    progress.end()
    if arguments.json:
        print_json(found)
    else:
        print(_said(found))
    if found["interrupted"]:
        return INTERRUPTED
    return 1 if found["failure"] or not found["problems"] else 0


def _check_all(arguments: argparse.Namespace, found: dict[str, Any], progress: Progress) -> None:
    """Check problems until one fails or the budget is spent; count them in ``found``."""
    from tileattn.testing import selfcheck  # only this command needs the oracle and the bounds

    rng, problems = np.random.default_rng(arguments.seed), arguments.problems
    families, backend = max(1, (problems or 500) // 25), found["backend"]
    start, passed_over, done = time.monotonic(), 0, 0.0
    for case in selfcheck.cases(rng, backend, families, progress):
        try:
            supported = selfcheck.check(case, backend)
        except AssertionError as failure:
            found["failure"] = str(failure)
            return
        found["problems" if supported else "not_supported"] += 1
        passed_over = 0 if supported else passed_over + 1
        elapsed = time.monotonic() - start
        done = found["problems"] / problems if problems else elapsed / max(arguments.seconds, 1e-9)
        progress(done, f"{found['problems']} problems  {case}")
        if done >= 1 or passed_over == MOST_PASSED_OVER:
            return


def _said(found: dict[str, Any]) -> str:
    """Describe what was found."""
    count, backend = found["problems"], f"backend {found['backend']!r}"
    if found["failure"]:
        return f"FAILED: {found['failure']}\n({count} problems passed before)"
    left_out = found["not_supported"]
    more = f"; {left_out} more are not supported" if left_out else ""
    if found["interrupted"]:
        return f"interrupted after {count} problems on {backend}, which all match the oracle{more}"
    if not count:
        return f"{backend} supports none of {left_out} problems"
    return f"{count} problems on {backend} match the float64 oracle in both passes{more}"
