"""Speed of decoding on the GPU, with cuDNN and FlashAttention-4 as baselines.

    python -m tileattn bench decode
    python -m tileattn bench decode --only "1 of 65,536" --head-dim 64 --peers cudnn

The rate counts the bytes of the keys and values within the lengths. Calls are replayed as CUDA
graphs, as in serving, over caches several times as large as the L2. cuDNN takes caches of equal
lengths, FlashAttention-4 also other lengths and pages. Results are compared with tileattn's. A row
that failed says why. The file is gpu_decode.json.
"""

import argparse
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np

import tileattn
from benchmarks import report
from benchmarks.configurations import Call, normal
from benchmarks.device import AGREEMENT, Gpu, difference
from benchmarks.implementations import arrays, to_torch
from benchmarks.report import Row, one_line

HEAD_DIMS = (128,)
ITEM = 2  # bytes of bfloat16


class Decoding(NamedTuple):
    """Sequences with a cache each."""

    name: str
    Hq: int
    Hkv: int
    lengths: Sequence[int]
    Nq: int = 1
    page: int | None = None

    @property
    def is_plain(self) -> bool:
        """True if all lengths are equal, and no keys are in pages."""
        return self.page is None and len(set(self.lengths)) == 1

    def cache_bytes(self, D: int) -> int:
        return 2 * sum(self.lengths) * self.Hkv * D * ITEM


def cases() -> list[Decoding]:
    """Return the cases."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(100, 16_001, 16).tolist()
    return [
        Decoding("1 of 4,096", 32, 8, [4096]),
        Decoding("1 of 65,536", 32, 8, [65536]),
        Decoding("16 of 8,192", 32, 8, [8192] * 16),
        Decoding("64 of 8,192", 32, 8, [8192] * 64),
        Decoding("16 of 8,192, MHA", 32, 32, [8192] * 16),
        Decoding("16 of 8,192, MQA", 128, 1, [8192] * 16),
        Decoding("16 of 8,192, 4 queries each", 32, 8, [8192] * 16, Nq=4),
        Decoding("16 of 100 to 16,000", 32, 8, drawn),
        Decoding("16 of 8,192, pages of 16", 32, 8, [8192] * 16, page=16),
        Decoding("16 of 8,192, pages of 1", 32, 8, [8192] * 16, page=1),
        *(
            Decoding(f"4 of 8,192, 2,048 queries each{where}", 32, 8, [8192] * 4, 2048, page)
            for where, page in (("", None), (", pages of 64", 64), (", pages of 16", 16))
        ),
    ]


class Given(NamedTuple):
    """The arrays of a call: caches are (B, Hkv, N, D), or (pages, Hkv, page, D)."""

    q: Any
    k: Any
    v: Any
    lengths: Any
    table: Any

    @classmethod
    def of(cls, xp: Any, case: Decoding, D: int, seed: int) -> "Given":
        B, longest = len(case.lengths), max(case.lengths)
        shape, table = (B, case.Hkv, longest, D), None
        if case.page is not None:
            pages = -(-longest // case.page)
            places = np.random.default_rng(seed).permutation(B * pages)
            table = xp.asarray(places.reshape(B, pages).astype(np.int32))
            shape = B * pages, case.Hkv, case.page, D
        q = normal(xp, (B, case.Hq, case.Nq, D), "bf16", seed)
        k, v = (normal(xp, shape, "bf16", seed + n) for n in (1, 2))
        return cls(q, k, v, xp.asarray(np.array(case.lengths, np.int32)), table)


def ours(case: Decoding, x: Given) -> Call:
    """Prepare the call of tileattn; lengths and pages are on the device."""
    options: dict[str, Any] = {"causal": True}
    if not case.is_plain:
        options |= {"kv_lengths": x.lengths, "block_table": x.table}
    call = partial(tileattn.forward, x.q, x.k, x.v, **options)
    return lambda: call().out


def cudnn(case: Decoding, x: Given) -> Call | None:
    """Prepare PyTorch's call of cuDNN, which aligns causal masks at the top left."""
    if not case.is_plain or case.Nq > 1:
        return None
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = map(to_torch, x[:3])

    def call() -> Any:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return call


def fa4(case: Decoding, x: Given) -> Call:
    """Prepare FlashAttention-4, whose arrays have tokens before heads."""
    library = importlib.import_module("flash_attn.cute")
    q, k, v = (to_torch(y).transpose(1, 2).contiguous() for y in x[:3])
    function = partial(library.flash_attn_func, q, k, v, causal=True)
    if not case.is_plain:
        more = {"seqused_k": to_torch(x.lengths)}
        if x.table is not None:
            more["page_table"] = to_torch(x.table)
        function = partial(library.flash_attn_varlen_func, q, k, v, causal=True, **more)

    def call() -> Any:
        out = function()
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


PEERS: dict[str, Callable[[Decoding, Given], Call | None]] = {"cudnn": cudnn, "fa4": fa4}


def replayed(call: Call) -> Call:
    """Capture a call of PyTorch in a CUDA graph."""
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay() -> Any:
        graph.replay()
        return out

    return replay


def in_turn(calls: list[Call]) -> Call:
    """Return a call that cycles through calls."""
    turns = itertools.cycle(calls)

    def turn() -> Any:
        return next(turns)()

    return turn


def compared(case: Decoding, D: int, peers: list[str], device: Gpu) -> Row:
    """Time tileattn and the baselines in turns; record failures."""
    xp, size = device.xp, case.cache_bytes(D)
    sets = [Given.of(xp, case, D, 3 * n) for n in range(device.sets(size))]
    calls = {"tileattn": in_turn([device.replayed(ours(case, x)) for x in sets])}
    expected, failed = [ours(case, sets[0])()], {}
    for peer in peers:
        try:
            made = [PEERS[peer](case, x) for x in sets]
            known = [call for call in made if call is not None]
            if not known:
                continue
            distance = difference(arrays(known[0](), xp), expected, xp)
            if not distance <= AGREEMENT["bf16"]:
                raise RuntimeError(f"the results differ by {distance:.1e}")
            calls[peer] = in_turn([replayed(call) for call in known])
        # A library that does not fit the others installed may fail with anything.
        except Exception as error:
            failed[peer] = one_line(error)
    times = device.time_each(list(calls.values()))
    us = {name: 1e6 * median(x) for name, x in zip(calls, times, strict=True)}
    own = us.pop("tileattn")
    return {
        **{"case": case.name, "dtype": "bf16", "B": len(case.lengths), "D": D, "Nq": case.Nq},
        **{"Hq": case.Hq, "Hkv": case.Hkv, "page": case.page, "keys": sum(case.lengths)},
        "us": own,
        "gbytes_per_second": size / own / 1e3,
        "peers_us": us,
        "speedup": min(us.values()) / own if us else None,
        "failed": failed,
    }


def rows(names: list[str], head_dims: list[int], peers: list[str], device: Gpu) -> Iterator[Row]:
    """Measure the cases of these names."""
    for D in head_dims:
        for case in cases():
            if case.name in names:
                yield compared(case, D, peers, device)
                device.release()


def main(argv: list[str] | None = None, device: Gpu | None = None) -> None:
    """Run the benchmark; an interrupted run writes its rows, too."""
    known = [case.name for case in cases()]
    parser = report.parser("decode", __doc__)
    parser.add_argument("--only", nargs="+", default=known, help="names of cases")
    parser.add_argument("--head-dim", type=int, nargs="+", default=list(HEAD_DIMS))
    parser.add_argument("--peers", type=partial(report.names, tuple(PEERS)), default=list(PEERS))
    arguments: argparse.Namespace = report.parsed(parser, argv)
    for name in arguments.only:
        if name not in known:
            parser.error(f"--only has {name}, which is none of: {'; '.join(known)}")
    device = device or Gpu.required()
    made = rows(arguments.only, arguments.head_dim, arguments.peers, device)
    path = arguments.to / "gpu_decode.json"
    report.written(made, path, device.machine, arguments.ran, section="decode")


if __name__ == "__main__":
    main()
