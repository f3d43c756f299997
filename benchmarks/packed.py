"""Speed of packed sequences on the GPU; baselines: FlashAttention, PyTorch, and unpacked calls.

    python -m tileattn bench packed                    all lengths, both passes
    python -m tileattn bench packed --head-dim 128 --tokens 16384

Lengths are equal, follow Zipf's law, or are one long and many short. FlashAttention-3, 4 and
PyTorch's varlen_attn get the same arrays and the largest length; their results are compared with
tileattn's. For equal lengths, the same attention as a batch is timed too. The file is
gpu_packed.json.
"""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks import peers, report
from benchmarks.comparison import compare
from benchmarks.configurations import Call, normal
from benchmarks.device import Gpu
from benchmarks.libraries import Arrays, Library, Step
from benchmarks.report import Row

PEERS = ("fa3", "fa4", "varlen")
H = 16
TOKENS, HEAD_DIMS = (16384, 65536), (64, 128)
LONGEST = 4096  # tokens of a sequence by Zipf's law
SHORT = 256
EQUAL = (512, 2048, 8192)


class Lengths(NamedTuple):
    """Sequences, by their numbers of tokens."""

    name: str
    each: list[int]


def lengths_of(tokens: int) -> list[Lengths]:
    """Return the cases, of ``tokens`` tokens each."""
    rng = np.random.default_rng(0)
    drawn: list[int] = []
    while sum(drawn) < tokens:
        drawn.append(max(1, LONGEST // int(rng.zipf(1.3))))
    drawn[-1] -= sum(drawn) - tokens
    half = tokens // 2
    return [
        *(Lengths(f"{tokens // n} of {n}", [n] * (tokens // n)) for n in EQUAL),
        Lengths("by Zipf's law", drawn),
        Lengths("one long, many short", [half, *[SHORT] * (half // SHORT)]),
    ]


class AsBatch(Arrays):
    """The same sequences as a batch, for sequences of equal lengths."""

    def passes(self, step: Step) -> list[Call]:
        """Prepare the calls of a batch; none if lengths differ."""
        T = step.rows[0].shape[-2]
        if T % step.longest or len(step.options["cu_seqlens_q"]) != T // step.longest + 1:
            return []
        rows = [x.swapaxes(0, 1).reshape(-1, step.longest, H, x.shape[-1]) for x in step.rows]
        batch = tuple(x.swapaxes(1, 2) for x in rows)
        return super().passes(Step(batch, {"causal": step.options["causal"]}))

    def heads_first(self, call: Call) -> Any:
        """Call; return arrays of packed sequences."""
        found = call()
        found = found if isinstance(found, tuple) else (found,)
        return tuple(x.swapaxes(1, 2).reshape(-1, H, x.shape[-1]).swapaxes(0, 1) for x in found)


def step_of(xp: Any, lengths: Lengths, D: int, causal: bool) -> Step:
    """Draw the arrays of a call; tokens come first in memory, as FlashAttention takes them."""
    shape = sum(lengths.each), H, D
    ends = xp.asarray(np.cumsum([0, *lengths.each]).astype(np.int32))
    rows = tuple(normal(xp, shape, "bf16", seed).swapaxes(0, 1) for seed in range(4))
    options = {"causal": causal, "cu_seqlens_q": ends}
    return Step(rows, options, longest=max(lengths.each))


def compared(
    lengths: Lengths, D: int, causal: bool, libraries: Mapping[str, Library], device: Gpu
) -> Iterator[Row]:
    """Time each pass of all libraries in turns."""
    step = step_of(device.xp, lengths, D, causal)
    for kind, found in compare([step], libraries, device, "bf16"):
        us = found["us"]
        yield {
            **{"pass": kind, "lengths": lengths.name, "causal": causal, "dtype": "bf16"},
            **{"tokens": sum(lengths.each), "sequences": len(lengths.each), "H": H, "D": D},
            "of_batch": us["batch"] / us["tileattn"] if "batch" in us else None,
            **found,
        }


def rows(
    head_dims: list[int], tokens: list[int], libraries: Mapping[str, Library], device: Gpu
) -> Iterator[Row]:
    """Measure all lengths."""
    for D in head_dims:
        for count in tokens:
            for lengths in lengths_of(count):
                for causal in (False, True):
                    yield from compared(lengths, D, causal, libraries, device)
                    device.release()


def main(argv: list[str] | None = None, device: Gpu | None = None) -> None:
    """Run the benchmark; an interrupted run writes its rows, too."""
    parser = report.parser("packed", __doc__)
    parser.add_argument("--head-dim", type=int, nargs="+", default=list(HEAD_DIMS))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    peers.add_options(parser, PEERS)
    arguments: argparse.Namespace = report.parsed(parser, argv)
    device = device or Gpu.required()
    found, missing = peers.find(arguments.peers)
    report.show_missing(missing)
    libraries = {"tileattn": Arrays("tileattn"), "batch": AsBatch("batch"), **found}
    made = rows(arguments.head_dim, arguments.tokens, libraries, device)
    path = arguments.to / "gpu_packed.json"
    more = {"section": "packed", "missing": missing}
    report.written(made, path, device.machine, arguments.ran, **more)


if __name__ == "__main__":
    main()
