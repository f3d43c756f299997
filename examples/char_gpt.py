"""Train a small GPT on the source text of Python's standard library, with tileattn inside.

The model reads bytes and predicts the next one. All of it is here, in array code, every gradient by
hand. Only attention is not: that is `tileattn.vjp`, which never holds the N x N probabilities.
Nothing is downloaded: the text is that of the running Python.

    python examples/char_gpt.py                  train for 40 seconds
    python examples/char_gpt.py --quick          train for 15 seconds
    python examples/char_gpt.py --check          tileattn and plain attention train alike
    python examples/char_gpt.py --backend cupy   the same on an NVIDIA GPU

The program prints the loss in bits per byte and, at the end, text that the model wrote. The folder
`--out` receives `loss.png`, the loss curve, and `attention.png`, where each head looks.

A layer is a function `layer(x, *weights)`. It returns its output and a function `backward`, which
takes the gradient with respect to the output and returns those with respect to x and the weights.
Activations are (T, C): T = B * N rows, one for each byte of B pieces of text of N bytes, and C
columns. NumPy's functions are called on CuPy arrays too: these run them on the GPU (NEP 13, 18).
"""

import argparse
import copy
import importlib
import math
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

import tileattn

Array = NDArray[Any]
Arrays = tuple[Array, ...]
Backward = Callable[[Array], Arrays]
Layer = Callable[..., tuple[Array, Backward]]
Curve = list[tuple[int, float]]

MAP_TEXT = b"def area(width):\n    return width * width\n"


def tiled_attention(backend: str = "auto") -> Layer:
    """Return tileattn's causal attention; for the way back it keeps one number for each query."""

    def attention(q: Array, k: Array, v: Array) -> tuple[Array, Backward]:
        (out, _), pullback = tileattn.vjp(q, k, v, causal=True, backend=backend)
        return out, lambda dout: pullback(dout)[:3]

    return attention


def plain_attention(q: Array, k: Array, v: Array) -> tuple[Array, Backward]:
    """Attend by the textbook formula, which keeps all the probabilities, (B, H, N, N)."""
    p = plain_probabilities(q, k)
    out = p @ v

    def backward(dout: Array) -> Arrays:
        delta = (dout * out).sum(axis=-1, keepdims=True)
        dscores = p * (dout @ v.swapaxes(-1, -2) - delta) / math.sqrt(q.shape[-1])
        return dscores @ k, dscores.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout

    return out, backward


def plain_probabilities(q: Array, k: Array) -> Array:
    """Return the causal softmax of q @ k.T / sqrt(D)."""
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    visible = np.tril(np.ones_like(scores, dtype=bool))
    scores = np.where(visible, scores, -math.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    probabilities: Array = weights / weights.sum(axis=-1, keepdims=True)
    return probabilities


def embedding(tokens: Array, table: Array, positions: Array) -> tuple[Array, Backward]:
    """Add the row of each byte and the row of its place: tokens (B, N) -> (B * N, C)."""
    N = tokens.shape[1]
    x = table[tokens] + positions[:N]

    def backward(dx: Array) -> Arrays:
        # As a matrix product, the sum over equal bytes has the same order in every run.
        one_hot = tokens.reshape(-1, 1) == np.arange(len(table), like=tokens)
        dpositions = np.zeros_like(positions)
        dpositions[:N] = dx.reshape(x.shape).sum(axis=0)
        return tokens, one_hot.astype(dx.dtype).T @ dx, dpositions

    return x.reshape(-1, x.shape[-1]), backward


def rms_norm(x: Array) -> tuple[Array, Backward]:
    """Scale each row to mean square 1."""
    inverse = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)
    y = x * inverse

    def backward(dy: Array) -> Arrays:
        return ((dy - y * (dy * y).mean(axis=-1, keepdims=True)) * inverse,)

    return y, backward


def attention_layer(
    x: Array, w_qkv: Array, w_out: Array, *, length: int, heads: int, core: Layer
) -> tuple[Array, Backward]:
    """Let each byte gather from itself and those before it: x + attend(norm(x) @ w_qkv) @ w_out."""
    normal, norm_backward = rms_norm(x)
    D = x.shape[1] // heads
    qkv = (normal @ w_qkv).reshape(-1, length, 3, heads, D)
    q, k, v = (qkv[:, :, part].swapaxes(1, 2) for part in range(3))  # views, (B, H, N, D)
    out, core_backward = core(q, k, v)
    joined = out.swapaxes(1, 2).reshape(x.shape)

    def backward(dy: Array) -> Arrays:
        dout = (dy @ w_out.T).reshape(-1, length, heads, D).swapaxes(1, 2)
        dparts = core_backward(dout)
        dqkv = np.stack([part.swapaxes(1, 2) for part in dparts], axis=2).reshape(len(x), -1)
        (dx,) = norm_backward(dqkv @ w_qkv.T)
        return dy + dx, normal.T @ dqkv, joined.T @ dy

    return x + joined @ w_out, backward


def mlp_layer(x: Array, w_up: Array, w_down: Array) -> tuple[Array, Backward]:
    """Transform each byte by itself: x + max(norm(x) @ w_up, 0)**2 @ w_down."""
    normal, norm_backward = rms_norm(x)
    positive = np.maximum(normal @ w_up, 0)
    hidden = positive * positive

    def backward(dy: Array) -> Arrays:
        dhidden = 2 * positive * (dy @ w_down.T)
        (dx,) = norm_backward(dhidden @ w_up.T)
        return dy + dx, normal.T @ dhidden, hidden.T @ dy

    return x + hidden @ w_down, backward


def head_layer(x: Array, table: Array) -> tuple[Array, Backward]:
    """Score each possible next byte by its row of the embedding table: (T, C) -> (T, 256)."""
    normal, norm_backward = rms_norm(x)
    return normal @ table.T, lambda dy: (*norm_backward(dy @ table), dy.T @ normal)


def cross_entropy(logits: Array, targets: Array) -> tuple[float, Array]:
    """Return the mean loss in bits per byte and its gradient with respect to the logits."""
    rows = np.arange(len(targets), like=targets)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    weights = np.exp(shifted)
    total = weights.sum(axis=-1, keepdims=True)
    bits = (np.log(total[:, 0]) - shifted[rows, targets]) / math.log(2)
    dlogits = weights / total
    dlogits[rows, targets] -= 1
    return float(bits.mean()), dlogits / (len(targets) * math.log(2))


class Shape(NamedTuple):
    """The sizes of a model; a head has width // heads columns."""

    layers: int
    width: int
    heads: int
    context: int


def initial_weights(shape: Shape, seed: int) -> dict[str, Array]:
    """Return every weight by name. At first the blocks add nothing: `out` and `down` are zero."""
    rng, C = np.random.default_rng(seed), shape.width
    # The places start as waves of many lengths, and are learned from there on. This way "one byte
    # before" means the same everywhere: 3.0 bits per byte after 300 steps, random places 3.3.
    wavelengths = (4 * shape.context) ** (np.arange(C) // 2 * 2 / C)
    angles = 2 * math.pi * np.arange(shape.context)[:, None] / wavelengths
    waves = np.sin(angles + math.pi / 2 * (np.arange(C) % 2))
    weights = {"table": 0.05 * rng.standard_normal((256, C)), "positions": 0.07 * waves}
    for i in range(shape.layers):
        weights[f"{i}.qkv"] = rng.standard_normal((C, 3 * C)) / math.sqrt(C)
        weights[f"{i}.out"] = np.zeros((C, C))
        weights[f"{i}.up"] = rng.standard_normal((C, 4 * C)) / math.sqrt(C)
        weights[f"{i}.down"] = np.zeros((4 * C, C))
    return weights


def named_views(flat: Array, like: dict[str, Array]) -> dict[str, Array]:
    """Cut a vector into arrays with the names and shapes of `like`; they share its memory."""
    ends = np.cumsum([array.size for array in like.values()])[:-1].tolist()
    parts = zip(like.items(), np.split(flat, ends), strict=True)
    return {name: part.reshape(array.shape) for (name, array), part in parts}


class Model:
    """The network: all weights in one vector, all gradients in another, both with named views."""

    def __init__(
        self, shape: Shape, core: Layer, seed: int, xp: Any = np, dtype: Any = np.float32
    ) -> None:
        start = initial_weights(shape, seed)
        self.shape, self.core, self.xp = shape, core, xp
        self.flat = xp.asarray(np.concatenate([w.ravel() for w in start.values()]), dtype)
        self.flat_gradient = xp.zeros_like(self.flat)
        self.weights = named_views(self.flat, start)
        self.gradients = named_views(self.flat_gradient, start)

    def layers(self, length: int) -> list[tuple[Layer, list[str]]]:
        """Return the layers in order, each with the names of its weights."""
        attend = partial(attention_layer, length=length, heads=self.shape.heads, core=self.core)
        layers: list[tuple[Layer, list[str]]] = [(embedding, ["table", "positions"])]
        for i in range(self.shape.layers):
            layers += [(attend, [f"{i}.qkv", f"{i}.out"]), (mlp_layer, [f"{i}.up", f"{i}.down"])]
        return [*layers, (head_layer, ["table"])]

    def forward(self, tokens: Array) -> tuple[Array, list[tuple[Backward, list[str]]]]:
        """Return the logits (B * N, 256) for tokens (B, N), and the way back through the layers."""
        x, way_back = self.xp.asarray(tokens), []
        for layer, names in self.layers(tokens.shape[1]):
            x, backward = layer(x, *(self.weights[name] for name in names))
            way_back.append((backward, names))
        return x, way_back

    def loss(self, texts: Array, *, with_gradient: bool = False) -> float:
        """Return the bits per byte of texts (B, N + 1), and fill `gradients` where asked to."""
        logits, way_back = self.forward(texts[:, :-1])
        loss, dx = cross_entropy(logits, self.xp.asarray(texts[:, 1:].ravel()))
        if with_gradient:
            self.flat_gradient[...] = 0
            for backward, names in reversed(way_back):
                dx, *dweights = backward(dx)
                for name, dweight in zip(names, dweights, strict=True):
                    self.gradients[name] += dweight  # the table serves two layers
        return loss


class Adam:
    """Adam (Kingma and Ba, 2015), after clipping the gradient to length 1."""

    def __init__(self, model: Model) -> None:
        self.model, self.steps = model, 0
        self.mean, self.square = np.zeros_like(model.flat), np.zeros_like(model.flat)

    def step(self, texts: Array, rate: float) -> float:
        """Return the loss on the texts, and move the weights against its gradient."""
        loss = self.model.loss(texts, with_gradient=True)
        gradient = self.model.flat_gradient
        gradient *= 1 / max(1.0, math.sqrt(float(gradient @ gradient)))
        self.steps += 1
        self.mean += 0.1 * (gradient - self.mean)
        self.square += 0.01 * (gradient * gradient - self.square)
        rate *= math.sqrt(1 - 0.99**self.steps) / (1 - 0.9**self.steps)
        self.model.flat -= rate * self.mean / (np.sqrt(self.square) + 1e-8)
        return loss


def library_text() -> tuple[Array, Array]:
    """Return the bytes of the standard library's modules: nine files in ten, and every tenth."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    if len(sources) < 20:
        sys.exit(f"char_gpt: {folder} has too few .py files; use a Python with its library's text")
    held_out = b"".join(sources[5::10])
    del sources[5::10]
    return np.frombuffer(b"".join(sources), np.uint8), np.frombuffer(held_out, np.uint8)


def pieces(text: Array, count: int, context: int, rng: np.random.Generator) -> Array:
    """Return random pieces of text, (count, context + 1)."""
    starts = rng.integers(0, len(text) - context, (count, 1))
    return text.take(starts + np.arange(context + 1)).astype(np.int64)


def held_out_loss(model: Model, text: Array) -> float:
    """Return the bits per byte over always the same 16 batches of 16 pieces of text."""
    context, rng = model.shape.context, np.random.default_rng(0)
    return float(np.mean([model.loss(pieces(text, 16, context, rng)) for _ in range(16)]))


def sample(model: Model, prompt: bytes, count: int, seed: int) -> str:
    """Return the prompt and `count` bytes drawn one by one, a little sharper than predicted."""
    rng, tokens = np.random.default_rng(seed), list(prompt)
    for _ in range(count):
        logits, _ = model.forward(np.array([tokens[-model.shape.context :]]))
        scores = np.array(logits[-1].tolist()) / 0.8  # from a GPU too
        weights = np.exp(scores - scores.max())
        tokens.append(int(rng.choice(256, p=weights / weights.sum())))
    return "".join(chr(t) if 32 <= t < 127 or t == 10 else "?" for t in tokens)


def attention_maps(model: Model, text: bytes) -> list[Array]:
    """Return the probabilities (H, N, N) of each layer, recomputed as exp(scores - lse)."""
    maps: list[Array] = []

    def watched_core(q: Array, k: Array, v: Array) -> tuple[Array, Backward]:
        _, lse = tileattn.forward(q, k, v, causal=True)
        scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
        probabilities = np.tril(np.exp(np.tril(scores - lse[..., None])))
        maps.append(np.array(probabilities[0].tolist()))
        return model.core(q, k, v)

    watched = copy.copy(model)
    watched.core = watched_core
    watched.forward(np.frombuffer(text, np.uint8)[None].astype(np.int64))
    return maps


def show_progress(before: float, done: float, message: str) -> None:
    """Move the progress bar; where stdout is no terminal, print a line at each tenth instead."""
    if sys.stdout.isatty():
        bar = ("#" * round(30 * done)).ljust(30, ".")
        print(f"\r[{bar}] {message}", end="\n" if done >= 1 else "", flush=True)
    elif int(10 * done) > int(10 * before):
        print(f"{done:4.0%}  {message}", flush=True)


def train(model: Model, text: Array, held_out: Array, args: argparse.Namespace) -> list[Curve]:
    """Train until the steps or the seconds are used up; the learning rate falls towards the end.

    Returns two curves of (step, bits per byte): each training batch, and the held-out text.
    """
    rng, adam = np.random.default_rng(args.seed), Adam(model)
    curves: list[Curve] = [[], [(0, held_out_loss(model, held_out))]]
    start, done = time.perf_counter(), 0.0
    while done < 1:
        rate = args.rate * min(1, (adam.steps + 1) / 50) * (1 - 0.98 * done)
        loss = adam.step(pieces(text, args.batch, args.context, rng), rate)
        curves[0].append((adam.steps, loss))
        seconds = time.perf_counter() - start
        before, done = done, min(1.0, max(adam.steps / args.steps, seconds / args.seconds))
        if int(20 * done) > int(20 * before):
            curves[1].append((adam.steps, held_out_loss(model, held_out)))
        loss = float(np.mean(curves[0][-50:], axis=0)[1])
        message = f"step {adam.steps:4d}  {loss:.3f} bits/byte  {seconds:4.0f} s"
        show_progress(before, done, message)
    return curves


def check(shape: Shape, text: Array, args: argparse.Namespace, xp: Any) -> bool:
    """Train with plain attention and with tileattn from one start; tell if the losses agree.

    The two round differently, and training magnifies any difference. A third run shows by how
    much: plain attention again, with every weight of the start changed by one rounding. The start
    has no weights of zero here, so that attention matters from the first step.
    """
    epsilon = float(np.finfo(np.float32).eps)

    def losses(core: Layer, nudge: float) -> Array:
        rng, adam = np.random.default_rng(args.seed), Adam(Model(shape, core, args.seed, xp))
        start = adam.model.flat
        start += xp.asarray(0.05 * rng.standard_normal(start.size))
        start *= xp.asarray(1 + nudge * rng.choice([-1, 1], start.size))
        batches = (pieces(text, args.batch, args.context, rng) for _ in range(args.steps))
        return np.array([adam.step(batch, args.rate) for batch in batches])

    print(f"Training three times, {args.steps} steps each ...", flush=True)
    plain, tiled = losses(plain_attention, 0), losses(tiled_attention(args.backend), 0)
    drift = np.abs(losses(plain_attention, epsilon) - plain).max()
    bound = 8 * max(float(drift), epsilon * float(plain.max()))
    difference = np.abs(tiled - plain)
    print("step   plain attention   tileattn    difference   (bits per byte)")
    for i in range(0, args.steps, max(1, args.steps // 20)):
        print(f"{i + 1:4d}   {plain[i]:15.6f}   {tiled[i]:.6f}   {difference[i]:11.1e}")
    print(f"largest difference {difference.max():.1e}; rounding alone may make {bound:.1e}")
    agree = bool(difference.max() <= bound)  # a NaN does not agree
    print("The losses agree." if agree else "THE LOSSES DISAGREE.")
    return agree


def draw(curves: list[Curve], maps: list[Array], folder: Path) -> None:
    """Write loss.png and attention.png into a folder."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("No pictures without matplotlib; to install it: python -m pip install matplotlib")
        return
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*np.transpose(curves[0]), color="0.75", lw=0.8, label="each training batch")
    axes.plot(*np.transpose(curves[1]), "o-", ms=4, label="held-out files")
    axes.set(title="Loss of the byte-level GPT", xlabel="step", ylabel="bits per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / "loss.png", dpi=150)
    letters = [{10: "\\n", 32: "\u00b7"}.get(byte, chr(byte)) for byte in MAP_TEXT]
    H, N = maps[0].shape[:2]
    figure = Figure(figsize=(3.6 * H + 0.8, 3.8 * len(maps) + 0.4), layout="constrained")
    grid = figure.subplots(len(maps), H, squeeze=False)
    for (layer, head), axes in np.ndenumerate(grid):
        image = axes.imshow(maps[layer][head], cmap="Blues", vmin=0, vmax=1)
        axes.set_xticks(range(N), letters[:N], fontsize=5.5, family="monospace")
        axes.set_yticks(range(N), letters[:N], fontsize=5.5, family="monospace")
        axes.tick_params(length=0, pad=2)
        axes.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=10)
    figure.suptitle("Attention: how much each byte (row) takes from each byte before it (column)")
    figure.colorbar(image, ax=grid, shrink=0.5, pad=0.01, label="probability, exp(score - lse)")
    figure.savefig(folder / "attention.png", dpi=150)
    print(f"Pictures: {folder / 'loss.png'}, {folder / 'attention.png'}")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = partial(parser.add_argument, metavar="N", type=int)
    add("--layers", default=2)
    add("--width", default=128)
    add("--heads", default=4)
    add("--context", default=128, help="bytes that the model sees at once")
    add("--batch", default=8, help="pieces of text in a training step")
    add("--steps", help="default: 1500, with --quick 300, with --check 30")
    add("--seconds", default=40, type=float, help="stop training after so long")
    add("--rate", default=3e-3, type=float, help="largest learning rate")
    add("--seed", default=0)
    add("--out", default="char_gpt_output", metavar="FOLDER", type=Path)
    parser.add_argument("--quick", action="store_true", help="train for 15 seconds at most")
    parser.add_argument("--check", action="store_true", help="compare with plain attention")
    parser.add_argument("--backend", default="auto", choices=["auto", "numpy", "llvm", "cupy"])
    args = parser.parse_args()
    if args.steps is None:
        args.steps = 30 if args.check else 300 if args.quick else 1500
    args.seconds = min(args.seconds, 15) if args.quick else args.seconds
    sizes = (args.layers, args.width, args.heads, args.context, args.batch)
    if min(*sizes, args.steps, args.seconds) < 1:
        parser.error("sizes, --steps and --seconds must be at least 1")
    if args.width % args.heads:
        parser.error(f"--width must be a multiple of --heads, {args.heads}; got {args.width}")
    return args


def main() -> None:
    """Train, or check."""
    # These matrix products are small: more threads gain little, and wait long for a busy core.
    threadpool_limits(1, user_api="blas")
    args = arguments()
    if reason := tileattn.available_backends().get(args.backend):
        sys.exit(f"char_gpt: {reason}")
    xp = importlib.import_module("cupy") if args.backend == "cupy" else np
    shape = Shape(args.layers, args.width, args.heads, args.context)
    text, held_out = library_text()
    if args.check:
        sys.exit(0 if check(shape, text, args, xp) else 1)
    model = Model(shape, tiled_attention(args.backend), args.seed, xp)
    print(f"{model.flat.size:,} weights; {len(text):,} bytes of text; {len(held_out):,} held out")
    curves = train(model, text, held_out, args)
    print(f"Held-out files: {curves[1][-1][1]:.3f} bits per byte.\nSample:\n")
    print(sample(model, b"def ", 400, args.seed), "\n")
    draw(curves, attention_maps(model, MAP_TEXT[: args.context]), args.out)


if __name__ == "__main__":
    main()
