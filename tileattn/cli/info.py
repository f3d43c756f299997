"""The command ``info``: versions, backends, threads, GPU."""

import argparse
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from typing import Any

import numpy as np
import threadpoolctl

import tileattn
from tileattn.backends import registry, threads
from tileattn.cli import kernel_cache
from tileattn.cli.arguments import add_json, print_json
from tileattn.errors import BackendUnavailableError
from tileattn.kernels.cuda.jit import shipped
from tileattn.kernels.cuda.jit.compile import known_archs, nvrtc_version

_LIBRARIES = "numpy", "ml_dtypes", "threadpoolctl", "llvmlite", "cupy", "torch", "jax"


def add_to(commands: Any) -> None:
    """Add the command."""
    about = "show versions, backends, threads, GPU"
    parser = commands.add_parser("info", help=about, description=about)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what is installed and what can run."""
    found = facts()
    if arguments.json:
        print_json(found)
        return 0
    rows = [*_rows(found)]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {value}")
    return 0


def facts() -> dict[str, Any]:
    """Return what ``--json`` prints; what cannot be found is None or has a key ``error``."""
    pools = (x for x in threadpoolctl.threadpool_info() if x["user_api"] == "blas")
    return {
        "tileattn": tileattn.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "processor": processor(),
        "workers": _tried(threads.worker_count),
        "blas": [f"{x['internal_api']} {x['version']}, {x.get('architecture', '')}" for x in pools],
        "nvrtc": _tried(_nvrtc),
        "cuda_kernels": _shipped(),
        "gpus": _tried(_gpus),
        "kernel_cache": _tried(kernel_cache.facts),
        "backends": tileattn.available_backends(),
        "default_backend": _tried(lambda: registry.asked_for("auto")),
        "backend_for_numpy": _tried(
            lambda: registry.candidates("auto", {"q": np.zeros(0)})[0].name
        ),
    }


def _tried(find: Callable[[], Any]) -> Any:
    """Return what a function finds, or its error."""
    try:
        return find()
    except (BackendUnavailableError, OSError, ValueError) as error:
        return {"error": str(error)}


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each fact as a name and a line."""
    yield "tileattn", found["tileattn"]
    yield "Python", f"{found['python']} on {found['platform']}"
    for name, version in found["libraries"].items():
        yield name, version or "not installed"
    yield "processor", found["processor"]
    yield "workers", _shown(found["workers"], "{} (set TILEATTN_NUM_THREADS to change)")
    for library in found["blas"]:
        yield "BLAS", library
    nvrtc = found["nvrtc"]
    known = "{}, compiles for " + ", ".join(nvrtc.get("architectures", ()))
    yield "NVRTC", _shown(nvrtc if "error" in nvrtc else nvrtc["version"], known)
    counts = ", ".join(f"{count} for {arch}" for arch, count in found["cuda_kernels"].items())
    yield "CUDA kernels", f"came compiled: {counts or 'none'}"
    gpus = found["gpus"]
    yield "GPU", "; ".join(gpus) if isinstance(gpus, list) else gpus["error"]
    yield "kernel cache", kernel_cache.summary()
    for name, reason in found["backends"].items():
        yield f"backend {name}", "ready" if reason is None else f"not available: {reason}"
    default = found["default_backend"]
    if default == "auto":
        default = f"by array type, {found['backend_for_numpy']} for NumPy arrays"
        default += " (set TILEATTN_BACKEND to change)"
    yield "default", _shown(default)


def _shown(x: Any, form: str = "{}") -> str:
    """Format a fact; show an error as it is."""
    return str(x["error"]) if isinstance(x, dict) else form.format(x)


def _version(name: str) -> str | None:
    for distribution in (name, f"{name}-cuda13x", f"{name}-cuda12x"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def processor() -> str:
    """Return the processor's name and number of cores."""
    name = platform.processor() or platform.machine()
    with suppress(OSError), open("/proc/cpuinfo") as lines:  # noqa: PTH123 - no path of ours
        name = next((line.split(":")[1].strip() for line in lines if "model name" in line), name)
    return f"{name}, {os.cpu_count()} cores"


def _nvrtc() -> dict[str, Any]:
    major, minor = nvrtc_version()
    architectures = [f"sm_{arch}" for arch in known_archs()]
    return {"version": f"{major}.{minor}", "architectures": architectures}


def _shipped() -> dict[str, int]:
    """Count the kernels that came compiled, by architecture."""
    archs = sorted(path.stem for path in shipped.FOLDER.glob("*.json"))
    return {arch: len(shipped.index(shipped.FOLDER, arch)) for arch in archs}


def _gpus() -> list[str]:
    """List the GPUs that the driver reports."""
    if shutil.which("nvidia-smi") is None:
        raise OSError("none found (no nvidia-smi)")
    asked = "name,compute_cap,driver_version,memory.total"
    query = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    if not answer.stdout.strip():
        raise OSError(f"nvidia-smi failed: {answer.stderr.strip()}")
    return answer.stdout.strip().splitlines()
