"""Every probe compiles, and every field of the parameter block lies where the kernels read it."""

import numpy as np
import pytest

from tests.probes import keys
from tests.probes.harness import compiled, require_nvrtc
from tileattn.kernels.key import KernelKey

ARCHS = ("sm_75", "sm_80", "sm_90a")


@pytest.fixture(scope="module", autouse=True)
def _nvrtc() -> None:
    require_nvrtc()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("key", keys.KEYS, ids=keys.name_of)
def test_a_probe_compiles(key: KernelKey, arch: str) -> None:
    assert compiled(key, arch).startswith(b"\x7fELF")
