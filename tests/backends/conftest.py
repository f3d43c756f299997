"""A GPU that is not there."""

from collections.abc import Iterator

import pytest

from tests.backends.cupy import fake_cupy
from tests.backends.cupy.fake_cupy import Machine


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with fake_cupy.machine(monkeypatch) as made:
        yield made


@pytest.fixture
def h200(gpu: Machine) -> Machine:
    """One that runs the Hopper kernels; the other's are generic."""
    gpu.arch = "sm_90a"
    return gpu
