"""Serve many requests at a time with the GPT of char_gpt.py, several bytes of each in a step.

- Continuous batching: a request joins when another has ended, and takes over its pages.
- A common prefix: its keys and values are stored once, and read once in a step for all requests.
  What these have of their own is attended to apart, and `tileattn.merge` joins both.
- Speculative decoding: where the last bytes stand earlier in the text, two of the continuations
  there are drafts. One call with a tree mask verifies them; those that the model would have
  written are kept.

    python examples/serve.py                    train for 30 seconds, then serve 16 requests
    python examples/serve.py --requests 40 --slots 8

The program prints the speed, and whether every request got the bytes that it gets alone, without
a cache, a prefix and drafts.
"""

import argparse
import copy
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import char_gpt  # type: ignore[import-not-found]  # it lies beside this file
import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

import tileattn

Array = NDArray[Any]
Attend = Callable[..., Any]
"""Takes queries, new keys and values, all (H, T, D), and pages of keys and values."""

PAGE = 16  # bytes whose keys and values one page has
PARENTS = (-1, 0, 1, 2, 0, 4, 5)  # the last byte, and two branches of drafts
DEPTH = np.array([0, 1, 2, 3, 1, 2, 3])
TREE = np.eye(len(PARENTS), dtype=bool)
for child, parent in enumerate(PARENTS[1:], 1):
    TREE[child] |= TREE[parent]


class Request:
    """A prompt, and what was written after it so far."""

    def __init__(self, prompt: bytes, count: int) -> None:
        self.text, self.count = list(prompt), count
        self.end = len(prompt) + count
        self.pages: list[int] = []
        self.length = 0  # keys in the cache; the last byte of the text has none yet

    def drafts(self) -> list[int]:
        """Guess the next bytes, as nodes of the tree: what followed the last two bytes before."""
        text, branch = bytes(self.text), len(PARENTS) // 2
        at, found = len(text) - 2, list[int]()
        while len(found) < 2 and (at := text.rfind(text[-2:], 0, at + 1)) >= 0:
            found.append(at + 2)
        nodes = [text[-1]]
        for start in [*found, 0, 0][:2]:
            nodes += (text[start:] * branch)[:branch]
        return nodes


class Server:
    """Runs up to `slots` requests at a time, each of up to `capacity` bytes after a prefix."""

    def __init__(self, model: Any, prefix: bytes, slots: int, capacity: int) -> None:
        shape, self.model = model.shape, model
        self.each = -(-(capacity + len(PARENTS)) // PAGE)
        sizes = slots * self.each, shape.heads, PAGE, shape.width // shape.heads
        self.k, self.v = np.zeros((2, shape.layers, *sizes), np.float32)
        self.free = list(range(slots * self.each))
        self.running: list[Request] = []
        self.prefix: list[tuple[Array, Array]] = []
        self.start = len(prefix)
        self.steps = 0

        def keep(q: Array, k: Array, v: Array) -> tuple[Array, None]:
            self.prefix.append((k, v))
            return tileattn.forward(q, k, v, causal=True).out, None

        self._run(np.frombuffer(prefix, np.uint8), np.arange(self.start), keep)

    def serve(self, requests: Sequence[Request]) -> None:
        """Answer all requests, those that come first first."""
        waiting = deque(requests)
        while waiting or self.running:
            joining = []
            while waiting and len(self.free) >= self.each:
                joining.append(waiting.popleft())
                joining[-1].pages = [self.free.pop() for _ in range(self.each)]
            if joining:
                self._read(joining)
            self.running += joining
            self._leave()
            if self.running:
                self._verify()
                self._leave()

    def _leave(self) -> None:
        for request in self.running:
            if len(request.text) >= request.end:
                del request.text[request.end :]
                self.free += request.pages
        self.running = [x for x in self.running if len(x.text) < x.end]

    def _read(self, joining: list[Request]) -> None:
        """Read prompts, packed, and write the first byte of each."""
        counts = [len(x.text) for x in joining]
        starts = np.cumsum([0, *counts])
        table, zeros = np.array([x.pages for x in joining]), np.zeros(len(joining), np.int64)

        def attend(q: Array, k: Array, v: Array, pages: tuple[Array, Array]) -> Any:
            where: dict[str, Any] = {"block_table": table, "cu_seqlens": starts}
            lengths = tileattn.append_kv(*pages, k, v, kv_lengths=zeros, **where)
            options = {"kv_lengths": lengths, "block_table": table, "cu_seqlens_q": starts}
            return tileattn.forward(q, *pages, **options, causal=True)

        places = self.start + np.concatenate([np.arange(n) for n in counts])
        tokens = np.concatenate([x.text for x in joining])
        written = self._run(tokens, places, self._core(attend))
        for request, n, last in zip(joining, counts, starts[1:] - 1, strict=True):
            request.length = n
            request.text.append(int(written[last]))

    def _verify(self) -> None:
        """Write one byte or more of each running request: those of its drafts that are right."""
        B, n, kept = len(self.running), len(PARENTS), list[tuple[Array, Array]]()
        table = np.array([x.pages for x in self.running])
        old = np.array([x.length for x in self.running])
        drafts = np.array([x.drafts() for x in self.running])
        places = self.start + old[:, np.newaxis] + DEPTH

        def attend(q: Array, k: Array, v: Array, pages: tuple[Array, Array]) -> tuple[Array, Array]:
            kept.append((k, v))
            q, k, v = (x.reshape(-1, B, n, x.shape[-1]).swapaxes(0, 1) for x in (q, k, v))
            where: dict[str, Any] = {"block_table": table, "kv_lengths": old}
            lengths = tileattn.append_kv(*pages, k, v, **where)
            options = {"kv_lengths": lengths, "block_table": table, "tree_mask": TREE[np.newaxis]}
            out, lse = tileattn.forward(q, *pages, **options)
            H = out.shape[1]
            return out.swapaxes(0, 1).reshape(H, B * n, -1), lse.swapaxes(0, 1).reshape(H, B * n)

        right = self._run(drafts.ravel(), places.ravel(), self._core(attend)).reshape(B, n)
        paths = [accepted(*each) for each in zip(drafts, right, strict=True)]
        # The rows of accepted nodes take the places after the old ones; the rest is forgotten.
        nodes = np.concatenate([b * n + np.array(path) for b, path in enumerate(paths)])
        starts = np.cumsum([0, *map(len, paths)])
        for layer, (k, v) in enumerate(kept):
            new = k[:, nodes], v[:, nodes]
            where: dict[str, Any] = {"kv_lengths": old, "block_table": table, "cu_seqlens": starts}
            tileattn.append_kv(self.k[layer], self.v[layer], *new, **where)
        for request, path, after in zip(self.running, paths, right, strict=True):
            request.length += len(path)
            request.text += after[path].tolist()
        self.steps += B

    def _core(self, attend: Attend) -> Callable[..., tuple[Array, None]]:
        """Return what attends in each layer in turn: to the prefix, and to keys in pages."""
        layers = zip(self.prefix, self.k, self.v, strict=True)

        def core(q: Array, k: Array, v: Array) -> tuple[Array, None]:
            (k_prefix, v_prefix), *pages = next(layers)
            common = tileattn.forward(q, k_prefix, v_prefix)
            out, lse = attend(q[0], k[0], v[0], pages)
            own = tileattn.Attention(out[np.newaxis], lse[np.newaxis])
            return tileattn.merge(*zip(common, own, strict=True)).out, None

        return core

    def _run(self, tokens: Array, places: Array, core: Callable[..., Any]) -> Array:
        """Run the model over packed bytes; give the most probable byte after each."""
        return next_bytes(self.model, tokens, places, core)


def accepted(drafts: Array, right: Array) -> list[int]:
    """Follow the tree from its root, as long as a draft is what the model writes there."""
    path = [0]
    while True:
        children = [n for n, parent in enumerate(PARENTS) if parent == path[-1]]
        found = [n for n in children if drafts[n] == right[path[-1]]]
        if not found:
            return path
        path.append(found[0])


def next_bytes(model: Any, tokens: Array, places: Array, core: Callable[..., Any]) -> Array:
    """Return the most probable byte after each of some bytes, whose places are given."""
    reader = copy.copy(model)
    reader.core = core
    reader.weights = model.weights | {"positions": model.weights["positions"][places]}
    logits, _ = reader.forward(np.asarray(tokens, np.int64)[np.newaxis])
    best: Array = np.argmax(logits, axis=-1)
    return best


def alone(model: Any, prefix: bytes, prompt: bytes, count: int) -> list[int]:
    """Write without a cache: read the whole text again for each byte."""
    text = [*prefix, *prompt]
    for _ in range(count):
        after = next_bytes(model, np.array(text), np.arange(len(text)), model.core)
        text.append(int(after[-1]))
    return text[len(prefix) :]


def compare(model: Any, prefix: bytes, asked: Sequence[tuple[bytes, int]], slots: int) -> bool:
    """Serve, and print the speed; tell if each request got the bytes that it gets alone."""
    capacity = max(len(prompt) + count for prompt, count in asked)
    requests = [Request(prompt, count) for prompt, count in asked]
    server = Server(model, prefix, slots, capacity)
    start = time.perf_counter()
    server.serve(requests)
    seconds, total = time.perf_counter() - start, sum(count for _, count in asked)
    start = time.perf_counter()
    expected = [alone(model, prefix, prompt, count) for prompt, count in asked]
    without = time.perf_counter() - start
    drafted = total - len(asked)
    print(f"served     {total / seconds:8,.0f} bytes/s, {len(asked)} requests in {slots} slots")
    print(f"alone      {total / without:8,.0f} bytes/s, without a cache")
    print(f"drafts     {drafted / max(server.steps, 1):8.2f} bytes in a step of a request")
    same = [x.text for x in requests] == expected
    print("The bytes are the same." if same else "THE BYTES DIFFER.")
    print("A request:\n\n" + bytes(requests[0].text).decode("ascii", "replace"))
    return same


def requests_of(text: Array, number: int, longest: int) -> list[tuple[bytes, int]]:
    """Draw prompts of several lengths from a text, and how many bytes each asks for."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(number):
        start, n = int(rng.integers(len(text) - 60)), int(rng.integers(4, 60))
        found.append((text[start : start + n].tobytes(), int(rng.integers(longest // 4, longest))))
    return found


def arguments() -> argparse.Namespace:
    """Read the command line; the rest is what training takes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", default=16, metavar="N", type=int)
    parser.add_argument("--slots", default=4, metavar="N", type=int, help="requests at a time")
    parser.add_argument("--tokens", default=200, metavar="N", type=int, help="bytes, at most")
    parser.add_argument("--seconds", default=30.0, metavar="N", type=float, help="of training")
    parser.set_defaults(seed=0, rate=3e-3, batch=2, steps=1_000_000)
    args = parser.parse_args()
    if min(args.requests, args.slots, args.seconds) < 1 or args.tokens < 4:
        parser.error("--requests, --slots and --seconds must be at least 1, and --tokens 4")
    return args


def main() -> None:
    """Train, and serve."""
    threadpool_limits(1, user_api="blas")  # the matrix products are small
    args = arguments()
    train, held_out = char_gpt.library_text()
    prefix = held_out[:200].tobytes()
    args.context = len(prefix) + 60 + args.tokens + len(PARENTS)
    shape = char_gpt.Shape(layers=2, width=128, heads=4, context=args.context)
    model = char_gpt.Model(shape, char_gpt.tiled_attention(), args.seed)
    char_gpt.train(model, train, held_out, args)
    asked = requests_of(held_out, args.requests, args.tokens)
    sys.exit(0 if compare(model, prefix, asked, args.slots) else 1)


if __name__ == "__main__":
    main()
