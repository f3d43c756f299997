"""The command ``bench``: run a benchmark of a checkout."""

import argparse
import importlib
from typing import Any

from tileattn.cli.arguments import add_json, print_json, refused

BENCHMARKS = {
    "cpu": "speed on NumPy arrays, both backends; baselines: PyTorch, OpenVINO, ONNX Runtime",
    "decode": "speed of decoding on the GPU; baselines: cuDNN, FlashAttention",
    "distributed": "speed of ranks that share a sequence; baseline: one rank",
    "distributed_gpu": "speed of GPUs that share a sequence; baseline: one GPU",
    "end_to_end": "speed of whole models, training and generating; baseline: PyTorch",
    "frameworks": "speed of attention inside PyTorch; baseline: PyTorch's own",
    "functions": "speed of score_mod and mask_mod on the GPU; baseline: FlexAttention",
    "gpu": "speed on CuPy arrays; baselines: PyTorch, FlashAttention, naive CuPy",
    "invariant": "cost of invariant=True on the GPU, in decoding and in prefill",
    "model_shapes": "speed of the shapes of real models on the GPU; baselines: as gpu",
    "packed": "speed of packed sequences on the GPU; baseline: FlashAttention",
    "options": "speed of options on the GPU; baselines: PyTorch, FlashAttention",
    "traffic": "FLOPs and bytes: the model, and hardware counters of a GPU",
    "memory": "peak memory by sequence length; baseline: naive attention",
    "lived": "speed of loops in which no call repeats; baselines: PyTorch, FlashAttention",
    "nonfinite": "slowdown of calls with NaN or infinity in the inputs",
    "part": "all benchmarks of a part of the page of speed, in at most ten minutes",
    "tuning": "what each tuned number of the CUDA kernels is worth, on the GPU at hand",
}
"""Modules of ``benchmarks``, and what each measures."""


def add_to(commands: Any) -> None:
    """Add the command."""
    about = "run a benchmark, in a checkout of the repository; it writes its results as JSON"
    parser = commands.add_parser("bench", help=about, description=about)
    add_json(parser)
    parser.add_argument("section", nargs="?", choices=BENCHMARKS, help="without it: list them")
    rest = "options of the benchmark; --help lists them"
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=rest)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Pass the rest of the command line to a module of ``benchmarks``, which the wheel lacks."""
    if arguments.section is None:
        if arguments.json:
            print_json(BENCHMARKS)
            return 0
        print("python -m tileattn bench BENCHMARK [--help]")
        for name, measured in BENCHMARKS.items():
            print(f"  {name:15} {measured}")
        return 0
    if arguments.json:
        return refused("--json lists the benchmarks: each writes its results to a JSON file itself")
    try:
        found = importlib.import_module("benchmarks")
    except ModuleNotFoundError:
        found = None
    if getattr(found, "MEASURES", None) != "tileattn":
        what = "is not installed"
        if found is not None:
            what = f"is a different one, {found.__file__ or list(found.__path__)}"
        return refused(
            f"bench: the package benchmarks {what}; the wheel does not contain it, so run "
            "`python -m tileattn bench` in a checkout of the repository"
        )
    section = importlib.import_module(f"benchmarks.{arguments.section}")
    return section.main(arguments.rest) or 0
