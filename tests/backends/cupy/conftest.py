"""Kernels that belong to no attention call, which run on the CPU."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.backends.cupy.fake_cupy import Machine, sent
from tests.kernels.cuda.src.single_launch_on_host import kernel_on_host
from tileattn.backends.cupy import single_launch
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.plan import merged_rows, shared_pages, token_rows

BUILT: dict[KernelKey, Any] = {}
CELLS = {  # of the parameter block
    **dict.fromkeys(("append_kv", "rope"), token_rows.CELLS),
    "merge_rows": merged_rows.CELLS,
    "cascade_tables": shared_pages.CELLS,
}


@pytest.fixture
def kernels(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[KernelKey]]:
    """Run loaded kernels on the CPU; give their keys."""
    import cupy

    loaded: list[KernelKey] = []

    def load(key: KernelKey, device: int) -> Any:
        assert device == gpu.device
        if key not in BUILT:
            folder = tmp_path_factory.mktemp(f"{key.kernel}_{key.dtype}")
            BUILT[key] = kernel_on_host(folder, key)
        run = BUILT[key]
        loaded.append(key)

        def start(grid: Any, threads: Any, arguments: Any, shared: int) -> None:
            assert (threads, shared) == ((key.threads,), 0)
            assert run(arguments[0].address, grid) == 8 * CELLS[key.kernel]

        return SimpleNamespace(function=start)

    def upload(x: Any) -> Any:
        assert not gpu.capturing, "a stream that is captured cannot be waited for"
        there = sent(gpu, x)
        gpu.uploads.append(there)
        return there

    monkeypatch.setattr(single_launch, "load", load)
    monkeypatch.setattr(cupy, "asarray", upload)
    single_launch._prepared.cache_clear()
    yield loaded
    single_launch._prepared.cache_clear()
