"""The memory that a call takes besides its results, from CuPy's pool or a workspace; no GPU."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tests.backends.cupy import fake_cupy
from tests.backends.cupy.fake_cupy import Machine, at_host
from tileattn import api
from tileattn.backends.cupy import backend as cupy_backend

B, HQ, HKV, NQ, NK, D, DV = 2, 6, 2, 300, 530, 72, 40
TEMPORARY = (
    "delta",
    "lse_log2",
    "row_max",
    "dq_accum",
    "head_flags",
    "tile_counter",
    "dq_semaphore",
)
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with fake_cupy.machine(monkeypatch) as made:
        made.arch = "sm_90a"
        yield made


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


def explained(given: dict[str, Any], options: dict[str, Any]) -> int:
    q, k, v = (given[name] for name in "qkv")
    found: int = tileattn.explain(q, k, v, **options).workspace_bytes
    return found


def taken(gpu: Machine, call: Callable[[], tuple[Any, ...]]) -> int:
    """Count what a call takes besides its results; only the first of its kind takes what stays."""
    call()
    before = len(gpu.allocated)
    results = call()
    kept: int = sum(x.nbytes for x in results if x is not None)
    return sum(gpu.allocated[before:]) - kept


# --- how much it is -----------------------------------------------------------------------------

SIZES: dict[str, dict[str, int]] = {
    "all different": {},
    "one of each": {"B": 1, "Hq": 1, "Hkv": 1, "Nq": 1, "Nk": 1, "D": 8, "Dv": 8},
    "for the naive kernels": {"Nq": 5, "Nk": 7, "D": 300},
    "no query": {"Nq": 0},
    "no key": {"Nk": 0},
    "no batch": {"B": 0},
    "no column": {"D": 0},
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_explain_counts_what_is_taken(
    gpu: Machine, sizes: dict[str, int], dtype: Any, arch: str
) -> None:
    gpu.arch = arch
    given = inputs(gpu, dtype, **sizes)
    expected = explained(given, {"causal": True})
    assert taken(gpu, lambda: tileattn.backward(**given, causal=True)) == expected
    # The same bytes are to do for both ways of summing dq.
    fixed = taken(gpu, lambda: tileattn.backward(**given, causal=True, deterministic=True))
    assert fixed <= expected
    assert taken(gpu, lambda: tileattn.forward(given["q"], given["k"], given["v"])) == 0


def options_of(gpu: Machine) -> dict[str, dict[str, Any]]:
    return {
        "bias": {"bias": gpu.array((HQ, NQ, NK), np.float16)},
        "broadcast bias": {"bias": gpu.array((1, NK))},
        "mask": {"mask": gpu.array((NQ, NK), np.bool_)},
        "sinks": {"sinks": gpu.array((HQ,))},
        "sinks of 16 bits": {"sinks": gpu.array((HQ,), ml_dtypes.bfloat16)},
        "sinks apart": {"sinks": gpu.array((2 * HQ,))[::2]},
        "slopes of 64 bits": {"alibi_slopes": gpu.array((B, HQ), np.float64)},
        "lengths": {"kv_lengths": [NK, 7], "q_offset": [3, 0]},
        "block mask": {"block_mask": tileattn.BlockMask(np.ones((5, 9), np.bool_), (64, 64))},
    }


OPTIONS = [
    *("bias", "broadcast bias", "mask", "sinks", "sinks of 16 bits", "sinks apart"),
    *("slopes of 64 bits", "lengths", "block mask"),
]


@pytest.mark.parametrize("name", OPTIONS)
def test_explain_counts_what_options_take(gpu: Machine, name: str) -> None:
    given, options = inputs(gpu), options_of(gpu)[name]
    expected = explained(given, options)
    assert taken(gpu, lambda: tileattn.backward(**given, **options)) == expected


@pytest.mark.parametrize("names", ["q", "kv", "qkv"])
def test_explain_counts_copies_of_rows(gpu: Machine, names: str) -> None:
    given = inputs(gpu)
    plain = explained(given, {})
    given |= {name: transposed(gpu, given[name]) for name in names}
    expected = explained(given, {})
    copies = sum(given[name].nbytes for name in names)
    assert 0 <= expected - plain - copies < 256 * len(names)
    assert taken(gpu, lambda: tileattn.backward(**given)) == expected
    rows = [given[name] for name in "qkv"]
    assert 0 <= taken(gpu, lambda: tileattn.forward(*rows)) - copies < 256 * len(names)


def test_no_more_is_taken_than_grows_with_the_rows(gpu: Machine) -> None:
    def found(rows: int) -> int:
        return explained(inputs(gpu, B=1, Hq=2, Nq=rows, Nk=rows), {})

    assert found(4096) <= 2 * found(2048) <= 4 * found(1024)


# --- a workspace --------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_with_a_workspace_nothing_but_results_is_taken(
    gpu: Machine, arch: str, deterministic: bool
) -> None:
    gpu.arch = arch
    given = inputs(gpu)
    given["q"] = transposed(gpu, given["q"])
    at_host(given["q"])[...] = np.random.default_rng(0).standard_normal(given["q"].shape)
    options: dict[str, Any] = {
        "sinks": gpu.array((HQ,), np.float16),
        "deterministic": deterministic,
    }
    tileattn.backward(**given, **options)
    expected = [launch[:3] for launch in gpu.launches]
    gpu.launches.clear()

    nbytes = explained(given, {"sinks": options["sinks"]})
    whole = gpu.array((nbytes + 512,), np.uint8)
    workspace = whole[256:-256]
    assert taken(gpu, lambda: tileattn.backward(**given, **options, workspace=workspace)) == 0
    assert [launch[:3] for launch in gpu.launches] == 2 * expected
    start, params = workspace.data.ptr, gpu.launches[-1][-1]
    own = arch == "sm_90a"
    parts = TEMPORARY if own else TEMPORARY[: 2 if deterministic else 3]
    for name in ("q", "sinks", "dsinks", *parts):
        assert start <= params[name] < start + nbytes, name
        assert (params[name] - start) % 256 == 0, name
    at = int(params["q"]) - start
    copy = at_host(workspace)[at : at + given["q"].nbytes].view(np.float16)
    np.testing.assert_array_equal(copy.reshape(given["q"].shape), at_host(given["q"]))
    if "dq_accum" in parts:
        at, sums = int(params["dq_accum"]) - start, 4 * B * HQ * NQ * (128 if own else 96)
        assert not at_host(workspace)[at + sums if own else at :].any()
        assert nbytes == at + sums + (2 * 256 + 2 * 4 * B * HQ * 5 if own else 0)
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
    workspace = gpu.array((explained(given, {}),), np.uint8)
    grads = tileattn.backward(**given, workspace=workspace)
    assert grads.dq.shape == (NQ, D)
    assert gpu.launches[0][-1]["delta"] == workspace.data.ptr


def test_calls_with_and_without_share_what_was_worked_out(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs(gpu)
    tileattn.backward(**given)

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("worked out again")

    monkeypatch.setattr(api, "parse", fail)
    for name in ("layout_of", "plan_backward"):
        monkeypatch.setattr(cupy_backend, name, fail)
    for nbytes in (1 << 21, 3 << 20):
        workspace = gpu.array((nbytes,), np.uint8)
        tileattn.backward(**given, workspace=workspace)
        assert gpu.launches[0][-1]["delta"] not in (0, workspace.data.ptr)
        assert gpu.launches[-1][-1]["delta"] == workspace.data.ptr
    tileattn.backward(**given)
    assert gpu.launches[-1][-1]["delta"] not in (0, workspace.data.ptr)


def test_a_call_that_needs_nothing_takes_an_empty_one(gpu: Machine) -> None:
    given = inputs(gpu, B=0)
    assert explained(given, {}) == 0
    grads = tileattn.backward(**given, workspace=gpu.array((0,), np.uint8))
    assert grads.dq.shape == given["q"].shape


# --- what is refused ----------------------------------------------------------------------------


def test_too_few_bytes_are_told_with_the_number_needed(gpu: Machine) -> None:
    given = inputs(gpu)
    nbytes = explained(given, {})
    workspace = gpu.array((nbytes - 1,), np.uint8)
    told = f"workspace has {nbytes - 1:,} bytes; this call needs {nbytes:,} or more (explain("
    with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
        tileattn.backward(**given, workspace=workspace)
    assert gpu.launches == []
    assert (at_host(workspace) == 0xFF).all()


@pytest.mark.parametrize("name", ["dout", "out", "lse"])
def test_copies_that_explain_cannot_see_are_told(gpu: Machine, name: str) -> None:
    given = inputs(gpu)
    nbytes = explained(given, {})
    given[name] = transposed(gpu, given[name])
    with pytest.raises(ValueError, match="this call needs") as told:
        tileattn.backward(**given, workspace=gpu.array((nbytes,), np.uint8))
    needed = int(re.findall(r"needs ([\d,]+)", str(told.value))[0].replace(",", ""))
    assert nbytes + given[name].nbytes <= needed < nbytes + given[name].nbytes + 256
    workspace = gpu.array((needed,), np.uint8)
    assert taken(gpu, lambda: tileattn.backward(**given, workspace=workspace)) == 0


def test_a_workspace_on_another_device(gpu: Machine) -> None:
    given = inputs(gpu)
    workspace = gpu.array((explained(given, {}),), np.uint8, device=3)
    with pytest.raises(ValueError, match=r"^workspace is on device 3; .*current device, 0"):
        tileattn.backward(**given, workspace=workspace)
    assert gpu.launches == []


def test_a_workspace_that_starts_between(gpu: Machine) -> None:
    given = inputs(gpu)
    workspace = gpu.array((1 << 22,), np.uint8)[128 + 16 :]
    told = r"^workspace starts 144 bytes past a multiple of 256; .*\(workspace\[112:\] has one\)$"
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
    with pytest.raises(ValueError, match=rf"^workspace overlaps {name}; "):
        tileattn.backward(**given, workspace=whole[: 1 << 22])
    assert gpu.launches == []
    given[name] = cupy.ndarray(x.shape, x.dtype, place + 16)
    tileattn.backward(**given, workspace=whole[: 1 << 22])


def test_a_workspace_of_numpy_is_named(gpu: Machine) -> None:
    told = "workspace is numpy.ndarray, which backend 'cupy' does not take; cupy.asarray makes"
    with pytest.raises(TypeError, match=f"^{told}"):
        tileattn.backward(**inputs(gpu), workspace=np.empty(1 << 22, np.uint8))
