"""Lengths, offsets and pages on the device: read as they are, and no reason to look at a call."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.backends.cupy.fake_cupy import Machine, at_host
from tests.backends.cupy.test_call import PLANNING, forbid
from tileattn.backends.cupy.backend import CupyCall
from tileattn.kernels.cuda.plan.params import POINTERS

B, HQ, HKV, D, T, NK, PAGES, PAGE = 3, 6, 2, 64, 90, 3000, 7, 16
INTEGERS = ("kv_lengths", "q_offset", "cu_seqlens_q", "cu_seqlens_k", "block_table")
WORKSPACE = ("block_order", "next_tiles", "tile_counter", "partial_out", "partial_sums")

Made = tuple[tuple[Any, Any, Any], dict[str, Any]]


@pytest.fixture
def gpu(h200: Machine) -> Machine:
    return h200


def rows(gpu: Machine, *lead: int) -> Any:
    return gpu.array((*lead, D), np.float16)


def kinds() -> Iterator[Any]:
    """Yield both dtypes alternately, so that the dtypes of one call differ."""
    while True:
        yield from (np.int32, np.int64)


def packed(gpu: Machine, *names: str) -> Made:
    kind = kinds()
    q, k, v = (rows(gpu, heads, T) for heads in (HQ, HKV, HKV))
    sizes = {name: B + ("cu" in name) for name in names}
    return (q, k, v), {name: gpu.array((n,), next(kind)) for name, n in sizes.items()}


def paged(gpu: Machine, *lead: int) -> Made:
    pool = rows(gpu, PAGES, HKV, PAGE)
    options = {"block_table": gpu.array((B, 2), np.int32), "kv_lengths": gpu.array((B,), np.int64)}
    if len(lead) == 2:
        options["cu_seqlens_q"] = gpu.array((B + 1,), np.int32)
    return (rows(gpu, *lead), pool, pool), options


def decoded(gpu: Machine, **options: Any) -> Made:
    k, v = (rows(gpu, B, HKV, NK) for _ in range(2))
    return (rows(gpu, B, HQ, 1), k, v), options


CASES: dict[str, Callable[[Machine], Made]] = {
    "packed": lambda gpu: packed(gpu, "cu_seqlens_q", "cu_seqlens_k"),
    "one of the two": lambda gpu: packed(gpu, "cu_seqlens_k"),
    "and lengths": lambda gpu: packed(gpu, "kv_lengths", "q_offset", "cu_seqlens_q"),
    "pages": lambda gpu: paged(gpu, B, HQ, 1),
    "packed over pages": lambda gpu: paged(gpu, HQ, T),
    "decoding": lambda gpu: decoded(gpu, kv_lengths=gpu.array((B,), np.int32)),
    "no integers": decoded,
    "other arrays": lambda gpu: decoded(
        gpu, sinks=gpu.array((HQ,)), alibi_slopes=gpu.array((HQ,)), q_offset=gpu.array((B,), "i8")
    ),
    "of pairs": lambda gpu: decoded(
        gpu, mask=gpu.array((1, NK), bool), bias=gpu.array((B, HQ, 1, NK), "f2")[..., ::-1]
    ),
}


def addresses(gpu: Machine, names: tuple[str, ...]) -> list[dict[str, int]]:
    """Return the addresses of some arrays at each launch."""
    return [{name: int(params[name]) for name in names} for *_, params in gpu.launches]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_second_call_is_launched_at_once(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch, name: str, given: bool
) -> None:
    """With the addresses of its own arrays, and a workspace of its own."""

    def out_like(q: Any) -> dict[str, Any]:
        return {"out": gpu.array(q.shape, q.dtype)} if given else {}

    arrays, options = CASES[name](gpu)
    first = tileattn.forward(*arrays, **(options | out_like(arrays[0])))
    known, before = [x[:3] for x in gpu.launches], addresses(gpu, WORKSPACE)
    gpu.launches.clear()
    forbid(monkeypatch, (CupyCall, "forward"), *PLANNING)
    arrays, options = CASES[name](gpu)
    out, allocated = out_like(arrays[0]), len(gpu.allocated)
    found = tileattn.forward(*arrays, **(options | out))
    assert [x[:3] for x in gpu.launches] == known
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in first]
    assert found.out is out.get("out", found.out)
    own = dict(zip("qkv", arrays, strict=True)) | found._asdict() | options
    ends = own.get("cu_seqlens_q", own.get("cu_seqlens_k"))
    if ends is not None:
        own.setdefault("cu_seqlens_q", ends)
        if "block_table" not in own:
            own.setdefault("cu_seqlens_k", ends)
    rest = tuple(x for x in POINTERS if x not in WORKSPACE)
    for there in addresses(gpu, rest):
        assert there == {x: own[x].data.ptr if x in own else 0 for x in rest}
    parts = addresses(gpu, WORKSPACE)
    assert len(gpu.allocated) - allocated <= 1 + any(parts[0].values())
    for one, other in zip(before, parts, strict=True):
        moved = {other[x] - one[x] for x in WORKSPACE if one[x]}
        assert one.keys() == other.keys()
        assert not any(other[x] for x in WORKSPACE if not one[x])
        assert len(moved) <= 1
        assert 0 not in moved


def backward(gpu: Machine, arrays: Any, options: Any, **more: Any) -> tuple[dict[str, Any], Any]:
    """Give the arrays and the gradients of a call."""
    q, k, v = arrays
    out, dout = (gpu.array(q.shape, q.dtype) for _ in range(2))
    given = {"q": q, "k": k, "v": v, "out": out, "dout": dout}
    given["lse"] = gpu.array(q.shape[:-1], np.float32)
    return given, tileattn.backward(**given, **(options | more))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("name", "more"),
    [
        *((name, ()) for name in ("packed", "one of the two", "and lengths", "no integers")),
        *(("packed", ("dlse",)), ("no integers", ("dlse", "mask"))),
    ],
)
def test_so_is_a_second_backward_pass(
    gpu: Machine,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    more: tuple[str, ...],
    deterministic: bool,
) -> None:
    def call(deterministic: bool) -> tuple[dict[str, Any], Any]:
        gpu.launches.clear()
        arrays, options = CASES[name](gpu)
        shapes = {"dlse": arrays[0].shape[:-1], "mask": (1, NK)}
        others = {x: gpu.array(shapes[x], bool if x == "mask" else np.float32) for x in more}
        options = options | others
        given, grads = backward(gpu, arrays, options, deterministic=deterministic)
        return given | options, grads

    call(not deterministic)
    call(deterministic)
    known = [x[:3] for x in gpu.launches]
    in_order = gpu.launches[1][-1]["in_order"]
    forbid(monkeypatch, (CupyCall, "backward"), *PLANNING)
    for order in (deterministic, not deterministic, deterministic):
        given, grads = call(order)
    assert [x[:3] for x in gpu.launches] == known
    given |= {f"d{x}": getattr(grads, f"d{x}") for x in "qkv"}
    assert all(given[f"d{x}"].shape == given[x].shape for x in "qkv")
    assert grads[3:] == (None, None)
    assert grads.daux is None
    for *_, params in gpu.launches:
        assert params["in_order"] == in_order
        assert all(params[x] == y.data.ptr for x, y in given.items())
        assert 0 not in {int(params[x]) for x in ("delta", "head_flags")}


def test_what_else_backward_may_be_asked_for(gpu: Machine) -> None:
    """Nothing of it is answered by the pass that is remembered."""
    arrays, options = packed(gpu, "cu_seqlens_q")
    for _ in range(2):
        backward(gpu, arrays, options)
    assert backward(gpu, arrays, options, wrt=["q"])[1].dk is None
    workspace = gpu.array((1 << 20,), np.uint8)
    backward(gpu, arrays, options, workspace=workspace)
    assert 0 <= int(gpu.launches[-1][-1]["delta"]) - workspace.data.ptr < 1 << 20
    with pytest.raises(TypeError, match=r"^deterministic must be True or False"):
        backward(gpu, arrays, options, deterministic=0)
    sinks = {**options, "sinks": gpu.array((HQ,))}
    backward(gpu, arrays, sinks, wrt=("q", "k", "v"))
    assert backward(gpu, arrays, sinks)[1].dsinks is not None
    dlse = gpu.array(arrays[0].shape[:-1])
    for _ in range(2):
        backward(gpu, arrays, options, dlse=dlse)
        assert gpu.launches[-1][-1]["dlse"] == dlse.data.ptr


def test_places_of_arrays_are_looked_at_in_every_backward_pass(gpu: Machine) -> None:
    whole = gpu.array((6 * HQ * T * D,), np.float16)

    def at(first: int) -> Any:
        return whole[first : first + HQ * T * D].reshape(HQ, T, D)

    options = {"cu_seqlens_q": gpu.array((B + 1,), np.int32)}
    for first, vector in ((0, 16), (4, 8), (1, 2), (0, 16)):
        backward(gpu, (at(first), at(0), at(0)), options)
        main = ("backward_sm90" if vector == 16 else "backward_dkdv", vector)
        assert main in {(x[0].kernel, x[0].alignment_bytes) for x in gpu.launches}
        gpu.launches[:-1] = []
        assert gpu.launches[-1][-1]["q"] == whole.data.ptr + 2 * first
    there = gpu.array((HQ, T, D), np.float16, device=3)
    with pytest.raises(ValueError, match=r"^k must be on .* is on device 3"):
        backward(gpu, (at(0), there, there), options)
    options["cu_seqlens_q"] = gpu.array((B + 1,), np.int32, device=3)
    with pytest.raises(ValueError, match=r"^cu_seqlens_q must be on .* is on device 3"):
        backward(gpu, (at(0), at(0), at(0)), options)


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_integers_are_read_as_they_are(gpu: Machine, kind: Any) -> None:
    """In both passes, of four or eight bytes each; nothing is computed of them."""
    (q, k, v), options = packed(gpu)
    ends, lengths = gpu.array((B + 1,), kind), gpu.array((B,), np.int32)
    options = {"cu_seqlens_q": ends, "kv_lengths": lengths}
    for _ in range(2):
        attention = tileattn.forward(q, k, v, **options)
        tileattn.backward(q, q, k, v, *attention, **options)
    for *_, params in gpu.launches:
        assert params["cu_seqlens_q"] == params["cu_seqlens_k"] == ends.data.ptr
        assert params["kv_lengths"] == lengths.data.ptr
        sizes = [params[f"{name}_bytes"].item() for name in INTEGERS]
        assert sizes == [4, 0, ends.itemsize, ends.itemsize, 0]
    assert gpu.uploads == []


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.uint32, np.uint64])
def test_other_integers_are_copied_to_the_workspace(gpu: Machine, kind: Any) -> None:
    (q, k, v), _ = packed(gpu)
    ends = gpu.array((B + 1,), kind)
    at_host(ends)[...] = [0, 40, 40, T]
    for _ in range(2):
        attention = tileattn.forward(q, k, v, cu_seqlens_q=ends)
        tileattn.backward(q, q, k, v, *attention, cu_seqlens_q=ends)
    for *_, params in gpu.launches:
        assert params["cu_seqlens_q_bytes"] == params["cu_seqlens_k_bytes"] == 8
    params = gpu.launches[-1][-1]
    assert params["cu_seqlens_q"] not in (0, ends.data.ptr)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        assert [*(ctypes.c_int64 * (B + 1)).from_address(int(params[name]))] == [0, 40, 40, T]


def test_integers_that_are_not_neighbours_are_copied(gpu: Machine) -> None:
    (q, k, v), _ = packed(gpu)
    ends = gpu.array((2 * B + 2,), np.int32)[::2]
    for _ in range(2):
        tileattn.forward(q, k, v, cu_seqlens_q=ends)
    for *_, params in gpu.launches:
        assert params["cu_seqlens_q"] not in (0, ends.data.ptr)
        assert params["cu_seqlens_q_bytes"] == 4


@pytest.mark.parametrize("name", ["kv_lengths", "q_offset", "cu_seqlens_q"])
def test_out_over_integers_of_a_second_call(gpu: Machine, name: str) -> None:
    (q, k, v), options = packed(gpu, "kv_lengths", "q_offset", "cu_seqlens_q")
    tileattn.forward(q, k, v, out=gpu.array(q.shape, q.dtype), **options)
    gpu.launches.clear()
    out, x = gpu.array(q.shape, q.dtype), options[name]
    options[name] = out.reshape(-1)[-4 * x.itemsize :].view(x.dtype)[: len(x)]
    with pytest.raises(ValueError, match=f"^out must not overlap {name}"):
        tileattn.forward(q, k, v, out=out, **options)
    assert gpu.launches == []


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_of_another_device_in_a_second_call(gpu: Machine, name: str) -> None:
    names = ("kv_lengths", "q_offset", "cu_seqlens_q", "cu_seqlens_k")
    arrays, options = paged(gpu, B, HQ, 1) if name == "block_table" else packed(gpu, *names)
    tileattn.forward(*arrays, **options)
    gpu.launches.clear()
    x = options[name]
    options[name] = gpu.array(x.shape, x.dtype, device=3)
    with pytest.raises(ValueError, match=f"^{name} must be on .* is on device 3"):
        tileattn.forward(*arrays, **options)
    assert gpu.launches == []


def test_pages_on_the_host_are_sent_in_every_call(gpu: Machine) -> None:
    (q, k, v), _ = paged(gpu, B, HQ, 1)
    lengths = gpu.array((B,), np.int32)
    sent: list[Any] = []
    import cupy

    def send(x: Any) -> Any:
        sent.append(gpu.array(x.shape, x.dtype))
        return sent[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cupy, "asarray", send)
        for _ in range(3):
            tileattn.forward(q, k, v, kv_lengths=lengths, block_table=np.zeros((B, 2), np.int32))
            assert gpu.launches[-1][-1]["block_table"] == sent[-1].data.ptr
            assert gpu.launches[-1][-1]["block_table_bytes"] == 8
    assert len(sent) == 3
