"""The libraries that take part in the benchmarks, by name, and their versions."""

import ctypes
import importlib
import importlib.metadata
import importlib.util
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from benchmarks import report
from benchmarks.decoders import FlashInfer, FlashInferCudaCores, FlashMLA
from benchmarks.flash import FlashAttention2, FlashAttention3, FlashAttention4
from benchmarks.libraries import Arrays, Flex, Library, Sdpa, TileattnTorch, VarlenAttn

PEERS: dict[str, Callable[[], Library]] = {
    "sdpa": partial(Sdpa, "SDPA"),
    "cudnn": partial(Sdpa, "SDPA, cuDNN", "CUDNN_ATTENTION"),
    "flash": partial(Sdpa, "SDPA, flash", "FLASH_ATTENTION"),
    "efficient": partial(Sdpa, "SDPA, efficient", "EFFICIENT_ATTENTION"),
    "math": partial(Sdpa, "SDPA, unfused", "MATH"),
    "varlen": partial(VarlenAttn, "varlen_attn"),
    "fa2": FlashAttention2,
    "fa3": FlashAttention3,
    "fa4": FlashAttention4,
    "flex": partial(Flex, "FlexAttention"),
    "flashinfer": FlashInfer,
    "flashinfer_cuda_cores": FlashInferCudaCores,
    "flashmla": FlashMLA,
}
ON_CPU = ("sdpa",)
DECODERS = ("flashinfer", "flashinfer_cuda_cores", "flashmla")
IN_LOOPS = tuple(name for name in PEERS if name not in ("math", *DECODERS))
FA3 = Path("fa3")  # in a folder of packages: _C.so, and VERSION, which names the build


def find(names: Iterable[str]) -> tuple[dict[str, Library], dict[str, str]]:
    """Return the libraries that can be imported, and why each of the others cannot."""
    found, missing = {}, {}
    for name in names:
        try:
            found[name] = PEERS[name]()
        # A package that does not fit the others installed may fail with anything.
        except Exception as error:
            missing[name] = report.one_line(error)
    return found, missing


def ours(on_gpu: bool) -> list[Library]:
    """Return the ways to call tileattn."""
    kinds = [Arrays("arrays")] if on_gpu else [Arrays("llvm", "llvm"), Arrays("numpy", "numpy")]
    has_torch = importlib.util.find_spec("torch") is not None
    return [*kinds, *([TileattnTorch("torch")] if has_torch else [])]


def add_options(parser: ArgumentParser, names: Iterable[str] = PEERS) -> None:
    """Add the options that choose and find the libraries."""
    allowed = tuple(names)
    add = parser.add_argument
    choose = partial(report.names, allowed)
    add("--peers", type=choose, default=list(allowed), help=",".join(allowed))
    about = "folder of packages: FlashAttention-4, FlashInfer, FlashMLA, and fa3/_C.so"
    add("--site", type=add_folder, metavar="FOLDER", help=about)


def add_folder(text: str) -> Path:
    """Find libraries among the packages in a folder, and FlashAttention-3 in fa3/_C.so."""
    folder = Path(text)
    sys.path[:0] = [str(folder), str(folder / "nvidia_cutlass_dsl" / "dsl_packages")]
    kernels = folder / FA3 / "_C.so"
    if kernels.exists():
        for runtime in kernels.parent.glob("libcudart.so*"):
            ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
        importlib.import_module("torch").ops.load_library(str(kernels))
    return folder


def versions() -> dict[str, str]:
    """Return the versions of the libraries that this process has loaded."""
    found = {}
    torch = sys.modules.get("torch")
    if torch is not None and (cudnn := torch.backends.cudnn.version()):
        found["cudnn"] = f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"
    if "flash_attn.cute" in sys.modules:
        found["fa4"] = _installed("flash-attn-4")
    if torch is not None and hasattr(torch.ops.flash_attn_3, "fwd"):
        named = [Path(folder) / FA3 / "VERSION" for folder in sys.path]
        known = [x.read_text(encoding="utf-8").strip() for x in named if x.is_file()]
        found["fa3"] = known[0] if known else _installed("flash-attn-3")
    for name, module in {"flashinfer": "flashinfer", "flashmla": "flash_mla"}.items():
        if module in sys.modules:
            found[name] = sys.modules[module].__version__
    return found


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
