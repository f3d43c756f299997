"""Write text with the GPT of char_gpt.py, several samples at once, from a cache in pages.

Each new byte attends to all bytes before it. Without a cache their keys and values are computed
again for every byte; with one, only those of the new byte are. The samples continue one prompt, and
share the pages that it fills: these are stored once.

    python examples/generate.py                      train for 30 seconds, then write both ways
    python examples/generate.py --samples 16 --tokens 100 --prompt "class "

The program prints a sample, the speed of both ways, and whether they wrote the same bytes.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable
from typing import Any

import char_gpt  # type: ignore[import-not-found]  # it lies beside this file
import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

import tileattn

Array = NDArray[Any]
NextScores = Callable[[Array], Array]
"""Takes new bytes (B, N) of each text, and scores each possible byte after them: (B, 256)."""

PAGE = 16  # bytes whose keys and values one page has


class Cache:
    """Keys and values in pages, of a prompt and then of samples that continue it.

    A page has the same number in all layers. ``capacity`` is that of a sequence.
    """

    def __init__(self, shape: Any, samples: int, prompt: int, capacity: int) -> None:
        self.shared, each = prompt // PAGE, -(-capacity // PAGE)
        self.own = self.shared + np.arange(samples * (each - self.shared)).reshape(samples, -1)
        size = self.own.size + self.shared, shape.heads, PAGE, shape.width // shape.heads
        self.k, self.v = np.zeros((2, shape.layers, *size), np.float32)
        self.block_table = np.arange(each)[np.newaxis]
        self.kv_lengths = np.zeros(1, np.int64)

    def fork(self) -> None:
        """Let the samples continue the prompt: they share its full pages, and copy the last one."""
        shared = np.broadcast_to(np.arange(self.shared), (len(self.own), self.shared))
        for pages in (self.k, self.v):
            pages[:, self.own[:, 0]] = pages[:, self.shared, np.newaxis]
        self.block_table = np.concatenate([shared, self.own], axis=1)
        self.kv_lengths = np.repeat(self.kv_lengths, len(self.own))

    def attention(self) -> Callable[..., Any]:
        """Return what attends in each layer in turn, for new bytes of all sequences."""
        layers = zip(self.k, self.v, strict=True)

        def attention(q: Array, k: Array, v: Array) -> tuple[Array, None]:
            pages, table = next(layers), self.block_table
            lengths = tileattn.append_kv(
                *pages, k, v, kv_lengths=self.kv_lengths, block_table=table
            )
            out, _ = tileattn.forward(q, *pages, kv_lengths=lengths, block_table=table, causal=True)
            return out, None  # there is no way back

        return attention


def last_scores(model: Any, tokens: Array) -> Array:
    """Score each possible byte after tokens (B, N)."""
    logits: Array = model.forward(tokens)[0]
    return logits.reshape(*tokens.shape, -1)[:, -1]


def recomputing(model: Any) -> NextScores:
    """Read the whole text again for each byte."""
    text = np.zeros((1, 0), np.int64)

    def next_scores(new: Array) -> Array:
        nonlocal text
        text = np.concatenate([np.broadcast_to(text, (len(new), text.shape[1])), new], axis=1)
        return last_scores(model, text)

    return next_scores


def from_cache(model: Any, cache: Cache) -> NextScores:
    """Read the new bytes alone: first the prompt, then one for each sample."""

    def next_scores(new: Array) -> Array:
        if len(new) > len(cache.kv_lengths):
            cache.fork()
        reader, start = copy.copy(model), cache.kv_lengths[0]
        reader.core = cache.attention()
        reader.weights = model.weights | {"positions": model.weights["positions"][start:]}
        scores = last_scores(reader, new)
        cache.kv_lengths = cache.kv_lengths + new.shape[1]
        return scores

    return next_scores


def write(next_scores: NextScores, prompt: bytes, samples: int, count: int) -> Array:
    """Draw `count` bytes of each sample, a little sharper than predicted: (samples, count)."""
    rng = np.random.default_rng(0)
    new, written = np.frombuffer(prompt, np.uint8)[np.newaxis].astype(np.int64), []
    for _ in range(count):
        scores = next_scores(new) / 0.8
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        ends = np.cumsum(weights / weights.sum(axis=1, keepdims=True), axis=1)
        # The prompt has one row of scores, from which all samples draw.
        new = np.sum(ends[:, :-1] < rng.random((samples, 1)), axis=1, keepdims=True)
        written.append(new)
    return np.concatenate(written, axis=1)


def compare(model: Any, prompt: bytes, samples: int, count: int) -> bool:
    """Write both ways, and print what came out; tell if the bytes are the same."""
    sizes = model.shape, samples, len(prompt), len(prompt) + count
    ways: dict[str, Callable[[], NextScores]] = {
        "recomputed": lambda: recomputing(model),
        "from the cache": lambda: from_cache(model, Cache(*sizes)),
    }
    texts: list[Array] = []
    for name, way in ways.items():
        write(way(), prompt, samples, min(count, 3))  # kernels are compiled
        start = time.perf_counter()
        texts.append(write(way(), prompt, samples, count))
        speed = samples * count / (time.perf_counter() - start)
        print(f"{name:15s}{speed:8,.0f} bytes/s")
    cache = Cache(*sizes)
    pages, table = cache.k.shape[1], cache.block_table.size
    print(f"{pages} pages of {PAGE} bytes; {samples * table} if the samples shared none")
    same = np.array_equal(texts[0], texts[1])
    print("The bytes are the same." if same else "THE BYTES DIFFER.")
    print("A sample:\n\n" + bytes([*prompt, *texts[1][0].tolist()]).decode("ascii", "replace"))
    return same


def arguments() -> argparse.Namespace:
    """Read the command line; the rest is what training takes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompt", default="class Reader:\n    def __init__(self, ")
    parser.add_argument("--samples", default=4, metavar="N", type=int)
    parser.add_argument("--tokens", default=400, metavar="N", type=int, help="bytes of a sample")
    parser.add_argument("--seconds", default=30.0, metavar="N", type=float, help="of training")
    parser.set_defaults(seed=0, rate=3e-3, batch=2, steps=1_000_000)
    args = parser.parse_args()
    if min(args.samples, args.tokens, args.seconds) < 1:
        parser.error("--samples, --tokens and --seconds must be at least 1")
    if not args.prompt:
        parser.error("--prompt must not be empty")
    args.context = len(args.prompt.encode()) + args.tokens
    return args


def main() -> None:
    """Train, and write."""
    threadpool_limits(1, user_api="blas")  # the matrix products are small
    args = arguments()
    shape = char_gpt.Shape(layers=2, width=128, heads=4, context=args.context)
    model = char_gpt.Model(shape, char_gpt.tiled_attention(), args.seed)
    char_gpt.train(model, *char_gpt.library_text(), args)
    same = compare(model, args.prompt.encode(), args.samples, args.tokens)
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
