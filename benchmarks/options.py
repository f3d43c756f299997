"""Speed of options on the GPU, with other libraries as baselines, in one run.

    python -m tileattn bench options                     every option, both passes
    python -m tileattn bench options --only bias,mask --peers cudnn

The baselines are PyTorch's scaled_dot_product_attention with its cuDNN, memory-efficient or
FlashAttention-2 kernels, FlexAttention and FlashAttention-4, if they have the option. Results are
compared too, except with dropout, whose random bits differ. A row that failed says why. The file is
gpu_options.json.
"""

import argparse
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np

import tileattn
from benchmarks import report
from benchmarks.configurations import PASSES, normal
from benchmarks.device import AGREEMENT, Gpu, difference
from benchmarks.functions import DOCUMENT, NAMES, B, Case, H, N, flex_calls
from benchmarks.implementations import arrays, to_torch
from benchmarks.report import Row, one_line

D = 128
WINDOW = 1024
SDPA = {"cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "flash": "FLASH_ATTENTION"}
PEERS = (*SDPA, "fa4", "flex")

Calls = list[Callable[[], Any]]
Given = tuple[Any, ...]  # q, k, v, dout


class Option(NamedTuple):
    """An option, and its equivalents in other libraries, or None."""

    ours: dict[str, Any]
    sdpa: dict[str, Any] | None = None
    fa4: dict[str, Any] | None = None
    flex: Case | None = None
    wrt: tuple[str, ...] = NAMES


def options(xp: Any) -> dict[str, Option]:
    """Return the calls, each with one option."""
    bias = normal(xp, (1, H, N, N), "bf16")
    mask = normal(xp, (B, 1, N, N), "f32") < 1.3  # nine in ten
    slopes = np.linspace(0.01, 0.5, H, dtype=np.float32)
    window = {"causal": True, "window": (WINDOW - 1, 0)}

    def alibi(t: Any) -> Any:
        x = t.as_tensor(slopes, device="cuda")  # no gradient is wanted
        return lambda s, b, h, i, j: s - x[h] * (i - j).abs()

    def document(_b: Any, _h: Any, i: Any, j: Any) -> Any:
        return i // DOCUMENT == j // DOCUMENT

    blocks = tileattn.BlockMask.from_predicate(document, (1, 1, N, N), (128, 128))
    return {
        "plain": Option({}, {}, {}),
        "dropout": Option({"dropout_p": 0.1, "seed": 3}, {"dropout_p": 0.1}),
        "bias": Option({"bias": bias}, {"attn_mask": bias}),
        "bias and its gradient": Option({"bias": bias}, {"attn_mask": bias}, wrt=(*NAMES, "bias")),
        "bias, float32": Option({"bias": bias.astype(np.float32)}),
        "mask": Option({"mask": mask}, {"attn_mask": mask}),
        "softcap": Option(
            {"softcap": 30.0},
            fa4={"softcap": 30.0},
            flex=_flex("score_mod", lambda t: lambda s, b, h, i, j: 30 * t.tanh(s / 30)),
        ),
        "alibi_slopes": Option(
            {"alibi_slopes": xp.asarray(slopes)},
            flex=_flex("score_mod", alibi),
        ),
        "sinks": Option({"sinks": normal(xp, (H,), "f32")}),
        "causal window": Option(
            window,
            fa4={"causal": True, "window_size": (WINDOW - 1, 0)},
            flex=_flex("mask_mod", lambda _: lambda b, h, i, j: (i >= j) & (i - j < WINDOW)),
        ),
        "documents, causal": Option(
            {"causal": True, "block_mask": blocks},
            flex=_flex("mask_mod", lambda _: lambda b, h, i, j: (document(b, h, i, j)) & (i >= j)),
        ),
    }


def _flex(option: str, theirs: Callable[..., Any]) -> Case:
    return Case(option, theirs, theirs)


def compared(name: str, option: Option, peers: list[str], device: Gpu) -> Iterator[Row]:
    """Time both passes of tileattn and the baselines in turns; record failures."""
    xp = device.xp
    shape = (B, H, N, D)
    given = tuple(normal(xp, shape, "bf16", seed) for seed in range(1, 5))
    q, k, v, dout = given
    attention = tileattn.forward(q, k, v, **option.ours)
    backward = partial(tileattn.backward, dout, q, k, v, *attention, wrt=option.wrt, **option.ours)
    calls: Calls = [partial(tileattn.forward, q, k, v, **option.ours), backward]
    grads = backward()
    expected = [attention.out, *(getattr(grads, f"d{x}") for x in option.wrt)]
    there, failed = ["tileattn"], {}
    for peer in peers:
        try:
            made = _calls(peer, option, given)
            if made is None:
                continue
            found = [x for call in made for x in arrays(call(), xp)]
            distance = difference(found, expected, xp)
            if "dropout_p" not in option.ours and not distance <= AGREEMENT["bf16"]:
                raise RuntimeError(f"the results differ by {distance:.1e}")
        # A library that does not fit the others installed may fail with anything.
        except Exception as error:
            failed[peer] = one_line(error)
        else:
            calls += made
            there.append(peer)
    times = [1e3 * median(x) for x in device.time_each(calls)]
    for n, kind in enumerate(PASSES):
        ms = dict(zip(there, times[n::2], strict=True))
        own = ms.pop("tileattn")
        yield {
            **{"pass": kind, "option": name, "dtype": "bf16", "B": B, "H": H, "N": N, "D": D},
            "ms": own,
            "peers_ms": ms,
            "speedup": min(ms.values()) / own if ms else None,
            "failed": failed,
        }


def _calls(peer: str, option: Option, given: Given) -> Calls | None:
    """Prepare both passes of a library; None if it lacks the option."""
    if peer == "flex":
        return None if option.flex is None else flex_calls(option.flex, given)
    if peer == "fa4":
        return None if option.fa4 is None else _fa4(given, option.fa4)
    if option.sdpa is None:
        return None
    return _sdpa(SDPA[peer], given, option.sdpa, learned="bias" in option.wrt)


def _sdpa(backend: str, given: Given, options: dict[str, Any], learned: bool) -> Calls:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, dout = map(to_torch, given)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    options = {n: to_torch(x) if hasattr(x, "shape") else x for n, x in options.items()}
    if learned:
        options["attn_mask"] = options["attn_mask"].clone().requires_grad_()
        leaves.append(options["attn_mask"])

    def forward() -> Any:
        with sdpa_kernel([getattr(SDPBackend, backend)]):
            return torch.nn.functional.scaled_dot_product_attention(*leaves[:3], **options)

    out = forward()
    return [forward, lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)]


def _fa4(given: Given, options: dict[str, Any]) -> Calls:
    """Prepare FlashAttention-4, whose arrays are (B, N, H, D)."""
    import torch

    function = importlib.import_module("flash_attn.cute").flash_attn_func
    q, k, v, dout = (to_torch(x).transpose(1, 2).contiguous() for x in given)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def forward() -> Any:
        out = function(*leaves, **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    out = forward()
    dout = dout.transpose(1, 2)

    def backward() -> Any:
        grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        return tuple(x.transpose(1, 2) for x in grads)

    return [forward, backward]


def rows(names: list[str], peers: list[str], device: Gpu) -> Iterator[Row]:
    """Measure the options, after the call without one."""
    plain: dict[str, float] = {}
    for name, option in options(device.xp).items():
        if name != "plain" and name not in names:
            continue
        for row in compared(name, option, peers, device):
            ms = plain.setdefault(row["pass"], row["ms"])
            yield row | {"times_plain": row["ms"] / ms}
        device.release()


def main(argv: list[str] | None = None, device: Gpu | None = None) -> None:
    """Run the benchmark; an interrupted run writes its rows, too."""
    parser = report.parser("options", __doc__)
    parser.add_argument("--only", type=lambda text: text.split(","), help="names of options")
    parser.add_argument("--peers", type=partial(report.names, PEERS), default=list(PEERS))
    arguments: argparse.Namespace = report.parsed(parser, argv)
    device = device or Gpu.required()
    known = list(options(device.xp))
    for name in arguments.only or ():
        if name not in known:
            parser.error(f"--only has {name}, which is none of {', '.join(known)}")
    made = rows(arguments.only or known, arguments.peers, device)
    path = arguments.to / "gpu_options.json"
    report.written(made, path, device.machine, arguments.ran, section="options")


if __name__ == "__main__":
    main()
