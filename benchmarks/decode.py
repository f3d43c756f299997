"""Speed of decoding on the GPU, with other libraries as baselines.

    python -m tileattn bench decode
    python -m tileattn bench decode --only "1 of 65,536" --head-dim 64 --peers cudnn

The rate counts the bytes of the keys and values within the lengths. Calls are replayed as CUDA
graphs, as in serving, over caches several times as large as the L2. cuDNN takes caches of equal
lengths; FlashAttention-3 and 4 and FlashInfer also take other lengths and pages. FlashInfer and
FlashMLA take latent caches (MLA): keys have 576 columns, and the first 512 are the values. Both
plan a call before it is timed. Results are compared with tileattn's.
Caches of 8 bits, with a descale for each token and head, are timed beside tileattn's call on the
same numbers in bf16. A row that failed says why. The file is gpu_decode.json.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import tileattn
from benchmarks import peers, report
from benchmarks.comparison import compare
from benchmarks.configurations import Call, normal
from benchmarks.device import Gpu
from benchmarks.libraries import Arrays, Library, Step
from benchmarks.report import Row

PEERS = ("cudnn", "fa3", "fa4", "flashinfer", "flashinfer_cuda_cores", "flashmla")
LATENT_PEERS = ("flashinfer", "flashmla")
HEAD_DIMS = (128,)
LATENT_HEAD_DIMS = (576, 512)  # of the keys, and of the values in their first columns
ITEM, DESCALE = 2, 4  # bytes of bfloat16, and of the factor of a key or value of 8 bits
CACHES = {"int8": np.dtype(np.int8), "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn)}


class Decoding(NamedTuple):
    """Sequences with a cache each."""

    name: str
    Hq: int
    Hkv: int
    lengths: Sequence[int]
    Nq: int = 1
    page: int | None = None
    cache: str = "bf16"  # dtype of keys and values
    is_latent: bool = False  # values are columns of the keys

    @property
    def is_plain(self) -> bool:
        """True if all lengths are equal, and no keys are in pages."""
        return self.page is None and len(set(self.lengths)) == 1

    def head_dims(self, D: int) -> tuple[int, int]:
        """Return the head dimensions of keys and values."""
        return LATENT_HEAD_DIMS if self.is_latent else (D, D)

    def cache_bytes(self, D: int) -> int:
        rows = sum(self.lengths) * self.Hkv
        if self.is_latent:
            return rows * LATENT_HEAD_DIMS[0] * ITEM
        return 2 * rows * (D * ITEM if self.cache == "bf16" else D + DESCALE)

    def flops(self, D: int) -> int:
        """Return the operations of both products on the keys that the queries see."""
        seen = sum(self.Nq * N - self.Nq * (self.Nq - 1) // 2 for N in self.lengths)
        return 2 * self.Hq * seen * sum(self.head_dims(D))


def cases() -> list[Decoding]:
    """Return the cases."""
    rng = np.random.default_rng(0)
    drawn, shorter = rng.integers(100, 16_001, 16).tolist(), rng.integers(100, 8193, 64).tolist()
    return [
        Decoding("1 of 4,096", 32, 8, [4096]),
        Decoding("1 of 65,536", 32, 8, [65536]),
        Decoding("16 of 8,192", 32, 8, [8192] * 16),
        Decoding("64 of 8,192", 32, 8, [8192] * 64),
        Decoding("128 of 1,024", 32, 8, [1024] * 128),
        Decoding("32 of 4,096", 32, 8, [4096] * 32),
        Decoding("1 of 65,536, MHA", 32, 32, [65536]),
        Decoding("8 of 8,192, 8 queries each", 32, 8, [8192] * 8, Nq=8),
        Decoding("8 of 8,192, 64 heads, 4 queries each", 64, 8, [8192] * 8, Nq=4),
        Decoding("16 of 8,192, MHA", 32, 32, [8192] * 16),
        Decoding("16 of 8,192, MQA", 128, 1, [8192] * 16),
        Decoding("16 of 8,192, 4 queries each", 32, 8, [8192] * 16, Nq=4),
        Decoding("16 of 100 to 16,000", 32, 8, drawn),
        Decoding("64 of 100 to 8,192", 32, 8, shorter),
        Decoding("16 of 8,192, pages of 16", 32, 8, [8192] * 16, page=16),
        Decoding("16 of 8,192, pages of 1", 32, 8, [8192] * 16, page=1),
        Decoding("16 of 8,192, int8", 32, 8, [8192] * 16, cache="int8"),
        *(
            Decoding(f"{B} of 8,192, float8{where}", 32, 8, [8192] * B, Nq, page, "float8_e4m3fn")
            for B, Nq, page, where in (
                (16, 1, None, ""),
                (64, 1, None, ""),
                (8, 8, None, ", 8 queries each"),
                (16, 1, 16, ", pages of 16"),
                (4, 2048, None, ", 2,048 queries each"),
            )
        ),
        *(
            Decoding(f"4 of 8,192, 2,048 queries each{where}", 32, 8, [8192] * 4, 2048, page)
            for where, page in (("", None), (", pages of 64", 64), (", pages of 16", 16))
        ),
        *(
            Decoding(
                f"128 of 4,096, latent, {Hq} heads, {queries}pages of 64",
                *(Hq, 1, [4096] * 128, Nq, 64),
                is_latent=True,
            )
            for Hq in (128, 64)
            for Nq, queries in ((1, ""), (2, "2 queries each, "))
        ),
    ]


def step_of(xp: Any, case: Decoding, D: int, seed: int) -> Step:
    """Draw the arrays of a call: caches are (B, Hkv, N, D), or (pages, Hkv, page, D)."""
    D, Dv = case.head_dims(D)
    B, longest = len(case.lengths), max(case.lengths)
    shape: tuple[int, ...] = B, case.Hkv, longest, D
    options: dict[str, Any] = {"causal": True} if case.Nq > 1 else {}
    if not case.is_plain:
        options["kv_lengths"] = xp.asarray(np.array(case.lengths, np.int32))
    if case.page is not None:
        pages = -(-longest // case.page)
        places = np.random.default_rng(seed).permutation(B * pages)
        options["block_table"] = xp.asarray(places.reshape(B, pages).astype(np.int32))
        shape = B * pages, case.Hkv, case.page, D
    q = normal(xp, (B, case.Hq, case.Nq, D), "bf16", seed)
    if case.is_latent:
        k = normal(xp, shape, "bf16", seed + 1)
        return Step((q, k, k[..., :Dv]), options)
    k, v = (normal(xp, shape, "bf16", seed + n) for n in (1, 2))
    if case.cache == "bf16":
        return Step((q, k, v), options)
    keys, values = (xp.zeros(shape, np.uint8).view(CACHES[case.cache]) for _ in "kv")
    factors = {name: xp.zeros(shape[:-1], np.float32) for name in ("k_descale", "v_descale")}
    tileattn.append_kv(keys, values, k, v, kv_lengths=np.zeros(len(k), int), **factors)
    return Step((q, keys, values), options | factors)


class Dequantised(Arrays):
    """The calls of tileattn on the numbers of caches of 8 bits, in bf16."""

    def passes(self, step: Step) -> list[Call]:
        q, *caches = step.rows
        options, rows = dict(step.options), [q]
        # CuPy converts no float8: look up each byte.
        numbers = np.arange(256, dtype=np.uint8).view(caches[0].dtype).astype(np.float32)
        table = np.asarray(numbers, like=q)
        for x, name in zip(caches, ("k_descale", "v_descale"), strict=True):
            factors = options.pop(name)[..., np.newaxis]
            rows.append((table[x.view(np.uint8)] * factors).astype(q.dtype))
        return super().passes(Step(tuple(rows), options))


def compared(case: Decoding, D: int, libraries: Mapping[str, Library], device: Gpu) -> Row:
    """Time tileattn and the baselines in turns, replayed as CUDA graphs."""
    size = case.cache_bytes(D)
    steps = [step_of(device.xp, case, D, 3 * n) for n in range(device.sets(size))]
    graph = partial(replayed, device=device)
    in_16_bits = case.cache == "bf16"
    if not in_16_bits:
        libraries = {"tileattn": libraries["tileattn"], "in bf16": Dequantised("in bf16")}
    if case.is_latent:
        libraries = {n: x for n, x in libraries.items() if x.ours or n in LATENT_PEERS}
    ((_, found),) = compare(steps, libraries, device, "bf16", graph)
    us = found["us"]
    D, Dv = case.head_dims(D)
    return {
        **{"case": case.name, "dtype": "bf16", "B": len(case.lengths), "D": D, "Nq": case.Nq},
        **({"Dv": Dv} if case.is_latent else {}),
        **{"Hq": case.Hq, "Hkv": case.Hkv, "page": case.page, "keys": sum(case.lengths)},
        **{"cache": case.cache},
        "gbytes_per_second": {n: size / x / 1e3 for n, x in us.items() if n != "in bf16"},
        "tflops": {n: case.flops(D) / x / 1e6 for n, x in us.items()},
        **found,
        "times_bf16": None if in_16_bits else round(us["in bf16"] / us["tileattn"], 3),
    }


def replayed(library: Library, call: Call, device: Gpu) -> Call:
    """Capture a call in a CUDA graph of CuPy or PyTorch."""
    if library.ours:
        return device.replayed(call)
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay() -> Any:
        graph.replay()
        return out, call  # whose arrays the graph reads

    return replay


def rows(
    names: list[str], head_dims: list[int], libraries: Mapping[str, Library], device: Gpu
) -> Iterator[Row]:
    """Measure the cases of these names; head_dims do not apply to latent ones."""
    for D in head_dims:
        for case in cases():
            if case.name in names and not (case.is_latent and head_dims[0] != D):
                yield compared(case, D, libraries, device)
                device.release()


def main(argv: list[str] | None = None, device: Gpu | None = None) -> None:
    """Run the benchmark; an interrupted run writes its rows, too."""
    known = [case.name for case in cases()]
    parser = report.parser("decode", __doc__)
    parser.add_argument("--only", nargs="+", default=known, help="names of cases")
    parser.add_argument("--head-dim", type=int, nargs="+", default=list(HEAD_DIMS))
    peers.add_options(parser, PEERS)
    arguments: argparse.Namespace = report.parsed(parser, argv)
    for name in arguments.only:
        if name not in known:
            parser.error(f"--only has {name}, which is none of: {'; '.join(known)}")
    device = device or Gpu.required()
    found, missing = peers.find(arguments.peers)
    report.show_missing(missing)
    libraries = {"tileattn": Arrays("tileattn"), **found}
    made = rows(arguments.only, arguments.head_dim, libraries, device)
    path = arguments.to / "gpu_decode.json"
    more = {"section": "decode", "missing": missing}
    report.written(made, path, device.machine, arguments.ran, **more)


if __name__ == "__main__":
    main()
