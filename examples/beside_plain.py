"""Both passes of attention beside the plain formula: time, and memory at its peak.

python examples/beside_plain.py                  4096 tokens
python examples/beside_plain.py --tokens 8192    where the formula takes gigabytes
"""

import argparse
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tileattn

Array = NDArray[Any]
HEADS, WIDTH = 4, 64


def plain(q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, ...]:
    """Compute causal attention and its gradients with two N x N arrays a head, changed in place."""
    scale, tokens = np.float32(q.shape[-1] ** -0.5), q.shape[1]
    p = (scale * q) @ k.swapaxes(1, 2)
    p += np.triu(np.full((tokens, tokens), -np.inf, np.float32), 1)
    p -= p.max(axis=-1, keepdims=True)
    np.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    out, dv = p @ v, p.swapaxes(1, 2) @ dout
    ds = dout @ v.swapaxes(1, 2)
    ds -= (dout * out).sum(axis=-1, keepdims=True)
    ds *= p
    ds *= scale
    return out, ds @ k, ds.swapaxes(1, 2) @ q, dv


def tiled(q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, ...]:
    """Compute the same tile by tile."""
    attention, pullback = tileattn.vjp(q, k, v, causal=True)
    return attention.out, *pullback(dout)[:3]


def measured(
    passes: Callable[..., tuple[Array, ...]], *arrays: Array
) -> tuple[float, float, tuple[Array, ...]]:
    """Return the least seconds of three runs, MiB at the peak, and the results."""
    passes(*(x[:, :64] for x in arrays))  # loads what the first call loads
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        passes(*arrays)
        seconds.append(time.perf_counter() - start)
    tracemalloc.start()
    results = passes(*arrays)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return min(seconds), peak / 2**20, results


def main() -> None:
    """Measure both, and compare their results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    tokens = parser.parse_args().tokens
    arrays = np.random.default_rng(0).standard_normal((4, HEADS, tokens, WIDTH), np.float32)
    print(f"Causal attention forward and backward, {tokens:,} tokens, {HEADS} heads:")
    found = {"plain": measured(plain, *arrays), "tileattn": measured(tiled, *arrays)}
    for name, (seconds, peak, _) in found.items():
        print(f"  {name:8}  {seconds:7.3f} s  {peak:9,.0f} MiB")
    (slow, large, expected), (fast, small, results) = found.values()
    print(f"tileattn: {slow / fast:.1f} times as fast, with 1/{large / small:.0f} of the memory.")
    pairs = zip(results, expected, strict=True)
    print(f"Largest difference: {max(np.abs(x - y).max() for x, y in pairs):.1e}")


if __name__ == "__main__":
    main()
