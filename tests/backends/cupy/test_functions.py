"""What a call with functions of the caller's own brings to its kernels; no GPU."""

from typing import Any

import numpy as np
import pytest

import tileattn
from tests.backends.cupy.fake_cupy import Machine, at_host
from tileattn import Gradients, UnsupportedError

WRT = ("q", "k", "v")


@pytest.fixture
def gpu(h200: Machine) -> Machine:
    return h200


def arrays(gpu: Machine) -> tuple[Any, Any]:
    return gpu.array((2, 4, 150, 16), np.float16), gpu.array((2, 2, 300, 16), np.float16)


def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any, number: Any) -> Any:
    return s + table[h, i - j] * number[0]


def mask_mod(b: Any, h: Any, i: Any, j: Any, table: Any, number: Any) -> Any:
    return (i >= j) & (number[0] + h < 9)


def window(b: Any, h: Any, i: Any, j: Any) -> Any:
    return abs(i - j) < 40


BOTH: dict[str, Any] = {"score_mod": score_mod, "mask_mod": mask_mod}


def test_arrays_and_blocks_lie_behind_the_parameters(gpu: Machine) -> None:
    q, k = arrays(gpu)
    gpu.behind = (1 + 2 * 2) + (1 + 2 * 1) + (1 + 2 * 4)
    number = gpu.array((1,), np.int32)
    for n in range(3):
        table = gpu.array((9, 8), np.float32)[:, :: 2 - n % 2]
        tileattn.forward(q, k, k, aux=(table, number), **BOTH)
        address, *of_table = gpu.tails[-1][:5]
        assert (address, of_table) == (table.data.ptr, [*table.shape, *table.strides])
        assert gpu.tails[-1][5] == number.data.ptr
        kinds, *of_kinds = gpu.tails[-1][8:]
        assert of_kinds == [1, 4, 2, 3, 24, 6, 3, 1]
        assert kinds in {x.data.ptr for x in gpu.uploads}
    assert len(gpu.uploads) == 2 * 2  # blocks and lists of tiles, for each layout of the table
    found = at_host(gpu.uploads[0])
    assert found[0, 0].tolist() == found[0, 3].tolist() == [[1, 0, 0], [1, 1, 0]]


def test_calls_without_arrays_find_their_blocks_again(gpu: Machine) -> None:
    q, k = arrays(gpu)
    gpu.behind = 9
    for _ in range(3):
        out = tileattn.forward(q, k, k, mask_mod=window).out
        assert gpu.launches[-1][-1]["out"] == out.data.ptr
        assert gpu.tails[-1][0] == gpu.uploads[0].data.ptr
    assert len(gpu.uploads) == 2  # blocks, and lists of tiles


def test_arrays_on_another_device_are_refused(gpu: Machine) -> None:
    q, k = arrays(gpu)
    table, number = gpu.array((4, 9), np.float32, device=1), gpu.array((1,), np.int32)
    with pytest.raises(ValueError, match=r"^aux\[0\] is on device 1"):
        tileattn.forward(q, k, k, aux=(table, number), **BOTH)


def backward(gpu: Machine, **options: Any) -> Gradients:
    q, k = arrays(gpu)
    given = {name: options[name] for name in options if name != "wrt"}
    out, lse = tileattn.forward(q, k, k, **given)
    return tileattn.backward(out, q, k, k, out, lse, **options)


def test_gradients_of_arrays(gpu: Machine) -> None:
    """None for integers, zeros where no score depends on an array, and no others yet."""
    floats, number = gpu.array((4, 9), np.float32), gpu.array((1,), np.int32)
    options = BOTH | {"aux": (floats, number)}
    with pytest.raises(UnsupportedError, match=r"gradients of aux; .* wrt=\('q', 'k', 'v'\)"):
        backward(gpu, **options)
    assert backward(gpu, **options, wrt=WRT).daux is None
    grads = backward(gpu, mask_mod=mask_mod, aux=(floats, number)).daux
    assert grads is not None
    assert at_host(grads[0]).tolist() == [[0.0] * 9] * 4
    assert grads[1] is None
    assert all(launch[0].mask_mod for launch in gpu.launches if "dkdv" in launch[0].kernel)


def test_explain_reads_no_array(gpu: Machine) -> None:
    q, k = arrays(gpu)
    floats, number = gpu.array((4, 9), np.float32), gpu.array((1,), np.int32)
    found = tileattn.explain(q, k, k, aux=(floats, number), **BOTH)
    assert found.kernel == "forward_sm90"
    assert found.tiles["skipped"] > 0
    clause = "mask_mod: tiles are skipped where it is empty whatever aux holds"
    assert clause in found.reasons
    assert clause not in tileattn.explain(q, k, k).reasons
