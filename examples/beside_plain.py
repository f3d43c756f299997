"""Both passes of attention beside the textbook formula: time, and memory at its peak.

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
    """Compute causal attention and its gradients with all N x N probabilities."""
    scores = q @ k.swapaxes(1, 2) / np.sqrt(np.float32(q.shape[-1]))
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    dp = dout @ v.swapaxes(1, 2)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) / np.sqrt(np.float32(q.shape[-1]))
    return p @ v, ds @ k, ds.swapaxes(1, 2) @ q, p.swapaxes(1, 2) @ dout


def tiled(q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, ...]:
    """Compute the same tile by tile."""
    attention, pullback = tileattn.vjp(q, k, v, causal=True)
    return attention.out, *pullback(dout)[:3]


def measured(
    passes: Callable[..., tuple[Array, ...]], *arrays: Array
) -> tuple[float, float, tuple[Array, ...]]:
    """Return seconds, MiB at the peak of what is allocated, and the results."""
    passes(*(x[:, :64] for x in arrays))  # loads what the first call loads
    start = time.perf_counter()
    passes(*arrays)
    seconds = time.perf_counter() - start
    tracemalloc.start()
    results = passes(*arrays)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seconds, peak / 2**20, results


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
    print(
        f"tileattn takes 1/{slow / fast:.1f} of the time and 1/{large / small:.0f} of the memory."
    )
    pairs = zip(results, expected, strict=True)
    print(f"Largest difference: {max(np.abs(x - y).max() for x, y in pairs):.1e}")


if __name__ == "__main__":
    main()
