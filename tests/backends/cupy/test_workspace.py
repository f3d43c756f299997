"""The memory that a call takes besides its results, from CuPy's pool or a workspace; no GPU."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tests.backends.cupy.fake_cupy import Machine, at_host
from tests.backends.cupy.test_call import PLANNING, forbid
from tileattn.backends.cupy import cached_passes
from tileattn.backends.cupy.external_memory import CupyMemory
from tileattn.call.prepared import CALLS
from tileattn.jax.cuda import Memory

B, HQ, HKV, NQ, NK, D, DV = 2, 6, 2, 300, 530, 72, 40
TEMPORARY = ("delta", "lse_log2", "row_max", "dq_accum", "head_flags")
COUNTERS = ("tile_counter", "dq_semaphore", "dq_counter")


@pytest.fixture
def gpu(h200: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Let each result have its own memory, so that what is taken besides is the rest."""
    monkeypatch.setattr(cached_passes, "ONE_ALLOCATION_MAX_BYTES", 0)
    return h200


def inputs(gpu: Machine, dtype: Any = np.float16, **sizes: int) -> dict[str, Any]:
    """Give the arrays that ``backward`` takes."""
    n = {"B": B, "Hq": HQ, "Hkv": HKV, "Nq": NQ, "Nk": NK, "D": D, "Dv": DV} | sizes
    rows, keys = (n["B"], n["Hq"], n["Nq"]), (n["B"], n["Hkv"], n["Nk"])
    shapes = {"dout": (*rows, n["Dv"]), "q": (*rows, n["D"]), "k": (*keys, n["D"])}
    shapes |= {"v": (*keys, n["Dv"]), "out": (*rows, n["Dv"])}
    made = {name: gpu.array(shape, dtype) for name, shape in shapes.items()}
    sums = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    return made | {"lse": gpu.array(rows, sums)}


def transposed(gpu: Machine, x: Any) -> Any:
    """Make an array like another one, in which no row is contiguous."""
    *lead, rows, columns = x.shape
    return gpu.array((*lead, columns, rows), x.dtype).swapaxes(-1, -2)


def explained(given: dict[str, Any], options: dict[str, Any] | None = None) -> int:
    q, k, v = (given[name] for name in "qkv")
    found: int = tileattn.explain(q, k, v, **(options or {})).workspace_bytes
    return found


def taken(gpu: Machine, call: Callable[[], tuple[Any, ...]]) -> int:
    """Count what a call takes besides its results; only the first of its kind takes what stays."""
    call()
    before = len(gpu.allocated)
    results = call()
    kept: int = sum(x.nbytes for x in results if x is not None)
    return sum(gpu.allocated[before:]) - kept


# --- how much it is -----------------------------------------------------------------------------

Case = tuple[Any, dict[str, int], Callable[[Machine], dict[str, Any]]]
CASES: dict[str, Case] = {
    "plain": (np.float16, {}, lambda _: {}),
    "bfloat16": (ml_dtypes.bfloat16, {}, lambda _: {}),
    "float32": (np.float32, {}, lambda _: {}),
    "float64": (np.float64, {}, lambda _: {}),
    "causal": (np.float16, {}, lambda _: {"causal": True}),
    "naive kernels": (np.float16, {"Nq": 5, "Nk": 7, "D": 300}, lambda _: {}),
    **{f"no {name}": (np.float16, {name: 0}, lambda _: {}) for name in ("B", "Nq", "Nk", "D")},
    "bias": (np.float16, {}, lambda gpu: {"bias": gpu.array((HQ, NQ, NK), np.float16)}),
    "broadcast bias": (np.float16, {}, lambda gpu: {"bias": gpu.array((1, NK))}),
    "mask": (np.float16, {}, lambda gpu: {"mask": gpu.array((NQ, NK), np.bool_)}),
    "sinks": (np.float16, {}, lambda gpu: {"sinks": gpu.array((HQ,))}),
    "short sinks": (np.float16, {}, lambda gpu: {"sinks": gpu.array((HQ,), ml_dtypes.bfloat16)}),
    "sinks apart": (np.float16, {}, lambda gpu: {"sinks": gpu.array((2 * HQ,))[::2]}),
    "slopes": (np.float16, {}, lambda gpu: {"alibi_slopes": gpu.array((B, HQ), np.float64)}),
    "lengths": (np.float16, {}, lambda _: {"kv_lengths": [NK, 7], "q_offset": [3, 0]}),
    "blocks": (
        np.float16,
        {},
        lambda _: {"block_mask": tileattn.BlockMask(np.ones((5, 9), np.bool_), (64, 64))},
    ),
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", CASES)
def test_explain_counts_what_is_taken(gpu: Machine, name: str, arch: str) -> None:
    gpu.arch = arch
    dtype, sizes, made = CASES[name]
    given, options = inputs(gpu, dtype, **sizes), made(gpu)
    expected = explained(given, options)
    assert taken(gpu, lambda: tileattn.backward(**given, **options)) == expected
    # The same bytes are to do for both ways of summing dq.
    assert taken(gpu, lambda: tileattn.backward(**given, **options, deterministic=True)) <= expected
    of_forward = taken(gpu, lambda: tileattn.forward(*map(given.get, "qkv"), **options))
    if (name, arch) == ("float32", "sm_90a"):  # two numbers for each element of k and v, and flags
        least = B * HKV * NK * (128 + 64) * 4
        assert least < of_forward < 1.1 * least
    elif not {"sinks", "alibi_slopes", "kv_lengths"} & options.keys():
        assert of_forward == 0


@pytest.mark.parametrize("names", ["q", "kv", "qkv"])
def test_explain_counts_copies_of_rows(gpu: Machine, names: str) -> None:
    given = inputs(gpu)
    plain = explained(given)
    given |= {name: transposed(gpu, given[name]) for name in names}
    expected = explained(given)
    copies = sum(given[name].nbytes for name in names)
    assert 0 <= expected - plain - copies < 256 * len(names)
    assert taken(gpu, lambda: tileattn.backward(**given)) == expected
    found = taken(gpu, lambda: tileattn.forward(*map(given.get, "qkv")))
    assert 0 <= found - copies < 256 * len(names)


def test_no_more_is_taken_than_grows_with_the_rows(gpu: Machine) -> None:
    found = [explained(inputs(gpu, B=1, Hq=2, Nq=n, Nk=n)) for n in (1024, 2048, 4096)]
    assert found[2] <= 2 * found[1] <= 4 * found[0]


# --- a workspace --------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_with_a_workspace_nothing_but_results_is_taken(
    gpu: Machine, arch: str, deterministic: bool
) -> None:
    gpu.arch, gpu.stream = arch, 7  # on which zeros must be written, too
    given = inputs(gpu)
    given["q"] = transposed(gpu, given["q"])
    at_host(given["q"])[...] = np.random.default_rng(0).standard_normal(given["q"].shape)
    sinks = gpu.array((HQ,), np.float16)
    options: dict[str, Any] = {"sinks": sinks, "deterministic": deterministic}
    tileattn.backward(**given, **options)
    expected = [launch[:3] for launch in gpu.launches]
    assert {*gpu.streams} == {7}
    gpu.launches.clear()

    nbytes = explained(given, {"sinks": sinks})
    whole = gpu.array((nbytes + 512,), np.uint8)
    workspace = whole[256:-256]
    assert taken(gpu, lambda: tileattn.backward(**given, **options, workspace=workspace)) == 0
    assert [launch[:3] for launch in gpu.launches] == 2 * expected
    start, params = workspace.data.ptr, gpu.launches[-1][-1]
    own = arch == "sm_90a"
    parts = [*TEMPORARY, *(COUNTERS if own else ())]
    if deterministic and not own:
        parts.remove("dq_accum")
    places = [int(params[name]) - start for name in ("q", "sinks", "dsinks", *parts)]
    assert all(0 <= place < nbytes and place % 256 == 0 for place in places)
    assert len(set(places)) == len(places)
    assert params["in_order"] == (own and deterministic)
    copy = at_host(workspace)[places[0] : places[0] + given["q"].nbytes].view(np.float16)
    np.testing.assert_array_equal(copy.reshape(given["q"].shape), at_host(given["q"]))
    # What must be zero comes last; no kernel has written to what comes before.
    first = int(params["head_flags"]) - start
    past = nbytes if "dq_accum" in parts else first + 4 * (2 + B * HKV)
    assert not at_host(workspace)[first:past].any()
    assert (at_host(workspace)[past:] == 0xFF).all()
    assert (at_host(workspace)[int(params["delta"]) - start : first] == 0xFF).any()
    assert (at_host(workspace)[first - 256 : first] == 0xFF).all()
    assert (at_host(whole)[:256] == 0xFF).all()
    assert (at_host(whole)[-256:] == 0xFF).all()


def test_sums_of_sinks_are_copied_to_the_result(gpu: Machine) -> None:
    """The kernel writes where the workspace, of zeros here, has its place for them."""
    given, sinks = inputs(gpu), gpu.array((HQ,), ml_dtypes.bfloat16)
    workspace = gpu.array((explained(given, {"sinks": sinks}),), np.uint8)
    at_host(workspace)[...] = 0
    at_host(sinks)[...] = 1
    grads = tileattn.backward(**given, sinks=sinks, workspace=workspace)
    assert grads.dsinks.dtype == sinks.dtype
    assert not at_host(grads.dsinks).astype(np.float32).any()


def test_arrays_of_a_few_axes(gpu: Machine) -> None:
    given = {name: x[0, 0] for name, x in inputs(gpu).items()}
    workspace = gpu.array((explained(given),), np.uint8)
    grads = tileattn.backward(**given, workspace=workspace)
    assert grads.dq.shape == (NQ, D)
    assert gpu.launches[0][-1]["delta"] == workspace.data.ptr


def test_calls_with_and_without_share_what_was_worked_out(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs(gpu)
    tileattn.backward(**given)
    forbid(monkeypatch, *PLANNING)
    for nbytes in (1 << 21, 3 << 20):
        workspace = gpu.array((nbytes,), np.uint8)
        tileattn.backward(**given, workspace=workspace)
        assert gpu.launches[0][-1]["delta"] not in (0, workspace.data.ptr)
        assert gpu.launches[-1][-1]["delta"] == workspace.data.ptr
    tileattn.backward(**given)
    assert gpu.launches[-1][-1]["delta"] not in (0, workspace.data.ptr)


def test_a_call_that_needs_nothing_takes_an_empty_one(gpu: Machine) -> None:
    given = inputs(gpu, B=0)
    assert explained(given) == 0
    grads = tileattn.backward(**given, workspace=gpu.array((0,), np.uint8))
    assert grads.dq.shape == given["q"].shape


@pytest.mark.parametrize("heads", [(2, 2), (4, 1)])
def test_small_results_of_a_second_call_lie_in_one_piece(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int]
) -> None:
    """The workspace, too, unless it is the larger part; and large ones each in their own.

    Results of another library also have memory of their own.
    """
    import cupy

    monkeypatch.setattr(cached_passes, "ONE_ALLOCATION_MAX_BYTES", 1 << 18)
    given = inputs(gpu, Hq=heads[0], Hkv=heads[1], Nq=30, Nk=70, D=64, Dv=64)

    def taken() -> list[int]:
        gpu.allocated.clear()
        grads = tileattn.backward(**given)
        params = gpu.launches[-1][-1]
        places = [int(params[f"d{name}"]) for name in "qkv"]
        assert places == [x.data.ptr for x in grads[:3]]
        ends = [at + x.nbytes for at, x in zip(places, grads[:3], strict=True)]
        assert all(end <= at for end, at in zip(ends, places[1:], strict=False))
        assert not any(x.data.ptr % 256 for x in grads[:3])
        assert int(params["delta"]) not in range(places[0], ends[-1])
        return [*gpu.allocated]

    first = taken()
    *results, workspace = first
    rounded = sum(-(-n // 256) * 256 for n in results)
    together = [rounded + workspace] if workspace <= rounded else [rounded, workspace]
    assert len(results) == 3
    assert len(together) == 1 + (heads[0] > heads[1])
    for _ in range(3):
        assert taken() == together
    with cupy.cuda.using_allocator(cached_passes.SeparateAllocations(gpu.allocate)):
        assert sorted(taken()) == sorted(first)
    assert taken() == together
    monkeypatch.setattr(cached_passes, "ONE_ALLOCATION_MAX_BYTES", rounded - 1)
    CALLS.clear()
    for _ in range(3):
        assert sorted(taken()) == sorted(first)


def test_small_results_of_a_second_call_are_in_the_places_that_xla_gives(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    monkeypatch.setattr(cached_passes, "ONE_ALLOCATION_MAX_BYTES", 1 << 18)
    monkeypatch.setattr(cupy.cuda, "Device", nullcontext)
    external = CupyMemory()
    external.stream = nullcontext
    monkeypatch.setattr("tileattn.jax.cuda._memory", lambda: external)
    x = inputs(gpu, Hq=2, Hkv=2, Nq=30, Nk=50, D=64, Dv=64)

    def allocate(nbytes: int) -> tuple[int, tuple[()]]:
        return gpu.allocate(nbytes).ptr, ()

    frame: Any = SimpleNamespace(device=0, stream=0, allocate=allocate, free=lambda: None)
    for _ in range(3):
        places = x["out"], x["lse"]
        with Memory(frame) as memory:
            memory.offer(places)
            found = tileattn.forward(x["q"], x["k"], x["v"])
        assert [y.data.ptr for y in found] == [y.data.ptr for y in places]


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "dout", "out", "lse"])
def test_too_few_bytes_are_told_with_the_number_needed(gpu: Machine, name: str) -> None:
    """Also where there are copies that explain cannot see."""
    given = inputs(gpu)
    needed = explained(given)
    if name:
        given[name] = transposed(gpu, given[name])
        with pytest.raises(ValueError, match="this call needs") as told:
            tileattn.backward(**given, workspace=gpu.array((needed,), np.uint8))
        before = needed + given[name].nbytes
        needed = int(re.findall(r"needs ([\d,]+)", str(told.value))[0].replace(",", ""))
        assert before <= needed < before + 256
    workspace = gpu.array((needed - 1,), np.uint8)
    message = f"workspace has {needed - 1:,} bytes; this call needs {needed:,} or more (explain("
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        tileattn.backward(**given, workspace=workspace)
    assert gpu.launches == []
    assert (at_host(workspace) == 0xFF).all()
    workspace = gpu.array((needed,), np.uint8)
    assert taken(gpu, lambda: tileattn.backward(**given, workspace=workspace)) == 0


def test_a_workspace_of_another_device_or_library(gpu: Machine) -> None:
    given = inputs(gpu)
    elsewhere = gpu.array((1 << 22,), np.uint8, device=3)
    told = r"workspace must be a CuPy array; got .* \(cupy.asarray\(workspace\) makes one"
    for workspace, error, message in (
        (elsewhere, ValueError, "workspace must be on .*current device, 0; .* device 3"),
        (np.empty(1 << 22, np.uint8), TypeError, told),
    ):
        with pytest.raises(error, match=f"^{message}"):
            tileattn.backward(**given, workspace=workspace)
    assert gpu.launches == []


def test_a_workspace_that_starts_between(gpu: Machine) -> None:
    given = inputs(gpu)
    workspace = gpu.array((1 << 22,), np.uint8)[128 + 16 :]
    told = r"^workspace must start at a multiple of 256 bytes; .* 144 .*\(workspace\[112:\] fits\)$"
    with pytest.raises(ValueError, match=told):
        tileattn.backward(**given, workspace=workspace)
    tileattn.backward(**given, workspace=workspace[112:])


@pytest.mark.parametrize("name", ["dout", "q", "k", "v", "out", "lse", "dlse", "bias", "sinks"])
def test_a_workspace_that_overlaps_an_input(gpu: Machine, name: str) -> None:
    import cupy

    whole = gpu.array((1 << 23,), np.uint8)
    given = inputs(gpu) | {"dlse": gpu.array((B, HQ, NQ)), "bias": gpu.array((NQ, NK))}
    given["sinks"] = gpu.array((HQ,))
    x = given[name]
    place = whole.data + (1 << 22) - 16  # a last row of the workspace is a first one of it
    given[name] = cupy.ndarray(x.shape, x.dtype, place)
    with pytest.raises(ValueError, match=rf"^workspace must not overlap {name}"):
        tileattn.backward(**given, workspace=whole[: 1 << 22])
    assert gpu.launches == []
    given[name] = cupy.ndarray(x.shape, x.dtype, place + 16)
    tileattn.backward(**given, workspace=whole[: 1 << 22])
