"""What a call with functions of the caller's own brings to its kernels; no GPU."""

from typing import Any

import numpy as np
import pytest

import tileattn
from tests.backends.cupy.fake_cupy import Machine, at_host, settle, values_at
from tileattn import Gradients, UnsupportedError
from tileattn.backends.cupy import backend
from tileattn.expressions.build import apply
from tileattn.expressions.functions import score_expression
from tileattn.expressions.nodes import Kind
from tileattn.expressions.parameters import Expression, cell_of, parameter
from tileattn.kernels.cuda.plan.plan import launch_plan

WRT = ("q", "k", "v")


@pytest.fixture
def gpu(h200: Machine) -> Machine:
    return h200


def arrays(gpu: Machine) -> tuple[Any, Any]:
    return gpu.array((2, 4, 200, 16), np.float16), gpu.array((2, 2, 350, 16), np.float16)


def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any, number: Any) -> Any:
    return s + table[h, i - j] * number[0]


def gathers(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any, number: Any) -> Any:
    return s + table[i * i % 99, j * j % 99]


def mask_mod(b: Any, h: Any, i: Any, j: Any, table: Any, number: Any) -> Any:
    return (i >= j) & (number[0] + h < 9)


def window(b: Any, h: Any, i: Any, j: Any) -> Any:
    return abs(i - j) < 40


def documents(b: Any, h: Any, i: Any, j: Any, of: Any) -> Any:
    return of[b, i] == of[b, j]


def doubled(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * 2


BOTH: dict[str, Any] = {"score_mod": score_mod, "mask_mod": mask_mod}


def test_arrays_follow_the_parameters(gpu: Machine) -> None:
    q, k = arrays(gpu)
    gpu.cells_after = (1 + 2 * 2) + (1 + 2 * 1)
    number = gpu.array((1,), np.int32)
    for n in range(3):
        table = gpu.array((9, 8), np.float32)[:, :: 2 - n % 2]
        tileattn.forward(q, k, k, aux=(table, number), **BOTH)
        address, *of_table = gpu.tails[-1][:5]
        assert (address, of_table) == (table.data.ptr, [*table.shape, *table.strides])
        assert gpu.tails[-1][5:] == [number.data.ptr, 1, 4]
        names = ["classify_tiles", "list_key_tiles", "forward_sm90"]
        assert [key.kernel for key, *_ in gpu.launches[-3:]] == names
        params = [launch[-1] for launch in gpu.launches[-3:]]
        for name in ("tile_kinds", "tile_list"):
            assert len({int(x[name]) for x in params} - {0}) == 1
        assert params[0]["tile_kinds_at"].tolist() == (0, 6, 3, 1)
    assert not gpu.uploads


def test_tiles_of_functions_without_arrays_are_classified_once_a_call_repeats(gpu: Machine) -> None:
    """Until then kernels classify them; nothing is uploaded."""
    q, k = arrays(gpu)
    tileattn.forward(q, k, k, mask_mod=window)
    assert gpu.started == ["classify_tiles", "list_key_tiles", "forward_sm90"]
    settle(gpu, lambda: tileattn.forward(q, k, k, mask_mod=window))
    kinds, lists = gpu.sent
    for _ in range(3):
        gpu.started.clear()
        out = tileattn.forward(q, k, k, mask_mod=window).out
        assert gpu.started == ["forward_sm90"]
        params = gpu.launches[-1][-1]
        assert params["out"] == out.data.ptr
        assert (params["tile_kinds"], params["tile_list"]) == (kinds.address, lists.address)
    assert values_at(kinds.address, (2, 3), np.int8) == [[1, 1, 0], [1, 1, 0]]
    assert gpu.uploads == []
    assert len(gpu.sent) == 2


def test_a_tree_is_a_function_of_its_mask_and_of_lengths(gpu: Machine) -> None:
    """Each call brings the first keys of trees: lengths on the GPU are an array."""
    q, k = arrays(gpu)
    tree = gpu.array((1, 200, 200), np.bool_)
    gpu.cells_after = (1 + 2 * 3) + (1 + 2 * 1)
    for lengths in ([300, 200], [300, 200], [180, 300]):
        tileattn.forward(q, k, k, tree_mask=tree, kv_lengths=lengths)
        address, *of_tree = gpu.tails[-1][:7]
        assert (address, of_tree[:3]) == (tree.data.ptr, [1, 200, 200])
        assert values_at(gpu.tails[-1][7], (2,)) == [n - 200 for n in lengths]
        assert gpu.tails[-1][8:] == [2, 8]
        params = gpu.launches[-1][-1]
        assert values_at(params["kv_lengths"], (2,)) == lengths
        assert values_at(params["q_offset"], (2,)) == [n - 200 for n in lengths]
        assert gpu.launches[-1][0].mask_mod
    assert gpu.uploads == []
    with pytest.raises(TypeError, match="tree_mask"):
        tileattn.forward(q, k, k, tree_mask=np.ones((1, 200, 200), bool))


def test_an_origin_is_an_array_of_functions_and_of_dropout(gpu: Machine) -> None:
    """Each call brings it: of functions in 32 bits, where it is near."""
    q, k = arrays(gpu)
    gpu.cells_after = (1 + 2 * 2) + (1 + 2 * 1) + (1 + 2 * 2)
    table, number = gpu.array((9, 8), np.float32), gpu.array((1,), np.int32)
    for origin in ((1, 2, 16, 5), (1, 2, 16, 5), (1, 2, 0, 2**30)):
        options = BOTH | {"aux": (table, number), "dropout_p": 0.5, "origin": origin}
        tileattn.forward(q, k, k, **options)
        key, *_, params = gpu.launches[-1]
        assert key.origin
        address, *of_array = gpu.tails[-1][8:]
        dtype = np.dtype(np.int64 if origin[3] > 5 else np.int32)
        for place, kind in ((address, dtype), (params["origin"], np.int64)):
            assert values_at(place, (2, 4), kind) == [[*origin]] * 2
        assert of_array == [2, 4, 4 * dtype.itemsize, dtype.itemsize]
    assert gpu.uploads == []
    assert tileattn.explain(q, k, k, **options).kernel == "forward_sm90"


def test_arrays_on_another_device_are_refused(gpu: Machine) -> None:
    q, k = arrays(gpu)
    table, number = gpu.array((4, 9), np.float32, device=1), gpu.array((1,), np.int32)
    with pytest.raises(ValueError, match=r"^aux\[0\] must be on .* is on device 1"):
        tileattn.forward(q, k, k, aux=(table, number), **BOTH)


def backward(gpu: Machine, **options: Any) -> Gradients:
    q, k = arrays(gpu)
    given = {name: options[name] for name in options if name != "wrt"}
    out, lse = tileattn.forward(q, k, k, **given)
    return tileattn.backward(out, q, k, k, out, lse, **options)


def test_gradients_of_arrays(gpu: Machine) -> None:
    """None for integers, zeros where no score depends on an array."""
    floats, number = gpu.array((4, 9), np.float32), gpu.array((1,), np.int32)
    options = BOTH | {"aux": (floats, number)}
    grads = backward(gpu, **options).daux
    assert grads is not None
    assert (grads[0].shape, grads[0].dtype, grads[1]) == (floats.shape, floats.dtype, None)
    last = [key.kernel for key, *_ in gpu.launches[-2:]]
    assert last == ["backward_daux_sm90", "backward_daux_sum"]
    far = BOTH | {"aux": (gpu.array((99, 99), np.float32), number), "score_mod": gathers}
    with pytest.raises(UnsupportedError, match=r"gradient of aux\[0\]: .* wrt=\('q', 'k', 'v'\)"):
        backward(gpu, **far)
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
    clause = "mask_mod: counted without the values of aux; the GPU reads them and skips more tiles"
    assert clause in found.reasons
    assert clause not in tileattn.explain(q, k, k, mask_mod=window).reasons


@pytest.mark.parametrize("deterministic", [None, False, True])
@pytest.mark.parametrize("reads", [False, True])
def test_calls_with_functions_are_planned_once_for_many_lengths(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch, reads: bool, deterministic: bool | None
) -> None:
    """Other lengths are filled into the plan of the first one, and the same kernels run."""
    planned = []

    def plan(*given: Any, **options: Any) -> Any:
        planned.append(given)
        return launch_plan(*given, **options)

    monkeypatch.setattr(backend, "launch_plan", plan)
    scaled = apply("multiply", score_expression(doubled, ()), parameter(0, Kind.FLOAT))
    gpu.cells_after = 2 + reads * (1 + 2 * 2)  # the number, and the slope of the score
    started, kinds = [], []
    for n in (1100, 1200, 1300, 1500):
        q, k, v = (gpu.array((2, heads, n, 64), np.float16) for heads in (6, 2, 2))
        cell, tail = cell_of(n / 1000), []
        options: dict[str, Any] = {"mask_mod": window, "score_mod": Expression(scaled, (cell,))}
        if reads:
            of = gpu.array((2, n), np.int32)
            options |= {"mask_mod": documents, "aux": (of,)}
            tail = [of.data.ptr, 2, n, 4 * n, 4]
        gpu.started.clear()
        if deterministic is None:
            tileattn.forward(q, k, v, **options)
        else:
            lse = gpu.array((2, 6, n), np.float32)
            grads = tileattn.backward(q, q, k, v, q, lse, deterministic=deterministic, **options)
            assert grads.daux == ((None,) if reads else None)
        started.append(tuple(gpu.started))
        kinds.append(gpu.launches[-1][-1]["tile_kinds_at"].tolist())
        assert gpu.tails[-1] == [cell, cell_of(n / 500), *tail]
    assert len(planned) == 1
    assert len(set(started)) == 1
    assert started[0][0] == "classify_tiles"
    assert len(set(kinds)) == 4
