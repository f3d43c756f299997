"""A function is read once, when the call is made: what it reads then is what is computed."""

import builtins
import functools
import gc
import pickle
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tileattn
import tileattn.distributed as dist
from tests.arrays import normal
from tests.distributed.threads import on_ranks
from tileattn import reference
from tileattn.call.prepared import signature
from tileattn.expressions.functions import read_functions
from tileattn.testing import assert_attention_close, error_bound

Q, K, V, DOUT = normal((2, 4, 2, 37, 41, 8, 12), np.float64)
Setter = Callable[[int], None]
width = 0


def by_global() -> tuple[Any, Setter]:
    def change(n: int) -> None:
        globals()["width"] = n

    return lambda b, h, i, j: abs(i - j) < width, change


def by_cell() -> tuple[Any, Setter]:
    width = 0

    def change(n: int) -> None:
        nonlocal width
        width = n

    return lambda b, h, i, j: abs(i - j) < width, change


def by_class() -> tuple[Any, Setter]:
    class Config:
        width = 0

    return lambda b, h, i, j: abs(i - j) < Config.width, lambda n: setattr(Config, "width", n)


def by_class_of_self() -> tuple[Any, Setter]:
    class Layer:
        width = 0

        def mask_mod(self, *indices: Any) -> Any:
            _, _, i, j = indices
            return abs(i - j) < self.width

    return Layer().mask_mod, lambda n: setattr(Layer, "width", n)


def by_self() -> tuple[Any, Setter]:
    layer = types.SimpleNamespace(inner=types.SimpleNamespace(width=0))

    def change(n: int) -> None:
        layer.inner.width = n

    return lambda b, h, i, j: abs(i - j) < layer.inner.width, change


def by_property() -> tuple[Any, Setter]:
    stored = [0]

    class Layer:
        @property
        def width(self) -> int:
            return stored[0]

        def __call__(self, *indices: Any) -> Any:
            _, _, i, j = indices
            return abs(i - j) < self.width

    return Layer(), lambda n: stored.__setitem__(0, n)


def by_itself() -> tuple[Any, Setter]:
    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return abs(i - j) < mask_mod.width  # type: ignore[attr-defined]  # set below

    return mask_mod, lambda n: setattr(mask_mod, "width", n)


def by_an_attribute_that_may_be_absent() -> tuple[Any, Setter]:
    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return abs(i - j) < getattr(mask_mod, "width", 5)

    def change(n: int) -> None:
        mask_mod.__dict__.clear()
        mask_mod.__dict__.update({} if n == 5 else {"width": n})

    return mask_mod, change


def by_module() -> tuple[Any, Setter]:
    config = types.ModuleType("config")
    return lambda b, h, i, j: abs(i - j) < config.width, lambda n: setattr(config, "width", n)


def by_import() -> tuple[Any, Setter]:
    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        from tests import test_read_once

        return abs(i - j) < test_read_once.width

    return mask_mod, lambda n: globals().__setitem__("width", n)


def by_default() -> tuple[Any, Setter]:
    def mask_mod(b: Any, h: Any, i: Any, j: Any, width: int = 0) -> Any:
        return abs(i - j) < width

    return mask_mod, lambda n: setattr(mask_mod, "__defaults__", (n,))


def by_keyword_default() -> tuple[Any, Setter]:
    def mask_mod(b: Any, h: Any, i: Any, j: Any, *, width: int = 0) -> Any:
        return abs(i - j) < width

    return mask_mod, lambda n: setattr(mask_mod, "__kwdefaults__", {"width": n})


def by_container() -> tuple[Any, Setter]:
    options = {"widths": [0]}
    return lambda b, h, i, j: abs(i - j) < options["widths"][-1], options["widths"].append


def by_method_of_container() -> tuple[Any, Setter]:
    options = {"width": 0}
    get = options.get
    return lambda b, h, i, j: abs(i - j) < get("width"), lambda n: options.update(width=n)


def by_array() -> tuple[Any, Setter]:
    widths = np.zeros(3, int)
    return lambda b, h, i, j: abs(i - j) < widths[1], widths.fill


def by_nested() -> tuple[Any, Setter]:
    inner, change = by_self()

    def mask_mod(*indices: Any) -> Any:
        def visible() -> Any:
            return inner(*indices)

        return visible()

    return mask_mod, change


def by_partial() -> tuple[Any, Setter]:
    widths = [0]

    def mask_mod(widths: Any, b: Any, h: Any, i: Any, j: Any, *, extra: int) -> Any:
        return abs(i - j) < widths[0] + extra

    return functools.partial(mask_mod, widths, extra=0), lambda n: widths.__setitem__(0, n)


def by_another_function() -> tuple[Any, Setter]:
    """Each new function shares the cell of the one before, and takes its place."""
    mask_mod: Any = None

    def change(n: int) -> None:
        nonlocal mask_mod

        def one(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (abs(i - j) < n) & ((mask_mod is one) | (i < 0))

        mask_mod = one

    return lambda *indices: mask_mod(*indices), change  # noqa: PLW0108 - another one later


def by_builtin() -> tuple[Any, Setter]:
    def change(n: int) -> None:
        globals()["abs"] = lambda x: builtins.abs(x) - n

    return lambda b, h, i, j: abs(i - j) < 0, change


def by_code() -> tuple[Any, Setter]:
    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return abs(i - j) < 0

    codes = {n: eval(f"lambda b, h, i, j: abs(i - j) < {n}").__code__ for n in (5, 23)}
    return mask_mod, lambda n: setattr(mask_mod, "__code__", codes[n])


def by_globals_dictionary() -> tuple[Any, Setter]:
    return (
        lambda b, h, i, j: abs(i - j) < globals()["width"],
        lambda n: globals().__setitem__("width", n),
    )


WAYS = {name: x for name, x in list(globals().items()) if name.startswith("by_")}


@pytest.fixture(params=[*WAYS])
def way(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Setter]]:
    yield WAYS[request.param]()
    globals().pop("abs", None)


@pytest.mark.parametrize("backend", ["numpy", pytest.param("llvm", marks=pytest.mark.slow)])
def test_each_call_reads_a_function_as_it_is_then(way: tuple[Any, Setter], backend: str) -> None:
    if (reason := tileattn.available_backends()[backend]) is not None:
        pytest.skip(reason)
    function, change = way
    bounds = error_bound(Q, K, V, DOUT, window=(4, 4), q_offset=0)
    for n in (5, 23, 5):
        change(n)
        own: dict[str, Any] = {"mask_mod": function, "backend": backend}
        plain: dict[str, Any] = {"window": (n - 1, n - 1), "q_offset": 0}
        for _ in range(2):
            attention = tileattn.forward(Q, K, V, **own)
            assert_attention_close(attention, reference.forward(Q, K, V, **plain), bounds)
        grads = tileattn.backward(DOUT, Q, K, V, *attention, **own)
        assert_attention_close(grads, reference.backward(DOUT, Q, K, V, **plain), bounds)


def test_a_pullback_differentiates_what_forward_has_read(way: tuple[Any, Setter]) -> None:
    function, change = way
    change(5)
    attention, pullback = tileattn.vjp(Q, K, V, mask_mod=function)
    expected = tileattn.backward(DOUT, Q, K, V, *attention, mask_mod=function)
    change(23)
    for found, wanted in zip(pullback(DOUT), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_the_pullbacks_of_a_loop() -> None:
    pullbacks, expected = [], []
    for slope in (0.5, 2.0):
        plain: dict[str, Any] = {"alibi_slopes": np.full(4, slope), "q_offset": 0}
        expected.append(reference.backward(DOUT, Q, K, V, **plain))

        def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s - slope * abs(i - j)  # noqa: B023 - on purpose

        pullbacks.append(tileattn.vjp(Q, K, V, score_mod=score_mod)[1])
    bounds = error_bound(Q, K, V, DOUT, alibi_slopes=np.full(4, 2.0), q_offset=0)
    for pullback, wanted in zip(pullbacks, expected, strict=True):
        assert_attention_close(pullback(DOUT), wanted, bounds)


@pytest.mark.parametrize("schedule", ["ring", "heads", "gather"])
def test_the_pullbacks_of_ranks(schedule: Any) -> None:
    def run(comm: Any) -> Any:
        layer = types.SimpleNamespace(width=5)
        (q, dout), (k, v) = (
            [np.ascontiguousarray(np.array_split(x, 2, axis=2)[comm.rank]) for x in some]
            for some in ((Q, DOUT), (K, V))
        )
        options = {"mask_mod": lambda b, h, i, j: abs(i - j) < layer.width, "schedule": schedule}
        attention, pullback = dist.vjp(q, k, v, comm, **options)
        expected = dist.backward(dout, q, k, v, *attention, comm, **options)
        layer.width = 23
        return attention, pullback(dout), expected

    found = on_ranks(2, run)
    for x in found:
        if isinstance(x, Exception):
            raise x
        for grad, wanted in zip(x[1][:3], x[2][:3], strict=True):
            np.testing.assert_array_equal(grad, wanted)
    rows = (np.concatenate(x, axis=2) for x in zip(*(x[0] for x in found), strict=True))
    plain: dict[str, Any] = {"window": (4, 4), "q_offset": 0}
    bounds = error_bound(Q, K, V, DOUT, **plain)
    assert_attention_close(tileattn.Attention(*rows), reference.forward(Q, K, V, **plain), bounds)


def test_a_function_that_a_rank_cannot_read_is_refused_on_all() -> None:
    def run(comm: Any) -> Any:
        def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
            return 1 / 0 if comm.rank else i >= j

        return dist.forward(Q, K, V, comm, mask_mod=mask_mod, timeout=20)

    mine, other = on_ranks(2, run)
    assert isinstance(other, ZeroDivisionError)
    assert isinstance(mine, RuntimeError)
    assert "rank 1 has failed: ZeroDivisionError" in str(mine)


def test_a_call_runs_a_function_once() -> None:
    runs = []

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        runs.append(1)
        return s * len(runs)

    attention = tileattn.forward(Q, K, V, score_mod=score_mod)
    assert len(runs) == 1
    plain = {"scale": 1 / np.sqrt(8)}
    bounds = error_bound(Q, K, V, DOUT, **plain)
    assert_attention_close(attention, reference.forward(Q, K, V, **plain), bounds)
    _, pullback = tileattn.vjp(Q, K, V, score_mod=score_mod)
    pullback(DOUT)
    assert len(runs) == 2


def test_calls_with_a_function_of_unknown_state_are_known() -> None:
    layer = types.SimpleNamespace(width=5)

    def key() -> Any:
        options = {"mask_mod": lambda b, h, i, j: abs(i - j) < layer.width}
        return signature((Q, K, V), "numpy", read_functions(options))

    first = key()
    assert first is not None
    assert key() == first
    layer.width = 6
    assert key() != first


def test_nothing_that_a_function_reads_is_kept_alive(cpu_backend: str) -> None:
    class Layer:
        width = 5

    layer = Layer()
    gone = weakref.ref(layer)

    def mask_mod(b: Any, h: Any, i: Any, j: Any, layer: Any = layer) -> Any:
        return abs(i - j) < layer.width

    attention, pullback = tileattn.vjp(Q, K, V, mask_mod=mask_mod)
    tileattn.forward(Q, K, V, mask_mod=functools.partial(mask_mod, layer=layer))
    mask = tileattn.BlockMask.from_predicate(mask_mod, (2, 4, 37, 41), (8, 8))
    del layer, mask_mod
    gc.collect()
    assert gone() is None
    expected = tileattn.backward(DOUT, Q, K, V, *attention, block_mask=mask)
    plain: dict[str, Any] = {"window": (4, 4), "q_offset": 0}
    bounds = error_bound(Q, K, V, DOUT, **plain)
    for grads in (pullback(DOUT), expected):
        assert_attention_close(grads, reference.backward(DOUT, Q, K, V, **plain), bounds)


def test_an_expression_is_a_value_that_can_be_pickled() -> None:
    layer = types.SimpleNamespace(width=5)
    options = read_functions({"mask_mod": lambda b, h, i, j: abs(i - j) < layer.width})
    layer.width = 6
    again = pickle.loads(pickle.dumps(options))
    assert again == options
    assert hash(again["mask_mod"]) == hash(options["mask_mod"])
    plain: dict[str, Any] = {"window": (4, 4), "q_offset": 0}
    bounds = error_bound(Q, K, V, DOUT, **plain)
    attention = tileattn.forward(Q, K, V, **again)
    assert_attention_close(attention, reference.forward(Q, K, V, **plain), bounds)


def test_methods_of_arrays_are_no_functions_of_a_module() -> None:
    take = np.array([2.0, 3.0]).item
    found = tileattn.forward(Q, K, V, score_mod=lambda s, b, h, i, j: s * take(0)).out
    expected = tileattn.forward(Q, K, V, score_mod=lambda s, b, h, i, j: s * 2.0).out
    np.testing.assert_array_equal(found, expected)
