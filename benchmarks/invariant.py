"""Speed of calls with ``invariant=True`` on the GPU, beside the same calls without.

    python -m tileattn bench invariant

Calls are replayed as CUDA graphs over caches several times as large as the L2, as by ``bench
decode``. The results are compared. The file is gpu_invariant.json.
"""

import argparse
from collections.abc import Iterator
from functools import partial

from benchmarks import report
from benchmarks.comparison import compare
from benchmarks.configurations import Call
from benchmarks.decode import Decoding, replayed, step_of
from benchmarks.device import Gpu
from benchmarks.libraries import Arrays, Step
from benchmarks.report import Row

HEAD_DIMS = (64, 128)


class Invariant(Arrays):
    """The calls of tileattn with the option."""

    def passes(self, step: Step) -> list[Call]:
        return super().passes(step._replace(options={**step.options, "invariant": True}))


def cases() -> list[Decoding]:
    """Return the cases: decoding, drafts, a chunk of a prefill, and prefills."""
    return [
        Decoding("1 of 4,096", 32, 8, [4096]),
        Decoding("1 of 65,536", 32, 8, [65536]),
        Decoding("16 of 8,192", 32, 8, [8192] * 16),
        Decoding("128 of 1,024", 32, 8, [1024] * 128),
        Decoding("16 of 8,192, pages of 16", 32, 8, [8192] * 16, page=16),
        Decoding("8 of 8,192, 8 queries each", 32, 8, [8192] * 8, Nq=8),
        Decoding("16 of 8,192, MQA", 128, 1, [8192] * 16),
        Decoding("4 of 8,192, 2,048 queries each", 32, 8, [8192] * 4, Nq=2048),
        Decoding("8 of 2,048, prefill", 32, 8, [2048] * 8, Nq=2048),
        Decoding("4 of 8,192, prefill", 32, 8, [8192] * 4, Nq=8192),
    ]


def compared(case: Decoding, D: int, device: Gpu) -> Row:
    """Time the calls with and without the option in turns."""
    steps = [step_of(device.xp, case, D, 3 * n) for n in range(device.sets(case.cache_bytes(D)))]
    libraries = {"tileattn": Arrays("tileattn"), "invariant": Invariant("invariant")}
    ((_, found),) = compare(steps, libraries, device, "bf16", partial(replayed, device=device))
    us = found["us"]
    return {
        **{"case": case.name, "dtype": "bf16", "B": len(case.lengths), "D": D, "Nq": case.Nq},
        **{"Hq": case.Hq, "Hkv": case.Hkv, "page": case.page, "us": us, "spread": found["spread"]},
        **{"mismatch": found["mismatch"], "speed": round(us["tileattn"] / us["invariant"], 3)},
    }


def rows(head_dims: list[int], device: Gpu) -> Iterator[Row]:
    """Measure all cases."""
    for D in head_dims:
        for case in cases():
            yield compared(case, D, device)


def main(argv: list[str] | None = None, device: Gpu | None = None) -> None:
    """Run the benchmark; an interrupted run writes its rows, too."""
    parser = report.parser("invariant", __doc__)
    parser.add_argument("--head-dim", type=int, nargs="+", default=list(HEAD_DIMS))
    arguments: argparse.Namespace = report.parsed(parser, argv)
    device = device or Gpu.required()
    made = rows(arguments.head_dim, device)
    path = arguments.to / "gpu_invariant.json"
    report.written(made, path, device.machine, arguments.ran, section="invariant", missing={})


if __name__ == "__main__":
    main()
