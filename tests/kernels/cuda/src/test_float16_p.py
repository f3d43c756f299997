"""float16: with an attention sink P of the other keys keeps its digits, and P never overflows.

The headers of the kernels run on the CPU, with P and dS rounded as on tensor cores.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kernels.cuda.src import softmax_on_host
from tests.kernels.cuda.src.softmax_on_host import WAYS, attended, gradients
from tileattn import reference
from tileattn.testing import Bound, error_bound

D = 64
SCALE = D**-0.5
LOG2_E = np.log2(np.e)
TILE = 32  # keys of a lane

Arrays = dict[str, Any]


def beside_a_sink(queries: int, keys: int, gap: float) -> Arrays:
    """Make arrays in which key 0 is a sink: its exponential is 2**gap times that of any other."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((n, D)) * 0.01 for n in (queries, keys))
    q[:, 0], k[:, 0] = 4.0, 0.0
    k[:, 1] += 1.0
    k[0], k[0, 0] = 0.0, gap / LOG2_E / SCALE / 4.0
    v = rng.standard_normal((keys, D)) * 0.3 + 1.0
    v[0] = 0.0
    dout = (rng.standard_normal((queries, D)) * 0.2 + 0.3) * 16.0
    return {n: x.astype(np.float16) for n, x in {"q": q, "k": k, "v": v, "dout": dout}.items()}


def bounds_of(x: Arrays) -> dict[str, Bound]:
    return error_bound(*(x[n][None, None] for n in ("q", "k", "v", "dout")), scale=SCALE)


def ratios(bounds: dict[str, Bound], exact: Arrays, found: Arrays) -> dict[str, float]:
    """Return errors divided by `error_bound`."""
    return {
        n: float(np.linalg.norm(y.astype(bounds[n].dtype).astype(float) - exact[n]))
        / bounds[n].error
        for n, y in found.items()
    }


def exactly(x: Arrays) -> Arrays:
    out, lse = reference.forward(x["q"], x["k"], x["v"], scale=SCALE)
    given = (x["dout"], x["q"], x["k"], x["v"], out, lse)
    return {"out": out, "lse": lse, **reference.backward(*given, scale=SCALE)._asdict()}


def products(x: Arrays) -> Any:
    return x["q"].astype(np.float32) @ x["k"].astype(np.float32).T


# If many queries have similar scores, similar rounding errors add up in the gradient of the sink.
CASES = [
    *((8, 2048, gap) for gap in (12.0, 24.5, 27.0)),
    *(pytest.param(*x, marks=pytest.mark.slow) for x in ((2, 1 << 14, 25.3), (512, 2048, 25.3))),
]


@pytest.mark.parametrize(("queries", "keys", "gap"), CASES)
def test_values_and_gradients_beside_a_sink(
    queries: int, keys: int, gap: float, tmp_path: Path
) -> None:
    x = beside_a_sink(queries, keys, gap)
    exact, bounds = exactly(x), bounds_of(x)
    for way in WAYS:
        out, lse, _ = attended(tmp_path, way, "float16", products(x), x["v"], SCALE, -np.inf)
        stored = out.astype(np.float16)  # from which comes delta
        assert ratios(bounds, exact, {"out": stored})["out"] <= 1, way
        for rounds in (False, True):
            found = gradients(tmp_path, "float16", x, stored, lse, SCALE, rounds=rounds)
            assert max(ratios(bounds, exact, found).values()) <= 1, (way, rounds)


@pytest.mark.parametrize(
    ("queries", "forward", "backward", "lost"),
    [(8, 0, 0, ("out", "dq", "dk")), (8, 11, 0, ("dq", "dk")), (512, 7, 15, ("dk",))],
)
def test_with_smaller_powers_of_two_digits_are_lost(
    queries: int,
    forward: int,
    backward: int,
    lost: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def smaller(key: Any, texts: Any = softmax_on_host.key_texts) -> dict[str, str]:
        made: dict[str, str] = texts(key)
        config = made["config.cuh"]
        for name, power in {"FORWARD": forward, "BACKWARD": backward}.items():
            config, count = re.subn(rf"(int {name}_P_LOG2 = ).*;", rf"\g<1>{power};", config)
            assert count == 1
        return made | {"config.cuh": config}

    monkeypatch.setattr(softmax_on_host, "key_texts", smaller)
    x = beside_a_sink(queries, 2048, 25.3)
    out, lse, _ = attended(
        tmp_path, "other kernels", "float16", products(x), x["v"], SCALE, -np.inf
    )
    stored = out.astype(np.float16)
    found = gradients(tmp_path, "float16", x, stored, lse, SCALE, rounds=True)
    off = ratios(bounds_of(x), exactly(x), {"out": stored, **found})
    assert min(off[n] for n in lost) > 1, off


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [0.01, 0.03, 1.0])
def test_logsumexp_of_one_key(way: str, size: float, tmp_path: Path) -> None:
    """The power of two of P must not show in a logsumexp near 0."""
    rng = np.random.default_rng(1)
    q = (rng.standard_normal((8192, D)) * size).astype(np.float16)
    k, v = (rng.standard_normal((1, D)).astype(np.float16) for _ in range(2))
    scores = np.full((len(q), TILE), -np.inf, np.float32)
    scores[:, :1] = products({"q": q, "k": k})
    _, lse, _ = attended(
        tmp_path, way, "float16", scores, np.repeat(v, TILE, axis=0), SCALE, -np.inf
    )
    bound = error_bound(*(x[None, None] for x in (q, k, v)), scale=SCALE)["lse"]
    exact = reference.forward(q, k, v, scale=SCALE).lse
    assert np.linalg.norm(lse - exact) <= bound.error


# --- shifts that lag behind maxima ----------------------------------------------------------------

KEYS = 8 * TILE


def rising() -> dict[str, Any]:
    """Make rows of scores, in units of log 2, that try shifts by sums."""
    t = np.arange(KEYS) // TILE
    noise = np.random.default_rng(1).standard_normal(KEYS)
    return {
        "rise by 7.5 a tile": 7.5 * t + 0.1 * noise,
        "rise by 2.9 a tile": 2.9 * t,
        "rise by 3.9 a tile": 3.9 * t,
        "rise by 15 a tile": 15.0 * t,
        "one key 8.01 above all before": np.where(np.arange(KEYS) % TILE == 7, 8.01 * t + 8, -30.0),
        "one key 4.01 above all before": np.where(np.arange(KEYS) % TILE == 7, 4.01 * t, -30.0),
        "spike at the end": np.where(np.arange(KEYS) == KEYS - 1, 60.0, noise),
        "fall": -9.0 * t,
        "first tile 100 below": np.where(t == 0, -100.0, noise),
        "first tile 100 above": np.where(t == 0, 100.0, noise),
        "near the limit of large rows": 4090.0 + noise,
        "equal": np.zeros(KEYS),
        "masked out at first": np.where(t < 2, -np.inf, noise),
        "masked out": np.full(KEYS, -np.inf),
        "large": 5000.0 + noise,
        "large from a tile on": np.where(t < 3, noise, 5000.0 + noise),
    }


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("way", WAYS)
def test_p_is_finite_and_rows_are_right(way: str, dtype: str, tmp_path: Path) -> None:
    log2 = np.stack([*rising().values()]).astype(np.float32)
    v = np.random.default_rng(2).standard_normal((KEYS, 8)).astype(np.float16).astype(np.float32)
    if way == "first pass of Hopper's kernel":  # which leaves large rows to the others
        log2 = log2[:-2]
    s = (log2 * np.float32(1 / LOG2_E)).astype(np.float32)
    out, lse, most = attended(tmp_path, way, dtype, s, v, 1.0, -np.inf)
    assert (most <= (2.0**15 if dtype == "float16" else 2.0**8)).all()
    top = np.where(np.isinf(s.max(1)), 0, s.max(1)).astype(float)[:, None]
    p = np.exp(s.astype(float) - top)
    total = p.sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = np.where(total > 0, (p @ v).T / total, 0.0).T
        exact_lse = np.log(total) + top[:, 0]
    # P in the dtype, and exponents of up to 2**12 in float32.
    size = np.where(total > 0, (p @ np.abs(v)).T / np.where(total > 0, total, 1), 0.0).T
    digits = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype] + 2.0**-11
    assert (np.abs(out - exact) <= digits * size).all()
    seen = total > 0
    assert np.isneginf(lse[~seen]).all()
    error = np.abs(lse[seen] - exact_lse[seen])
    assert (error <= 2.0**-22 * (np.abs(exact_lse[seen]) + 8)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_second_pass_has_the_bits_of_the_first(dtype: str, tmp_path: Path) -> None:
    """A row that is not large keeps its bits if another row makes both passes run."""
    log2 = np.stack([*rising().values()][:-2]).astype(np.float32)
    v = np.random.default_rng(2).standard_normal((KEYS, 8)).astype(np.float16).astype(np.float32)
    s = (log2 * np.float32(1 / LOG2_E)).astype(np.float32)
    first, second = (attended(tmp_path, way, dtype, s, v, 1.0, -np.inf)[:2] for way in [*WAYS][:2])
    assert [x.tobytes() for x in first] == [x.tobytes() for x in second]
