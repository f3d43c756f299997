"""Calls whose numbers were never seen before: bits of a first call, and flat memory."""

import tracemalloc
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.arrays import normal
from tileattn.backends import known_calls, registry
from tileattn.backends.llvm import arrays as llvm_arrays
from tileattn.call import parse
from tileattn.call.prepared import CALLS

SIZES = (2, 4, 2, 40, 40, 16, 24)  # B, Hq, Hkv, Nq, Nk, D, Dv
Q, K, V, DOUT = normal(SIZES)


def band(width: int) -> Callable[..., Any]:
    return lambda _b, _h, i, j: abs(i - j) < width


# Options of step n of a loop in which a number changes each time.
LOOPS: dict[str, Callable[[int], dict[str, Any]]] = {
    "lengths": lambda _: {},
    "causal": lambda _: {"causal": True},
    "window": lambda n: {"window": (n % 7, n % 3)},
    "scale and softcap": lambda n: {"scale": 0.1 + n / 100, "softcap": 1.0 + n},
    "seed": lambda n: {"dropout_p": 0.2, "seed": n * (1 << 40) + n},
    "kv_lengths": lambda n: {"kv_lengths": [n, n // 2], "q_offset": [0, n]},
    "mask_mod": lambda _: {"mask_mod": band(9)},
    "sinks": lambda n: {"sinks": np.full(4, n / 10, np.float32)},
}


@pytest.fixture(params=["numpy", "llvm"])
def both(request: pytest.FixtureRequest) -> Callable[..., list[bytes]]:
    """Run both passes of a backend on the first ``n`` queries and keys."""
    reason = registry.get(request.param).unavailable()
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")

    def call(nq: int, nk: int, **options: Any) -> list[bytes]:
        rows = Q[:, :, :nq], K[:, :, :nk], V[:, :, :nk]
        result = tileattn.forward(*rows, backend=request.param, **options)
        grads = tileattn.backward(DOUT[:, :, :nq], *rows, *result, backend=request.param, **options)
        return [x.tobytes() for x in (*result, *grads) if x is not None]

    return call


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("nq", [1, None], ids=["decode", "training"])
def test_new_numbers_give_the_bits_of_a_first_call(
    both: Callable[..., list[bytes]], name: str, nq: int | None
) -> None:
    steps = [(nq or n, n, LOOPS[name](n)) for n in (11, 12, 20, 31, 40)]
    found = [both(*sizes, **options) for *sizes, options in steps]
    again = [both(*sizes, **options) for *sizes, options in steps]
    for (*sizes, options), first, second in zip(steps, found, again, strict=True):
        CALLS.clear()
        assert both(*sizes, **options) == first == second


def offsets(rng: Random, end: int) -> list[int]:
    return [0, *sorted(rng.choices(range(end + 1), k=3)), end]


KINDS: dict[str, Callable[[Random, int, int, int], dict[str, Any]]] = {
    "scale": lambda rng, *_: {"scale": rng.uniform(-1, 1)},
    "softcap": lambda rng, *_: {"causal": True, "softcap": rng.uniform(1, 9)},
    "window": lambda rng, *_: {"window": (rng.randrange(1, 90), rng.randrange(1, 9))},
    "dropout": lambda rng, *_: {"dropout_p": rng.random(), "seed": rng.randrange(1 << 64)},
    "lengths": lambda rng, B, _, Nk: {"kv_lengths": [rng.randrange(Nk + 1) for _ in range(B)]},
    "one length": lambda rng, _, __, Nk: {"kv_lengths": rng.randrange(Nk + 1)},
    "offsets": lambda rng, B, *_: {"q_offset": np.array(rng.choices(range(-9, 99), k=B))},
    "mask_mod": lambda rng, *_: {"mask_mod": band(rng.randrange(90))},
    "packed": lambda rng, _, Nq, Nk: {
        "cu_seqlens_q": offsets(rng, Nq), "cu_seqlens_k": offsets(rng, Nk), "causal": True
    },
}  # fmt: skip


@pytest.mark.parametrize("backend", ["numpy", "llvm"])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_any_size_give_the_bits_of_a_first_call(
    backend: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One query and many, one key and several splits; most calls need no validation."""
    if reason := registry.get(backend).unavailable():
        pytest.skip(f"{backend}: {reason}")
    rng, steps = Random(kind), []
    for _ in range(12):
        B, Hkv = (rng.choice((1, 2, 3)), rng.choice((1, 2))) if kind != "packed" else (1, 1)
        Nq, Nk = rng.choice((1, 2, 5, 60)), rng.choice((1, 7, 65, 1500))
        given = normal((B, 2 * Hkv, Hkv, Nq, Nk, 16, 8))
        rows = [x[0] if kind == "packed" else x for x in given]
        steps.append((rows, {"backend": backend, **KINDS[kind](rng, B, Nq, Nk)}))

    def both(rows: list[Any], options: dict[str, Any]) -> list[bytes]:
        q, k, v, dout = rows
        out, lse = tileattn.forward(q, k, v, **options)
        grads = tileattn.backward(dout, q, k, v, out, lse, **options)
        return [x.tobytes() for x in (out, lse, *grads[:3])]

    expected = []
    for step in steps:
        CALLS.clear()
        expected.append(both(*step))
    CALLS.clear()
    validated: list[Any] = []

    def counting(*given: Any) -> Any:
        validated.append(given)
        return parse.at_numbers(*given)

    monkeypatch.setattr(known_calls, "at_numbers", counting)
    for step, same in zip(steps, expected, strict=True):
        assert both(*step) == same
    assert len(validated) < len(steps)


@pytest.mark.parametrize("backend", ["numpy", "llvm"])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "out", "lse"])
def test_sizes_of_a_known_kind_are_checked(backend: str, name: str) -> None:
    backward: Any = tileattn.backward
    out, lse = tileattn.forward(Q, K, V, backend=backend)
    rows = {"q": Q, "k": K, "v": V, "dout": DOUT, "out": out, "lse": lse}
    for batch in (2, 1):
        backward(**{n: x[:batch] for n, x in rows.items()}, backend=backend)
    with pytest.raises(ValueError, match="must have"):
        backward(**{**rows, name: rows[name][:, :1]}, backend=backend)


@pytest.mark.parametrize("backend", ["numpy", "llvm"])
def test_new_offsets_of_packed_sequences_give_the_bits_of_a_first_call(backend: str) -> None:
    """Sequences of few queries and of many: both kernels of llvm run."""
    rows, dout = (Q[0], K[0], V[0]), DOUT[0]

    def both(n: int) -> list[bytes]:
        options: dict[str, Any] = {"cu_seqlens_q": [0, n, 40], "cu_seqlens_k": [0, 2 * n, 40]}
        result = tileattn.forward(*rows, backend=backend, causal=True, **options)
        grads = tileattn.backward(dout, *rows, *result, backend=backend, causal=True, **options)
        return [x.tobytes() for x in (*result, *grads[:3])]

    found = [[both(n) for n in (0, 1, 2, 15, 20)] for _ in range(2)]
    for n, first, second in zip((0, 1, 2, 15, 20), *found, strict=True):
        CALLS.clear()
        assert both(n) == first == second


def test_kinds_of_blocks_change_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems do without: their blocks are unknown."""
    found = []
    for least in (0, 1 << 62):
        monkeypatch.setattr(llvm_arrays, "_MIN_WORK", least)
        CALLS.clear()
        q, k, v, dout = normal((2, 2, 1, 300, 280, 16, 24))
        options: dict[str, Any] = {"mask_mod": band(50), "backend": "llvm"}
        result = tileattn.forward(q, k, v, **options)
        grads = tileattn.backward(dout, q, k, v, *result, **options)
        found.append([x.tobytes() for x in (*result, *grads[:3])])
    assert found[0] == found[1]


def numbers() -> Iterator[tuple[int, dict[str, Any]]]:
    """Draw lengths, scales and seeds, no two alike."""
    for n in range(1 << 30):
        yield 1 + n % 40, {"scale": 1.0 + n / 1000, "dropout_p": 0.1, "seed": n}


@pytest.mark.parametrize("backend", ["llvm", pytest.param("numpy", marks=pytest.mark.slow)])
def test_many_numbers_leave_memory_as_it_is(backend: str) -> None:
    given, q, held = numbers(), Q[:1, :, :1], []
    tracemalloc.start()
    try:
        for _ in range(3):
            for _ in range(1_700):
                n, options = next(given)
                tileattn.forward(q, K[:1, :, :n], V[:1, :, :n], backend=backend, **options)
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[2] - held[1] < 1 << 17, held  # 77 bytes for a call


def test_the_preferred_backend_is_asked_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it refused earlier numbers changes no bits of later calls."""
    if registry.get("llvm").unavailable():
        pytest.skip("llvm is not available")
    CALLS.clear()

    def why_not(problem: Any) -> str | None:
        return None if problem.Nq % 2 else "the number of queries is even"

    monkeypatch.setattr(registry.get("llvm"), "why_not", why_not)
    for Nq in (40, 38, 36, 39, 37):
        q = Q[:, :, :Nq]
        found = tileattn.forward(q, K, V)
        used = tileattn.explain(q, K, V).backend
        assert used == ("llvm" if Nq % 2 else "numpy")
        alone = tileattn.forward(q, K, V, backend=used)
        assert found.out.tobytes() == alone.out.tobytes()
