"""What the CuPy backend asks of a GPU: tried without one, on arrays in host memory."""

import ctypes
import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tests.backends.cupy import fake_cupy
from tests.backends.cupy.fake_cupy import Machine, launch_together
from tileattn import api
from tileattn.backends import registry
from tileattn.backends.cupy import backend as cupy_backend
from tileattn.backends.cupy import describe
from tileattn.backends.cupy.backend import CupyBackend, CupyCall
from tileattn.kernels.launch.device import device_of_arch
from tileattn.kernels.launch.params import POINTERS

B, HQ, HKV, NQ, NK, D, DV = 2, 6, 2, 37, 53, 24, 40


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with fake_cupy.machine(monkeypatch) as made:
        yield made


def arrays(gpu: Machine, dtype: Any = np.float16) -> tuple[Any, Any, Any]:
    shapes = ((B, HQ, NQ, D), (B, HKV, NK, D), (B, HKV, NK, DV))
    q, k, v = (gpu.array(shape, dtype) for shape in shapes)
    return q, k, v


def gradients(gpu: Machine, q: Any, k: Any, v: Any, **options: Any) -> tileattn.Gradients:
    out = gpu.array((B, HQ, NQ, DV), q.dtype)
    lse = gpu.array((B, HQ, NQ), np.float32 if q.dtype != np.float64 else np.float64)
    return tileattn.backward(out, q, k, v, out, lse, **options)


def kernels(gpu: Machine) -> list[str]:
    return [key.kernel for key, *_ in gpu.launches]


def forbid(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Let a function fail where it is called."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError(f"{name} is called again")

    monkeypatch.setattr(owner, name, fail)


# --- the parameter block ------------------------------------------------------------------------


def test_the_parameter_block_describes_the_call(gpu: Machine) -> None:
    q, k, v = arrays(gpu)
    v = v[:, :, :, 8:24]
    q = q.swapaxes(1, 2).swapaxes(1, 2)[:, :, ::-1]
    out, lse = tileattn.forward(q, k, v, scale=0.5, window=(7, None), q_offset=[4, 4])
    assert out.shape == (B, HQ, NQ, 16)
    assert (lse.shape, lse.dtype) == ((B, HQ, NQ), np.float32)
    ((key, blocks, shared, params),) = gpu.launches
    assert (key.kernel, key.dtype, key.head_dim, key.value_dim) == ("forward", "float16", 32, 32)
    assert blocks == B * HQ * math.ceil(NQ / key.block_q)
    assert shared > 0
    addresses = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    for name in POINTERS:
        assert params[name] == (addresses[name].data.ptr if name in addresses else 0), name
    assert params["q_at"].tolist() == (HQ * NQ * D, NQ * D, -D)
    assert params["v_at"].tolist() == (HKV * NK * DV, NK * DV, DV)
    sizes = {"B": B, "Hq": HQ, "Hkv": HKV, "Nq": NQ, "Nk": NK, "D": D, "Dv": 16, "group": 3}
    for name, size in sizes.items():
        assert params[name] == size, name
    assert (params["left"], params["right"]) == (7, -1)
    assert (params["length"], params["offset"], params["scale"]) == (NK, 4, 0.5)


def test_options_are_passed_as_they_lie(gpu: Machine) -> None:
    q, k, v = arrays(gpu, np.float32)
    bias = gpu.array((HQ, 1, NK + 5), np.float16)[..., 2:-3]
    mask, sinks = gpu.array((B, 1, NQ, 1), np.bool_), gpu.array((HQ,))
    slopes = gpu.array((B, HQ))
    tileattn.forward(q, k, v, bias=bias, mask=mask, sinks=sinks, alibi_slopes=slopes)
    ((key, _, _, params),) = gpu.launches
    assert (key.bias, key.mask, key.alibi, key.fold_scale) == ("float16", True, True, False)
    assert params["bias_at"].tolist() == (0, NK + 5, 0, 1)
    assert [params[f"bias_{n}"] for n in ("B", "H", "Nq", "Nk")] == [1, HQ, 1, NK]
    assert params["mask_at"].tolist() == (NQ, 0, 1, 0)
    assert params["alibi_slopes_b"] == HQ
    given = {"bias": bias, "mask": mask, "sinks": sinks, "alibi_slopes": slopes}
    for name, x in given.items():
        assert params[name] == x.data.ptr, name


def test_lengths_that_differ_are_copied_once(gpu: Machine) -> None:
    copies = gpu.uploads
    q, k, v = arrays(gpu)
    for _ in range(3):
        tileattn.forward(q, k, v, kv_lengths=np.array([50, 9]), q_offset=[0, 3])
    assert len(copies) == 2
    for *_, params in gpu.launches:
        for name, x in (("kv_lengths", [50, 9]), ("q_offset", [0, 3])):
            place = (ctypes.c_int64 * 2).from_address(int(params[name]))
            assert list(place) == x
    tileattn.forward(q, k, v, kv_lengths=np.array([50, 8]), q_offset=[0, 3])
    assert len(copies) == 4
    mask = tileattn.BlockMask(np.ones((3, 4), np.bool_), (16, 16))
    tileattn.forward(q, k, v, kv_lengths=[9, 8], q_offset=[2, 1], block_mask=mask)
    found = {
        int(gpu.launches[-1][-1][name])
        for name in ("kv_lengths", "q_offset", "block_kinds", "block_bits")
    }
    assert found == {x.data.ptr for x in copies[4:]}


# --- what is done once --------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"causal": True, "kv_lengths": [9, 9]}])
def test_a_second_call_does_only_what_addresses_need(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    q, k, v = arrays(gpu)
    first = tileattn.forward(q, k, v, **options)
    gradients(gpu, q, k, v, **options)
    forbid(monkeypatch, api, "parse")
    for name in ("layout_of", "plan_forward", "plan_backward"):
        forbid(monkeypatch, cupy_backend, name)
    gpu.allowed.clear()
    q, k, v = arrays(gpu)
    second = tileattn.forward(q, k, v, **options)
    gradients(gpu, q, k, v, **options)
    assert gpu.allowed == []
    half = len(gpu.launches) // 2
    for (key, *rest, _), (again, *others, params) in zip(
        gpu.launches[:half], gpu.launches[half:], strict=True
    ):
        assert (key, rest) == (again, others)
        for name, x in (("q", q), ("k", k), ("v", v)):
            assert params[name] == x.data.ptr
    assert gpu.launches[half][-1]["out"] == second.out.data.ptr != first.out.data.ptr
    assert gpu.launches[half][-1]["lse"] == second.lse.data.ptr


@pytest.mark.parametrize("given", [False, True])
def test_the_shortest_way_of_a_second_call(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    def out() -> dict[str, Any]:
        return {"out": gpu.array((B, HQ, NQ, 2 * DV), np.float16)[..., DV:]} if given else {}

    tileattn.forward(*arrays(gpu), **out())
    forbid(monkeypatch, CupyCall, "forward")
    (q, k, v), there = arrays(gpu), out()
    attention = tileattn.forward(q, k, v, **there)
    (*_, first), (*_, params) = gpu.launches
    assert attention.out is there.get("out", attention.out)
    for name, x in {"q": q, "k": k, "v": v, **attention._asdict()}.items():
        assert params[name] == x.data.ptr
    assert params["out_at"] == first["out_at"]


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_out_that_overlaps_in_a_second_call(gpu: Machine, name: str) -> None:
    """It has the layout of the first one, so only its place tells."""
    shape = (B, HQ, NQ, D)

    def inputs() -> dict[str, Any]:
        return {each: gpu.array(shape, np.float16) for each in "qkv"}

    def backwards(x: Any) -> Any:
        return x[:, :, ::-1]

    given = inputs()
    given[name] = backwards(given[name])
    tileattn.forward(**given, out=gpu.array(shape, np.float16))
    pair = gpu.array((2, *shape), np.float16)
    for n in range(2):
        given[name] = backwards(pair[n])
        with pytest.raises(ValueError, match=f"out overlaps {name}"):
            tileattn.forward(**given, out=pair[n])
        assert tileattn.forward(**given, out=pair[1 - n]).lse.shape == shape[:3]
    assert len(gpu.launches) == 3


def test_an_out_on_another_device_in_a_second_call(gpu: Machine) -> None:
    q, k, v = arrays(gpu)
    tileattn.forward(q, k, v, out=gpu.array((B, HQ, NQ, DV), np.float16))
    with pytest.raises(ValueError, match="out is on device 1"):
        tileattn.forward(q, k, v, out=gpu.array((B, HQ, NQ, DV), np.float16, device=1))


def test_nothing_that_was_refused_is_remembered(gpu: Machine) -> None:
    q, k, v = arrays(gpu)
    for _ in range(2):
        with pytest.raises(ValueError, match="kv_lengths holds 54"):
            tileattn.forward(q, k, v, kv_lengths=[3, 54])
        with pytest.raises(TypeError, match="causal is int"):
            tileattn.forward(q, k, v, causal=1)  # type: ignore[arg-type]  # wrong on purpose
        tileattn.forward(q, k, v, causal=True)
        tileattn.forward(q, k, v, kv_lengths=[3, 3])


def test_a_backend_of_the_same_name_takes_over(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(CupyBackend):
        def why_not(self, problem: Any) -> str | None:  # noqa: ARG002 - the protocol's argument
            return "it never does"

    q, k, v = arrays(gpu)
    tileattn.forward(q, k, v)
    monkeypatch.setitem(registry._loaded, "cupy", registry.get("cupy"))
    tileattn.register_backend(Other())
    with pytest.raises(tileattn.UnsupportedError, match="it never does"):
        tileattn.forward(q, k, v)


def test_a_subclass_may_replace_a_pass(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in repeated calls, which nothing else may answer."""
    asked = []

    class Counting(CupyBackend):
        def forward(self, problem: Any, operands: Any, out: Any) -> tileattn.Attention:
            asked.append(problem)
            return super().forward(problem, operands, out)

    monkeypatch.setitem(registry._loaded, "cupy", registry.get("cupy"))
    tileattn.register_backend(Counting())
    q, k, v = arrays(gpu)
    for _ in range(3):
        tileattn.forward(q, k, v)
    assert len(asked) == len(gpu.launches) == 3


def test_alignment_and_device_are_looked_at_each_time(gpu: Machine) -> None:
    whole = gpu.array(
        (
            1,
            1,
            2 * NK * 32,
        ),
        np.float16,
    )

    def at(first: int) -> Any:
        return whole[..., first : first + NK * 32].reshape(1, 1, NK, 32)

    for first, vector in ((0, 16), (1, 2), (4, 8), (8, 16), (1, 2)):
        tileattn.forward(at(first), at(0), at(0))
        key, *_, params = gpu.launches[-1]
        assert key.alignment_bytes == vector
        assert params["q"] == whole.data.ptr + 2 * first
    gpu.device = 1
    with pytest.raises(ValueError, match="q is on device 0"):
        tileattn.forward(at(1), at(0), at(0))  # as the last call
    gpu.device = 0
    tileattn.forward(at(0), at(0), at(0))


def test_threads_do_not_share_a_parameter_block(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every launch waits for the others', so all blocks are filled before one is read."""
    sets = [arrays(gpu) for _ in range(6)]
    tileattn.forward(*sets[0])
    gpu.launches.clear()
    launch_together(monkeypatch, sets)
    seen = {tuple(int(params[name]) for name in "qkv") for *_, params in gpu.launches}
    assert seen == {tuple(x.data.ptr for x in given) for given in sets}


# --- the backward pass --------------------------------------------------------------------------

BEFORE = ("backward_preprocess", "backward_large_scores")
SUMMED = ("backward_dkdv", "backward_dq_convert", "backward_dq")  # dq in memory, then repairs
PLAIN = ("naive_large_scores", "naive_dkdv", "naive_dq")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_what_the_backward_pass_starts(gpu: Machine, dtype: Any) -> None:
    q, k, v = arrays(gpu, dtype)
    options = {"bias": gpu.array((NQ, NK), np.float32), "sinks": gpu.array((HQ,), np.float64)}
    grads = gradients(gpu, q, k, v, **options)
    assert kernels(gpu) == [*BEFORE, *SUMMED, "backward_dbias", "backward_dsinks"]
    params = gpu.launches[-1][-1]
    for name in ("dq_accum", "delta", "lse_log2", "row_max", "head_flags", "dbias", "dsinks"):
        assert params[name] != 0, name
    assert grads.dsinks.dtype == np.float64
    gpu.launches.clear()
    grads = gradients(gpu, q, k, v, deterministic=True)
    assert kernels(gpu) == [*BEFORE, "backward_dkdv", "backward_dq"]
    params = gpu.launches[-1][-1]
    assert params["dq_accum"] == 0
    assert params["lse_log2"] > params["delta"] > 0
    for name, like in (("dq", q), ("dk", k), ("dv", v)):
        x = getattr(grads, name)
        assert (x.shape, x.dtype, int(params[name])) == (like.shape, like.dtype, x.data.ptr)
    assert grads.dbias is None
    assert grads.dsinks is None


# --- what bad input gets ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["k", "v", "out", "bias", "mask", "alibi_slopes", "sinks", "kv_lengths"]
)
def test_an_array_on_another_device_is_named(gpu: Machine, name: str) -> None:
    q, k, v = arrays(gpu)
    given = {
        "k": k,
        "v": v,
        "out": gpu.array((B, HQ, NQ, DV), np.float16),
        "bias": gpu.array((NQ, NK)),
        "mask": gpu.array((NQ, NK), np.bool_),
        "alibi_slopes": gpu.array((B, HQ)),
        "sinks": gpu.array((HQ,)),
        "kv_lengths": gpu.array((B,), np.int64),
    }
    elsewhere = gpu.array(given[name].shape, given[name].dtype, device=3)
    options: dict[str, Any] = {"k": k, "v": v, "q_offset": 0, name: elsewhere}
    with pytest.raises(
        ValueError, match=rf"^{name} is on device 3; .*current device, 0.*Device\(3"
    ):
        tileattn.forward(q, **options)
    assert gpu.launches == []


def test_out_may_not_overlap_an_input(gpu: Machine) -> None:
    whole = gpu.array((2, 3, 4, 16))
    k = gpu.array((2, 3, 4, 8))
    left, right = whole[..., :8], whole[..., 8:]
    with pytest.raises(ValueError, match="out overlaps q"):
        tileattn.forward(left, k, k, out=left)
    with pytest.raises(ValueError, match="out overlaps v"):
        tileattn.forward(k, k, left, out=whole[..., 1:9])
    with pytest.raises(ValueError, match="out has elements that overlap"):
        tileattn.forward(k, k, k, out=_broadcast(gpu))
    # They interleave, and share nothing.
    out, _ = tileattn.forward(left, k, k, out=right)
    assert out is right
    assert gpu.launches[-1][-1]["out_at"].tolist() == (3 * 4 * 16, 4 * 16, 16)


def _broadcast(gpu: Machine) -> Any:
    import cupy

    memory = gpu.array((2, 3, 1, 8)).data
    return cupy.ndarray((2, 3, 4, 8), np.float32, memory, (96, 32, 0, 4))


@pytest.mark.parametrize("room", [0, 1])
def test_without_memory_nothing_is_started(gpu: Machine, room: int) -> None:
    """Neither out= nor an input is touched: the kernels come last."""
    import cupy

    q, k, v = arrays(gpu)
    out = gpu.array((B, HQ, NQ, DV), np.float16)
    left = [room]

    def full(nbytes: int) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise cupy.cuda.memory.OutOfMemoryError(nbytes, 0)
        return gpu.allocate(nbytes)

    cupy.cuda.set_allocator(full)
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        tileattn.forward(q, k, v, out=None if room else out)
    assert gpu.launches == []
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        tileattn.backward(out, q, k, v, out, gpu.array((B, HQ, NQ)))
    assert gpu.launches == []


# --- explain ------------------------------------------------------------------------------------


def test_explain_says_what_would_run(gpu: Machine) -> None:
    q, k, v = (gpu.array((2, 4, 1000, 64), np.float16) for _ in range(3))
    found = tileattn.explain(q, k, v, causal=True)
    assert gpu.launches == []
    assert (found.backend, found.kernel, found.workers) == ("cupy", "forward", 132)
    rows, columns = found.forward_tile
    per_head = math.ceil(1000 / rows) * math.ceil(1000 / columns)
    assert sum(found.tiles.values()) == 8 * per_head
    assert found.tiles["skipped"] > 0
    assert [line.split()[0] for line in found.kernels] == [*("forward", *BEFORE, *SUMMED)]
    assert "100 registers" in found.kernels[0]
    assert "2 on each SM" in found.kernels[0]
    assert found.workspace_bytes == 2 * 4 * (3 * 1024 + 1000 * 64) * 4 + 256
    assert found.traffic["flash2"][0] == sum(found.bytes_moved.values())
    assert all(min(nbytes) > 0 for nbytes in found.traffic.values())
    report = str(found)
    assert "NVIDIA H200" in report
    assert report.count("launch    ") == 6
    assert len(report.splitlines()) < 23


def test_a_device_is_described_by_what_cuda_says(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip("cupy", exc_type=ImportError).cuda.runtime
    said = {
        runtime.cudaDevAttrMultiProcessorCount: 132,
        runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin: 232448,
        runtime.cudaDevAttrL2CacheSize: 50 << 20,
    }
    monkeypatch.setattr(runtime, "deviceGetAttribute", lambda which, ordinal: said[which] + ordinal)
    monkeypatch.setattr(runtime, "getDeviceProperties", lambda _: {"name": b"H200"})
    monkeypatch.setattr(describe, "arch_of", lambda ordinal: f"sm_{90 + ordinal}a")
    describe.device_of.cache_clear()
    try:
        assert describe.device_of(0) == device_of_arch("sm_90a")
        assert describe.device_of(1).sm_count == 133
    finally:
        describe.device_of.cache_clear()
