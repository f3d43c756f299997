"""Compile the kernels that the wheel brings, into the package's folder for them.

    python tools/make_cubins.py                              all of them: half an hour of a core
    python tools/make_cubins.py --arch sm_90a --dtype bfloat16 --head-dim 64

No GPU is needed. Kernels that the disk cache has are not compiled again, so that after an edit only
those that include the edited file are.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tileattn.cli.progress import Progress
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit import shipped
from tileattn.kernels.cuda.jit.compile import compiled, compiler_name
from tileattn.kernels.cuda.plan import catalog


def made(arch: str, keys: Sequence[KernelKey], jobs: int, folder: Path = shipped.FOLDER) -> int:
    """Compile the kernels of an architecture and write its files; return their bytes."""
    progress = Progress(sys.stderr)
    bodies = {}
    with ThreadPoolExecutor(jobs) as pool:
        found = pool.map(lambda key: compiled(key, arch, ship=False), keys)
        for done, kernel in enumerate(found, 1):
            bodies[kernel.inputs] = kernel.body
            progress(done / len(keys), f"{arch}: {done} of {len(keys)} kernels")
    progress.end()
    return shipped.write(folder, arch, compiler_name(), bodies)


def main(arguments: Sequence[str]) -> int:
    """Make the files, and say how large they are."""
    parser = argparse.ArgumentParser(prog="make_cubins", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--arch", nargs="+", default=catalog.ARCHS, choices=catalog.ARCHS)
    add("--dtype", nargs="+", default=catalog.DTYPES, choices=catalog.DTYPES)
    add("--head-dim", nargs="+", type=int, default=catalog.HEAD_DIMS, choices=catalog.HEAD_DIMS)
    add("--jobs", type=int, default=os.cpu_count() or 1, help="kernels compiled at the same time")
    chosen = parser.parse_args(arguments)
    for arch in chosen.arch:
        start, keys = time.monotonic(), catalog.shipped_keys(arch, chosen.dtype, chosen.head_dim)
        nbytes = made(arch, keys, chosen.jobs)
        seconds = time.monotonic() - start
        print(f"{arch}: {len(keys)} kernels, {nbytes / 1e6:.1f} MB, {seconds:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
