"""What the driver is told at each launch, and what becomes of its answer; no GPU."""

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.backends.cupy.fake_cupy import Machine, launch_together
from tests.backends.cupy.test_workspace import inputs
from tileattn.backends.cupy import driver, driver_launch, executable, tensor_maps
from tileattn.backends.cupy.driver_launch import LaunchBlock, PlannedLaunch
from tileattn.kernels.cuda.families.context import KernelLaunch
from tileattn.kernels.cuda.families.grid import OPEN
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.plan.params import POINTERS, template

OVERLAPPING = [(6, 1)]  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


def forward(gpu: Machine, Nk: int = 530) -> None:
    given = inputs(gpu, Nk=Nk)
    tileattn.forward(*(given[name] for name in "qkv"))


# --- which kernels overlap ------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_90a", "compute_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_kernel_of_a_plan_but_the_first_overlaps(
    gpu: Machine, arch: str, deterministic: bool
) -> None:
    """In each call, also with few queries, and with packed sequences.

    Their first calls store the offsets before. No kernel that stores values overlaps.
    """
    gpu.arch = arch
    given = inputs(gpu)
    packed = {name: x[0] for name, x in given.items()}
    packed |= {f"cu_seqlens_{x}": np.array([0, 100, given[x].shape[2]]) for x in "qk"}
    cache = gpu.array((1, 2, 40_000, 64), np.float16)
    for n in range(4):
        gpu.planner.work()
        for kernels, stores, call in (
            (4, False, lambda: tileattn.backward(**given, deterministic=deterministic)),
            (4, n < 3, lambda: tileattn.backward(**packed, deterministic=deterministic)),
            (
                2,
                False,
                lambda: tileattn.forward(gpu.array((1, 8, 1, 64), np.float16), cache, cache),
            ),
        ):
            gpu.attributes.clear()
            gpu.started.clear()
            call()
            first, *others = gpu.attributes
            assert (gpu.started[0] == "store_values") == stores
            assert first == (OVERLAPPING if stores else [])
            assert others == [OVERLAPPING] * len(others)
            assert len(others) >= kernels - 1


def test_a_kernel_alone_does_not(h200: Machine) -> None:
    forward(h200)
    forward(h200)
    assert h200.attributes == [[], []]


@pytest.mark.parametrize(("arch", "version"), [("sm_89", 13000), ("sm_90a", 12020)])
def test_older_gpus_and_drivers_launch_one_kernel_after_the_other(
    gpu: Machine, arch: str, version: int
) -> None:
    """The code for older GPUs does not wait, and older drivers take no such launch into a graph."""
    gpu.arch, gpu.driver = arch, version
    tileattn.backward(**inputs(gpu))
    assert len(gpu.attributes) > 3
    assert not any(gpu.attributes)


# --- what the driver is told ----------------------------------------------------------------------


def test_a_stream_is_that_of_the_call(h200: Machine) -> None:
    given = inputs(h200)
    for stream in (0, 5, 5, 7, 0):
        h200.stream = stream
        h200.streams.clear()
        tileattn.backward(**given)
        assert len(h200.streams) > 3
        assert set(h200.streams) == {stream}


def test_an_empty_grid_has_a_block(gpu: Machine) -> None:
    key = KernelKey("backward_preprocess", "float16")
    planned = PlannedLaunch(KernelLaunch(key, OPEN), gpu.load(key), overlaps=False)
    empty = template({})
    block = LaunchBlock(len(empty), [planned])
    block.fill(empty, [0], [(POINTERS.index("q"), 256)], [], (0, 0))
    block.launch(0)
    (launched,) = gpu.launches
    assert launched[:3] == (key, 1, 0)
    assert launched[3]["q"] == 256


def test_threads_at_a_time_have_blocks_of_their_own(
    h200: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as threads have run at a time, and later calls take those."""
    made = []

    class Counted(LaunchBlock):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(threading.get_ident())

    monkeypatch.setattr(executable, "LaunchBlock", Counted)
    sets: Any = [[inputs(h200)[name] for name in "qkv"] for _ in range(4)]
    tileattn.forward(*sets[0])
    assert len(made) == 1
    for _ in range(2):
        h200.launches.clear()
        with monkeypatch.context() as patch:
            launch_together(patch, sets)
        expected = {tuple(x.data.ptr for x in given) for given in sets}
        found = {tuple(int(x[-1][name]) for name in POINTERS[:3]) for x in h200.launches}
        assert found == expected
        assert len(made) == len(sets)


# --- what it answers ------------------------------------------------------------------------------


class RefusalError(Exception):
    """Stands in for CuPy's, whose text the driver gives."""


@pytest.fixture
def refusals(h200: Machine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from cupy_backends.cuda.api import driver as cupy_driver

    def check(status: int) -> None:
        if status:
            raise RefusalError(status)

    monkeypatch.setattr(cupy_driver, "check_status", check)
    return h200.refusals


def test_a_refusal_is_raised_as_cupy_does(h200: Machine, refusals: list[int]) -> None:
    given = inputs(h200)
    refusals += [0x2BC]
    with pytest.raises(RefusalError, match="700"):
        tileattn.backward(**given)
    assert h200.launches == []
    tileattn.backward(**given)
    assert len(h200.launches) > 3


def test_a_thread_without_a_context_gets_one(h200: Machine, refusals: list[int]) -> None:
    forward(h200)
    h200.bound.clear()
    refusals += [201]
    forward(h200)
    assert h200.bound[-1:] == [h200.device]
    assert len(h200.launches) == 2
    refusals += [201, 201]
    with pytest.raises(RefusalError, match="201"):
        forward(h200)


@pytest.mark.parametrize(("system", "library"), [("posix", "libcuda.so.1"), ("nt", "nvcuda.dll")])
@pytest.mark.parametrize(
    ("module", "loader", "name"),
    [(tensor_maps, "PyDLL", "cuTensorMapEncodeTiled"), (driver_launch, "CDLL", "cuLaunchKernelEx")],
    ids=["tensor_maps", "driver_launch"],
)
def test_a_function_of_the_driver_is_found_once(
    monkeypatch: pytest.MonkeyPatch, module: Any, loader: str, name: str, system: str, library: str
) -> None:
    """Only short ones keep the interpreter's lock."""
    asked: list[str] = []
    function = SimpleNamespace()

    def load(path: str) -> Any:
        asked.append(path)
        return SimpleNamespace(**{name: function})

    monkeypatch.setattr(ctypes, loader, load)
    monkeypatch.setattr(driver, "os", SimpleNamespace(name=system))
    module._driver_function.cache_clear()
    try:
        assert module._driver_function() is module._driver_function() is function
    finally:
        module._driver_function.cache_clear()
    assert asked == [library]
