"""Speed inside PyTorch: `tileattn.torch`, `tileattn` on arrays, and PyTorch's attention.

    python -m tileattn bench frameworks            everything: about five minutes
    python -m tileattn bench frameworks --quick    small sizes: about half a minute
    python -m tileattn bench frameworks --gpu      on a GPU: about a minute

host: microseconds of a call of 16 tokens, which has hardly any arithmetic
passes: both passes of attention, on tensors and on arrays
block: both passes of a Llama block, compiled by PyTorch
training: a training step of a GPT in float32

The file is frameworks.json, with --gpu frameworks_gpu.json, or NAME.json. Implementations take
turns, as in `bench cpu` and `bench gpu`. On the CPU PyTorch has as many threads as tileattn; on a
GPU the block is timed with each backend of PyTorch that runs it.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import tileattn
import tileattn.torch
from benchmarks import report
from benchmarks.configurations import Call
from benchmarks.cpu import repeated, rounded, shortest_seconds
from benchmarks.report import Row
from tileattn.backends import threads
from tileattn.torch.tensors import array_of

Attention = Callable[..., Any]

ATTENTIONS: dict[str, Attention] = {
    "tileattn": tileattn.torch.scaled_dot_product_attention,
    "PyTorch": torch.nn.functional.scaled_dot_product_attention,
}


# --- models ---------------------------------------------------------------------------------------


class Block(nn.Module):  # type: ignore[misc,name-defined,unused-ignore]  # PyTorch is untyped here
    """Attention with groups of heads, and a gated perceptron, as in Llama."""

    def __init__(self, width: int, head_dim: int, groups: int, attention: Attention) -> None:
        super().__init__()
        self.heads, self.head_dim, self.attention = width // head_dim, head_dim, attention
        self.kv_heads = self.heads // groups
        linear = partial(nn.Linear, bias=False)
        self.of_rows = linear(width, (self.heads + 2 * self.kv_heads) * head_dim)
        self.out = linear(width, width)
        self.gate, self.up, self.down = (
            linear(*sizes) for sizes in ((width, 3 * width),) * 2 + ((3 * width, width),)
        )
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))

    def forward(self, x: Any) -> Any:
        B, N, width = x.shape
        rows = self.of_rows(self.norms[0](x)).view(B, N, -1, self.head_dim).transpose(1, 2)
        q, k, v = rows.split((self.heads, self.kv_heads, self.kv_heads), 1)
        mixed = self.attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(B, N, width))
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def step_of(model: Any, x: Any, optimiser: Any = None) -> Call:
    """Return a call of both passes and of the optimiser, if any."""

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()
        if optimiser is not None:
            optimiser.step()

    return step


def training_steps(layers: int, width: int, x: Any, device: str = "cpu") -> dict[str, Call]:
    """Return a training step of a GPT with AdamW, for each attention."""
    calls: dict[str, Call] = {}
    for name, attention in ATTENTIONS.items():
        torch.manual_seed(0)
        blocks = (Block(width, 64, 1, attention) for _ in range(layers))
        model = nn.Sequential(*blocks).to(device)
        calls[name] = step_of(model, x, torch.optim.AdamW(model.parameters()))
    return calls


# --- sections -------------------------------------------------------------------------------------


def drawn(*shapes: tuple[int, ...], grad: bool = True) -> list[Any]:
    """Draw tensors on the default device, of the default dtype."""
    return [torch.randn(shape).requires_grad_(grad) for shape in shapes]


def both_passes(attention: Attention, rows: list[Any]) -> Call:
    """Make a call of attention and its gradients."""
    upstream = torch.ones_like(rows[0])
    return lambda: torch.autograd.grad(attention(*rows), rows, upstream) and None


def of_arrays(rows: list[Any]) -> Call:
    """Make the same call without PyTorch."""
    q, k, v = map(array_of, rows)
    dout = array_of(torch.ones_like(rows[0]))

    def call() -> None:
        out, lse = tileattn.forward(q, k, v)
        tileattn.backward(dout, q, k, v, out, lse)

    return call


def small_calls(drawn: Callable[..., list[Any]]) -> Iterator[tuple[str, dict[str, Call]]]:
    """Make calls that have hardly anything to compute, by pass, of rows as they are drawn."""
    rows = drawn(*((1, 8, 16, 64),) * 3, grad=False)
    q, k, v = map(array_of, rows)
    calls: dict[str, Call] = {"arrays": lambda: tileattn.forward(q, k, v) and None}
    calls |= {name: partial(attention, *rows) for name, attention in ATTENTIONS.items()}
    yield "forward", calls
    rows = drawn(*((1, 8, 16, 64),) * 3)
    calls = {"arrays": of_arrays(rows)}
    calls |= {name: both_passes(attention, rows) for name, attention in ATTENTIONS.items()}
    yield "forward and backward", calls


def host(seconds: float, _quick: bool) -> Iterator[Row]:
    """Time calls that have hardly anything to compute."""
    for kind, calls in small_calls(drawn):
        yield {"pass": kind, "us": micro(calls, seconds)}


def micro(calls: dict[str, Call], seconds: float) -> dict[str, float]:
    many = {name: repeated(call, 100) for name, call in calls.items()}
    return {name: 1e4 * t for name, t in shortest_seconds(many, seconds).items()}


def passes(seconds: float, quick: bool) -> Iterator[Row]:
    """Time both passes of attention alone."""
    for N in (256,) if quick else (256, 1024, 2048, 4096):
        rows = drawn(*((1, 8, N, 64),) * 3)
        calls = {"arrays": of_arrays(rows)}
        calls |= {name: both_passes(attention, rows) for name, attention in ATTENTIONS.items()}
        times = shortest_seconds(calls, seconds)
        yield {"N": N, "ms": {name: 1e3 * t for name, t in times.items()}}


def block(seconds: float, quick: bool) -> Iterator[Row]:
    """Time a block of width 1024, in the two dtypes of training."""
    N = 256 if quick else 2048
    for dtype in (torch.float32, torch.bfloat16):
        calls = {}
        for name, attention in ATTENTIONS.items():
            torch.manual_seed(0)
            model = torch.compile(Block(1024, 128, 4, attention).to(dtype), fullgraph=True)
            (x,) = drawn((1, N, 1024), grad=False)
            calls[name] = step_of(model, x.to(dtype))
        times = shortest_seconds(calls, seconds)
        yield {"N": N, "dtype": str(dtype)[6:], "ms": {n: 1e3 * t for n, t in times.items()}}


def training(seconds: float, quick: bool) -> Iterator[Row]:
    """Time a step of a GPT of 12 blocks, with its optimiser."""
    N, layers = (128, 2) if quick else (1024, 12)
    (x,) = drawn((2, N, 384), grad=False)
    times = shortest_seconds(training_steps(layers, 384, x), seconds)
    yield {"N": N, "layers": layers, "ms": {name: 1e3 * t for name, t in times.items()}}


SECTIONS = {section.__name__: section for section in (host, passes, block, training)}


def main(argv: list[str] | None = None) -> None:
    """Run the sections; what was measured is written even where a run is broken off."""
    parser = report.parser("frameworks", __doc__)
    names = partial(report.names, tuple(SECTIONS))
    parser.add_argument("--only", type=names, default=list(SECTIONS), help=",".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="small sizes, a tenth of the time")
    parser.add_argument("--gpu", action="store_true", help="time on a GPU")
    parser.add_argument("--name", help="stem of the file (frameworks, or frameworks_gpu)")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each row of the CPU (5)")
    arguments: argparse.Namespace = report.parsed(parser, argv)
    stem = arguments.name or ("frameworks_gpu" if arguments.gpu else "frameworks")
    made, machine = (_on_gpu if arguments.gpu else _on_cpu)(arguments)
    print(report.line(machine))
    path = arguments.to / f"{stem}.json"
    report.written(map(rounded, made), path, lambda: machine, arguments.ran)


def _on_cpu(arguments: argparse.Namespace) -> tuple[Iterator[Row], Row]:
    torch.set_num_threads(threads.worker_count())
    seconds = arguments.seconds / (10 if arguments.quick else 1)
    made = (
        {"section": section} | row
        for section in arguments.only
        for row in SECTIONS[section](seconds, arguments.quick)
    )
    return made, report.host() | {"torch": torch.__version__}


def _on_gpu(arguments: argparse.Namespace) -> tuple[Iterator[Row], Row]:
    from benchmarks import frameworks_gpu
    from benchmarks.device import Gpu

    gpu = Gpu.required()
    return frameworks_gpu.rows(arguments.only, arguments.quick, gpu), gpu.machine()


if __name__ == "__main__":
    main()
