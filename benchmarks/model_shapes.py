"""Speed of the shapes of real models on the GPU, with every library that computes the same call.

    python -m tileattn bench model_shapes                    all models, both passes, bf16
    python -m tileattn bench model_shapes --dtype f32        models that run in float32, too
    python -m tileattn bench model_shapes --only "Swin, windows of 49"

A bias is (1, H, N, N), and its gradient is part of the backward pass. Calls cycle through sets of
arrays several times as large as the L2. Results are compared with tileattn's. A row that failed
says why. The file is gpu_models.json. Another name is set with --name:

    python -m tileattn bench model_shapes --dtype f32 --name gpu_models_f32
"""

import argparse
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from benchmarks import peers, report
from benchmarks.comparison import compare
from benchmarks.configurations import DTYPES, normal
from benchmarks.device import Gpu
from benchmarks.libraries import Arrays, Library, Step
from benchmarks.report import Row

PEERS = ("cudnn", "flash", "efficient", "math", "fa3", "fa4")
IN_16_BITS = ("cudnn", "flash", "fa3", "fa4")  # which have no kernels for float32
MOST_SCORES = 1 << 30  # that the unfused attention stores


class Model(NamedTuple):
    """The attention of a model; B, H and N as in training or in inference."""

    name: str
    B: int
    H: int
    Hkv: int
    N: int  # queries
    Nk: int
    D: int
    Dv: int = 0  # if not D
    options: dict[str, Any] = {}  # noqa: RUF012 - of a tuple that nothing changes
    bias: bool = False
    backward: bool = True
    float32: bool = False  # runs in float32, too


CAUSAL = {"causal": True}
MODELS = [
    Model("GPT-2 small", 8, 12, 12, 1024, 1024, 64, options=CAUSAL, float32=True),
    Model("Llama-3 8B, 8192 tokens", 2, 32, 8, 8192, 8192, 128, options=CAUSAL),
    Model("Llama-3 70B, one of eight shards", 4, 8, 1, 4096, 4096, 128, options=CAUSAL),
    Model("Qwen3 0.6B", 8, 16, 8, 2048, 2048, 128, options=CAUSAL),
    Model(
        "Gemma-2 9B, window of 4096, softcap",
        *(1, 16, 8, 8192, 8192, 256),
        options=CAUSAL | {"window": (4095, 0), "softcap": 50.0},
    ),
    Model(
        "Mistral 7B, window of 4096",
        *(1, 32, 8, 16384, 16384, 128),
        options=CAUSAL | {"window": (4095, 0)},
    ),
    Model("DeepSeek-V3", 1, 128, 128, 4096, 4096, 192, 128, options=CAUSAL),
    Model("BERT-base", 32, 12, 12, 512, 512, 64, float32=True),
    Model("ViT-B/16", 128, 12, 12, 197, 197, 64, float32=True),
    Model("ViT-L/14", 32, 16, 16, 577, 577, 64),
    Model("ViT-H/14", 64, 16, 16, 257, 257, 80),
    Model("Whisper, encoder", 16, 20, 20, 1500, 1500, 64, float32=True),
    Model("Stable Diffusion XL, self", 4, 10, 10, 4096, 4096, 64, float32=True),
    Model("Stable Diffusion XL, cross", 4, 10, 10, 4096, 77, 64, float32=True),
    Model("Flux", 1, 24, 24, 4608, 4608, 128, float32=True),
    Model("video transformer, 32760 tokens", 1, 12, 12, 32760, 32760, 128),
    Model("Swin, windows of 49", 1024, 6, 6, 49, 49, 32, bias=True, float32=True),
    Model("SAM, windows of 196", 100, 16, 16, 196, 196, 80, bias=True, float32=True),
    Model("AlphaFold, pair bias", 128, 4, 4, 384, 384, 32, bias=True, float32=True),
    Model("T5, relative bias", 16, 16, 16, 512, 512, 64, bias=True, float32=True),
    Model("Swin, windows of 144", 256, 6, 6, 144, 144, 32, bias=True, float32=True),
    Model("PatchTST, 42 patches", 1024, 16, 16, 42, 42, 8, float32=True),
    Model("Gemma 4 26B, global", 2, 8, 4, 8192, 8192, 512, options=CAUSAL),
    Model("Gemma 4 12B, global, 16 heads on one", 1, 16, 1, 8192, 8192, 512, options=CAUSAL),
    Model("Falcon 7B, 71 heads on one", 2, 71, 1, 2048, 2048, 64, options=CAUSAL),
    Model("Llama-3 8B, one of four shards", 1, 8, 2, 8192, 8192, 128, options=CAUSAL),
    Model("ViT-g/14", 64, 16, 16, 257, 257, 88),
    Model("SigLIP so400m", 32, 16, 16, 729, 729, 72),
    Model("Whisper, cross", 16, 20, 20, 448, 1500, 64),
    Model("PixArt, cross", 4, 16, 16, 4096, 120, 72, float32=True),
    Model("GPT-J", 2, 16, 16, 2048, 2048, 256, options=CAUSAL),
    Model("ESM-2 650M", 16, 20, 20, 1024, 1024, 64),
    Model("32 x Llama-3 8B, decoding", 32, 32, 8, 1, 4096, 128, backward=False),
    Model("8 x Llama-3 8B, 8 draft tokens", 8, 32, 8, 8, 8192, 128, options=CAUSAL, backward=False),
]


def steps_of(model: Model, dtype: str, device: Gpu) -> list[Step]:
    """Draw sets of arrays that exceed the L2 cache together."""
    B, H, Hkv, N, Nk, D = model[1:7]
    Dv = model.Dv or D
    shapes = [(B, H, N, D), (B, Hkv, Nk, D), (B, Hkv, Nk, Dv)]
    shapes += [(B, H, N, Dv)] if model.backward else []
    draw = partial(normal, device.xp, dtype=dtype)
    options = dict(model.options)
    if model.bias:
        options["bias"] = draw((1, H, N, Nk), seed=9)
    learned = ("bias",) if model.bias else ()
    size = 2 * B * (H * N + Hkv * Nk) * D * DTYPES[dtype].itemsize

    def step(n: int) -> Step:
        rows = tuple(draw(shape, seed=10 * n + i) for i, shape in enumerate(shapes))
        return Step(rows, options, learned=learned)

    return [step(n) for n in range(device.sets(size))]


def compared(
    model: Model, dtype: str, libraries: Mapping[str, Library], device: Gpu
) -> Iterator[Row]:
    """Time each pass of all libraries in turns."""
    fits = model.B * model.H * model.N * model.Nk <= MOST_SCORES
    without = () if fits else ("math",)
    if dtype == "f32":
        without = (*without, *IN_16_BITS)
    there = {name: x for name, x in libraries.items() if name not in without}
    steps = steps_of(model, dtype, device)
    known = {**model.options, **({"bias": "(1, H, N, Nk)"} if model.bias else {})}
    for kind, found in compare(steps, there, device, dtype):
        yield {
            **{"pass": kind, "case": model.name, "dtype": dtype, "B": model.B, "H": model.H},
            **{"Hkv": model.Hkv, "N": model.N, "Nk": model.Nk, "D": model.D},
            **{"Dv": model.Dv or model.D, "causal": model.options.get("causal", False)},
            "options": ", ".join(f"{n} {x}" for n, x in known.items() if n != "causal"),
            **found,
        }


def rows(
    names: list[str], dtypes: list[str], libraries: Mapping[str, Library], device: Gpu
) -> Iterator[Row]:
    """Measure the models of these names."""
    for dtype in dtypes:
        for model in MODELS:
            if model.name in names and (dtype != "f32" or model.float32):
                yield from compared(model, dtype, libraries, device)
                device.release()


def main(argv: list[str] | None = None, device: Gpu | None = None) -> None:
    """Run the benchmark; an interrupted run writes its rows, too."""
    known = [model.name for model in MODELS]
    parser = report.parser("model_shapes", __doc__)
    about = "names of models"
    parser.add_argument("--only", nargs="+", choices=known, default=known, help=about, metavar="M")
    dtypes = ("bf16", "fp16", "f32")
    parser.add_argument("--dtype", type=partial(report.names, dtypes), default=["bf16"])
    peers.add_options(parser, PEERS)
    parser.add_argument("--name", default="gpu_models", help="stem of the file (gpu_models)")
    arguments: argparse.Namespace = report.parsed(parser, argv)
    device = device or Gpu.required()
    found, missing = peers.find(arguments.peers)
    report.show_missing(missing)
    made = rows(arguments.only, arguments.dtype, {"tileattn": Arrays("tileattn"), **found}, device)
    path = arguments.to / f"{arguments.name}.json"
    more = {"section": "models", "missing": missing}
    report.written(made, path, device.machine, arguments.ran, **more)


if __name__ == "__main__":
    main()
