"""All benchmarks of a part of the page of speed, one after the other, in at most ten minutes each.

    python -m tileattn bench part                               list the parts
    python -m tileattn bench part grid --site FOLDER --update   measure one

Each part runs on one GPU. FOLDER holds the packages of FlashAttention-4, FlashInfer and FlashMLA,
and the kernels of FlashAttention-3 in fa3/_C.so. Whoever changes a kernel measures the parts that
it speeds up.
"""

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks import report

NEW = "cudnn,fa3,fa4"
GRID = "gpu --grid --pass {0} --dtype {1} --peers " + NEW + " --name gpu_{0}_{1}"

PARTS: dict[str, Sequence[str]] = {
    "grid": [
        "gpu --ceilings",
        GRID.format("forward", "bf16"),
        GRID.format("backward", "bf16"),
    ],
    "grid_fp16": [GRID.format("forward", "fp16"), GRID.format("backward", "fp16")],
    "shapes": [
        f"gpu --shapes --dtype bf16 --pass forward --peers {NEW}",
        f"gpu --shapes --dtype bf16 --pass backward --peers {NEW} --name gpu_backward",
    ],
    "models": [
        "model_shapes --dtype bf16,f32",
    ],
    "floats": [
        "gpu --grid --dtype f32 --length 512,2048,8192 --peers efficient --name gpu_f32",
        "gpu --grid --dtype f64 --length 512,2048 --peers math,cupy --name gpu_f64",
    ],
    "decode": ["decode"],
    "packed": ["packed"],
    "options": ["options", "gpu --sparse --dtype bf16", "gpu --host --dtype bf16"],
    "functions": ["functions"],
    "loops": [
        "lived --gpu --quick --peers sdpa,flash,varlen,fa3,fa4",
        "lived --gpu --only waits --peers flash",
    ],
    "whole_models": [
        "end_to_end --gpu --quick --peers sdpa,flash,fa3,fa4",
        "end_to_end --gpu --only training --dtype f32 --tokens 1024,2048,4096 "
        "--peers sdpa,efficient --quick",
        "frameworks --gpu",
    ],
    "first_calls": ["lived --gpu --only first_calls --peers sdpa,fa4"],
}
WITHOUT_SITE = ("functions", "frameworks")  # take no other library than PyTorch


def commands(part: str, site: str | None, to: Sequence[str]) -> list[list[str]]:
    """Return the arguments of ``bench`` for the benchmarks of a part."""
    made = []
    for line in PARTS[part]:
        name, *rest = shlex.split(line)
        found = [] if site is None or name in WITHOUT_SITE else ["--site", site]
        made.append([name, *rest, *found, *to])
    return made


def main(argv: list[str] | None = None) -> int:
    """Run the benchmarks in processes of their own; return 1 if one of them fails."""
    parser = report.parser("part", __doc__)
    parser.add_argument("part", nargs="?", choices=PARTS, help="without it: list them")
    parser.add_argument("--site", help="folder of packages of other libraries")
    arguments: argparse.Namespace = report.parsed(parser, argv)
    if arguments.part is None:
        for part, lines in PARTS.items():
            print(f"{part}:", *lines, sep="\n  ")
        return 0
    failed = []
    for line in commands(arguments.part, arguments.site, ["--to", str(arguments.to)]):
        start = time.monotonic()
        print("bench", shlex.join(line), flush=True)
        done = subprocess.run([sys.executable, "-m", "tileattn", "bench", *line], check=False)
        print(f"{line[0]}: {time.monotonic() - start:.0f} s", flush=True)
        failed += [shlex.join(line)] if done.returncode else []
    for ran in failed:
        print(f"failed: bench {ran}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
