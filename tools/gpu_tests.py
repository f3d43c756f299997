"""Run the tests that need a GPU in several processes that share it, and sum up their results.

    python -m tools.gpu_tests --processes 15 tests/gpu/test_hopper_forward.py

Other options are passed to pytest. Compiled kernels go to the user's cache, so a kernel that one
process compiled is there for all.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

_COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|xpassed)")
_SLOW = re.compile(r"\s*[\d.]+s (call|setup|teardown) ")
_LAST_WORDS = 10.0  # seconds for an interrupted shard to print its results
NO_TESTS = 5  # pytest's exit status if a shard has no tests
# Other processes share the CPU and the GPU: use one BLAS thread, and let JAX preallocate nothing.
_SHARED = {"OPENBLAS_NUM_THREADS": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def main(argv: Sequence[str]) -> int:
    """Run all shards; the exit status is 1 where one of them fails or does not end."""
    parser = argparse.ArgumentParser(prog="gpu_tests", description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument(
        "--seconds", type=float, default=570, help="time limit, after which shards are ended"
    )
    chosen, others = parser.parse_known_args(argv)
    start, count = time.time(), chosen.processes
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    command += ["--durations=3", *others]
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{n}.log") for n in range(count)]
        shards = []
        for n, log in enumerate(logs):
            with log.open("w", encoding="utf-8") as file:
                shards.append(
                    subprocess.Popen(
                        [*command, f"--shard={n}/{count}"],
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        env=os.environ | _SHARED,
                    )
                )
        late = [n for n, shard in enumerate(shards) if not _ended(shard, start + chosen.seconds)]
        said = [log.read_text(encoding="utf-8", errors="replace") for log in logs]
    bad = [n for n, shard in enumerate(shards) if shard.returncode not in (0, NO_TESTS)]
    for n in bad:
        print(f"--- shard {n} of {count}, status {shards[n].returncode} ---\n{said[n][-6000:]}")
    slow = filter(_SLOW.match, "\n".join(said).splitlines())
    print("slowest:", *sorted(slow, key=_time)[-10:], sep="\n")
    for n in late:
        print(f"shard {n} of {count} did not end within {chosen.seconds:.0f} s")
    sums = summed(said)
    print(f"{time.time() - start:.0f} s in {count} processes; shards that fail: {bad}")
    print(", ".join(f"{sums[kind]} {kind}" for kind in ("passed", "failed", "skipped")))
    return bool(bad or late)


def summed(said: Sequence[str]) -> Counter[str]:
    """Add up the counts in the last lines of pytest; errors are failures."""
    sums: Counter[str] = Counter()
    for text in said:
        for number, kind in _COUNTS.findall((text.strip().splitlines() or [""])[-1]):
            sums["failed" if kind.startswith("error") else kind] += int(number)
    return sums


def _time(line: str) -> float:
    return float(line.split("s ", maxsplit=1)[0])


def _ended(shard: "subprocess.Popen[bytes]", deadline: float) -> bool:
    """Wait for a shard. If it takes too long, interrupt it, so that it reports, then kill it."""
    try:
        shard.wait(max(0, deadline - time.time()))
    except subprocess.TimeoutExpired:
        shard.send_signal(signal.SIGINT)
    else:
        return True
    try:
        shard.wait(max(0, deadline + _LAST_WORDS - time.time()))
    except subprocess.TimeoutExpired:
        shard.kill()
        shard.wait()
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
