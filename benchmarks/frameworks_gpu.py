"""`bench frameworks --gpu`: the sections of `benchmarks.frameworks` on a GPU."""

from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.configurations import Call
from benchmarks.device import Gpu
from benchmarks.frameworks import (
    ATTENTIONS,
    Attention,
    Block,
    both_passes,
    drawn,
    of_arrays,
    small_calls,
    step_of,
    training_steps,
)
from benchmarks.report import Row

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


def bf16(*shapes: tuple[int, ...], grad: bool = True) -> list[Any]:
    """Draw tensors on the GPU."""
    return [x.detach().cuda().bfloat16().requires_grad_(grad) for x in drawn(*shapes)]


def timed(gpu: Gpu, calls: dict[str, Call]) -> dict[str, float]:
    """Return the median milliseconds of each call that runs; say why others do not."""
    able = {name: call for name, call in calls.items() if runs(name, call)}
    times = gpu.time_each(list(able.values()))
    return {name: 1e3 * median(each) for name, each in zip(able, times, strict=True)}


def runs(name: str, call: Call) -> bool:
    """Return True if a call runs; if not, say why."""
    try:
        call()
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"{name} does not run: {type(error).__name__}: {error}")
        return False
    return True


def with_backend(backend: Any) -> Attention:
    """Make PyTorch's attention in one backend; graphs that are compiled keep it."""

    def attention(*rows: Any, **options: Any) -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(*rows, **options)

    return attention


def host(gpu: Gpu, quick: bool) -> Iterator[Row]:
    """Time calls that have hardly anything to compute."""
    for kind, calls in small_calls(bf16):
        yield {"pass": kind, "us": overheads(gpu, calls, quick)}


def overheads(gpu: Gpu, calls: dict[str, Call], quick: bool) -> dict[str, float]:
    """Return microseconds of the host, the least of several turns."""
    for call in calls.values():
        call()
    turns = [
        [gpu.launch_overhead(call, count=100) for call in calls.values()]
        for _ in range(2 if quick else 5)
    ]
    return {
        name: 1e6 * t for name, t in zip(calls, map(min, zip(*turns, strict=True)), strict=True)
    }


def passes(gpu: Gpu, quick: bool) -> Iterator[Row]:
    """Time both passes of attention alone."""
    for N in (512,) if quick else (512, 1024, 2048, 4096, 8192):
        rows = bf16(*((1, 16, N, 128),) * 3)
        calls = {"arrays": of_arrays(rows)}
        calls |= {name: both_passes(attention, rows) for name, attention in ATTENTIONS.items()}
        yield {"N": N, "dtype": "bfloat16", "ms": timed(gpu, calls)}


def block(gpu: Gpu, quick: bool) -> Iterator[Row]:
    """Time a Llama block, with each backend of PyTorch."""
    N, width = (512, 512) if quick else (4096, 4096)
    (x,) = bf16((1, N, width), grad=False)
    calls: dict[str, Call] = {}
    choices = {"tileattn": ATTENTIONS["tileattn"]}
    choices |= {f"PyTorch {name}": with_backend(x) for name, x in BACKENDS.items()}
    for name, attention in choices.items():
        torch.manual_seed(0)
        model = Block(width, 128, 4, attention).cuda().bfloat16()
        calls[name] = step_of(torch.compile(model, fullgraph=True), x)
    yield {"N": N, "dtype": "bfloat16", "ms": timed(gpu, calls)}


def training(gpu: Gpu, quick: bool) -> Iterator[Row]:
    """Time a step of a GPT of 12 blocks, with its optimiser, in float32."""
    N, layers, width = (256, 2, 256) if quick else (2048, 12, 768)
    x = torch.randn(4, N, width).cuda()
    for precision in ("highest", "high"):  # of matrix products; the second is TensorFloat-32
        torch.set_float32_matmul_precision(precision)
        times = timed(gpu, training_steps(layers, width, x, "cuda"))
        yield {"N": N, "layers": layers, "matmul precision": precision, "ms": times}
    torch.set_float32_matmul_precision("highest")


SECTIONS = {section.__name__: section for section in (host, passes, block, training)}


def rows(names: list[str], quick: bool, gpu: Gpu) -> Iterator[Row]:
    """Run sections on the current GPU."""
    for name in names:
        for row in SECTIONS[name](gpu, quick):
            yield {"section": name} | row
        gpu.release()
