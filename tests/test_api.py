"""The public calls: what they refuse beyond ``parse``, ``out=``, ``merge``, ``explain``."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.arrays import Array, Given, normal
from tileattn import Attention
from tileattn.algorithm import spec
from tileattn.call.parse import parse
from tileattn.messages import shown
from tileattn.traffic import ALGORITHMS, KINDS, counted

on_the_cpu = pytest.mark.usefixtures("cpu_backend")

B, HQ, HKV, NQ, NK, D, DV = 2, 4, 2, 7, 5, 3, 6
OUT = (B, HQ, NQ, DV)


def arrays() -> Given:
    return normal((B, HQ, HKV, NQ, NK, D, DV))


def saved() -> tuple[list[Array], Attention]:
    q, k, v, dout = arrays()
    return [dout, q, k, v], tileattn.forward(q, k, v)


# --- out= ---------------------------------------------------------------------------------------


def read_only() -> Array:
    out = np.full(OUT, 9, np.float32)
    out.setflags(write=False)
    return out


def strided(count: int, strides: tuple[int, ...]) -> Array:
    """Make a view of OUT's shape into few numbers."""
    return np.lib.stride_tricks.as_strided(np.full(count, 9, np.float32), OUT, strides)


LIST = "must be a NumPy array; got {found} (numpy.asarray({name}) makes one)"
OVERLAP = "must not overlap itself; some elements share memory"


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        ([[9.0]], TypeError, LIST),
        (np.full((*OUT[:3], D), 9, "f4"), ValueError, "must have shape {shape}; got (2, 4, 7, 3)"),
        (np.full(OUT[1:], 9, "f4"), ValueError, "must have shape {shape}; got (4, 7, 6)"),
        (np.full(OUT, 9.0), TypeError, "must have dtype float32; got float64"),
        (np.full(OUT, 9, ">f4"), TypeError, "must have dtype float32; got >f4"),
        (read_only(), ValueError, "must be writable; got a read-only array"),
        (strided(HQ * NQ * DV, (0, NQ * DV * 4, DV * 4, 4)), ValueError, OVERLAP),
        (strided(B * HQ * NQ + DV, (4,) * 4), ValueError, OVERLAP),
    ],
)
@pytest.mark.usefixtures("cpu_backend")
def test_out_refused_and_left_alone(out: Any, error: type[Exception], message: str) -> None:
    q, k, v, _ = arrays()
    said = message.format(shape=OUT, name="out", found=shown(out))
    with pytest.raises(error, match=f"^{re.escape('out ' + said)}$"):
        tileattn.forward(q, k, v, out=out)
    assert np.all(np.asarray(out) == 9)


@on_the_cpu
@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
def test_out_overlapping_an_input_is_refused(name: str) -> None:
    x: dict[str, Any] = dict(zip("qkv", np.ones((3, B, HQ, NQ, 6), np.float32), strict=True))
    x["bias"] = np.zeros((B, HQ, NQ, NQ), np.float32)
    memory = np.full(2 * x[name].size + DV, 9, np.float32)
    given = memory[: x[name].size].reshape(x[name].shape)
    out = memory[x[name].size - 1 :][: B * HQ * NQ * DV].reshape(OUT)
    before = memory.copy()
    message = f"^out must not overlap {name}$"
    with pytest.raises(ValueError, match=message):
        tileattn.forward(**{**x, name: given, "out": out})
    np.testing.assert_array_equal(memory, before)


@on_the_cpu
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"scale": float("nan")}, ValueError),
        ({"sinks": np.zeros(3)}, ValueError),
        ({"kv_lengths": [9, 9]}, ValueError),
        ({"backend": "nothing"}, ValueError),
        ({"backend": "cupy"}, TypeError),
        ({"causal": "yes"}, TypeError),
    ],
)
def test_any_refusal_leaves_out_alone(options: dict[str, Any], error: type[Exception]) -> None:
    q, k, v, _ = arrays()
    out = np.full(OUT, 9, np.float32)
    with pytest.raises(error):
        tileattn.forward(q, k, v, out=out, **options)
    assert np.all(out == 9)


def test_a_failure_half_way_leaves_out_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = arrays()
    out = np.full(OUT, 9, np.float32)
    finish = spec.finalize
    calls = []

    def fails_at_last(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == B:
            raise MemoryError
        return finish(*args)

    monkeypatch.setattr(spec, "finalize", fails_at_last)
    with pytest.raises(MemoryError):
        tileattn.forward(q, k, v, out=out, backend="numpy")
    assert len(calls) == B
    assert np.all(out == 9)


@on_the_cpu
@pytest.mark.parametrize("ndim", [2, 3, 4])
def test_out_is_written_and_returned(ndim: int) -> None:
    q, k, v = (x[(0,) * (4 - ndim)] for x in arrays()[:3])
    expected = tileattn.forward(q, k, v)
    wide = np.full((*expected.out.shape[:-1], 2 * DV), 9, np.float32)
    out = wide[..., ::2]
    result = tileattn.forward(q, k, v, out=out)
    assert result.out is out
    np.testing.assert_array_equal(out, expected.out)
    np.testing.assert_array_equal(result.lse, expected.lse)
    assert np.all(wide[..., 1::2] == 9)


@on_the_cpu
def test_out_may_lie_between_the_inputs() -> None:
    packed = np.random.default_rng(0).normal(size=(B, NQ, 4, HQ, D)).astype(np.float32)
    q, k, v, out = (packed[:, :, n].swapaxes(1, 2) for n in range(4))
    expected = tileattn.forward(q.copy(), k.copy(), v.copy())
    np.testing.assert_array_equal(tileattn.forward(q, k, v, out=out).out, expected.out)


# --- backward -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dout", "out", "lse", "dlse"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: x.tolist(), TypeError, "{name} " + LIST),
        (lambda x: x.astype("f8"), TypeError, "{name} must have dtype float32; got float64"),
        (lambda x: x[:, :2], ValueError, "{name} must have shape {}; got {}"),
        (lambda x: x[0], ValueError, "{name} must have shape {}; got {}"),
    ],
)
@pytest.mark.usefixtures("cpu_backend")
def test_backward_refuses(
    name: str, change: Callable[[Array], Any], error: type[Exception], message: str
) -> None:
    (dout, q, k, v), (out, lse) = saved()
    given: dict[str, Any] = {"dout": dout, "out": out, "lse": lse, "dlse": np.ones_like(lse)}
    right = given[name]
    given[name] = wrong = change(right)
    shapes = right.shape, np.shape(wrong)
    expected = message.format(*shapes, name=name, found=shown(wrong))
    with pytest.raises(error, match=f"^{re.escape(expected)}$"):
        tileattn.backward(q=q, k=k, v=v, **given)


@pytest.mark.parametrize("name", ["dout", "out", "lse"])
def test_backward_needs(name: str) -> None:
    (dout, q, k, v), (out, lse) = saved()
    given: dict[str, Any] = {"dout": dout, "out": out, "lse": lse, name: None}
    with pytest.raises(TypeError, match=f"^{name} must be a NumPy or CuPy array; got None"):
        tileattn.backward(q=q, k=k, v=v, **given)


def test_deterministic_is_a_flag() -> None:
    (dout, q, k, v), (out, lse) = saved()
    with pytest.raises(TypeError, match=r"^deterministic must be True or False; got 1$"):
        tileattn.backward(dout, q, k, v, out, lse, deterministic=1)  # type: ignore[arg-type]  # wrong


# --- merge --------------------------------------------------------------------------------------

GOOD = np.ones((3, 2), np.float32)
LSE = np.ones(3, np.float32)
WIDE = GOOD.astype(np.float64)
AS_MANY = "outs and lses must have as many entries, and at least one; got"


@pytest.mark.parametrize(
    ("outs", "lses", "error", "message"),
    [
        (None, [LSE], TypeError, "outs must be a sequence of arrays; got None"),
        ([GOOD], 3, TypeError, "lses must be a sequence of arrays; got 3"),
        (
            np.stack([GOOD, GOOD]),  # which may as well be one result, of two heads
            np.stack([LSE, LSE]),
            TypeError,
            "outs must be a sequence of arrays; got numpy.ndarray of dtype float32 and shape "
            "(2, 3, 2) (list(outs) where its first axis counts the parts)",
        ),
        ([], [], ValueError, f"{AS_MANY} 0 and 0"),
        ([GOOD] * 2, [LSE], ValueError, f"{AS_MANY} 2 and 1"),
        (
            [[1.0]],
            [LSE],
            TypeError,
            "outs[0] must be a NumPy or CuPy array; got [1.0] (numpy.asarray(outs[0]) makes one)",
        ),
        (
            [GOOD.astype(int)],
            [LSE],
            TypeError,
            "outs[0] must have dtype float16, bfloat16, float32 or float64; got int64",
        ),
        ([GOOD, WIDE], [LSE] * 2, TypeError, "outs[1] must have dtype float32; got float64"),
        ([GOOD, GOOD[:, :1]], [LSE] * 2, ValueError, "outs[1] must have shape (3, 2); got (3, 1)"),
        ([GOOD] * 2, [LSE, WIDE[:, 0]], TypeError, "lses[1] must have dtype float32; got float64"),
        ([GOOD], [LSE[:2]], ValueError, "lses[0] must have shape (3,); got (2,)"),
    ],
)
def test_merge_refuses(outs: Any, lses: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        tileattn.merge(outs, lses)


def test_merge_of_rows_without_a_key() -> None:
    nothing = np.full(3, -np.inf, np.float32)
    unseen = np.full((3, 2), np.nan, np.float32)  # what a part holds there does not matter
    out, lse = tileattn.merge([unseen, unseen], [nothing, nothing])
    assert not out.any()
    assert np.isneginf(lse).all()
    out, lse = tileattn.merge([unseen, GOOD], [nothing, LSE])
    np.testing.assert_array_equal(out, GOOD)
    np.testing.assert_array_equal(lse, LSE)


def test_merge_of_one_part_with_infinite_scores_is_the_part() -> None:
    """A score of infinity is no missing score; nor does it warn where an output is 0."""
    lse = np.array([-np.inf, np.inf, 2], np.float32)
    out = np.array([[0, 0], [0, 3], [1, 2]], np.float32)
    merged = tileattn.merge([out], [lse])
    np.testing.assert_array_equal(merged.out, out)
    np.testing.assert_array_equal(merged.lse, lse)
    merged = tileattn.merge([out, out], [lse, np.zeros_like(lse)])
    np.testing.assert_array_equal(merged.lse[:2], [0, np.inf])
    np.testing.assert_array_equal(merged.out[0], out[0])


# --- explain ------------------------------------------------------------------------------------


def test_explain_says_what_would_run() -> None:
    q, k, v, _ = arrays()
    explanation = tileattn.explain(q, k, v, causal=True, backend="numpy")
    rows, keys = explanation.forward_tile
    assert explanation.backend == "numpy"
    assert explanation.tiles == {"skipped": 0, "partial": B * HQ, "full": 0}
    assert explanation.bytes_moved["q"] == q.nbytes
    assert explanation.workers == 1
    problem, operands = parse(q, k, v, {"causal": True})
    tiles = (explanation.forward_tile, explanation.backward_tile)
    assert explanation.traffic == {
        algorithm: tuple(
            counted(problem, operands, tile, algorithm, kind).nbytes
            for tile, kind in zip(tiles, KINDS, strict=True)
        )
        for algorithm in ALGORITHMS
    }
    report = str(explanation)
    for word in (
        "numpy",
        "tileattn.algorithm.spec",
        "8 partial",
        "NumPy arrays",
        f"{rows} x {keys}",
    ):
        assert word in report
    for kind, n in (("forward ", 0), ("backward", 1)):
        (line,) = (line for line in report.splitlines() if line.startswith(kind))
        moved = [f"{nbytes[n] / 1e6:,.2f} MB" for nbytes in explanation.traffic.values()]
        names = "standard", "FlashAttention", "FlashAttention-2"
        said = ", ".join(f"{name} {mb}" for name, mb in zip(names, moved, strict=True))
        assert line == f"{kind}  {said}"


def test_explain_refuses_what_forward_refuses() -> None:
    q, k, v, _ = arrays()
    with pytest.raises(TypeError, match=r"^causal must be True or False"):
        tileattn.explain(q, k, v, causal=1)  # type: ignore[arg-type]  # wrong on purpose
