"""Run small problems over every kernel, for ``compute-sanitizer --tool memcheck`` and its like.

``python tests/sanitize.py --threads 16`` first: compiling is slow under a sanitizer
``compute-sanitizer --tool {memcheck,racecheck,initcheck,synccheck} python tests/sanitize.py``

Initcheck does not see what TMA adds up in memory: it complains where ``backward_dq_convert_sm90``
reads that, and must complain of nothing else. Racecheck at times misses a named barrier of the
NaN-safe pass of ``forward_sm90``: what it may complain of is the table of what was not finite,
written by ``clean`` and read by ``add_non_finite``. Clocks read by each warp around the barrier, in
calls that it complained of, have every read after all writes. In ``forward_latent_sm90`` it misses
the barriers of both warpgroups: what it may complain of there is ``rescale``, which a lane releases
for its warp after ``__syncwarp``, and ``row_sums`` and ``bad``, written before and read after one
``named_barrier_sync`` of all that touch them. In ``forward_decode_sm90`` it may complain of the
request to the gather warps: a lane releases it for its warp after ``__syncwarp``. It may complain
of the descales: their copies arrive at a mbarrier with ``cp.async.mbarrier.arrive``.
In ``forward_split`` with 17 to 64 rows it misses ``__syncthreads`` and ``__syncwarp`` around
``row_sums`` and ``zero_non_finite``: the machine code has both barriers.

Results are not compared here; the sanitizer watches what kernels read and write. Without CuPy's
pool each array is an allocation of its own, so that one byte past an end is seen.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import tileattn

DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
SIZES = (2, 4, 2, 75, 141)  # B, Hq, Hkv, Nq, Nk: more than one tile each, the last one part full
SHAPES = (  # D, Hq, Hkv, Nq, Nk
    (80, 40, 20, 575, 200),  # tall tiles, many of them
    (128, 40, 20, 575, 200),
    (32, 6, 6, 49, 49),  # windows of a tile
    (64, 4, 4, 2300, 77),  # a key block is split by queries
    (128, 8, 1, 2600, 300),  # and by query heads
    (320, 4, 2, 150, 141),  # pairs of thread blocks
    (512, 4, 2, 150, 141),
)


def options(rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Yield options, each of which changes what a kernel reads."""
    B, Hq, _, Nq, Nk = SIZES
    yield {}
    yield {"causal": True, "kv_lengths": [Nk, 3], "sinks": rng.standard_normal(Hq)}
    yield {"window": (20, 5), "q_offset": [-30, 90], "dropout_p": 0.2, "seed": 5}
    yield {"bias": rng.standard_normal((Hq, Nq, Nk)), "softcap": 5.0}
    yield {"bias": rng.standard_normal((1, Nk)), "alibi_slopes": rng.random((B, Hq))}
    yield {"bias": rng.standard_normal((Nq, 1)), "mask": rng.random((B, 1, Nq, Nk)) < 0.5}
    blocks = rng.random((Nq, Nk)) < 0.02
    yield {"block_mask": tileattn.BlockMask.from_mask(blocks, (16, 24)), "causal": True}
    yield {"mask": rng.random((1, Nk)) < 0.5, "bias": rng.standard_normal(())}
    yield {"tree_mask": rng.random((1, Nq, Nq)) < 0.5, "kv_lengths": [Nk, 60]}
    yield {"prefix": [40, 3], "causal": True}
    table = rng.standard_normal((Hq, 9)).astype(np.float32)
    own = {"score_mod": past_the_ends, "mask_mod": near, "aux": (table,)}
    yield own | {"causal": True}
    yield own | {"origin": [[0, 1, 5, 9], [2, 0, 16, 32]], "dropout_p": 0.2}


def past_the_ends(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    """Ask for elements that there are not, where the nearest are read."""
    return s * table[h + b, i - j]


def near(b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:  # noqa: ARG001 - a mask_mod's
    """Let a query attend to neighbours, and to what the table says."""
    return (abs(i - j) < 30) | (table[h, j] > 1)


def packed(rng: np.random.Generator) -> Iterator[tuple[Any, int, int, dict[str, Any]]]:
    """Yield the same for packed sequences: the tokens of all end where the arrays do."""
    _, Hq, _, Nq, Nk = SIZES
    ends = {
        "cu_seqlens_q": np.array([0, 0, 65, 66, Nq]),
        "cu_seqlens_k": np.array([0, 9, 9, 140, Nk]),
    }
    for dtype in DTYPES:
        yield dtype, 64, 64, ends
        yield dtype, 128, 128, {**ends, "causal": True, "sinks": rng.standard_normal(Hq)}
    yield np.float16, 256, 256, ends
    yield ml_dtypes.bfloat16, 512, 512, {**ends, "causal": True}
    yield np.float64, 264, 270, ends


def calls(rng: np.random.Generator) -> Iterator[tuple[Any, int, int, dict[str, Any]]]:
    """Yield dtype, D, Dv and options: each of them, not every combination."""
    chosen = list(options(rng))
    for n, given in enumerate(chosen):
        yield DTYPES[n % 4], 64, 64, given
        yield DTYPES[(n + 2) % 4], 40, 24, given
    for dtype in DTYPES:
        yield dtype, 128, 128, {"causal": True}
        yield dtype, 17, 33, chosen[1]
    for dtype in (np.float16, np.float64):
        yield dtype, 256, 256, {}
        yield dtype, 264, 270, chosen[3]
    yield np.float16, 192, 128, {"window": (60, 0)}
    yield np.float16, 128, 128, {"window": (60, 0)}
    yield ml_dtypes.bfloat16, 80, 48, {"causal": True}
    yield ml_dtypes.bfloat16, 96, 96, {"softcap": 2.0, "kv_lengths": [0, 90]}
    yield from packed(rng)


def few(rng: np.random.Generator) -> Iterator[tuple[Any, int, int, dict[str, Any]]]:
    """Yield options of few queries over many keys, some of them in pages."""
    table = rng.permutation(60)[: 2 * 25].reshape(2, 25)
    small = rng.permutation(310)[: 2 * 150].reshape(2, 150)
    for dtype in DTYPES:
        yield dtype, 128, 128, {"kv_lengths": np.array([2400, 37]), "causal": True}
        yield dtype, 128, 128, {"kv_lengths": np.array([2400, 37]), "block_table": small}
        yield dtype, 17, 33, {"kv_lengths": np.array([0, 2399]), "softcap": 2.0}
        yield dtype, 64, 64, {"kv_lengths": np.array([2399, 1]), "block_table": table}
    for dtype in (np.float16, ml_dtypes.bfloat16):  # latent attention
        yield dtype, 576, 512, {"kv_lengths": np.array([2399, 65]), "causal": True}
        yield dtype, 576, 512, {"kv_lengths": np.array([1599, 1]), "block_table": table}


def cache_shape(given: dict[str, Any], page: int | None = None) -> tuple[int, int]:
    """Return the number of caches, or of pages, and the keys of each."""
    if "block_table" not in given:
        return 2, 2400
    table = given["block_table"]
    return int(table.max()) + 1, page or 2500 // table.shape[1]


def run_few(dtype: Any, D: int, Dv: int, given: dict[str, Any]) -> None:
    """Run the forward pass of few queries."""
    import cupy

    rng = np.random.default_rng(2)
    lead, keys = cache_shape(given, page=64 if D == 576 else None)
    for heads, Nq in ((4, 1), (8, 3), (16, 5)):
        shapes = (2, heads, Nq, D), (lead, 1, keys, D), (lead, 1, keys, Dv)
        q, k, v = (cupy.asarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes)
        if D == 576:
            v = k[..., :Dv]
        v[0, 0, 20 % keys] = np.inf
        there = {n: cupy.asarray(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
        for x in tileattn.forward(q, k, v, **there):
            x.get()


def run_quantised(dtype: Any, D: int, Dv: int, given: dict[str, Any]) -> None:
    """Append to caches of 8 bits, and attend to them, with descales of tokens and of heads."""
    import cupy

    if max(D, Dv) > 256 or dtype == np.float64:
        return
    rng = np.random.default_rng(6)
    lead, keys = cache_shape(given)
    there = {n: cupy.asarray(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    places = {n: x for n, x in there.items() if n in ("kv_lengths", "block_table")}
    for heads, Nq, kind in ((4, 1, np.int8), (16, 5, ml_dtypes.float8_e4m3fn)):
        k, v = (cupy.asarray(rng.standard_normal((2, 1, 9, n)).astype(dtype)) for n in (D, Dv))
        keys8, values8 = (cupy.zeros((lead, 1, keys, n), np.uint8).view(kind) for n in (D, Dv))
        q = cupy.asarray(rng.standard_normal((2, heads, Nq, D)).astype(dtype))
        for shape in ((2, 1), (lead, 1, keys)):
            factors: dict[str, Any] = {f"{n}_descale": cupy.ones(shape, np.float32) for n in "kv"}
            tileattn.append_kv(keys8, values8, k, v, **places, **factors).get()
            if len(shape) == 3:
                factors["v_descale"][0, 0, 20 % keys] = np.inf
            for x in tileattn.forward(q, keys8, values8, **there, **factors):
                x.get()


def many(more: dict[str, Any]) -> Iterator[tuple[Any, int, int, dict[str, Any]]]:
    """Yield ``more`` options of many queries, over contiguous keys and over keys in pages."""
    table = np.random.default_rng(7).permutation(95)[: 2 * 45].reshape(2, 45)
    lengths = {"kv_lengths": np.array([4500, 4201]), "causal": True}
    for dtype, D, Dv in ((ml_dtypes.bfloat16, 128, 128), (np.float16, 64, 64)):
        yield dtype, D, Dv, lengths | more
        yield dtype, D, Dv, lengths | {"block_table": table} | more
    yield ml_dtypes.bfloat16, 256, 256, lengths | more


def run_many(dtype: Any, D: int, Dv: int, given: dict[str, Any]) -> None:
    """Run the forward pass over more keys than a split has, of many queries and of the last two.

    A page has 100 keys.
    """
    import cupy

    rng = np.random.default_rng(8)
    lead, keys = (95, 100) if "block_table" in given else (2, 4500)
    shapes = (2, 4, 200, D), (lead, 1, keys, D), (lead, 1, keys, Dv)
    q, k, v = (cupy.asarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes)
    v[0, 0, 20 % keys] = np.inf
    there = {n: cupy.asarray(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    for rows in (q, q[:, :, -2:]):
        for x in tileattn.forward(rows, k, v, **there):
            x.get()


def run_claimed(D: int) -> None:
    """Run a short causal forward pass of more work tiles than SMs, which claim them."""
    import cupy

    rng = np.random.default_rng(4)
    q, k, v = (
        cupy.asarray(rng.standard_normal((1, 140, 129, D)).astype(np.float16)) for _ in "qkv"
    )
    v[0, 70:, 100] = np.inf
    for x in tileattn.forward(q, k, v, causal=True):
        x.get()


def run_shape(D: int, Hq: int, Hkv: int, Nq: int, Nk: int) -> None:
    """Run both passes of a shape without options."""
    import cupy

    rng = np.random.default_rng(5)
    q, k, v, dout = (
        cupy.asarray(rng.standard_normal((2, heads, n, D)).astype(np.float16))
        for heads, n in ((Hq, Nq), (Hkv, Nk), (Hkv, Nk), (Hq, Nq))
    )
    k[0, 0, Nk // 2] = np.inf
    out, lse = tileattn.forward(q, k, v)
    for x in (out, lse, *tileattn.backward(dout, q, k, v, out, lse)[:3]):
        x.get()


def split_floats() -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield D, Dv and options of float32 whose kernels split numbers; Nq is 201, Nk 330."""
    rng = np.random.default_rng(10)
    ends = {"cu_seqlens_q": np.array([0, 0, 70, 201]), "cu_seqlens_k": np.array([0, 9, 199, 330])}
    yield 64, 64, {}
    yield 128, 128, {"causal": True, "kv_lengths": [330, 133], "sinks": rng.standard_normal(4)}
    yield 128, 128, {"bias": rng.standard_normal((2, 4, 201, 330)).astype(np.float32)}
    yield 64, 64, {"bias": rng.standard_normal((4, 201, 330)), "dropout_p": 0.2}
    yield 40, 72, {"mask": rng.random((2, 1, 201, 330)) < 0.5, "softcap": 2.0}
    yield 64, 128, ends | {"causal": True}
    blocks = rng.random((4, 6)) < 0.5
    yield 128, 64, {"block_mask": tileattn.BlockMask(blocks, (64, 64)), "window": (200, 30)}
    yield 256, 256, {"causal": True}
    yield 192, 160, {"dropout_p": 0.2}


def run_split_floats(D: int, Dv: int, given: dict[str, Any]) -> None:
    """Run both passes of float32; other kernels compute the heads of one row that is infinite."""
    import cupy

    rng = np.random.default_rng(11)
    B = 1 if "cu_seqlens_q" in given else 2
    q, k, v, dout = (
        cupy.asarray(rng.standard_normal(shape).astype(np.float32))
        for shape in ((B, 4, 201, D), (B, 2, 330, D), (B, 2, 330, Dv), (B, 4, 201, Dv))
    )
    v[0, 1, 100] = np.inf
    there = {n: cupy.asarray(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    out, lse = tileattn.forward(q, k, v, **there)
    for x in (out, lse, *tileattn.backward(dout, q, k, v, out, lse, **there)):
        if isinstance(x, cupy.ndarray):
            x.get()


def append(dtype: Any, D: int, Dv: int, given: dict[str, Any]) -> None:
    """Append to caches, and rotate: what the device says is beyond the caches in part."""
    import cupy

    rng = np.random.default_rng(3)
    lead, keys = cache_shape(given)
    shapes = *((lead, 3, keys, n) for n in (D, Dv)), *((2, 3, 9, n) for n in (D, Dv))
    arrays = [cupy.asarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes]
    tables = tuple(cupy.asarray(rng.standard_normal((2, 2405, D // 3)).astype(np.float32)))
    places = {n: cupy.asarray(x) for n, x in given.items() if isinstance(x, np.ndarray)}
    tileattn.append_kv(*arrays, **places, rotary=tables).get()
    positions = cupy.asarray(rng.integers(-9, 2500, (2, 9)))
    for interleaved in (False, True):
        tileattn.rope(arrays[2], *tables, positions=positions, interleaved=interleaved).get()


def run_cascade(dtype: Any, D: int, Dv: int, page: int) -> None:
    """Attend to shared pages, and merge; some integers on the device are beyond the table."""
    import cupy

    rng = np.random.default_rng(9)
    shapes = (6, 4, 3, D), (40, 2, page, D), (40, 2, page, Dv)
    q, k, v = (cupy.asarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes)
    table, lengths = rng.permutation(40)[:36].reshape(6, 6), np.array([6, 5, 5, 4, 6, 6]) * page
    table[1:3, :4], table[4:, :4] = table[0, :4], table[3, :4]
    places = {"block_table": cupy.asarray(table), "kv_lengths": cupy.asarray(lengths)}
    for shared in (4 * page, [0, 3 * page], cupy.asarray([7 * page + 1, -5])):
        for x in tileattn.cascade(q, k, v, shared_lengths=shared, **places):
            x.get()
    outs = [q[..., n : D - 1 + n] for n in (0, 1)]
    for count in (1, 3, 9):
        lses = [cupy.asarray(rng.standard_normal(q.shape[:-1])) for _ in range(count)]
        lses = [x.astype(np.float64 if dtype == np.float64 else np.float32) for x in lses]
        for x in tileattn.merge([outs[n % 2] for n in range(count)], lses):
            x.get()


def run(dtype: Any, D: int, Dv: int, given: dict[str, Any]) -> None:
    """Run both passes, the backward one in either order of its sums."""
    import cupy

    rng = np.random.default_rng(1)
    B, Hq, Hkv, Nq, Nk = SIZES
    B = 1 if "cu_seqlens_q" in given else B
    q, k, v, dout = (
        cupy.asarray(rng.standard_normal(shape).astype(dtype))
        for shape in ((B, Hq, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, Dv), (B, Hq, Nq, Dv))
    )
    k[0, 0, 1] = np.inf  # a row that is not finite is computed again
    there = {n: cupy.asarray(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    if "aux" in given:
        there["aux"] = tuple(map(cupy.asarray, given["aux"]))
    out, lse = tileattn.forward(q, k, v, **there)
    for deterministic in (False, True):
        grads = tileattn.backward(
            *(dout, q, k, v, out, lse),
            dlse=cupy.zeros_like(lse),
            deterministic=deterministic,
            **there,
        )
        for x in (out, lse, *grads, *(grads.daux or ())):
            if x is not None:
                x.get()  # copying tells initcheck of bytes that were never written


def _few() -> Iterator[Any]:
    return few(np.random.default_rng(0))


JOBS: dict[str, tuple[Callable[..., None], Callable[[], Iterable[Any]]]] = {
    "calls": (run, lambda: calls(np.random.default_rng(0))),
    "few": (run_few, _few),
    "append": (append, _few),
    "quantised": (run_quantised, _few),
    "cascade": (
        run_cascade,
        lambda: ((x, *sizes) for x in DTYPES for sizes in ((64, 64, 16), (40, 24, 5))),
    ),
    "pages": (run_many, lambda: many({})),
    "invariant": (run_many, lambda: many({"invariant": True})),
    "claimed": (run_claimed, lambda: ((D,) for D in (64, 128, 256))),
    "shapes": (run_shape, lambda: SHAPES),
    "float32": (run_split_floats, split_floats),
}
"""By name for ``--only``: a function, and what lists the problems that it runs."""


def main() -> int:
    """Run everything; the exit status is 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="sanitize.py")
    parser.add_argument("--threads", type=int, default=1, help="problems at a time (default: 1)")
    parser.add_argument("--only", choices=JOBS, nargs="+", default=[*JOBS], help="some of them")
    parser.add_argument("--generic", action="store_true", help="run only generic kernels")
    chosen = parser.parse_args()
    reason = tileattn.available_backends()["cupy"]
    if reason is not None:
        sys.stderr.write(f"{reason}\n")
        return 2
    import cupy

    from tileattn.backends.cupy import describe

    cupy.cuda.set_allocator(None)
    if chosen.generic:
        device = describe.device_of(0)
        tuning = replace(device.tuning, generic_plane_rows=device.tuning.plane_rows)
        generic = replace(device, arch=device.arch.rstrip("a"), tuning=tuning)
        patch.object(describe, "device_of", lambda _: generic).start()
    count = 0
    with ThreadPoolExecutor(chosen.threads) as pool:
        for name in chosen.only:
            job, problems = JOBS[name]
            count += len(list(pool.map(lambda problem, f=job: f(*problem), problems())))
    cupy.cuda.Device().synchronize()
    sys.stdout.write(f"ran {count} problems: {', '.join(chosen.only)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
