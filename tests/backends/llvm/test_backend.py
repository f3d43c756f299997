"""NumPy arrays on kernels of LLVM: what the contract suite does not reach."""

import importlib.util
import re
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("llvmlite", reason="it compiles the kernels: pip install llvmlite")

import llvmlite

import tileattn
from tests.arrays import normal
from tileattn import BlockMask, reference
from tileattn.backends import registry, threads
from tileattn.backends.llvm import backend as llvm
from tileattn.backends.llvm import execute
from tileattn.backends.llvm.backend import LlvmBackend
from tileattn.call.parse import parse
from tileattn.call.prepared import CALLS
from tileattn.dtypes import DTYPES
from tileattn.kernels import disk_cache as cache
from tileattn.kernels.llvm import compile as compiling
from tileattn.kernels.llvm.compile import bf16_host, host
from tileattn.kernels.llvm.target import AVX2, AVX512_BF16, GENERIC, Target
from tileattn.testing import assert_attention_close, error_bound

Array = NDArray[Any]
Sizes = tuple[int, ...]
SIZES = (2, 4, 2, 75, 141, 40, 24)  # B, Hq, Hkv, Nq, Nk, D, Dv: several blocks, none of them whole
FEW = (2, 6, 2, 3, 141, 40, 24)  # so few rows of a key head that the decoding kernel runs
on_x86 = pytest.mark.skipif("x86" not in host().triple, reason="machine code of an x86-64")


def options(sizes: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Make options, each of which changes what a kernel reads."""
    B, Hq, _, Nq, Nk, *_ = sizes
    rng = np.random.default_rng(1)
    pairs = rng.random((Nq, Nk)) < 0.02
    return {
        "plain": {},
        "causal": {"causal": True, "kv_lengths": [Nk, 3], "sinks": rng.standard_normal(Hq)},
        "window": {"window": (20, 5), "q_offset": [-30, 90], "dropout_p": 0.2, "seed": 5},
        "bias": {"bias": rng.standard_normal((Hq, Nq, Nk)), "softcap": 5.0},
        "bias of keys": {"bias": rng.standard_normal((1, Nk)), "alibi_slopes": rng.random((B, Hq))},
        "bias of rows": {"bias": rng.standard_normal((Nq, 1)), "mask": rng.random((Nq, Nk)) < 0.5},
        "transposed": {"bias": rng.random((Nk, Nq)).T, "mask": rng.random((Nk, Nq)).T < 0.5},
        "mask of rows": {"mask": rng.random((Nq, 1)) < 0.5, "bias": rng.random((B, 1, 1, Nk))},
        "blocks": {"block_mask": BlockMask.from_mask(pairs, (16, 24)), "causal": True},
        "functions": {
            "score_mod": past_the_ends,
            "mask_mod": near,
            "aux": (rng.standard_normal((Hq, 99)), rng.standard_normal(Nq)),
        },
    }


def past_the_ends(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any, rows: Any) -> Any:
    """Ask for elements that there are not, too."""
    return s * table[h, i - j] + rows[i] * table[h, 2 * j] + rows[b]


def near(
    b: Any,  # noqa: ARG001 - as of every mask_mod
    h: Any, i: Any, j: Any, table: Any, rows: Any,
) -> Any:  # fmt: skip
    """Let a query attend to neighbours, and to what the array says."""
    return (abs(i - j) < 30) | (table[h, j] > rows[i])


OPTIONS = options(SIZES)
CASES = {
    f"{name}, {many} rows": (sizes, chosen)
    for many, sizes in (("many", SIZES), ("few", FEW))
    for name, chosen in options(sizes).items()
}
"""Problems of each forward kernel."""


def raising(error: Exception) -> Callable[..., Any]:
    def raises(*_: Any) -> None:
        raise error

    return raises


def both(name: str, given: tuple[Array, ...], **chosen: Any) -> tuple[Any, Any]:
    q, k, v, dout = given
    attention = tileattn.forward(q, k, v, backend=name, **chosen)
    return attention, tileattn.backward(dout, q, k, v, *attention, backend=name, **chosen)


@pytest.fixture
def other_target(request: pytest.FixtureRequest) -> Iterator[str]:
    """A backend with the kernels of a CPU that can less than this one."""

    class Other(LlvmBackend):
        name = "other_target"

    registry.register_backend(Other(request.param, split_keys=40))
    yield Other.name
    registry._loaded.pop(Other.name)


@on_x86
@pytest.mark.parametrize(
    ("other_target", "dtype"),
    [
        (AVX2, np.float32),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in ((AVX2, ml_dtypes.bfloat16), (AVX2, np.float64), (GENERIC, np.float32))
        ),
    ],
    indirect=["other_target"],
    ids=lambda x: x.name if isinstance(x, Target) else np.dtype(x).name,
)
@pytest.mark.parametrize(("sizes", "chosen"), CASES.values(), ids=CASES)
def test_kernels_of_other_cpus_are_right(
    other_target: str, sizes: Sizes, chosen: dict[str, Any], dtype: Any
) -> None:
    q, k, v, dout = given = normal(sizes, dtype)
    attention, grads = both(other_target, given, **chosen)
    bounds = error_bound(q, k, v, dout, **chosen)
    assert_attention_close(attention, reference.forward(q, k, v, **chosen), bounds)
    assert_attention_close(grads, reference.backward(dout, q, k, v, **chosen), bounds)


def test_products_that_are_exact_stay_so() -> None:
    """Multiplied by ``1 / sqrt(D)`` first, equal terms would round in one direction."""
    q, k, v, dout = given = normal((2, 4, 2, 29, 71, 128, 24), np.float32)
    q[...], k[...] = -2, np.sign(k[..., :1]) / 2
    attention, grads = both("llvm", given)
    bounds = error_bound(q, k, v, dout)
    assert_attention_close(attention, reference.forward(q, k, v), bounds)
    assert_attention_close(grads, reference.backward(dout, q, k, v), bounds)


# --- bfloat16 ------------------------------------------------------------------------------------

multiplies_bfloat16 = pytest.mark.skipif(
    bf16_host() is None, reason="the CPU has no instructions for products of bfloat16"
)


@multiplies_bfloat16
@pytest.mark.parametrize("chosen", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("sizes", [SIZES, (2, 4, 4, 75, 141, 64, 33), (2, 4, 2, 75, 141, 7, 96)])
def test_products_of_bfloat16_are_right(sizes: tuple[int, ...], chosen: dict[str, Any]) -> None:
    """Terms that fill the blocks of a product, and that do not."""
    q, k, v, dout = given = normal(sizes, ml_dtypes.bfloat16)
    attention, grads = both("llvm", given, **chosen)
    bounds = error_bound(q, k, v, dout, **chosen)
    assert_attention_close(attention, reference.forward(q, k, v, **chosen), bounds)
    assert_attention_close(grads, reference.backward(dout, q, k, v, **chosen), bounds)


@multiplies_bfloat16
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("number", [1e-39, 2.0**-64, 2.0**-63, 2.0**63, np.inf, np.nan])
def test_unusual_numbers_are_computed_in_float32(
    name: str, number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = dict(zip(("q", "k", "v", "dout"), normal(SIZES, ml_dtypes.bfloat16), strict=True))
    head = 1 if name in ("k", "v") else 2  # of a group that the last key head has
    given[name][1, head, 70, 17] = number
    *qkv, dout = given.values()

    def computed(attention: Any = None) -> tuple[Any, Any]:
        attention = attention or tileattn.forward(*qkv, backend="llvm")
        return attention, tileattn.backward(dout, *qkv, *attention, backend="llvm")

    attention, grads = computed()
    monkeypatch.setattr(LlvmBackend, "targets_of", lambda self, _: (self.target,))
    CALLS.clear()
    forward_alone, grads_alone = computed()[0], computed(attention)[1]
    CALLS.clear()
    usual = number == 2.0**-63
    same = partial(np.array_equal, equal_nan=True)
    ours = attention.lse[1, 2:], grads.dk[1, 1].astype(float)
    alone = forward_alone.lse[1, 2:], grads_alone.dk[1, 1].astype(float)
    assert same(ours[0], alone[0]) == (not usual and name != "dout")
    assert same(ours[1], alone[1]) == (not usual)


@multiplies_bfloat16
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("number", [1e-39, 2.0**-64, 2.0**63, np.inf, np.nan])
@pytest.mark.parametrize("chosen", OPTIONS.values(), ids=OPTIONS)
def test_unusual_numbers_change_no_bits_of_other_heads(
    name: str, number: float, chosen: dict[str, Any]
) -> None:
    given = dict(zip(("q", "k", "v", "dout"), normal(SIZES, ml_dtypes.bfloat16), strict=True))
    expected = both("llvm", tuple(given.values()), **chosen)
    given[name][1, -1, 70, 17] = number
    _assert_others_alike(both("llvm", tuple(given.values()), **chosen), expected)


@multiplies_bfloat16
def test_large_rows_change_no_bits_of_other_heads() -> None:
    """Backward computes a head with rows whose logsumexp is large in float32."""
    q, k, v, dout = normal(SIZES, ml_dtypes.bfloat16)
    expected = both("llvm", (q, k, v, dout))
    q[1, -1] = q[1, -1].astype(np.float32) * 2.0**14
    _assert_others_alike(both("llvm", (q, k, v, dout)), expected)


def _assert_others_alike(found: Any, expected: Any) -> None:
    """All but the last key head of the last batch entry, and its group, have the same bits."""
    for ours, theirs in zip(
        (*found[0], *found[1][:3]), (*expected[0], *expected[1][:3]), strict=True
    ):
        others = np.ones(ours.shape[:2], bool)
        others[1, -(ours.shape[1] // SIZES[2]) :] = False
        assert ours[others].tobytes() == theirs[others].tobytes()


@multiplies_bfloat16
@pytest.mark.parametrize("shape", [(75, 141), (4, 75, 141), (75, 1), (141,), (2, 4, 1, 141)])
def test_gradient_of_a_bias_that_usual_and_other_heads_share(shape: tuple[int, ...]) -> None:
    q, k, v, dout = normal(SIZES, ml_dtypes.bfloat16)
    q[1, 2, 70, 17], v[0, 0, 3, 5] = 1e-30, 1e-39
    chosen: dict[str, Any] = {
        "bias": np.random.default_rng(3).normal(size=shape).astype(np.float32)
    }
    attention, grads = both("llvm", (q, k, v, dout), **chosen)
    bounds = error_bound(q, k, v, dout, **chosen)
    assert_attention_close(attention, reference.forward(q, k, v, **chosen), bounds)
    assert_attention_close(grads, reference.backward(dout, q, k, v, **chosen), bounds)


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="mprotect is of POSIX")
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize(
    "dtype",
    [
        np.float32,
        *(pytest.param(x, marks=pytest.mark.slow) for x in DTYPES if x != np.float32),
    ],
)
@pytest.mark.parametrize(("sizes", "chosen"), CASES.values(), ids=CASES)
def test_nothing_beside_an_array_is_touched(
    guarded: Callable[[Array, bool], Array],
    sizes: Sizes,
    chosen: dict[str, Any],
    dtype: Any,
    at_end: bool,
) -> None:
    """A read or write past either end of an operand ends the process."""
    given = normal(sizes, dtype)
    expected = both("llvm", given, **chosen)
    placed = tuple(guarded(x, at_end) for x in given)
    there: dict[str, Any] = {
        n: guarded(x, at_end) if isinstance(x, np.ndarray) else x for n, x in chosen.items()
    }
    if "aux" in chosen:
        there["aux"] = tuple(guarded(x, at_end) for x in chosen["aux"])
    q, k, v, dout = placed
    out = guarded(np.empty_like(expected[0].out), at_end)
    attention = tileattn.forward(q, k, v, backend="llvm", out=out, **there)
    lse = guarded(attention.lse, at_end)
    grads = tileattn.backward(dout, q, k, v, out, lse, backend="llvm", **there)
    assert bits((attention, grads)) == bits(expected)


# --- threads -------------------------------------------------------------------------------------


BESIDE: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((1, 2, 1, 300, 900, 32, 32), {"causal": True}),
    ((2, 3, 3, 65, 700, 40, 24), {"bias": np.linspace(-1, 1, 65)[:, np.newaxis]}),
    ((1, 1, 1, 130, 1500, 64, 64), {"dropout_p": 0.1}),
    ((2, 4, 2, 300, 900, 16, 16), options((2, 4, 2, 300, 900))["functions"]),
)
"""Problems of several key blocks, whose tasks wait for each other to add to dQ."""


@pytest.mark.parametrize(
    "workers", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 16)), 7]
)
def test_callers_beside_each_other_get_the_same_bits_from_any_number_of_workers(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mostly more threads than cores: one that waits lets that run which it waits for."""
    calls = [partial(both, "llvm", normal(sizes, np.float32), **o) for sizes, o in BESIDE]
    expected = [bits(call()) for call in calls]
    monkeypatch.setattr(threads, "worker_count", lambda: workers)
    threads._crew.cache_clear()
    with ThreadPoolExecutor(8) as callers:
        found = list(callers.map(lambda n: bits(calls[n % len(calls)]()), range(30 * len(calls))))
    threads._crew.cache_clear()
    assert found == 30 * expected


def bits(results: tuple[Any, Any]) -> list[bytes]:
    arrays = (*results[0], *results[1], *(results[1].daux or ()))
    return [x.tobytes() for x in arrays if x is not None]


def test_a_call_from_another_thread_than_the_main_one() -> None:
    given = normal(SIZES, np.float32)
    expected, found = both("llvm", given), []
    thread = threading.Thread(target=lambda: found.append(both("llvm", given)))
    thread.start()
    thread.join()
    np.testing.assert_array_equal(found[0][0].out, expected[0].out)


# --- compiling -----------------------------------------------------------------------------------


@pytest.fixture
def compiled_afresh() -> Iterator[Callable[[], None]]:
    def forget() -> None:
        CALLS.clear()
        compiling._functions.clear()
        execute.load.cache_clear()
        cache._warn_once.cache_clear()

    forget()
    yield forget
    forget()


@pytest.mark.skipif(sys.platform == "win32", reason="folders there have no mode")
def test_without_a_private_folder_for_the_cache_it_compiles_and_warns_once(
    compiled_afresh: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = normal(SIZES, np.float32)
    expected = both("llvm", given)
    compiled_afresh()
    tmp_path.chmod(0o777)
    monkeypatch.setenv("TILEATTN_CACHE_DIR", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="without the disk cache: .*TILEATTN_CACHE_DIR") as said:
        found = both("llvm", given)
    assert len(said) == 1
    np.testing.assert_array_equal(found[0].out, expected[0].out)
    np.testing.assert_array_equal(found[1].dk, expected[1].dk)


@pytest.mark.usefixtures("compiled_afresh")
def test_an_error_of_llvm_names_the_backend_that_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "optimized", raising(RuntimeError("LLVM IR parsing error")))
    x, out = np.zeros((1, 1, 4, 8), np.float32), np.full((1, 1, 4, 8), 9, np.float32)
    with pytest.raises(tileattn.BackendUnavailableError) as caught:
        tileattn.forward(x, x, x, backend="llvm", out=out)
    assert str(caught.value) == (
        "backend 'llvm' cannot run here: LLVM does not compile its kernels (LLVM IR parsing "
        "error); use backend='numpy', or TILEATTN_BACKEND=numpy for all calls"
    )
    assert np.all(out == 9)
    monkeypatch.undo()
    np.testing.assert_array_equal(tileattn.forward(x, x, x, backend="llvm").out, x)


# --- which calls ---------------------------------------------------------------------------------


@pytest.fixture
def asked_afresh() -> Iterator[None]:
    llvm._unavailable.cache_clear()
    yield
    llvm._unavailable.cache_clear()


@pytest.mark.usefixtures("asked_afresh")
@pytest.mark.parametrize(
    ("where", "name", "value", "said"),
    [
        (importlib.util, "find_spec", lambda _: None, "llvmlite is not installed: pip install "),
        (llvmlite, "__version__", "0.46.1", "llvmlite 0.46.1 is older than 0.47: pip install --up"),
        (llvm, "host", raising(OSError("no library")), "llvmlite does not load (no library): pip "),
        (llvm, "host", lambda: GENERIC, "this CPU has neither AVX2 nor NEON; use backend='numpy'"),
    ],
    ids=["absent", "old", "broken", "old CPU"],
)
def test_where_it_cannot_run_it_says_what_helps_and_numpy_runs(
    where: Any, name: str, value: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, value)
    x = np.zeros((1, 1, 4, 8), np.float32)
    with pytest.raises(tileattn.BackendUnavailableError, match=re.escape(said)):
        tileattn.forward(x, x, x, backend="llvm")
    found = tileattn.explain(x, x, x)
    assert found.backend == "numpy"
    assert found.reasons[0].startswith(f"backend 'llvm' cannot run here: {said}")


def test_the_extra_brings_a_release_that_is_new_enough() -> None:
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8"))
    wanted = extras["project"]["optional-dependencies"]["cpu"]
    assert wanted == [f"llvmlite>={'.'.join(map(str, llvm.OLDEST))}"]


@pytest.mark.parametrize("name", ["Nq", "Nk"])
def test_what_is_longer_is_refused(name: str) -> None:
    x = np.zeros((1, 1, 4, 8), np.float32)
    problem = parse(x, x, x, {})[0]
    longest: dict[str, Any] = {name: (1 << 31) - 1}
    longer: dict[str, Any] = {name: 1 << 31}
    assert LlvmBackend().why_not(replace(problem, **longest)) is None
    reason = LlvmBackend().why_not(replace(problem, **longer))
    assert reason is not None
    assert reason.startswith(f"{name} is 2,147,483,648; the kernels take at most 2,147,483,647")


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=lambda x: x.__name__)
@pytest.mark.parametrize("Nq", [1, 64])
def test_all_invariant_calls_have_one_kernel_for_one_target(
    monkeypatch: pytest.MonkeyPatch, Nq: int, dtype: Any
) -> None:
    """Also on CPUs with instructions for products of bfloat16, which few queries do not use."""
    monkeypatch.setattr(llvm, "bf16_host", lambda: AVX512_BF16)
    q, k = np.zeros((2, 8, Nq, 32), dtype), np.zeros((2, 2, 64, 32), dtype)
    found = tileattn.explain(q, k, k, invariant=True, backend="llvm")
    assert found.kernel == f"tileattn.kernels.llvm.forward, {host().name}"
    assert "forward kernel: invariant=True computes any number of queries with it" in found.reasons
    problem = parse(q, k, k, {"invariant": True})[0]
    assert LlvmBackend().targets_of(problem) == (host(),)


def test_an_explanation_names_the_target_and_its_tiles() -> None:
    x = np.zeros((1, 8, 1000, 64), np.float32)
    found = tileattn.explain(x, x, x, causal=True, backend="llvm")
    assert host().name in found.kernel
    assert found.forward_tile == (host().width(4), 64)
    assert found.backward_tile == (64, host().width(4))
    assert found.tiles["full"] > 0
