"""Speed of score_mod and mask_mod on the GPU, with FlexAttention as the baseline, in one run.

    python -m tileattn bench functions                   the gallery, at head dimensions 64 and 128
    python -m tileattn bench functions --only alibi --head-dim 128

tileattn runs each function of examples/score_functions.py, and FlexAttention its PyTorch
equivalent, compiled. The call without a function is timed too. There are times of the forward pass,
of the gradients of q, k and v, and, if a score reads floats, of all gradients. FlexAttention's
block masks are computed before the clock starts. The file is gpu_functions.json.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import tileattn
from benchmarks import report
from benchmarks.comparison import figures, time_in_turns
from benchmarks.configurations import DTYPES
from benchmarks.device import AGREEMENT, Gpu, difference
from benchmarks.report import Row, one_line
from benchmarks.tensors import arrays, to_torch
from examples import score_functions as gallery

B, H, N = 4, 16, 4096
HEAD_DIMS = (128, 64)
DOCUMENT = 700  # tokens
NAMES = ("q", "k", "v")
KINDS = ("forward", "backward", "backward, all gradients")

Function = Callable[..., Any]


class Case(NamedTuple):
    """A function of the gallery, its arrays, and how it is written for PyTorch."""

    option: str  # score_mod or mask_mod
    ours: Function
    theirs: Function  # of PyTorch and the arrays: the function that FlexAttention takes
    aux: tuple[Any, ...] = ()

    @property
    def learned(self) -> tuple[int, ...]:
        """Return the indices of the arrays that have gradients."""
        floats = (n for n, x in enumerate(self.aux) if x.dtype.kind == "f")
        return tuple(floats) if self.option == "score_mod" else ()


def cases() -> dict[str, Case]:
    """Return the calls of the gallery."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32)

    documents = np.broadcast_to(np.arange(N) // DOCUMENT, (B, N)).astype(np.int32)
    score, mask = partial(Case, "score_mod"), partial(Case, "mask_mod")
    return {
        "alibi": score(
            gallery.alibi,
            lambda _: lambda s, b, h, i, j: s - 2.0 ** -(h + 1.0) * (i - j).abs(),
        ),
        "soft_cap": score(
            gallery.soft_cap, lambda t: lambda s, b, h, i, j: 15.0 * t.tanh(s / 15.0)
        ),
        "relative_bias": score(
            gallery.relative_bias,
            lambda t, x: lambda s, b, h, i, j: s + x[h, t.clamp(i - j, -16, 16) + 16],
            (normal(H, 33),),
        ),
        "t5_bias": score(
            gallery.t5_bias,
            lambda _, x, y: lambda s, b, h, i, j: s + x[h, y[(i - j).abs()]],
            (normal(H, 16), gallery.t5_buckets(N).astype(np.int32)),
        ),
        "temperature": score(
            gallery.temperature,
            lambda t, x: lambda s, b, h, i, j: s * t.exp(-x[h]),
            (0.1 * normal(H),),
        ),
        "gaussian": score(
            gallery.gaussian,
            lambda _, x, y: lambda s, b, h, i, j: s - 0.5 * ((i - j - x[h]) / y[h]) ** 2,
            (3 * normal(H), 400 + 10 * normal(H)),
        ),
        "masked_score": score(
            gallery.masked_score,
            lambda t: lambda s, b, h, i, j: t.where((i + j) % 3 == 0, -float("inf"), s),
        ),
        "sliding_window": mask(
            partial(gallery.sliding_window, width=1024),
            lambda _: lambda b, h, i, j: (i >= j) & (i - j < 1024),
        ),
        "prefix_lm": mask(
            gallery.prefix_lm,
            lambda _, x: lambda b, h, i, j: (j < x[b]) | (i >= j),
            (np.array([100, 900, 2000, 3000], np.int32),),
        ),
        "documents": mask(
            gallery.documents,
            lambda _, x: lambda b, h, i, j: (x[b, i] == x[b, j]) & (i >= j),
            (documents,),
        ),
        "dilated_window": mask(
            partial(gallery.dilated_window, width=1024),
            lambda _: lambda b, h, i, j: ((i - j).abs() < 1024) & ((i - j) % 3 == 0),
        ),
        "local_and_global": mask(
            partial(gallery.local_and_global, block=256, tokens=64),
            lambda _: lambda b, h, i, j: (i // 256 == j // 256) | (j < 64) | (i < 64),
        ),
        "neighbourhood": mask(
            partial(gallery.neighbourhood, width=64, reach=4),
            lambda _: (
                lambda b, h, i, j: ((i // 64 - j // 64).abs() <= 4) & ((i % 64 - j % 64).abs() <= 4)
            ),
        ),
    }


def compared(name: str, case: Case | None, D: int, device: Gpu) -> Iterator[Row]:
    """Time each pass of tileattn and FlexAttention in turns; record failures."""
    xp, dtype = device.xp, DTYPES["bf16"]
    draw = xp.random.default_rng(1).standard_normal
    q, k, v, dout = (draw((B, H, N, D), dtype=np.float32).astype(dtype) for _ in range(4))
    options: dict[str, Any] = {} if case is None else {case.option: case.ours}
    if case is not None and case.aux:
        options["aux"] = tuple(map(xp.asarray, case.aux))
    attention = tileattn.forward(q, k, v, **options)

    def backward(wrt: tuple[str, ...] = NAMES) -> Any:
        return tileattn.backward(dout, q, k, v, *attention, wrt=wrt, **options)

    learned = () if case is None else case.learned
    ours: list[Callable[[], Any]] = [lambda: tileattn.forward(q, k, v, **options), backward]
    ours += [partial(backward, (*NAMES, "aux"))] if learned else []
    flex: list[Callable[[], Any]] = []
    failed, mismatch = {}, {}
    if case is not None:
        grads = ours[-1]()
        expected = [attention.out, *grads[:3], *(grads.daux[n] for n in learned)]
        try:
            flex = flex_calls(case, (q, k, v, dout))
            found = [x for call in (flex[0], flex[-1]) for x in arrays(call(), xp)]
            distance = difference(found, expected, xp)
        # A compiler that does not fit the GPU or a function may fail with anything.
        except Exception as error:
            failed["flex"] = one_line(error)
            flex = []
        else:
            if not distance <= AGREEMENT["bf16"]:
                mismatch["flex"] = f"{distance:.1e}"
    for n, kind in enumerate(KINDS[: len(ours)]):
        calls = {"tileattn": ours[n]} | ({"flex": flex[n]} if flex else {})
        times = time_in_turns(calls, device, failed)
        row = {"pass": kind, "function": name, "dtype": "bf16", "B": B, "H": H, "N": N, "D": D}
        yield row | figures(times, ["tileattn"], mismatch) | {"failed": dict(failed)}


def flex_calls(case: Case, given: tuple[Any, ...]) -> list[Callable[[], Any]]:
    """Prepare both passes of FlexAttention, and if a score reads floats, all gradients too."""
    import torch

    torch._dynamo.reset()
    calls = _flex_graph(case, given, learned=False)
    return calls + (_flex_graph(case, given, learned=True)[1:] if case.learned else [])


def _flex_graph(case: Case, given: tuple[Any, ...], *, learned: bool) -> list[Callable[[], Any]]:
    """Compile both passes, with the gradients of the arrays that a function reads."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v, dout = map(to_torch, given)
    aux = [torch.as_tensor(x, device="cuda") for x in case.aux]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    leaves += [aux[n].requires_grad_() for n in case.learned if learned]
    own = case.theirs(torch, *aux)
    options: dict[str, Any] = {"score_mod": own}
    if case.option == "mask_mod":
        options = {"block_mask": create_block_mask(own, B, None, N, N, device="cuda")}
    forward = partial(torch.compile(flex_attention, dynamic=False), *leaves[:3], **options)
    out = forward()
    return [forward, lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)]


def rows(names: list[str], head_dims: list[int], device: Gpu) -> Iterator[Row]:
    """Measure all functions at all head dimensions, after the call without one."""
    every: dict[str, Case | None] = {"plain": None, **cases()}
    for D in head_dims:
        plain: dict[str, float] = {}
        for name in ("plain", *names):
            for row in compared(name, every[name], D, device):
                us = row["us"]["tileattn"]
                yield row | {"of_plain": plain.setdefault(row["pass"], us) / us}
            device.release()


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; an interrupted run writes its rows, too."""
    parser = report.parser("functions", __doc__)
    known = tuple(cases())
    parser.add_argument("--only", type=partial(report.names, known), default=list(known))
    parser.add_argument("--head-dim", type=int, nargs="+", default=list(HEAD_DIMS))
    arguments: argparse.Namespace = report.parsed(parser, argv)
    device = Gpu.required()
    made = rows(arguments.only, arguments.head_dim, device)
    path = arguments.to / "gpu_functions.json"
    report.written(made, path, device.machine, arguments.ran, section="functions")


if __name__ == "__main__":
    main()
