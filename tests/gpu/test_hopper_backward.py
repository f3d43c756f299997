"""The Hopper backward kernels: repeated calls, a fixed order of sums, heads computed again."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

import tileattn
from tests import on_gpu
from tests.arrays import Given, normal
from tests.gpu.hopper import (
    DTYPES,
    HKV,
    HQ,
    MASKS,
    OPTIONS,
    PAIRED,
    SQUARE,
    WIDE,
    arrays,
    both,
    check,
    described,
    filled,
    runs_backward,
)
from tests.on_gpu import bits, captured, host, needs_gpu, poisoned, sent
from tileattn import reference
from tileattn.backends.cupy import describe
from tileattn.kernels.cuda.families.hopper import HOPPER_BACKWARD
from tileattn.kernels.cuda.plan.plan import plan_backward
from tileattn.testing import assert_attention_close, error_bound

pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread", "on_hopper")]


def check_repeats(given: Given, times: int, **options: Any) -> None:
    """Compare with the oracle, and more calls with the first: dk and dv, and dq without adds."""
    first = check(given, **options)
    same = slice(0 if given[2].shape[-1] > 128 else 1, 3)
    for _ in range(times):
        again = both(given, **options)[1]
        assert bits(again[same]) == bits(first[same])
        assert np.isfinite(again.dq.astype(np.float32)).all()


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize(
    "dims",
    [
        *(*SQUARE, (64, 24), (128, 64), (64, 128), (72, 24)),
        *((192, 128), (192, 192), (256, 256), *PAIRED),
    ],
)
@pytest.mark.parametrize("window", [(None, None), (1, 0), (30, 200), (None, 0)])
def test_work_tiles_of_one_tile_and_of_none(
    dims: tuple[int, int], window: tuple[int | None, int | None]
) -> None:
    """A work tile's results must be stored before the next one reuses their shared memory."""
    made = arrays(DTYPES[1], *dims, 60, 1500)
    options: dict[str, Any] = {"window": window, "kv_lengths": [1500, 300], "q_offset": [1300, 90]}
    check_repeats(made, 20, **options)


@pytest.mark.parametrize("group", [1, 2, 6])
@pytest.mark.parametrize(("D", "Dv"), [*SQUARE, *WIDE[:3], *PAIRED[1:]])
def test_heads_that_share_keys(D: int, Dv: int, group: int) -> None:
    check(normal((1, 6, 6 // group, 257, 301, D, Dv), DTYPES[1]), window=(100, 20))


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("D", "Dv", "added"),
    [
        *((*dims, added) for dims in SQUARE for added in ("alibi_slopes", "dropout_p", "bias")),
        # Hopper kernels for wide heads take no bias.
        *(
            (*dims, added)
            for dims in ((192, 128), (256, 256), PAIRED[0])
            for added in ("alibi_slopes", "dropout_p")
        ),
    ],
)
def test_heads_that_share_keys_come_one_after_the_other(
    D: int, Dv: int, added: str, deterministic: bool
) -> None:
    """In a window: what belongs to a head is taken with its tiles."""
    made, rng = normal((2, 6, 2, 515, 700, D, Dv), DTYPES[1]), np.random.default_rng(0)
    more = {
        "alibi_slopes": rng.random(6),
        "bias": rng.standard_normal((6, 515, 700), dtype=np.float32),
        "dropout_p": 0.2,
    }[added]
    options: dict[str, Any] = {"window": (150, 0), "kv_lengths": [700, 310], added: more}
    check(made, **options, deterministic=deterministic)


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize(("D", "Dv"), [*SQUARE, *WIDE[:3], PAIRED[0]])
def test_key_blocks_that_begin_at_the_diagonal(D: int, Dv: int) -> None:
    """Every second run of key blocks begins there; some queries see nothing."""
    made = normal((2, 4, 1, 515, 1037, D, Dv), DTYPES[1])
    check(made, window=(None, 0), kv_lengths=[1037, 450], q_offset=[522, -60])


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("Dv", [128, 64])
@pytest.mark.parametrize(("Nq", "Nk"), [(78, 300), (80, 128), (240, 515), (637, 130), (2048, 300)])
def test_tiles_of_80_queries(Nq: int, Nk: int, Dv: int, dtype: Any) -> None:
    """As calls without a mask have them, where these fill them, and long causal ones."""
    made = arrays(dtype, 128, Dv, Nq, Nk)
    # Of the first sequence most queries see nothing, of the second most see all.
    cut = {"causal": True, "q_offset": [Nk // 2 - Nq, 0]}
    options: dict[str, Any] = cut if Nq >= 2048 else {}
    problem, layout = described("backward", *map(sent, made[:3]), dout=sent(made[3]), **options)
    launches = plan_backward(problem, layout, describe.device_of(0)).launches
    assert {x.key.block_q for x in launches if x.key.kernel == HOPPER_BACKWARD} == {80}
    check_repeats(made, 5, kv_lengths=[Nk, Nk // 3], **options)
    first, *others = (both(made, deterministic=True, **options)[1] for _ in range(3))
    assert all(bits(again[:3]) == bits(first[:3]) for again in others)
    made[1][1, 1, Nk // 2, 5] = math.nan
    check(made, **options)


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize(("D", "Dv"), [*SQUARE, (192, 128)])
@pytest.mark.parametrize("mask", ["few", "half"])
def test_tiles_that_the_first_to_come_claims(D: int, Dv: int, mask: str) -> None:
    """Key blocks of few tiles may come to two of them in either order: none waits for ever."""
    check_repeats(arrays(DTYPES[1], D, Dv, 1409, 1500), 30, block_mask=MASKS[mask](1409, 1500))


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize(
    ("sizes", "splits", "options"),
    [
        ((2, 3, 3, 4200, 77, 64, 64), (1, 4), {}),
        ((2, 3, 3, 2200, 130, 128, 64), (1, 2), {"kv_lengths": [130, 50]}),
        ((2, 18, 2, 1400, 130, 128, 128), (2, 1), {"causal": True, "q_offset": [0, -90]}),
        ((2, 8, 2, 1300, 130, 96, 128), (4, 1), {}),
        ((2, 4, 2, 2200, 130, 64, 64), (2, 2), {"softcap": 3.0}),
    ],
    ids=str,
)
def test_splits_of_the_queries_of_a_key_block(
    sizes: tuple[int, ...],
    splits: tuple[int, int],
    options: dict[str, Any],
    few: bool,
    request: pytest.FixtureRequest,
) -> None:
    """dk and dv are sums over splits that end in any order, in any batch and with any heads."""
    if few:
        request.getfixturevalue("few_sms")
    made = normal(sizes, DTYPES[1])
    problem, layout = described("backward", *map(sent, made[:3]), dout=sent(made[3]), **options)
    plan = plan_backward(problem, layout, describe.device_of(0))
    assert (plan.fields["head_splits"], plan.fields["query_splits"]) == splits
    check_repeats(made, 10, **options)
    first = both(made, deterministic=True, **options)[1]
    assert bits(both(made, deterministic=True, **options)[1]) == bits(first)
    each: dict[str, Any] = {n: x[1:] if isinstance(x, list) else x for n, x in options.items()}
    q, k, v, dout = (x[1:, : x.shape[1] // problem.Hkv] for x in made)
    alone = both((q, k, v, dout), deterministic=True, **each)[1]
    for x, y in zip(first[:3], alone[:3], strict=True):
        assert x[1:, : y.shape[1]].tobytes() == y.tobytes()
    made[1][1, -1, 30, 5] = math.nan
    made[0][0, 0, 90] *= 300
    check(made, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_narrow_heads_of_so_many_keys_that_p_is_subnormal(dtype: Any) -> None:
    """In float16: it is held times a power of two."""
    check(arrays(dtype, 64, 64, 130, (1 << 14) + 3))


@pytest.mark.parametrize("gap", [18.0, 24.5, 25.3, 27.0])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_keys_beside_an_attention_sink(D: int, gap: float) -> None:
    """The exponential of key 0 is 2**gap times those of others, which are alike and add up."""
    q, k, v, dout = (x * 0.01 for x in normal((1, 2, 1, 1024, 1024, D, D), np.dtype(float), 0))
    q[..., 0], k[..., 0] = 4.0, 0.0
    k[..., 1] += 1.0
    k[:, :, 0], k[:, :, 0, 0] = 0.0, gap * math.log(2.0) * math.sqrt(D) / 4.0
    v, dout = v * 30.0 + 1.0, dout * 320.0 + 4.8
    v[:, :, 0] = 0.0
    f16 = np.float16
    check((q.astype(f16), k.astype(f16), v.astype(f16), dout.astype(f16)))


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["causal", "lengths", "left"])
@pytest.mark.parametrize(("D", "Dv"), [(128, 128), (192, 128), (192, 192), (256, 256), *PAIRED])
def test_every_byte_is_written_and_the_same_on_every_run(D: int, Dv: int, options: str) -> None:
    """Except dq where it is summed in any order; unattended keys have gradients of zero."""
    check_repeats(arrays(DTYPES[1], D, Dv, 500, 1000), 10, **filled(OPTIONS[options], 1000))


@pytest.mark.parametrize(("shape", "own"), [((), True), ((1, 1, 1, 64), False)])
def test_an_upstream_gradient_that_is_broadcast(shape: tuple[int, ...], own: bool) -> None:
    """One number is copied to rows first; one row has no tensor map."""
    import cupy

    q, k, v, dout = arrays(DTYPES[0], 64, 64, 100, 200)
    there = cupy.broadcast_to(cupy.ones(shape, q.dtype), dout.shape)
    given = sent(q), sent(k), sent(v)
    assert runs_backward(*given, there) is own
    grads = host(tileattn.backward(there, *given, *tileattn.forward(*given)))
    dout[...] = 1
    assert_attention_close(grads, reference.backward(dout, q, k, v), error_bound(q, k, v, dout))


def test_captured_in_a_graph() -> None:
    """Accumulators and head flags are zeros again whenever it is replayed."""
    good = arrays(DTYPES[1], 128, 128, 700, 700)
    bad = *good[:1], good[1].copy(), *good[2:]
    bad[1][1, 1, 600] = math.nan
    q, k, v, dout = map(sent, good)
    results = []
    for one in (good, bad):
        attention = tileattn.forward(q, sent(one[1]), v, causal=True)
        wanted = reference.backward(one[3], *one[:3], causal=True)
        results.append((sent(one[1]), *attention, wanted, error_bound(*one, causal=True)))
    out, lse = results[0][1].copy(), results[0][2].copy()
    call = partial(tileattn.backward, dout, q, k, v, out, lse, causal=True)
    with captured(call) as (grads, replay):
        for n in (0, 1, 0, 0, 1):
            *there, wanted, bounds = results[n]
            for x, value in zip((k, out, lse), there, strict=True):
                x[...] = value
            for x in grads[:3]:
                x.fill(7)
            replay()
            assert_attention_close(host(grads), wanted, bounds)


# --- a fixed order ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("D", "Dv"), [*SQUARE, (128, 64), (192, 128), (256, 256), PAIRED[0]])
def test_a_fixed_order_gives_the_same_bits_on_any_number_of_sms(
    D: int, Dv: int, options: str, request: Any
) -> None:
    """A thread block for each key block, or five that have several work tiles each."""
    Nq, Nk = 500, 1100
    made, there = arrays(DTYPES[1], D, Dv, Nq, Nk), filled(OPTIONS[options], Nk)
    many = check(made, deterministic=True, **there)
    request.getfixturevalue("few_sms")
    few = both(made, deterministic=True, **there)[1]
    assert bits(few[:3]) == bits(many[:3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("D", "Dv", "group"), [(64, 40, 1), (128, 72, 1), (128, 128, 3)])
@pytest.mark.parametrize(
    ("Nq", "Nk", "options"),
    [
        (500, 500, {"causal": True}),
        (333, 1100, {"causal": True}),
        (1100, 333, {"causal": True}),
        (640, 1025, {"causal": True, "kv_lengths": [130, 1025]}),
        (513, 700, {"window": (None, 30), "q_offset": [-40, 307]}),
        (641, 1027, {}),
    ],
    ids=str,
)
def test_a_fixed_order_of_heads_that_begin_together_or_apart(
    Nq: int, Nk: int, options: dict[str, Any], D: int, Dv: int, group: int, dtype: Any, request: Any
) -> None:
    """The same bits on every run, on five SMs, and beside other heads; with NaN in one of them."""
    made = normal((2, 7 * group, 7, Nq, Nk, D, Dv), dtype)
    many = check(made, deterministic=True, **options)
    for _ in range(5):
        assert bits(both(made, deterministic=True, **options)[1][:3]) == bits(many[:3])
    q, k, v, dout = (x[1:, n : 2 * n] for x in made if (n := 2 * x.shape[1] // 7))
    own: dict[str, Any] = {n: x[1:] if isinstance(x, list) else x for n, x in options.items()}
    few_heads = both((q, k, v, dout), deterministic=True, **own)[1]
    those = [x[1:, n : 2 * n] for x in many[:3] if (n := 2 * x.shape[1] // 7)]
    assert bits(few_heads[:3]) == bits(those)
    request.getfixturevalue("few_sms")
    few = both(made, deterministic=True, **options)[1]
    assert bits(few[:3]) == bits(many[:3])
    made[1][1, 1, Nk // 2, 5] = math.nan
    check(made, deterministic=True, **options)


@pytest.mark.parametrize(("D", "Dv"), [*SQUARE, (192, 128)])
def test_a_fixed_order_gives_the_same_bits_under_any_load(D: int, Dv: int) -> None:
    """Two calls at a time, which do not wait for each other's thread blocks, beside a matmul."""
    import cupy

    rng = cupy.random.default_rng(0)
    q, k, v, dout = (
        rng.standard_normal((2, 12, 2500, dim), np.float32).astype(np.float16)
        for dim in (D, D, Dv, Dv)
    )
    assert runs_backward(q, k, v, dout, causal=True)
    attention = tileattn.forward(q, k, v, causal=True)
    first = tileattn.backward(dout, q, k, v, *attention, causal=True, deterministic=True)
    load = cupy.ones((2048, 2048), np.float32)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    cupy.cuda.Device().synchronize()
    for _ in range(50):
        with streams[0]:
            load @ load
        found = []
        for stream in streams[1:]:
            with stream:
                found.append(
                    tileattn.backward(dout, q, k, v, *attention, causal=True, deterministic=True)
                )
        cupy.cuda.Device().synchronize()
        assert all(bits(each) == bits(first) for each in found)


@pytest.mark.parametrize("options", [{}, {"causal": True, "q_offset": [40, -2000]}], ids=str)
@pytest.mark.parametrize(("waves", "group", "Nq"), [(1, 1, 960), (1, 3, 330), (8, 1, 90)])
@pytest.mark.parametrize(("D", "Dv"), [*SQUARE, (192, 128), (256, 256), PAIRED[1]])
def test_what_follows_begins_while_the_last_heads_run(
    D: int, Dv: int, waves: int, group: int, Nq: int, options: dict[str, Any]
) -> None:
    """Some waves of key heads and a few more: idle SMs go on with dq of those that are complete.

    From eight waves on, the first heads run while delta of others is computed. Of a head with one
    key block dq has the same bits in any call.
    """
    import cupy

    heads = waves * describe.device_of(0).sm_count // 2 + 3
    made = normal((2, group * heads, heads, Nq, 120, D, Dv), DTYPES[1])
    first = bits(check(made, **options)[:3])
    q, k, v, dout = map(sent, made)
    attention = tileattn.forward(q, k, v, **options)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.Device().synchronize()
    for turn in range(30):
        found = []
        for stream in streams[: 1 + turn % 2]:
            with stream, poisoned():
                grads = tileattn.backward(dout, q, k, v, *attention, **options)
                found.append(grads[:3])
        cupy.cuda.Device().synchronize()
        assert all(bits(each) == first for each in found)


# --- NaN and infinity ---------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 128), (192, 128), (256, 256), PAIRED[1]])
def test_gradients_at_scores_beyond_float16(D: int, Dv: int, deterministic: bool) -> None:
    """The Hopper kernels make infinity of some of them; the repair kernels do not."""
    q, k, v, dout = arrays(np.float16, D, Dv, 300, 300)
    given = 0.01 * q, 0.01 * k, 2000 * v, 2000 * dout
    q, k, v, dout = (x.astype(np.float16) for x in given)
    grads = check((q, k, v, dout), deterministic=deterministic)
    assert all(np.isfinite(x).all() for x in (grads.dq, grads.dk, grads.dv))
    shared = np.repeat(v.astype(np.float64), HQ // HKV, axis=1)
    dP = dout.astype(np.float64) @ shared.swapaxes(2, 3)
    assert abs(dP / 300).max() > 1.1 * float(np.finfo(np.float16).max)


@pytest.mark.parametrize("which", range(4))
def test_nan_and_large_scores_in_pairs_of_thread_blocks(which: int) -> None:
    """Naive kernels compute the flagged heads."""
    q, k, v, dout = given = arrays(DTYPES[1], 512, 512, 160, 160)
    given[which][1, 1, 80, 5] = math.nan
    check((q, k, v, dout), causal=True)
    q, k, v, dout = arrays(DTYPES[0], 384, 320, 200, 260)
    check(((q * 40).astype(q.dtype), (k * 40).astype(k.dtype), v, dout), causal=True)


def test_flags_of_many_heads() -> None:
    """Only heads with non-finite values are computed again."""
    import cupy

    rng = cupy.random.default_rng(0)
    heads = 132 * 40
    shape = (2, heads, 65, 64)  # more than a window of one small tile
    q, k, v, dout = (rng.standard_normal(shape, np.float32).astype(np.float16) for _ in range(4))
    assert runs_backward(q, k, v, dout)
    before = tileattn.backward(dout, q, k, v, *tileattn.forward(q, k, v))
    wrong = [7, heads // 2, heads - 3]
    v[1, wrong, 1] = math.nan
    after = tileattn.backward(dout, q, k, v, *tileattn.forward(q, k, v))
    right = np.setdiff1d(np.arange(heads), wrong)
    for ours, theirs in ((after.dk, before.dk), (after.dv, before.dv)):
        assert bits((ours[0], ours[1, right])) == bits((theirs[0], theirs[1, right]))
    assert cupy.isnan(after.dk[1, wrong]).all()
    assert cupy.isnan(after.dq[1, wrong]).all()
    assert cupy.isfinite(after.dv).all()  # its probabilities are those of finite scores
    assert cupy.isfinite(after.dq[1, right]).all()


@pytest.mark.parametrize("flag", ["NON_FINITE", "LARGE_SCORES", "FAILED"])
def test_a_flag_of_one_head_of_many_is_found(flag: str) -> None:
    """The last head of 2,000 has the gradients of a call of its own; the others keep their bits."""
    import cupy

    rng = cupy.random.default_rng(0)
    shape = (2, 1000, 130, 64)
    given = [rng.standard_normal(shape, np.float32).astype(np.float16) for _ in range(4)]
    before = gradients_of(given)
    factors = {"NON_FINITE": (1, 1, math.inf, 1), "LARGE_SCORES": (300, 1, 1, 1)}
    for x, factor in zip(given, factors.get(flag, (0.01, 0.01, 2000, 2000)), strict=True):
        x[1, -1, :3] *= factor
    after = gradients_of(given)
    alone = gradients_of([x[1:, -1:] for x in given])
    for ours, own, theirs in zip(after, alone, before, strict=True):
        assert bits((ours[1, -1],)) == bits((own[0, 0],))
        assert bits((ours[0], ours[1, :-1])) == bits((theirs[0], theirs[1, :-1]))
    assert all(cupy.isfinite(x).all() for x in after) == (flag != "NON_FINITE")


def gradients_of(given: Sequence[Any]) -> tuple[Any, ...]:
    q, k, v, dout = given
    assert runs_backward(q, k, v, dout)
    attention = tileattn.forward(q, k, v)
    return tuple(tileattn.backward(dout, q, k, v, *attention, deterministic=True)[:3])


@pytest.mark.parametrize("options", ["plain", "causal", "lengths"])
@pytest.mark.parametrize(("Nq", "Nk"), [(49, 49), (64, 1), (1, 64)])
@pytest.mark.parametrize("dtype", [DTYPES[1], np.float32])
def test_a_small_tile_has_all_queries_and_keys(dtype: Any, Nq: int, Nk: int, options: str) -> None:
    """The kernel over keys writes dq of every query, also of those that attend to nothing."""
    for D, Dv in ((32, 24), (37, 50)):
        on_gpu.check(arrays(np.dtype(dtype), D, Dv, Nq, Nk), filled(OPTIONS[options], Nk))
