"""Hypothesis profiles, the collector, and the backends that the contract suite runs on."""

import gc
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray

import tileattn
from tests.poison import on_host
from tileattn.backends import registry
from tileattn.backends.cupy import describe
from tileattn.backends.llvm.backend import LlvmBackend
from tileattn.backends.numpy.backend import NumpyBackend
from tileattn.call.parse import parse
from tileattn.call.prepared import CALLS
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit import load as loader
from tileattn.kernels.cuda.jit.compile import Compiled, compiled

Array = NDArray[Any]


# Values of HYPOTHESIS_PROFILE. ``default`` draws the same examples on every run. ``quick`` draws a
# third of them (``make test``), ``random`` others on each run, ``thorough`` 5000 for a night.
# No deadline: it would fail on a busy machine. Drawing a whole call of attention fills several
# arrays, which Hypothesis reports as too slow or too large.
QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large)
settings.register_profile("random", deadline=None, suppress_health_check=QUIET)
settings.register_profile("thorough", settings.get_profile("random"), max_examples=5000)
settings.register_profile("default", settings.get_profile("random"), derandomize=True)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
settings.register_profile("quick", settings.get_profile("default"))
settings.load_profile(PROFILE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Draw a third of the examples with the ``quick`` profile.

    A profile alone does not reach the tests that set their own number of examples.
    """
    name = "_hypothesis_internal_use_settings"
    tests = {x.function for x in items if isinstance(x, pytest.Function)}
    for test in tests if PROFILE == "quick" else ():
        if (own := getattr(test, name, None)) is not None:
            setattr(test, name, settings(own, max_examples=-(-own.max_examples // 3)))


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Let objects go by their counts of references alone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class SmallTiles(NumpyBackend):
    """The NumPy backend with tiles so small that short problems need many of them."""

    name = "small_tiles"

    def __init__(self) -> None:
        super().__init__(forward_tile=(16, 24), backward_tile=(24, 16))


class Decode(LlvmBackend):
    """The LLVM backend with its decoding kernel for any number of rows, and short splits."""

    name = "llvm_decode"

    def __init__(self) -> None:
        super().__init__(kernel="decode", split_keys=40)


VARIANTS: dict[str, Callable[[], Any]] = {SmallTiles.name: SmallTiles, Decode.name: Decode}


class Runner:
    """Calls one backend with NumPy arrays, whatever kind of array it takes.

    Parameters
    ----------
    name : str
        A registered backend.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def why_not(self, q: Array, k: Array, v: Array, options: dict[str, Any]) -> str | None:
        """Say why the backend does not serve a problem; None if it does."""
        return registry.get(self.name).why_not(parse(q, k, v, options)[0])

    def forward(self, q: Array, k: Array, v: Array, **options: Any) -> tileattn.Attention:
        """Call ``tileattn.forward``."""
        given, options = self._sent((q, k, v)), self._sent_options(options)
        result = tileattn.forward(*given, backend=self.name, **options)
        return tileattn.Attention(*map(self._fetched, result))

    def backward(
        self, *arrays: Array, deterministic: bool = True, **options: Any
    ) -> tileattn.Gradients:
        """Call ``tileattn.backward``."""
        given, options = self._sent(arrays), self._sent_options(options)
        options["deterministic"] = deterministic
        result = tileattn.backward(*given, backend=self.name, **options)
        grads = tileattn.Gradients(*map(self._fetched, result))
        grads.daux = None if result.daux is None else tuple(map(self._fetched, result.daux))
        return grads

    def _sent(self, arrays: tuple[Array, ...]) -> Any:
        if self.name != "cupy":
            return arrays
        cupy = pytest.importorskip("cupy", reason="arrays are sent to a GPU: pip install cupy")
        return tuple(cupy.asarray(x) for x in arrays)

    def _sent_options(self, options: dict[str, Any]) -> dict[str, Any]:
        arrays = {name for name, x in options.items() if isinstance(x, np.ndarray)}
        arrays -= {"origin"}  # is read on the host
        sent = options | {name: self._sent((options[name],))[0] for name in arrays}
        return sent | {"aux": self._sent(options["aux"])} if "aux" in options else sent

    def _fetched(self, x: Any) -> Any:
        return x if x is None or isinstance(x, np.ndarray) else x.get()


REASONS = tileattn.available_backends()


def runner_of(name: str) -> Runner:
    reason = REASONS.get(name.removesuffix("_decode"))
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return Runner(name)


def each(names: set[str]) -> list[Any]:
    """Make backends the parameters of a fixture; mark what needs a GPU or compiles for long."""
    marks = {"cupy": pytest.mark.gpu, Decode.name: pytest.mark.slow}
    return [pytest.param(n, marks=marks[n]) if n in marks else n for n in sorted(names)]


@pytest.fixture(scope="module", params=each({*REASONS}))
def backend(request: pytest.FixtureRequest) -> Runner:
    """Every backend that can run here."""
    return runner_of(request.param)


@pytest.fixture(scope="module", params=each({*REASONS, *VARIANTS}))
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """Every backend that can run here, and variants of them."""
    if request.param in VARIANTS:
        registry.register_backend(VARIANTS[request.param]())
    yield runner_of(request.param)
    for name in VARIANTS:
        registry._loaded.pop(name, None)


@pytest.fixture(params=["numpy", "llvm"])
def cpu_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have calls that name no backend run on one for NumPy arrays."""
    monkeypatch.setenv("TILEATTN_BACKEND", request.param)
    return runner_of(request.param).name


@pytest.fixture(autouse=True)
def no_call_is_known() -> None:
    """Clear the cache of validated calls: a test may change what is valid."""
    CALLS.clear()


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill newly allocated host memory with NaN."""
    on_host(monkeypatch)


@pytest.fixture(scope="module")
def one_blas_thread() -> Iterator[None]:
    """Hold the oracle's matrix products to one thread: on a busy machine more are far slower."""
    with threadpoolctl.threadpool_limits(1, "blas"):
        yield


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def compiled_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have one process compile a kernel, where several that run tests need it at the same time."""
    if sys.platform == "win32" or not request.node.get_closest_marker("gpu"):
        return
    import fcntl

    folder = Path(tempfile.gettempdir(), f"tileattn-locks-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)

    def locked(key: KernelKey, arch: str, *more: Any, **options: Any) -> Compiled:
        name = hashlib.sha256(repr((key, arch)).encode()).hexdigest()
        with (folder / name).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return compiled(key, arch, *more, **options)

    monkeypatch.setattr(loader, "compiled", locked)


# --- the Hopper kernels ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_hopper() -> None:
    """Skip where the kernel cannot run."""
    import cupy

    capability = cupy.cuda.Device().compute_capability
    if capability != "90":
        pytest.skip(f"the kernel is for compute capability 9.0, the GPU has {capability}")


@pytest.fixture
def few_sms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have so few thread blocks that each has many work tiles, assigned in advance."""
    device = describe.device_of(0)
    monkeypatch.setattr(describe, "device_of", lambda _: replace(device, sm_count=5))
    CALLS.clear()
    yield
    CALLS.clear()


@pytest.fixture
def generic_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the generic kernels run what is called."""
    device = describe.device_of(0)
    monkeypatch.setattr(describe, "device_of", lambda _: replace(device, arch="sm_90"))
    CALLS.clear()
    yield
    CALLS.clear()


@pytest.fixture
def matplotlib_figure() -> Any:
    """Class of matplotlib's figures; it draws the pictures of the docs, and is no dependency."""
    return pytest.importorskip(
        "matplotlib.figure", reason="it draws: pip install matplotlib"
    ).Figure
