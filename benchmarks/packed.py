"""Speed of packed sequences on the GPU; baselines: FlashAttention-4, and unpacked calls.

    python -m tileattn bench packed                    all lengths, both passes
    python -m tileattn bench packed --head-dim 128 --tokens 16384

Lengths are equal, follow Zipf's law, or are one long and many short. FlashAttention-4 gets the same
arrays and the maximum lengths; its results are compared with tileattn's. For equal lengths, the
same attention as a batch is timed too. The file is gpu_packed.json.
"""

import argparse
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np

import tileattn
from benchmarks import report
from benchmarks.configurations import PASSES, normal
from benchmarks.device import AGREEMENT, Gpu, difference
from benchmarks.implementations import arrays, to_torch
from benchmarks.report import Row, one_line

H = 16
TOKENS, HEAD_DIMS = (16384, 65536), (64, 128)
LONGEST = 4096  # tokens of a sequence by Zipf's law
SHORT = 256
EQUAL = (512, 2048, 8192)

Calls = list[Callable[[], Any]]


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


class Packed(NamedTuple):
    """The arrays of a call: tokens first in memory, as FlashAttention-4 takes them."""

    q: Any
    k: Any
    v: Any
    dout: Any
    cu_seqlens: Any

    @classmethod
    def of(cls, xp: Any, lengths: list[int], D: int) -> "Packed":
        shape = sum(lengths), H, D
        ends = xp.asarray(np.cumsum([0, *lengths]).astype(np.int32))
        q, k, v, dout = (normal(xp, shape, "bf16", seed) for seed in range(4))
        return cls(q, k, v, dout, ends)


def ours(given: Packed, causal: bool) -> Calls:
    """Prepare both passes of tileattn."""
    q, k, v, dout = (x.swapaxes(0, 1) for x in given[:4])
    return _both(q, k, v, dout, causal=causal, cu_seqlens_q=given.cu_seqlens)


def as_batch(given: Packed, N: int, causal: bool) -> Calls:
    """Prepare both passes of tileattn over the same sequences, which have N tokens each."""
    q, k, v, dout = (x.reshape(-1, N, *x.shape[1:]).swapaxes(1, 2) for x in given[:4])
    return _both(q, k, v, dout, causal=causal)


def _both(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> Calls:
    attention = tileattn.forward(q, k, v, **options)
    backward = partial(tileattn.backward, dout, q, k, v, *attention, **options)
    return [partial(tileattn.forward, q, k, v, **options), backward]


def fa4(given: Packed, longest: int, causal: bool) -> Calls:
    """Prepare both passes of FlashAttention-4."""
    import torch

    function = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    q, k, v, dout, ends = map(to_torch, given)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    sizes = {f"cu_seqlens_{x}": ends for x in "qk"} | {f"max_seqlen_{x}": longest for x in "qk"}

    def forward() -> Any:
        out = function(*leaves, causal=causal, **sizes)
        return out[0] if isinstance(out, tuple) else out

    out = forward()
    return [forward, lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)]


def compared(lengths: Lengths, D: int, causal: bool, device: Gpu) -> Iterator[Row]:
    """Time both passes of all implementations in turns; record failures."""
    xp, each = device.xp, lengths.each
    given = Packed.of(xp, each, D)
    calls = ours(given, causal)
    taking_part, failed = ["tileattn"], None
    if len(set(each)) == 1:
        calls += as_batch(given, each[0], causal)
        taking_part.append("batch")
    try:
        theirs = fa4(given, max(each), causal)
        forward, backward = calls[:2]
        expected = [x.swapaxes(0, 1) for x in (forward().out, *backward()[:3])]
        distance = difference([x for call in theirs for x in arrays(call(), xp)], expected, xp)
        if not distance <= AGREEMENT["bf16"]:
            raise RuntimeError(f"the results differ by {distance:.1e}")
    # A library that does not fit the others installed may fail with anything.
    except Exception as error:
        failed = one_line(error)
    else:
        calls += theirs
        taking_part.append("fa4")
    times = [1e3 * median(x) for x in device.time_each(calls)]
    for n, kind in enumerate(PASSES):
        ms = dict(zip(taking_part, times[n::2], strict=True))
        own, batch, peer = ms["tileattn"], ms.get("batch"), ms.get("fa4")
        yield {
            **{"pass": kind, "lengths": lengths.name, "causal": causal, "dtype": "bf16"},
            **{"tokens": sum(each), "sequences": len(each), "H": H, "D": D, "ms": own},
            "of_batch": batch and batch / own,
            "fa4_ms": peer,
            "speedup": peer and peer / own,
            "failed": failed,
        }


def rows(head_dims: list[int], tokens: list[int], device: Gpu) -> Iterator[Row]:
    """Measure all lengths."""
    for D in head_dims:
        for count in tokens:
            for lengths in lengths_of(count):
                for causal in (False, True):
                    yield from compared(lengths, D, causal, device)
                    device.release()


def main(argv: list[str] | None = None, device: Gpu | None = None) -> None:
    """Run the benchmark; an interrupted run writes its rows, too."""
    parser = report.parser("packed", __doc__)
    parser.add_argument("--head-dim", type=int, nargs="+", default=list(HEAD_DIMS))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    arguments: argparse.Namespace = report.parsed(parser, argv)
    device = device or Gpu.required()
    made = rows(arguments.head_dim, arguments.tokens, device)
    path = arguments.to / "gpu_packed.json"
    report.written(made, path, device.machine, arguments.ran, section="packed")


if __name__ == "__main__":
    main()
