"""Speed of options on the GPU, with other libraries as baselines, in one run.

    python -m tileattn bench options                     every option, both passes
    python -m tileattn bench options --only bias,mask --peers cudnn

The baselines are PyTorch's scaled_dot_product_attention with its cuDNN, memory-efficient or
FlashAttention-2 kernels, FlexAttention and FlashAttention-3 and 4, if they have the option. Results
are compared too, except with dropout, whose random bits differ. A row that failed says why. The
file is gpu_options.json.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

import tileattn
from benchmarks import peers, report
from benchmarks.comparison import compare
from benchmarks.configurations import Call, normal
from benchmarks.device import Gpu
from benchmarks.functions import DOCUMENT, B, Case, H, N, flex_calls
from benchmarks.libraries import Arrays, Flex, Library, Step
from benchmarks.report import Row

D = 128
WINDOW = 1024
PEERS = ("cudnn", "efficient", "flash", "fa3", "fa4", "flex")


class Option(NamedTuple):
    """An option, the same for FlexAttention if that has it, and options whose gradient is timed."""

    given: dict[str, Any]
    flex: Case | None = None
    learned: tuple[str, ...] = ()


class WithFlex(Flex):
    """FlexAttention with its own functions for an option."""

    def __init__(self, case: Case) -> None:
        super().__init__("FlexAttention")
        self._case = case

    def passes(self, step: Step) -> list[Call]:
        return flex_calls(self._case, step.rows)


def options(xp: Any) -> dict[str, Option]:
    """Return the calls, each with one option."""
    bias = normal(xp, (1, H, N, N), "bf16")
    mask = normal(xp, (B, 1, N, N), "f32") < 1.3  # nine in ten
    slopes = np.linspace(0.01, 0.5, H, dtype=np.float32)

    def alibi(t: Any) -> Any:
        x = t.as_tensor(slopes, device="cuda")  # no gradient is wanted
        return lambda s, b, h, i, j: s - x[h] * (i - j).abs()

    def document(_b: Any, _h: Any, i: Any, j: Any) -> Any:
        return i // DOCUMENT == j // DOCUMENT

    blocks = tileattn.BlockMask.from_predicate(document, (1, 1, N, N), (128, 128))
    soft = _flex("score_mod", lambda t: lambda s, b, h, i, j: 30 * t.tanh(s / 30))
    recent = _flex("mask_mod", lambda _: lambda b, h, i, j: (i >= j) & (i - j < WINDOW))
    within = _flex("mask_mod", lambda _: lambda b, h, i, j: document(b, h, i, j) & (i >= j))
    return {
        "plain": Option({}),
        "dropout": Option({"dropout_p": 0.1, "seed": 3}),
        "bias": Option({"bias": bias}),
        "bias and its gradient": Option({"bias": bias}, learned=("bias",)),
        "bias, float32": Option({"bias": bias.astype(np.float32)}),
        "mask": Option({"mask": mask}),
        "softcap": Option({"softcap": 30.0}, soft),
        "alibi_slopes": Option({"alibi_slopes": xp.asarray(slopes)}, _flex("score_mod", alibi)),
        "sinks": Option({"sinks": normal(xp, (H,), "f32")}),
        "causal window": Option({"causal": True, "window": (WINDOW - 1, 0)}, recent),
        "documents, causal": Option({"causal": True, "block_mask": blocks}, within),
    }


def _flex(option: str, theirs: Callable[..., Any]) -> Case:
    return Case(option, theirs, theirs)


def compared(
    name: str, option: Option, libraries: Mapping[str, Library], device: Gpu
) -> Iterator[Row]:
    """Time each pass of tileattn and the baselines in turns."""
    rows = tuple(normal(device.xp, (B, H, N, D), "bf16", seed) for seed in range(1, 5))
    step = Step(rows, option.given, learned=option.learned)
    there = {key: x for key, x in libraries.items() if key != "flex"}
    if "flex" in libraries and option.flex is not None:
        there["flex"] = WithFlex(option.flex)
    for kind, found in compare([step], there, device, "bf16"):
        row = {"pass": kind, "option": name, "dtype": "bf16", "B": B, "H": H, "N": N, "D": D}
        yield row | found


def rows(names: list[str], libraries: Mapping[str, Library], device: Gpu) -> Iterator[Row]:
    """Measure the options, after the call without one."""
    plain: dict[str, float] = {}
    for name, option in options(device.xp).items():
        if name != "plain" and name not in names:
            continue
        for row in compared(name, option, libraries, device):
            us = row["us"]["tileattn"]
            yield row | {"times_plain": us / plain.setdefault(row["pass"], us)}
        device.release()


def main(argv: list[str] | None = None, device: Gpu | None = None) -> None:
    """Run the benchmark; an interrupted run writes its rows, too."""
    parser = report.parser("options", __doc__)
    parser.add_argument("--only", type=lambda text: text.split(","), help="names of options")
    peers.add_options(parser, PEERS)
    arguments: argparse.Namespace = report.parsed(parser, argv)
    device = device or Gpu.required()
    known = list(options(device.xp))
    for name in arguments.only or ():
        if name not in known:
            parser.error(f"--only has {name}, which is none of {', '.join(known)}")
    found, missing = peers.find(arguments.peers)
    report.show_missing(missing)
    made = rows(arguments.only or known, {"tileattn": Arrays("tileattn"), **found}, device)
    path = arguments.to / "gpu_options.json"
    more = {"section": "options", "missing": missing}
    report.written(made, path, device.machine, arguments.ran, **more)


if __name__ == "__main__":
    main()
