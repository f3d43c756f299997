"""What a call on CuPy arrays does: tried without a GPU, on arrays in host memory."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tests.backends.cupy.fake_cupy import Machine, at_host, launch_together
from tileattn.backends import known_calls, registry
from tileattn.backends.cupy import backend as cupy_backend
from tileattn.backends.cupy import cached_passes, describe
from tileattn.backends.cupy.backend import CupyBackend, CupyCall
from tileattn.kernels.cuda.plan.device import device_of_arch
from tileattn.kernels.cuda.plan.params import POINTERS

B, HQ, HKV, NQ, NK, D, DV = 2, 6, 2, 37, 53, 24, 40


def arrays(gpu: Machine, dtype: Any = np.float16) -> tuple[Any, Any, Any]:
    shapes = ((B, HQ, NQ, D), (B, HKV, NK, D), (B, HKV, NK, DV))
    q, k, v = (gpu.array(shape, dtype) for shape in shapes)
    return q, k, v


def out_of(gpu: Machine, **where: int) -> Any:
    return gpu.array((B, HQ, NQ, DV), np.float16, **where)


OPTIONS = ("bias", "mask", "alibi_slopes", "sinks", "kv_lengths", "q_offset")


def options_of(gpu: Machine, **where: int) -> dict[str, Any]:
    made = (
        gpu.array((HQ, 1, NK + 5), np.float16, **where)[..., 2:-3],
        gpu.array((B, 1, NQ, 1), np.bool_, **where),
        *(gpu.array((B, HQ), **where), gpu.array((HQ,), **where)),
        *(gpu.array((B,), np.int64, **where) for _ in range(2)),
    )
    return dict(zip(OPTIONS, made, strict=True))


def gradients(gpu: Machine, q: Any, k: Any, v: Any, **options: Any) -> tileattn.Gradients:
    out = gpu.array((B, HQ, NQ, DV), q.dtype)
    lse = gpu.array((B, HQ, NQ), np.float64 if q.dtype == np.float64 else np.float32)
    return tileattn.backward(out, q, k, v, out, lse, **options)


def kernels(gpu: Machine) -> list[str]:
    return [key.kernel for key, *_ in gpu.launches]


def forbid(monkeypatch: pytest.MonkeyPatch, *owners: tuple[Any, str]) -> None:
    """Let functions fail where they are called."""
    for owner, name in owners:

        def fail(*_: Any, name: str = name, **__: Any) -> None:
            raise AssertionError(f"{name} is called again")

        monkeypatch.setattr(owner, name, fail)


PLANNING = (
    (known_calls, "kind_of_call"),
    (known_calls, "at_numbers"),
    *((cupy_backend, name) for name in ("layout_of", "kind_key", "launch_plan")),
)


# --- the parameter block ------------------------------------------------------------------------


@pytest.mark.parametrize("with_options", [False, True])
def test_the_parameter_block_describes_the_call(gpu: Machine, with_options: bool) -> None:
    q, k, v = arrays(gpu)
    q, v = q[:, :, ::-1], v[..., 8:24]
    options = options_of(gpu) if with_options else {"q_offset": [4, 4]}
    out, lse = tileattn.forward(q, k, v, scale=0.5, window=(7, None), **options)
    assert out.shape == (B, HQ, NQ, 16)
    assert (lse.shape, lse.dtype) == ((B, HQ, NQ), np.float32)
    ((key, _, shared, params),) = gpu.launches
    assert gpu.allowed == [(key, shared)]
    kernel = "forward_split" if with_options else "forward"  # kv_lengths are of a cache
    assert (key.kernel, key.dtype, key.head_dim, key.value_dim) == (kernel, "float16", 32, 32)
    addresses = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    fields: dict[str, Any] = {
        "q_at": (HQ * NQ * D, NQ * D, -D),
        "v_at": (HKV * NK * DV, NK * DV, DV),
    }
    fields |= {"left": 7, "right": -1, "scale": 0.5, "Nk": NK, "Dv": 16}
    if with_options:
        addresses |= options
        fields |= {"bias_at": (0, NK + 5, 0, 1), "mask_at": (NQ, 0, 1, 0), "length": 0}
        assert (key.bias, key.mask, key.alibi) == ("float16", True, True)
    else:
        fields |= {"bias_at": (0, 0, 0, 0), "length": NK, "offset": 4}
    for name in POINTERS:
        assert params[name] == (addresses[name].data.ptr if name in addresses else 0), name
    assert {name: params[name].tolist() for name in fields} == fields


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_are_written_where_they_are_returned(
    gpu: Machine, dtype: Any, deterministic: bool
) -> None:
    given = dict(zip("qkv", arrays(gpu, dtype), strict=True))
    gradients(gpu, **given, deterministic=not deterministic)  # which has a plan of its own
    plain = gradients(gpu, **given, deterministic=deterministic)
    params, like = gpu.launches[-1][-1], {f"d{name}": x for name, x in given.items()}
    assert (plain.dbias, plain.dsinks) == (None, None)
    assert params["dbias"] == params["dsinks"] == 0
    # One key block has all keys, and writes rows of dq that are short.
    assert (params["dq_accum"] == 0) == (deterministic or dtype != np.float64)
    options = {"bias": gpu.array((NQ, NK), np.float32), "sinks": gpu.array((HQ,), np.float64)}
    grads = gradients(gpu, **given, **options, deterministic=deterministic)
    assert kernels(gpu)[-3:] == ["backward_dbias", "backward_dbias_sum", "backward_dsinks"]
    params, like = gpu.launches[-1][-1], like | {f"d{name}": x for name, x in options.items()}
    for name, x in like.items():
        found = getattr(grads, name)
        assert (found.shape, found.dtype) == (x.shape, x.dtype)
        if name != "dsinks" or dtype == np.float64:  # else a copy, of accumulated numbers
            assert params[name] == found.data.ptr
    assert not at_host(grads.dbias).any()  # tiles that are skipped are not written
    names = ("delta", "lse_log2", "row_max", "head_flags", "dsinks")
    assert len({int(params[name]) for name in names} - {0}) == len(names)


@pytest.mark.parametrize("deterministic", [False, True])
def test_vjp_gives_the_kernels_of_both_passes_the_same(gpu: Machine, deterministic: bool) -> None:
    q, k = arrays(gpu)[0], gpu.array((B, HKV, 70, D), np.float16)
    dlse = gpu.array((B, HQ, NQ))
    attention, pullback = tileattn.vjp(q, k, k, causal=True, scale=0.25)
    grads = pullback(gpu.array(q.shape, np.float16), dlse, deterministic=deterministic)
    assert ("backward_dq_convert" in kernels(gpu)) != deterministic
    for *_, params in gpu.launches:
        assert (params["right"], params["scale"], params["q"]) == (0, 0.25, q.data.ptr)
    params = gpu.launches[1][-1]
    assert params["dlse"] == dlse.data.ptr
    assert (params["out"], params["lse"]) == tuple(x.data.ptr for x in attention)
    assert grads.dk.shape == k.shape


# --- what is done once --------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"causal": True, "kv_lengths": [9, 9]}])
def test_a_second_call_does_only_what_addresses_need(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    first = tileattn.forward(*arrays(gpu), **options)
    gradients(gpu, *arrays(gpu), **options)
    forbid(monkeypatch, *PLANNING)
    gpu.allowed.clear()
    q, k, v = arrays(gpu)
    second = tileattn.forward(q, k, v, **options)
    gradients(gpu, q, k, v, **options)
    assert gpu.allowed == []
    half = len(gpu.launches) // 2
    assert [x[:3] for x in gpu.launches[:half]] == [x[:3] for x in gpu.launches[half:]]
    for *_, params in gpu.launches[half:]:
        assert [params[name] for name in "qkv"] == [x.data.ptr for x in (q, k, v)]
    params = gpu.launches[half][-1]
    assert params["out"] == second.out.data.ptr != first.out.data.ptr
    assert params["lse"] == second.lse.data.ptr


@pytest.mark.parametrize("given", [False, True])
def test_the_shortest_way_of_a_second_call(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    def out() -> dict[str, Any]:
        return {"out": gpu.array((B, HQ, NQ, 2 * DV), np.float16)[..., DV:]} if given else {}

    tileattn.forward(*arrays(gpu), **out())
    forbid(monkeypatch, (CupyCall, "forward"))
    (q, k, v), there = arrays(gpu), out()
    attention = tileattn.forward(q, k, v, **there)
    (*_, first), (*_, params) = gpu.launches
    assert attention.out is there.get("out", attention.out)
    for name, x in {"q": q, "k": k, "v": v, **attention._asdict()}.items():
        assert params[name] == x.data.ptr
    assert params["out_at"] == first["out_at"]


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("dtype", [np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (3, 0, 2), (2, 3, 5)])
def test_results_are_arrays_as_cupy_makes_them(
    gpu: Machine, shape: tuple[int, ...], dtype: Any, private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a CuPy whose constructor has other parts."""
    import cupy

    expected = cupy.ndarray(shape, dtype)
    if not private:
        monkeypatch.setattr(cached_passes, "_PART", "_none")
        cached_passes._own_part.cache_clear()
    make = cached_passes.maker([(shape, np.dtype(dtype), 256), (shape, np.dtype(dtype), 1024)])
    cached_passes._own_part.cache_clear()
    piece = gpu.allocate(2048)
    gpu.allocated.clear()
    places = [x.data.ptr - piece.ptr for x in make(piece)]
    assert places == [256, 1024]
    assert gpu.allocated == []
    found, other = make(None)
    assert gpu.allocated == [expected.nbytes] * 2
    assert found.data.ptr != other.data.ptr
    for x in (found, *make(piece)):
        assert type(x) is cupy.ndarray
        assert x.base is None
        for name in ("shape", "strides", "dtype", "nbytes"):
            assert getattr(x, name) == getattr(expected, name)
        for flag in ("c_contiguous", "f_contiguous", "owndata"):
            assert getattr(x.flags, flag) == getattr(expected.flags, flag)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_out_that_overlaps_in_a_second_call(gpu: Machine, name: str) -> None:
    """It has the layout of the first one, so only its place tells."""
    shape = (B, HQ, NQ, D)
    given = {each: gpu.array(shape, np.float16) for each in "qkv"}
    back = np.s_[::-1, ::-1, ::-1]
    given[name] = given[name][back]
    tileattn.forward(**given, out=gpu.array(shape, np.float16))
    pair = gpu.array((2, *shape), np.float16)
    for n in range(2):
        given[name] = pair[n][back]
        with pytest.raises(ValueError, match=f"out must not overlap {name}"):
            tileattn.forward(**given, out=pair[n])
        assert tileattn.forward(**given, out=pair[1 - n]).lse.shape == shape[:3]
    flat, size = pair.reshape(-1), pair[0].size
    given[name] = flat[size // 2 :][:size].reshape(shape)[back]  # it starts after out
    with pytest.raises(ValueError, match=f"out must not overlap {name}"):
        tileattn.forward(**given, out=pair[0])
    assert len(gpu.launches) == 3


def test_nothing_that_was_refused_is_remembered(gpu: Machine) -> None:
    q, k, v = arrays(gpu)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"kv_lengths must be .*; got 54"):
            tileattn.forward(q, k, v, kv_lengths=[3, 54])
        with pytest.raises(TypeError, match="causal must be True or False"):
            tileattn.forward(q, k, v, causal=1)  # type: ignore[arg-type]  # wrong on purpose
        tileattn.forward(q, k, v, causal=True)
        tileattn.forward(q, k, v, kv_lengths=[3, 3])


def test_another_backend_of_the_same_name(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes over, and its pass also runs repeated calls, which nothing else may answer."""
    asked, reasons = [], ["it never does", *[None] * 3]

    class Other(CupyBackend):
        def why_not(self, problem: Any) -> str | None:  # noqa: ARG002 - the protocol's argument
            return reasons.pop(0)

        def forward(self, problem: Any, operands: Any, out: Any) -> tileattn.Attention:
            asked.append(problem)
            return super().forward(problem, operands, out)

    q, k, v = arrays(gpu)
    tileattn.forward(q, k, v)
    monkeypatch.setitem(registry._loaded, "cupy", registry.get("cupy"))
    tileattn.register_backend(Other())
    with pytest.raises(tileattn.UnsupportedError, match="it never does"):
        tileattn.forward(q, k, v)
    for _ in range(3):
        tileattn.forward(q, k, v)
    assert (len(asked), len(gpu.launches)) == (3, 4)


def test_alignment_and_device_are_looked_at_each_time(gpu: Machine) -> None:
    whole, other = (gpu.array((2 * NK * 32,), np.float16) for _ in range(2))

    def at(first: int, x: Any = whole) -> Any:
        return x[first : first + NK * 32].reshape(1, 1, NK, 32)

    for first, vector in ((0, 16), (1, 2), (4, 8), (8, 16), (1, 2)):
        tileattn.forward(at(first), at(0), at(0))
        key, *_, params = gpu.launches[-1]
        assert key.alignment_bytes == vector
        assert params["q"] == whole.data.ptr + 2 * first
    for first, vector in ((0, 16), (4, 8)):
        tileattn.forward(at(0), at(0), at(0), out=at(first, other))
        assert gpu.launches[-1][0].alignment_bytes == vector
    x, bias = gpu.array((1, 1, 56, 32), np.float16), gpu.array((56, 72), np.float16)
    for first, vector in ((0, 16), (4, 8), (0, 16), (4, 8)):
        tileattn.forward(x, x, x, bias=bias[:, first : first + 56])
        assert gpu.launches[-1][0].bias_alignment_bytes == vector
    gpu.device = 1
    with pytest.raises(ValueError, match=r"q must be on .* is on device 0"):
        tileattn.forward(at(1), at(0), at(0))  # as an earlier call
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


# --- what bad input gets ------------------------------------------------------------------------


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("name", ["q", "k", "v", "out", *OPTIONS])
def test_an_array_on_another_device_is_named(gpu: Machine, name: str, repeated: bool) -> None:
    given: dict[str, Any] = dict(zip("qkv", arrays(gpu), strict=True))
    elsewhere = {"out": out_of(gpu, device=3), **options_of(gpu, device=3)}
    elsewhere |= {n: gpu.array(x.shape, x.dtype, device=3) for n, x in given.items()}
    given["q_offset"] = 0
    if repeated:
        there = given | {"out": out_of(gpu), **options_of(gpu)}
        tileattn.forward(**given | {name: there[name]})
        gpu.launches.clear()
    with pytest.raises(
        ValueError, match=rf"^{name} must be on .*current device, 0; .* device 3.*Device\(3"
    ):
        tileattn.forward(**given | {name: elsewhere[name]})
    assert gpu.launches == []


def test_out_may_not_overlap_an_input(gpu: Machine) -> None:
    whole, k = gpu.array((2, 3, 4, 16)), gpu.array((2, 3, 4, 8))
    left, right = whole[..., :8], whole[..., 8:]
    with pytest.raises(ValueError, match="out must not overlap v"):
        tileattn.forward(k, k, left, out=whole[..., 1:9])
    # They interleave, and share nothing.
    out, _ = tileattn.forward(left, k, k, out=right)
    assert out is right
    assert gpu.launches[-1][-1]["out_at"].tolist() == (3 * 4 * 16, 4 * 16, 16)


@pytest.mark.parametrize("room", [0, 1])
def test_without_memory_nothing_is_started(gpu: Machine, room: int) -> None:
    """Neither out= nor an input is touched: the kernels come last."""
    import cupy

    q, k, v = arrays(gpu)
    out = out_of(gpu)
    left = [room]

    def full(nbytes: int) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise cupy.cuda.memory.OutOfMemoryError(nbytes, 0)
        return gpu.allocate(nbytes)

    cupy.cuda.set_allocator(full)
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        tileattn.forward(q, k, v, out=None if room else out)
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        tileattn.backward(out, q, k, v, out, gpu.array((B, HQ, NQ)))
    assert gpu.launches == []


# --- explain ------------------------------------------------------------------------------------


def test_explain_says_what_would_run(gpu: Machine) -> None:
    q, k, v = (gpu.array((2, 4, 1000, 64), np.float16) for _ in range(3))
    found = tileattn.explain(q, k, v, causal=True)
    assert gpu.launches == []
    assert (found.backend, found.kernel, found.workers) == ("cupy", "forward", 132)
    assert found.tiles["skipped"] > 0
    tileattn.forward(q, k, v, causal=True)
    tileattn.backward(q, q, k, v, q, gpu.array(q.shape[:3]), causal=True)
    assert [line.split()[0] for line in found.kernels] == kernels(gpu)
    assert "100 registers" in found.kernels[0]
    assert "2 on each SM" in found.kernels[0]
    assert found.traffic["flash2"][0] == sum(found.bytes_moved.values())
    assert "NVIDIA H200" in str(found)


def test_a_device_is_described_by_what_cuda_says(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip(
        "cupy", reason="its runtime is asked: pip install cupy", exc_type=ImportError
    ).cuda.runtime
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
