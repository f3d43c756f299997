"""Interrupts and forks at random moments of calls on NumPy arrays.

    python -m tools.stress_threads                                  seconds
    python -m tools.stress_threads --interrupts 10000 --forks 500   minutes

After each, BLAS must have its number of threads, and the next calls, in this thread and in another,
must be bitwise identical to undisturbed ones. A call that hangs ends the program and prints the
stacks of all threads. Needs ``os.fork`` and ``signal.setitimer``, so not on Windows.
"""

import argparse
import faulthandler
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from typing import Any, NamedTuple, NoReturn

import numpy as np
import threadpoolctl

import tileattn

WORKERS = 2
BLAS_THREADS = 3  # neither 1 nor the number of workers
HANGS = 30  # seconds after which a call counts as hanging

Result = list[bytes]


class Call(NamedTuple):
    """A call, the bytes of its undisturbed results, and its time."""

    run: Callable[[], Result]
    expected: Result
    seconds: float


def calls() -> list[Call]:
    """Prepare calls of both passes: some run in the caller's thread, some on all workers."""
    rng, unavailable = np.random.default_rng(0), tileattn.available_backends()
    backends = [name for name in ("numpy", "llvm") if unavailable[name] is None]
    problems: tuple[tuple[int, int, int, dict[str, Any]], ...] = (
        (1, 1, 16, {}),
        (1, 8, 64, {"causal": True}),
        (1, 4, 300, {"causal": True}),
        (2, 2, 700, {"bias": rng.normal(size=(700, 1)).astype(np.float32)}),
    )
    made = []
    for (B, H, N, chosen), backend in product(problems, backends):
        options = chosen | {"backend": backend}
        q, k, v, dout = rng.normal(size=(4, B, H, N, 32)).astype(np.float32)
        saved = tileattn.forward(q, k, v, **options)

        def forward(q: Any = q, k: Any = k, v: Any = v, options: Any = options) -> Result:
            return [x.tobytes() for x in tileattn.forward(q, k, v, **options)]

        def backward(arrays: Any = (dout, q, k, v, *saved), options: Any = options) -> Result:
            return [x.tobytes() for x in tileattn.backward(*arrays, **options) if x is not None]

        for run in (forward, backward):
            expected, start = run(), time.perf_counter()
            run()
            made.append(Call(run, expected, time.perf_counter() - start))
    return made


def wrong(made: Sequence[Call]) -> list[str]:
    """Return the faults found by new calls."""
    faults = []
    for pool in threadpoolctl.threadpool_info():
        if pool["user_api"] == "blas" and pool["num_threads"] != BLAS_THREADS:
            faults.append(f"BLAS has {pool['num_threads']} threads instead of {BLAS_THREADS}")
    call = random.choice(made)
    if call.run() != call.expected:
        faults.append("the next call gives other bits")
    others: list[Result] = []
    thread = threading.Thread(target=lambda: others.append(made[0].run()))
    thread.start()
    thread.join()
    if others != [made[0].expected]:
        faults.append("a call of another thread gives other bits")
    return faults


def disturb(call: Call, disturbance: Callable[[], None]) -> bool:
    """Make a call that a signal disturbs; return True if it was interrupted."""
    delay = random.choice((random.uniform(0, 1.1), random.choice((0, 1)) + random.gauss(0, 0.05)))
    signal.signal(signal.SIGALRM, lambda *_: disturbance())
    try:
        signal.setitimer(signal.ITIMER_REAL, max(delay * call.seconds, 1e-6))
        result = call.run()
    except KeyboardInterrupt:
        return True
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # the signal may be on its way
        signal.setitimer(signal.ITIMER_REAL, 0)
    if result != call.expected:
        raise AssertionError("the disturbed call gives other bits")
    return False


def interrupt() -> None:
    """Raise KeyboardInterrupt, as the handler of Ctrl-C."""
    raise KeyboardInterrupt


def stress_interrupts(made: Sequence[Call], count: int) -> tuple[int, list[str]]:
    """Interrupt calls; return the number of interrupted calls, and the faults."""
    cut, faults = 0, []
    for number in range(count):
        faulthandler.dump_traceback_later(HANGS, exit=True)
        with suppress(KeyboardInterrupt):  # a moment too late for the call
            cut += disturb(random.choice(made), interrupt)
        faults += [f"interrupt {number}: {fault}" for fault in wrong(made)]
    return cut, faults


def fork() -> int:
    """Fork; a child that hangs ends with the stacks of its threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: there are threads
        child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, chain=True)
        signal.setitimer(signal.ITIMER_REAL, HANGS / 2)
    return child


def end_child(made: Sequence[Call]) -> NoReturn:
    """Check a child and end it."""
    faults = ["failed"]
    try:
        faults = wrong(made)
        if faults:
            print("in a child:", *faults, file=sys.stderr, flush=True)
    finally:
        os._exit(bool(faults))


@contextmanager
def company(made: Sequence[Call]) -> Iterator[None]:
    """Make calls in another thread meanwhile."""
    over = threading.Event()

    def user() -> None:
        while not over.is_set():
            random.choice(made).run()

    thread = threading.Thread(target=user)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def stress_forks(made: Sequence[Call], count: int) -> tuple[int, list[str]]:
    """Fork during calls of another thread, or in a signal handler of this one; return as above."""
    children: list[int] = []
    ended: list[int] = []

    def in_handler() -> None:
        children.append(fork())
        if not children[-1] and random.random() < 0.5:
            interrupt()

    for number in range(count):
        faulthandler.dump_traceback_later(HANGS, exit=True)
        if number % 2:
            time.sleep(random.uniform(0, 0.005))
            children.append(fork())
        else:
            # The call goes on in the child, without its other threads.
            with suppress(KeyboardInterrupt, RuntimeError):
                disturb(random.choice(made), in_handler)
        if 0 in children:
            end_child(made)
        ended += [os.waitpid(child, 0)[1] for child in children[len(ended) :]]
        if any(ended):
            break
    return len(children), [
        f"child {n}: status {status}" for n, status in enumerate(ended) if status
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 1 if there are faults."""
    parser = argparse.ArgumentParser(description="Interrupts and forks at random moments.")
    parser.add_argument("--interrupts", type=int, default=300)
    parser.add_argument("--forks", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    random.seed(given.seed)
    os.environ["TILEATTN_NUM_THREADS"] = str(WORKERS)
    threadpoolctl.threadpool_limits(BLAS_THREADS, "blas")
    made = calls()
    cut, faults = stress_interrupts(made, given.interrupts)
    print(f"{given.interrupts} interrupts, {cut} of them cut a call short: {len(faults)} faults")
    with company(made):
        forks, in_children = stress_forks(made, given.forks)
    faulthandler.cancel_dump_traceback_later()
    print(f"{forks} forks: {len(in_children)} faults")
    for fault in [*faults, *in_children][:20]:
        print(fault)
    return int(bool(faults or in_children))


if __name__ == "__main__":
    sys.exit(main())
