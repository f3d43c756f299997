"""``score_mod``, ``mask_mod``, ``aux`` and ``wrt`` of the public calls."""

import copy
import pickle
import re
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.arrays import normal
from tests.gallery import calls
from tileattn import Gradients, reference
from tileattn.algorithm import spec
from tileattn.backends import registry
from tileattn.backends.numpy import backend as numpy_backend
from tileattn.backends.numpy.backend import NumpyBackend
from tileattn.backends.protocol import Backend
from tileattn.call.parse import parse
from tileattn.call.prepared import signature
from tileattn.expressions.functions import read_functions
from tileattn.testing import assert_attention_close, error_bound

SIZES = (2, 4, 2, 37, 53, 8, 12)
B, HQ, HKV, NQ, NK, D, DV = SIZES
THREADS = vars(numpy_backend)["threads"]
Q, K, V, DOUT = normal(SIZES, np.float64)
TABLE = np.random.default_rng(3).normal(size=(HQ, NQ + NK))
DOCUMENT = np.arange(NK) // 11


def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any, document: Any) -> Any:
    return s * table[h, 0] + table[h, i - j + NK] * (document[j] % 2)


def mask_mod(b: Any, h: Any, i: Any, j: Any, table: Any, document: Any) -> Any:
    return (document[i] <= document[j]) | (table[h, 1] > j)


OPTIONS: dict[str, Any] = {"score_mod": score_mod, "mask_mod": mask_mod, "aux": (TABLE, DOCUMENT)}


def both(**options: Any) -> tuple[tileattn.Attention, Gradients]:
    attention = tileattn.forward(Q, K, V, backend="numpy", **options)
    given = {"backend": "numpy", **options}
    return attention, tileattn.backward(DOUT, Q, K, V, *attention, **given)


# --- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"aux": TABLE}, TypeError, "aux must be a tuple of arrays; got numpy.ndarray"),
        ({"aux": ([1, 2], DOCUMENT)}, TypeError, "aux[0] must be a NumPy array; got [1, 2]"),
        ({"aux": (TABLE, None)}, TypeError, "aux[1] must be a NumPy or CuPy array; got None"),
        (
            {"aux": (TABLE.astype(complex), DOCUMENT)},
            TypeError,
            "aux[0] must hold booleans, integers of up to 64 bits but not uint64, or float16, "
            "bfloat16, float32 or float64; got dtype complex128",
        ),
        ({"aux": (TABLE, DOCUMENT.astype(np.uint64))}, TypeError, "aux[1] must hold booleans, "),
        ({"aux": (TABLE.astype(">f8"), DOCUMENT)}, TypeError, "aux[0] must hold booleans, "),
        (
            {"aux": (np.ma.array(TABLE), DOCUMENT)},
            TypeError,
            "aux[0] must be a NumPy array; got numpy.ma",
        ),
        ({"aux": (TABLE,)}, TypeError, "score_mod has the parameters (s: Any, b: Any,"),
        ({"score_mod": None, "mask_mod": None}, ValueError, "aux must be empty without score_mod"),
        ({"score_mod": 3}, TypeError, "score_mod must be a function; got 3"),
        ({"mask_mod": "causal"}, TypeError, "mask_mod must be a function; got 'causal'"),
        (
            {"score_mod": lambda s, b, h, i, j, t, d: s + t[h + HQ, i]},
            ValueError,
            "score_mod indexes axis 0 of aux[0], of shape (4, 90), with 4 to 7; indices must be "
            "within -4 to 3",
        ),
        (
            {"mask_mod": lambda b, h, i, j, t, d: d[-54] > d[i]},
            ValueError,
            "mask_mod indexes axis 0 of aux[1], of shape (53,), with -54; indices must be "
            "within -53 to 52",
        ),
        (
            {"aux": (TABLE, DOCUMENT[:0])},
            ValueError,
            "score_mod indexes axis 0 of aux[1], of shape (0,), with 0 to 52; it has no elements",
        ),
    ],
)
def test_what_is_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        both(**OPTIONS | changed)


def test_an_output_that_overlaps_aux_is_refused() -> None:
    memory = np.zeros((B, HQ, NQ, DV))
    with pytest.raises(ValueError, match=r"^out must not overlap aux\[0\]"):
        tileattn.forward(
            *(Q, K, V),
            out=memory,
            backend="numpy",
            score_mod=lambda s, b, h, i, j, t: s + t[b, h, i, 0],
            aux=(memory,),
        )


def test_indices_past_an_end_are_moved_to_it() -> None:
    def reads(index: Any) -> tuple[tileattn.Attention, Gradients]:
        return both(score_mod=lambda s, b, h, i, j, t: s + t[index(i, j)], aux=(TABLE[0, :9],))

    one, other = reads(lambda i, j: i - j), reads(lambda i, j: np.clip(i - j, -9, 8))
    np.testing.assert_array_equal(one[0].out, other[0].out)
    np.testing.assert_array_equal(one[1].daux, other[1].daux)


# --- results ------------------------------------------------------------------------------------


def test_the_gradients_of_aux_are_an_attribute() -> None:
    grads = both(**OPTIONS)[1]
    dq, dk, dv, dbias, dsinks = grads
    assert len(grads) == 5
    assert dbias is dsinks is None
    assert grads.daux is not None
    of_table, of_document = grads.daux
    assert of_table.shape == TABLE.shape
    assert of_document is None
    assert both()[1].daux is None
    for made in (pickle.loads(pickle.dumps(grads)), copy.copy(grads), grads._replace(dq=dq)):
        np.testing.assert_array_equal((made.daux or ())[0], of_table)
    assert all(x is not None for x in (dk, dv))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=str)
def test_the_gradient_of_an_array_has_its_dtype(dtype: Any) -> None:
    grads = both(**OPTIONS | {"aux": (TABLE.astype(dtype), DOCUMENT)})[1]
    assert grads.daux is not None
    assert grads.daux[0].dtype == dtype


def test_an_array_that_no_score_depends_on_has_a_gradient_of_zero() -> None:
    def above(b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
        return t[h, 0] < j

    grads = both(mask_mod=above, aux=(TABLE,))[1]
    assert grads.daux
    np.testing.assert_array_equal(grads.daux[0], np.zeros(TABLE.shape))


def reads_by(names: str) -> Any:
    """Make a function that indexes an array by these of b, h, i and j."""

    def function(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
        place = {"b": b, "h": h, "i": i, "j": j, "0": 0 * i, "d": i // 5 + j // 7}
        return s * t[tuple(place[name] for name in names)]

    return function


BACKENDS = {
    "numpy": NumpyBackend(),
    "numpy, small tiles": NumpyBackend((16, 24), (24, 16)),
    "llvm": registry.get("llvm"),
}


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
@pytest.mark.parametrize(
    "names",
    [
        *("", "h", "ji", "bhij", "hd", "0"),
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("b", "i", "j", "hb", "jih", "ii", "d", "jd", "bb")
        ),
    ],
)
def test_gradients_by_any_indices(names: str, backend: Backend) -> None:
    """Through sums that tasks share, and through sums of their own."""
    if (reason := backend.unavailable()) is not None:
        pytest.skip(reason)
    lengths = {"b": B, "h": HQ + 1, "i": NQ + 2, "j": NK, "0": 3, "d": 20}
    table = np.random.default_rng(0).normal(size=tuple(lengths[name] for name in names))
    options: dict[str, Any] = {"score_mod": reads_by(names), "aux": (table,), "causal": True}
    problem, operands = parse(Q, K, V, options)
    attention = BACKENDS["numpy"].forward(problem, operands, None)
    grads = backend.backward(problem, operands, DOUT, attention, None, True)
    expected = reference.backward(DOUT, Q, K, V, **options)
    assert_attention_close(grads, expected, error_bound(Q, K, V, DOUT, **options))


@pytest.mark.slow
@pytest.mark.parametrize("length", ["B", "Hq", "Nq", "Nk"])
def test_an_axis_without_elements(cpu_backend: str, length: str) -> None:
    sizes = {"B": 2, "Hq": 4, "Nq": 5, "Nk": 6} | {length: 0}
    rows, keys = ((sizes["B"], sizes["Hq"], sizes[n], 8) for n in ("Nq", "Nk"))
    q, k, dout = np.ones(rows), np.ones(keys), np.ones(rows)
    for options in calls(**sizes).values():
        attention = tileattn.forward(q, k, k, backend=cpu_backend, **options)
        grads = tileattn.backward(dout, q, k, k, *attention, backend=cpu_backend, **options)
        assert not grads.dq.any()
        assert attention.out.shape == rows


@pytest.mark.parametrize("names", ["h", "d", "hd", "jd"])
def test_sums_do_not_depend_on_the_threads(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_backend, "_SERIAL_WORK", 0)
    table = np.random.default_rng(0).normal(size=(60,) * len(names)).astype(np.float32)
    q, k, v, dout = normal((2, 4, 2, 90, 110, 8, 12))
    options: dict[str, Any] = {"score_mod": reads_by(names), "aux": (table,)}
    problem, operands = parse(q, k, v, options)
    backend = NumpyBackend((16, 24), (24, 16))
    attention, found = backend.forward(problem, operands, None), []
    for count in (1, 2, 3, 5):
        monkeypatch.setattr(THREADS, "worker_count", lambda count=count: count)
        THREADS._crew.cache_clear()
        grads = backend.backward(problem, operands, dout, attention, None, deterministic=True)
        found.append((grads.daux or ())[0].tobytes() + grads.dq.tobytes())
    THREADS._crew.cache_clear()
    assert len({*found}) == 1


def test_what_a_function_hides_reaches_nothing(cpu_backend: str) -> None:
    """NaN in keys that no query sees, and in scores and derivatives of hidden pairs."""

    def hides(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
        return np.where(j % 3 == 0, -np.inf, s * t[j])

    def sees(b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
        return j % 4 != 0

    hidden = np.arange(NK) % 3 * (np.arange(NK) % 4) == 0
    k, v, table = K.copy(), V.copy(), np.linspace(1, 2, NK)
    k[:, :, hidden], v[:, :, hidden], table[hidden] = np.nan, np.inf, np.nan
    options: dict[str, Any] = {"score_mod": hides, "mask_mod": sees, "aux": (table,)}
    expected = reference.backward(DOUT, Q, k, v, **options)
    attention = tileattn.forward(Q, k, v, backend=cpu_backend, **options)
    grads = tileattn.backward(DOUT, Q, k, v, *attention, backend=cpu_backend, **options)
    bounds = error_bound(Q, k, v, DOUT, **options)
    assert all(np.isfinite(x).all() for x in (*attention, *grads[:3], *(grads.daux or ())))
    assert_attention_close(attention, reference.forward(Q, k, v, **options), bounds)
    assert_attention_close(grads, expected, bounds)


# --- wrt ----------------------------------------------------------------------------------------

ALL = {
    **OPTIONS,
    "bias": np.random.default_rng(4).normal(size=(HQ, 1, NK)),
    "sinks": np.linspace(-1, 1, HQ),
}
NAMES = ("q", "k", "v", "bias", "sinks", "aux")


@pytest.mark.parametrize(
    "wrt",
    [(), *((name,) for name in NAMES), ("q", "v"), ["k", "aux"], {"bias", "sinks"}, NAMES],
    ids=lambda names: " ".join(sorted(names)) or "none",
)
def test_what_is_not_asked_for_is_none_and_the_rest_the_same(cpu_backend: str, wrt: Any) -> None:
    given = {"backend": cpu_backend, **ALL}
    attention = tileattn.forward(Q, K, V, **given)
    whole = tileattn.backward(DOUT, Q, K, V, *attention, **given)
    grads = tileattn.backward(DOUT, Q, K, V, *attention, wrt=wrt, **given)
    _, pullback = tileattn.vjp(Q, K, V, **given)
    for found in (grads, pullback(DOUT, wrt=wrt)):
        for name in NAMES:
            ours, theirs = getattr(found, f"d{name}"), getattr(whole, f"d{name}")
            if name not in wrt:
                assert ours is None
            elif name == "aux":
                np.testing.assert_array_equal(ours[0], theirs[0])
            else:
                np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("wrt", "error", "message"),
    [
        ("q", TypeError, "wrt must be a sequence of names among q, k,"),
        (3, TypeError, "wrt must be a sequence of names among q, k,"),
        (("q", "x"), ValueError, "wrt must be a sequence of names among q, k,"),
        (("q", "bias"), ValueError, "wrt must not have 'bias': the call has no bias"),
        (("aux",), ValueError, "wrt must not have 'aux': the call has no aux"),
    ],
)
def test_wrong_names_of_gradients(wrt: Any, error: type[Exception], message: str) -> None:
    attention = tileattn.forward(Q, K, V, backend="numpy")
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        tileattn.backward(DOUT, Q, K, V, *attention, wrt=wrt, backend="numpy")


def test_tiles_are_not_computed_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = tileattn.forward(Q, K, V, backend="numpy", **ALL)
    monkeypatch.setattr(spec, "backward_tile", None)
    grads = tileattn.backward(DOUT, Q, K, V, *attention, wrt=("sinks",), backend="numpy", **ALL)
    assert grads.dsinks.shape == (HQ,)


def test_gradients_of_other_backends_are_dropped() -> None:
    if tileattn.available_backends()["llvm"] is not None:
        pytest.skip("without llvmlite: pip install llvmlite")
    attention = tileattn.forward(Q, K, V, backend="llvm")
    grads = tileattn.backward(DOUT, Q, K, V, *attention, wrt=("v",), backend="llvm")
    assert grads.dq is grads.dk is None
    assert grads.dv.shape == V.shape


# --- the cache of calls -------------------------------------------------------------------------


class OnDevice:
    """An array that is not on the host."""

    def __init__(self, shape: tuple[int, ...], dtype: Any = np.float32) -> None:
        self.shape, self.dtype, self.strides = shape, np.dtype(dtype), (4,) * len(shape)


def test_functions_and_aux_are_part_of_a_signature() -> None:
    def scaled(by: Any) -> Any:
        return lambda s, *_: s * by

    x = OnDevice((2, 3, 4, 8))

    def key(function: Any, *aux: Any) -> Any:
        options = read_functions({"score_mod": function}, aux)
        return signature((x, x, x), "cupy", {**options, "aux": aux})

    base = key(scaled(2), OnDevice((3,)))
    assert base is not None
    assert base == key(scaled(2), OnDevice((3,)))
    assert hash(base) == hash(key(scaled(2), OnDevice((3,))))
    for other in (
        key(scaled(3.0), OnDevice((3,))),
        key(lambda s, *_: s + 2, OnDevice((3,))),
        key(scaled(2), OnDevice((4,))),
        key(scaled(2), OnDevice((3,), np.float16)),
        key(scaled(2), OnDevice((3,)), OnDevice((3,))),
        key(scaled(2)),
    ):
        assert other is not None
        assert other != base
    assert key(scaled(2), np.zeros(3)) is None
