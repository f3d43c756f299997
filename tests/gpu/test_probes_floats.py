"""Each CUDA header of floating numbers computes what the Python module of the same name does.

Bounds follow from the roundings in the formulas. u is the relative error of one rounding: 2**-24
for float32, 2**-53 for float64.
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.on_gpu import needs_gpu
from tests.probes import keys
from tests.probes.bounds import (
    assert_near,
    assert_same_bits,
    dtype_of,
    sums_of,
    truth_of,
    unit_of,
)
from tests.probes.harness import Probe, params, strides_of
from tests.probes.splitting import elements_and_factors, largest_elements
from tileattn.algorithm.scores import ScoreMods
from tileattn.algorithm.softmax import RowState
from tileattn.algorithm.splitting import inverse_power, power_of_two, split
from tileattn.algorithm.tiles import Tile
from tileattn.call.block_mask import FULL
from tileattn.kernels.cuda.families.key import KernelKey

Array = NDArray[Any]

pytestmark = needs_gpu

# Branches for older GPUs are compiled for this one and run, too.
older = pytest.mark.parametrize("as_arch", ["", "800", "750"])


def each(probes: tuple[KernelKey, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("key", probes, ids=keys.name_of)


# --- types.cuh ----------------------------------------------------------------------------------


def halves_of(dtype: np.dtype[Any]) -> Array:
    """Every value of a 16-bit type."""
    return np.arange(2**16, dtype=np.uint16).view(dtype)


def floats_around(dtype: np.dtype[Any]) -> Array:
    """Float32 numbers at, between and next to the values of a type, and random ones."""
    with np.errstate(invalid="ignore"):
        exact = np.sort(halves_of(dtype).astype(np.float32))
    exact = exact[np.isfinite(exact)]
    ties = ((exact[1:].astype(np.float64) + exact[:-1]) / 2).astype(np.float32)
    beyond = exact[-1] + (exact[-1] - exact[-2]) / 2  # the first that is rounded to infinity
    special = np.array([beyond, -beyond, np.inf, -np.inf, np.nan], np.float32)
    some = np.concatenate([exact, ties, special])
    near = [np.nextafter(some, np.float32(side)) for side in (-np.inf, np.inf)]
    wild = np.random.default_rng(0).integers(0, 2**32, 2**18, np.uint32).view(np.float32)
    return np.concatenate([some, *near, wild])


@older
@each(keys.TYPES)
def test_conversions_round_to_the_nearest(key: KernelKey, as_arch: str) -> None:
    dtype, sums = dtype_of(key), sums_of(key)
    probe = Probe(key, as_arch)
    with np.errstate(over="ignore", invalid="ignore"):
        x = floats_around(dtype if dtype.itemsize == 2 else np.dtype(np.float16))
        narrow = np.full(x.shape, 7, dtype)
        probe("narrowed", x, narrow, x.size)
        assert_same_bits(narrow, x.astype(dtype))

        doubles = x.astype(np.float64) * (1 + 2.0**-30)
        want = doubles if dtype == np.float64 else doubles.astype(np.float32).astype(dtype)
        probe("narrowed_doubles", doubles, narrow, x.size)
        assert_same_bits(narrow, want)

        given = halves_of(dtype) if dtype.itemsize == 2 else x.astype(dtype)
        wide = np.full(given.shape, 7, sums)
        probe("widened", given, wide, given.size)
        assert_same_bits(wide, given.astype(sums))


@older
@each(keys.TYPES[:2])
def test_the_first_of_a_packed_pair_is_the_lower(key: KernelKey, as_arch: str) -> None:
    dtype = dtype_of(key)
    x = floats_around(dtype)
    pairs = np.stack([x, x[::-1]], axis=1)
    packed = np.zeros(len(pairs), np.uint32)
    Probe(key, as_arch)("packed", pairs, packed, len(pairs))
    with np.errstate(over="ignore", invalid="ignore"):
        assert_same_bits(packed.view(dtype).reshape(pairs.shape), pairs.astype(dtype))


@each(keys.TYPES[2:])
def test_exponentials_and_logarithms(key: KernelKey) -> None:
    """Exponentials: 2**-22 (float32), 2 ulp (float64), and small ones may be 0. Logarithms: 2 ulp.

    PTX ISA, ex2.approx; CUDA programming guide, mathematical functions.
    """
    sums, truth = sums_of(key), truth_of(key)
    rng, info = np.random.default_rng(1), np.finfo(sums)
    probe, y = Probe(key), np.zeros(10_000, sums)
    x = rng.uniform(info.minexp - 30, info.maxexp - 1, y.size).astype(sums)
    x[:5] = 0, -0.0, -np.inf, np.inf, np.nan
    probe("exp2s", x, y, x.size)
    want = np.exp2(x.astype(truth))
    relative = 2**-22 if sums == np.float32 else 2 * info.eps
    assert_near(y, want, relative * want + info.tiny)
    x = np.exp(rng.uniform(-80, 80, y.size)).astype(sums)
    x[:6] = 0, np.inf, np.nan, 1, 1 + info.eps, 1 - info.eps / 2
    probe("log2s", x, y, x.size)
    with np.errstate(divide="ignore"):
        want = np.log2(x.astype(truth))
    assert_near(y, want, 2 * info.eps * np.abs(want))


@each(keys.TYPES[2:])
def test_limits(key: KernelKey) -> None:
    sums = sums_of(key)
    top = np.finfo(sums).max
    x = np.array([0, 1, -1, top, -top, np.inf, -np.inf, np.nan], sums)
    finite, limits, probe = np.zeros(x.shape, np.bool_), np.zeros(2, sums), Probe(key)
    probe("finite_ones", x, finite, x.size)
    probe("limits", limits)
    assert np.array_equal(finite, np.isfinite(x))
    assert limits.tolist() == [top, np.inf]


# --- splitting.cuh ------------------------------------------------------------------------------


@each(keys.SPLITTING)
def test_splits(key: KernelKey) -> None:
    probe, largest, (x, factors) = Probe(key), largest_elements(), elements_and_factors()
    powers, inverses = np.full((2, largest.size), 7, np.float32)
    probe("powers", largest, powers, inverses, largest.size)
    assert_same_bits(powers, power_of_two(largest))
    assert_same_bits(inverses, inverse_power(powers))
    parts = np.full((x.size, 2), 7, np.float16)
    probe("splits", x, factors, parts, x.size)
    assert_same_bits(parts, np.stack(split(x, factors), axis=1))


# --- tile.cuh -----------------------------------------------------------------------------------


@older
@each(keys.COPIES)
def test_copies_into_a_tile_and_out_of_it(key: KernelKey, as_arch: str) -> None:
    """Beyond the rows and columns that there are, a tile holds zeros and nothing is written."""
    dtype, ROWS, COLUMNS = dtype_of(key), key.block_q, key.head_dim
    # A multiple of the vector, and of nothing larger.
    stride = COLUMNS + 16 + key.alignment_bytes // dtype.itemsize
    random = np.random.default_rng(5).standard_normal((ROWS + 8, stride))
    probe = Probe(key, as_arch)
    for rows in (0, 1, ROWS - 15, ROWS - 1, ROWS, ROWS + 8):
        for columns in (1, 8, COLUMNS - 13, COLUMNS):
            source = np.full(random.shape, np.nan, dtype)
            source[:rows, :columns] = random[:rows, :columns]
            held, target = np.full((ROWS, COLUMNS), 7, dtype), np.full(source.shape, 7, dtype)
            probe("copied", source, stride, rows, columns, held, target)
            kept = min(rows, ROWS)
            want, want_target = np.zeros_like(held), np.full_like(target, 7)
            for x in want, want_target:
                x[:kept, :columns] = source[:kept, :columns]
            assert_same_bits(held, want)
            assert_same_bits(target, want_target)


def products_of(key: KernelKey, x: Array, y: Array, sums: Array) -> dict[str, tuple[Array, Array]]:
    """Factors of each function of the probe."""
    half, K = key.head_dim // 2, key.block_k
    return {
        "product": (x[16:], y[16:].T),
        "product_of_sums": (sums, y[:, half:]),
        "product_of_columns": (x[:K, half:].T, y[:, half:]),
        "product_of_rows": (x[16:, :K], y[:, half:]),
    }


def bound_of(key: KernelKey, depth: int) -> float:
    """Bound the error of a sum of products, relative to the sum of their absolute values.

    Tensor cores may cut what they add to the last bit, 2 u, where others round. A product of
    float32 is made of tf32 parts: see mma.cuh.
    """
    split = 2**-21 if key.dtype == "float32" else 0.0
    return split + (2 * depth + 8) * unit_of(key)


@pytest.mark.parametrize("whole", [True, False], ids=["integers", "random"])
@older
@each(keys.TILE)
def test_products(key: KernelKey, as_arch: str, whole: bool) -> None:
    """Sums of products of small integers are exact; others are within their bound."""
    rng, truth = np.random.default_rng(6), truth_of(key)
    M, K, D = key.block_q, key.block_k, key.head_dim
    x, y, a = (
        (rng.integers(-4, 5, shape) if whole else rng.standard_normal(shape)).astype(dtype_of(key))
        for shape in ((M, D), (K, D), (M - 16, K))
    )
    probe = Probe(key, as_arch)
    for name, factors in products_of(key, x, y, a).items():
        left, right = (factor.astype(np.float64).astype(truth) for factor in factors)
        got = np.full((len(left), right.shape[1]), np.nan, sums_of(key))
        sums = [a.astype(sums_of(key))] if name == "product_of_sums" else []
        probe(name, x, y, got, *sums)
        size = 1 + np.abs(left) @ np.abs(right)
        assert_near(got, 1 + left @ right, 0 if whole else bound_of(key, left.shape[1]) * size)


@older
@each(keys.TILE)
def test_careful_products(key: KernelKey, as_arch: str) -> None:
    """They are infinite and NaN where the plain ones are; finite ones have the same bits."""
    rng, truth, sums = np.random.default_rng(13), truth_of(key), sums_of(key)
    M, K, D = key.block_q, key.block_k, key.head_dim
    x, y = (rng.standard_normal(shape).astype(dtype_of(key)) for shape in ((M, D), (K, D)))
    probe, top = Probe(key, as_arch), np.finfo(sums).max
    clean, got = np.full((2, M - 16, K - 16), 7, sums)
    probe("product", x, y, clean)
    probe("careful_product", x, y, got)
    assert_same_bits(got, clean)

    x[18:21, 3] = np.inf, -np.inf, np.nan
    y[20, :4], y[21, :4], y[22, 5] = 1, 0, np.inf  # of 1 and 0 the lower tf32 part is 0
    if dtype_of(key) == sums:
        x[21, 7], y[23, 7] = top / 16, -top / 16  # their product overflows
        x[22, 8], y[:, 8] = top, y[:, 8] / 1024  # rounded to 11 bits, top would be infinite
    probe("careful_product", x, y, got)
    left, right = (z[16:].astype(np.float64).astype(truth) for z in (x, y))
    with np.errstate(over="ignore", invalid="ignore"):
        want = (1 + left @ right.T).astype(sums).astype(truth)
        size = 1 + np.abs(left) @ np.abs(right.T)
    assert np.isnan(want).any()
    assert np.isposinf(want).any()
    assert np.isneginf(want).any()
    assert_near(got, want, bound_of(key, D) * size)


@older
@each(keys.TILE)
def test_accumulators_are_scaled_by_rows_and_stored(key: KernelKey, as_arch: str) -> None:
    rng, dtype, sums = np.random.default_rng(7), dtype_of(key), sums_of(key)
    M, N = key.block_q - 16, key.head_dim // 2
    numbers = rng.standard_normal((M, N)).astype(sums)
    probe = Probe(key, as_arch)
    for factors in (np.ones(M, sums), rng.standard_normal(M).astype(sums)):
        held = np.full((M, N), 7, dtype)
        probe("stored", numbers, factors, held)
        assert_same_bits(held, (numbers * factors[:, None]).astype(dtype))


@older
@each((keys.TILE[0], keys.TILE[-1]))
def test_accumulators_are_added_to_the_rows_that_there_are(key: KernelKey, as_arch: str) -> None:
    rng, sums, rows = np.random.default_rng(11), sums_of(key), key.block_q - 5
    M, N = key.block_q, key.head_dim
    before = np.full((M, N), 0.3, sums)  # alike in all columns, whatever their order
    numbers = rng.standard_normal((M - 16, N // 2)).astype(sums)
    got, want = np.full((M, N), 7, sums), before.copy()
    want[16:rows, N // 2 :] += numbers[: rows - 16]
    Probe(key, as_arch)("added", numbers, rows, before, got)
    assert_same_bits(got, want)


@older
@each((keys.COPIES[0], keys.COPIES[-1]))
def test_a_row_is_copied(key: KernelKey, as_arch: str) -> None:
    row = np.random.default_rng(12).standard_normal(key.block_q).astype(sums_of(key))
    held = np.full_like(row, 7)
    Probe(key, as_arch)("copied_row", row, held)
    assert_same_bits(held, row)


# --- score_mod.cuh ------------------------------------------------------------------------------

LOG2_E = np.log2(np.exp(np.longdouble(1)))


@each(tuple(KernelKey("score_mod", dtype) for dtype in keys.DTYPES))
def test_tanh(key: KernelKey) -> None:
    """Within 2 ulp, which is 4 u (CUDA programming guide)."""
    sums = sums_of(key)
    large = np.linspace(-100, 100, 1001)
    small = np.geomspace(1e-30, 1, 1000)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, np.finfo(sums).max, -np.finfo(sums).max]
    x = np.concatenate([np.linspace(-12, 12, 200_001), large, small, -small, special]).astype(sums)
    y = np.full(x.shape, 7, sums)
    Probe(key)("tanhs", x, y, x.size)
    want = np.tanh(x.astype(truth_of(key)))
    assert_near(y, want, 4 * unit_of(key) * np.abs(want))


@each(keys.SCORE_MOD)
def test_scores_and_their_derivatives(key: KernelKey) -> None:
    """Each part of a score passes at most 9 roundings; a derivative 1 - t**2 has 6 of t and 2.

    The 9: scale over cap and its product, 4 for tanh, cap and two sums.
    """
    B, Hq, Nq, Nk = 2, 3, 21, 34
    rows, columns = Nq + 3, Nk + 4  # past the end the bias is not read: it is NaN there
    rng, sums, truth, u = np.random.default_rng(8), sums_of(key), truth_of(key), unit_of(key)
    scale, softcap, offsets = 0.15625, 2.5, np.array([-4, 30], np.int64)
    products = (20 * rng.standard_normal((B, Hq, rows, columns))).astype(sums)
    slopes = rng.random((B, Hq)).astype(sums)
    bias = rng.standard_normal((B, 1, rows, columns))
    bias[:, :, Nq:], bias[..., Nk:] = np.nan, np.nan
    bias = bias.astype(getattr(ml_dtypes, key.bias, key.bias or "float32"))
    sizes = {"Hq": Hq, "Nq": Nq, "Nk": Nk, "alibi_slopes_b": Hq, "bias_at": strides_of(bias)}
    (scores, derivatives), unit = np.full((2, *products.shape), 7, sums), np.zeros(1, sums)
    given = (offsets, slopes, bias, products, rows, columns, scores, derivatives, unit)
    Probe(key)("scored", params(**sizes, scale=scale, softcap=softcap), *given, grid=(Hq, B))

    assert np.isfinite(scores).all()
    if key.fold_scale:
        assert_same_bits(scores, products)
        assert_same_bits(derivatives, np.ones_like(products))
        assert_near(unit, np.array([scale * LOG2_E], truth), 3 * u * scale)
        return
    assert_near(unit, np.array([LOG2_E], truth), u * LOG2_E)
    distance = np.abs(np.arange(Nq)[:, None] + offsets[:, None, None, None] - np.arange(Nk))
    for b, h in np.ndindex(B, Hq):
        inside = b, h, slice(Nq), slice(Nk)
        added = bias[b, 0, :Nq, :Nk].astype(np.float64).astype(truth) if key.bias else None
        mods = ScoreMods.of(
            softcap if key.softcap else None,
            slopes[b, h].astype(truth) if key.alibi else None,
            added,
            int(offsets[b]),
        )
        want = scale * products[inside].astype(truth)
        size = np.minimum(np.abs(want), softcap) if key.softcap else np.abs(want)
        grads = mods.apply_with_grad(want, Tile(0, Nq, 0, Nk, FULL))
        grad = next((x.by_score for x in grads if x.by_score is not None), None)
        size += slopes[b, h] * distance[b, 0] if key.alibi else 0
        size += 0 if added is None else np.abs(added)
        assert_near(scores[inside], want, 10 * u * size)
        if grad is None:
            assert (derivatives[inside] == 1).all()
        else:
            assert_near(derivatives[inside], grad, 14 * u)


# --- softmax.cuh --------------------------------------------------------------------------------


def tiles_of_products(key: KernelKey, tiles: int) -> Array:
    """Products with masked-out pairs, and rows without a key, at first, at last or at all."""
    rng = np.random.default_rng(9)
    x = 20 * rng.standard_normal((tiles, key.block_q, key.block_k))
    x[rng.random(x.shape) < 0.3] = -np.inf
    x[:, 0] = -np.inf
    x[:2, 1], x[2:, 2], x[1:3, 3] = -np.inf, -np.inf, -np.inf
    steps = 90.0 * np.arange(tiles)[:, None]
    x[:, 4], x[:, 5] = x[:, 4] + steps, x[:, 5] - steps
    x[:, 6], x[:, 7] = 0, -1e4
    # Too large for a rounded shift at once, and from some tile on. The truth rounds a score in base
    # e to 64 bits: those of float64 may not be as large as those of float32.
    far = 1e9 if sums_of(key) == np.float32 else 1e5
    x[:, 13], x[:, 14] = x[:, 13] + far, x[:, 14] + (1 << 12) - 70 + steps / 3
    x[:, 15] = -0.9 * np.finfo(sums_of(key)).max
    return x.astype(sums_of(key))


def updated(key: KernelKey, x: Array, unit: float, sinks: Array, gain: float) -> list[Array]:
    """Run the probe: p, m, rescale, weight and lse. The four lanes of a row agree."""
    sums = sums_of(key)
    p, T, M = np.full_like(x, 7), *x.shape[:2]
    lanes = [np.full((*shape, 4), 7, sums) for shape in ((T, M), (T, M), (M,), (M,))]
    natural = sums.type(unit * np.log(2))
    Probe(key)("updated", x, T, sums.type(unit), sinks, sums.type(gain), natural, p, *lanes)
    for four in lanes:
        assert np.array_equal(four, np.broadcast_to(four[..., :1], four.shape), equal_nan=True)
    return [p, *(four[..., 0] for four in lanes)]


def ways_down(top: Array, x: Array) -> Array:
    """How far numbers are below the top; 0 where masked out, for then nothing is rounded."""
    return np.subtract(top, x, out=np.zeros(x.shape, top.dtype), where=x > -np.inf)


@pytest.mark.parametrize("unit", [1.0, 0.2])
@each(keys.SOFTMAX)
def test_row_states(key: KernelKey, unit: float) -> None:
    """Weights of all keys and logsumexp are those of RowState, which is given the same in base e.

    A weight is a product of exponentials, one for each later tile and the sink. Their arguments,
    each rounded once, add up to its way down from the maximum: ln 2 u of it, and the errors of the
    exponentials. The denominator has the same errors, weighted, and its sums.
    """
    T, gain, sums, truth, u = 4, 1.25, sums_of(key), truth_of(key), unit_of(key)
    x = tiles_of_products(key, T)
    M, N = x.shape[1:]
    sinks = np.random.default_rng(10).normal(0, 5, (M,)).astype(sums)
    sinks[::2], sinks[9] = -np.inf, 140
    p, m, rescale, weight, lse = updated(key, x, unit, sinks, gain)

    ln2, scores = np.log(truth.type(2)), x.astype(truth) * truth.type(sums.type(unit))
    state = RowState.empty((M,), T * N, truth)
    total = np.zeros((M, T, N), truth)
    for t in range(T):
        state.update(scores[t] * ln2, np.eye(N, T * N, t * N, dtype=truth))
        assert_near(m[t], state.m / ln2, 2 * u * np.abs(state.m / ln2))
        total *= rescale[t][:, None, None]
        total[:, t] = p[t]
    state.sink(sinks.astype(truth))
    end = state.m / ln2
    want, want_lse = state.finalize(gain)

    way = ways_down(end[:, None], scores.swapaxes(0, 1).reshape(M, T * N))
    sink_way = ways_down(end, sinks / ln2)
    share = want / gain
    mean = (share * way).sum(axis=1) + (1 - share.sum(axis=1)) * sink_way
    exponentials = (T + 2) * (2**-22 if sums == np.float32 else 4 * u)
    of_sink = 2 * u * np.abs(np.where(np.isfinite(sinks), sinks, 0))
    of_sum = ln2 * u * mean + exponentials + (T * N + T + 4) * u + of_sink
    of_weight = ln2 * u * way + exponentials + of_sum[:, None] + 4 * u
    got = (total * weight[:, None, None]).reshape(M, T * N)
    assert_near(got, want, 1.01 * of_weight * want + T * N * gain * np.finfo(sums).tiny)
    of_logarithm = u * (3 * np.abs(ways_down(want_lse, state.m)) + 4 * np.abs(want_lse))
    assert_near(lse, want_lse, 1.01 * of_sum + of_logarithm)


@each(keys.SOFTMAX)
def test_only_rows_that_are_not_finite_have_weights_that_are_not(key: KernelKey) -> None:
    x = tiles_of_products(key, 3)
    x[1, 10, 5], x[2, 11, 0], x[0, 12, 7] = np.nan, np.inf, np.inf
    no_sinks = np.full(key.block_q, -np.inf, sums_of(key))
    weight = updated(key, x, 1.0, no_sinks, 1.0)[3]
    assert np.flatnonzero(~np.isfinite(weight)).tolist() == [10, 11, 12]
    assert weight[0] == 0
