"""From a key to one kernel for each device: what can be tried without a GPU."""

import dataclasses
import itertools
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.kernels.cuda.jit.tiny_kernel import HEADER, KEY
from tileattn.errors import BackendUnavailableError, KernelCompileError
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit import compile as compiling
from tileattn.kernels.cuda.jit import load as loader
from tileattn.kernels.cuda.jit.compile import Compiled, compiled, sources_in
from tileattn.kernels.cuda.jit.load import load, load_all

pytestmark = pytest.mark.usefixtures("place")


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Replace what needs a GPU; list what is put on a device."""
    calls: list[tuple[Any, ...]] = []

    def place(key: KernelKey, arch: str, made: Compiled, device: int) -> object:
        calls.append((key, arch, made.image, device))
        return object()

    monkeypatch.setattr(loader, "_placed", place)
    monkeypatch.setattr(loader, "_loaded", {})
    monkeypatch.setattr(loader, "arch_of", lambda device: ("sm_80", "sm_90a")[device])
    return calls


def test_a_kernel_is_loaded_once_whatever_the_thread(
    folder: Path, placed: list[tuple[Any, ...]]
) -> None:
    together = threading.Barrier(8)

    def ask(_: int) -> object:
        together.wait()
        return load(KEY, 0, None, (folder,))

    with ThreadPoolExecutor(8) as pool:
        kernels = list(pool.map(ask, range(8)))
    assert len({id(kernel) for kernel in kernels}) == 1
    assert [(key, arch, device) for key, arch, _, device in placed] == [(KEY, "sm_80", 0)]


def test_each_device_arch_and_key_has_its_kernel(
    folder: Path, placed: list[tuple[Any, ...]]
) -> None:
    wide = dataclasses.replace(KEY, head_dim=128)
    asked: list[tuple[KernelKey, int, str | None]] = [
        (KEY, 0, None),
        (KEY, 1, None),
        (wide, 1, None),
        (KEY, 1, "compute_75"),
    ]
    kernels = [load(key, device, arch, (folder,)) for key, device, arch in asked * 2]
    assert len({id(kernel) for kernel in kernels}) == len(asked)
    assert kernels[:4] == kernels[4:]
    assert [(key, arch, device) for key, arch, _, device in placed] == [
        (KEY, "sm_80", 0),
        (KEY, "sm_90a", 1),
        (wide, "sm_90a", 1),
        (KEY, "compute_75", 1),
    ]


def test_a_failure_is_not_remembered(folder: Path, placed: list[tuple[Any, ...]]) -> None:
    (folder / "twice.cuh").write_text("nonsense")
    sources_in.cache_clear()
    with pytest.raises(KernelCompileError):
        load(KEY, 0, None, (folder,))
    (folder / "twice.cuh").write_text(HEADER)
    sources_in.cache_clear()
    assert load(KEY, 0, None, (folder,)) is load(KEY, 0, None, (folder,))
    assert len(placed) == 1


# --- the kernels of a call ------------------------------------------------------------------------

CALL = [dataclasses.replace(KEY, head_dim=16 * n) for n in (1, 2, 1, 3)]


@pytest.fixture
def on_device_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a runtime whose current device is the second one, in any thread."""
    monkeypatch.setattr(loader, "_runtime", lambda: SimpleNamespace(getDevice=lambda: 1))


@pytest.mark.usefixtures("on_device_1")
def test_the_kernels_of_a_call_are_made_at_the_same_time(
    folder: Path,
    placed: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = threading.Barrier(3, timeout=30)
    make = compiling._compile

    def wait(*arguments: Any) -> bytes:
        together.wait()
        return make(*arguments)

    monkeypatch.setattr(compiling, "_compile", wait)
    kernels = load_all(CALL, (folder,))
    assert kernels == [load(key, 1, None, (folder,)) for key in CALL]
    assert kernels[0] is kernels[2]
    assert sorted((key.head_dim, device) for key, _, _, device in placed) == [
        (16, 1),
        (32, 1),
        (48, 1),
    ]


@pytest.mark.usefixtures("on_device_1")
def test_no_thread_is_started_for_kernels_that_are_there(
    folder: Path,
    placed: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = load_all(CALL, (folder,))
    monkeypatch.setattr(loader, "_failures", None)
    assert load_all(CALL, (folder,)) == kernels
    assert len(placed) == 3


@pytest.mark.usefixtures("on_device_1")
def test_kernels_are_loaded_here_where_no_thread_can_be_started(
    folder: Path, placed: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert len(set(map(id, load_all(CALL, (folder,))))) == 3
    assert len(placed) == 3


@pytest.mark.usefixtures("on_device_1")
def test_the_first_error_of_a_call_is_raised_and_no_thread_is_left(
    folder: Path, placed: list[tuple[Any, ...]]
) -> None:
    wrong = [dataclasses.replace(KEY, head_dim=n) for n in (17, 18)]
    before = threading.active_count()
    with pytest.raises(KernelCompileError) as caught:
        load_all([CALL[0], *wrong, CALL[1]], (folder,))
    assert caught.value.key == wrong[0]
    (note,) = caught.value.__notes__
    assert "columns come in sixteens" in note
    assert threading.active_count() == before
    assert len(placed) == 2  # what compiles is there for the next call
    with pytest.raises(KernelCompileError):
        load_all(wrong, (folder,))


@pytest.mark.usefixtures("on_device_1", "placed")
def test_an_interrupt_leaves_no_thread(
    folder: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, calls, main = compiling._compile, itertools.count(1), threading.get_ident()
    # Python leaves SIGINT alone where its parent ignores it, as a job in the background does.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, handler))

    def slow(*arguments: Any) -> bytes:
        last = next(calls) == 3
        time.sleep(0.2 if last else 0.4)
        if last:
            signal.pthread_kill(main, signal.SIGINT)  # it waits for this thread
        return make(*arguments)

    monkeypatch.setattr(compiling, "_compile", slow)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        load_all(CALL, (folder,))
    assert threading.active_count() == before
    assert len(load_all(CALL, (folder,))) == len(CALL)


class FakeError(RuntimeError):
    """What CuPy raises for an error of the driver or the runtime."""

    status = 0


class FakeDevice:
    """A device of compute capability 12.0."""

    compute_capability = "120"
    used: list[int] = []  # noqa: RUF012 - a list for all of them

    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> None:
        self.used.append(self.number)

    def __exit__(self, *_: object) -> None:
        self.used.append(-1)


@pytest.fixture
def fake_cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Replace CuPy and the driver by what answers as a machine with one GPU would."""
    attributes = {"NUM_REGS": 40, "LOCAL_SIZE_BYTES": 8, "SHARED_SIZE_BYTES": 1024}
    values = {f"CU_FUNC_ATTRIBUTE_{name}": number for name, number in attributes.items()}
    fake = SimpleNamespace(
        loads=[], refusal=None, set=[], function=SimpleNamespace(ptr=7), no_gpu=None
    )

    def loading(image: bytes) -> None:
        if fake.refusal is not None:
            raise fake.refusal
        fake.loads.append(image)

    def current() -> int:
        if fake.no_gpu is not None:
            raise fake.no_gpu
        return 0

    module = SimpleNamespace(load=loading, get_function=lambda _: fake.function)
    driver = SimpleNamespace(
        **{name: name for name in values},
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic",
        CUDADriverError=FakeError,
        funcGetAttribute=lambda attribute, _: values[attribute],
        funcSetAttribute=lambda *given: fake.set.append(given),
        occupancyMaxActiveBlocksPerMultiprocessor=lambda _, threads, shared: threads + shared,
    )
    cuda = SimpleNamespace(
        function=SimpleNamespace(Module=lambda: module),
        runtime=SimpleNamespace(CUDARuntimeError=FakeError, getDevice=current),
        Device=FakeDevice,
    )
    for name, content in (("cupy", {"cuda": cuda}), ("cupy_backends.cuda.api", {"driver": driver})):
        stub = ModuleType(name)
        stub.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, stub)
    monkeypatch.setattr(loader, "_loaded", {})
    monkeypatch.setattr(FakeDevice, "used", [])
    loader.arch_of.cache_clear()
    loader._runtime.cache_clear()
    yield fake
    loader.arch_of.cache_clear()
    loader._runtime.cache_clear()


def test_a_kernel_knows_its_resources(folder: Path, fake_cupy: SimpleNamespace) -> None:
    kernel = load(KEY, folders=(folder,))
    assert (kernel.key, kernel.arch, kernel.function) == (KEY, "sm_120", fake_cupy.function)
    assert (kernel.registers, kernel.local_bytes, kernel.shared_bytes) == (40, 8, 1024)
    assert fake_cupy.loads == [compiled(KEY, "sm_120", (folder,)).image]
    assert FakeDevice.used == [0, -1]
    assert load(KEY, folders=(folder,)) is kernel
    kernel.allow_shared(100_000)
    assert fake_cupy.set == [(7, "dynamic", 100_000)]
    assert kernel.occupancy(128, 70_000) == 70_128
    assert fake_cupy.set[1:] == [(7, "dynamic", 70_000)]


@pytest.mark.parametrize(("status", "known"), [(200, True), (209, True), (222, True), (2, False)])
def test_a_driver_that_refuses_the_code(
    folder: Path, fake_cupy: SimpleNamespace, status: int, known: bool
) -> None:
    fake_cupy.refusal = FakeError("the driver's words")
    fake_cupy.refusal.status = status
    error = BackendUnavailableError if known else FakeError
    message = r"sm_120 \(the driver's words\); install a newer driver" if known else "words"
    with pytest.raises(error, match=message):
        load(KEY, folders=(folder,))


def test_without_a_gpu_the_message_says_so(folder: Path, fake_cupy: SimpleNamespace) -> None:
    fake_cupy.no_gpu = FakeError("cudaErrorNoDevice: no CUDA-capable device is detected")
    with pytest.raises(BackendUnavailableError, match=r"cudaErrorNoDevice.*backend='numpy'"):
        load(KEY, folders=(folder,))


@pytest.mark.parametrize(
    ("capability", "arch"), [("75", "sm_75"), ("80", "sm_80"), ("89", "sm_89"), ("90", "sm_90a")]
)
def test_a_usual_gpu_is_known_without_the_compiler(
    fake_cupy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capability: str, arch: str
) -> None:
    assert fake_cupy.no_gpu is None
    monkeypatch.setattr(loader, "known_archs", None)
    monkeypatch.setattr(FakeDevice, "compute_capability", capability)
    assert loader.arch_of(0) == arch


@pytest.mark.usefixtures("on_device_1", "placed")
@pytest.mark.parametrize(
    ("seconds", "terminal", "said"),
    [
        (0.1, True, "tileattn: compiling 3 CUDA kernels for sm_90a\n"),
        (0.1, False, ""),
        (60.0, True, ""),
    ],
)
def test_a_terminal_is_told_of_a_long_compilation(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds: float,
    terminal: bool,
    said: str,
) -> None:
    make = compiling._compile

    def slow(*arguments: Any) -> bytes:
        time.sleep(0.3 if seconds < 1 else 0)
        return make(*arguments)

    monkeypatch.setattr(compiling, "_compile", slow)
    monkeypatch.setattr(loader, "NOTICE_SECONDS", seconds)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    load_all(CALL, (folder,))
    assert capsys.readouterr().err == said
    load_all(CALL, (folder,))
    assert not capsys.readouterr().err
