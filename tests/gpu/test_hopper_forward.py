"""The Hopper forward kernel: block masks, large scores, the same bits in any call."""

import itertools
import math
import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tileattn
from tests.arrays import normal
from tests.gpu.hopper import (
    DTYPES,
    HKV,
    HQ,
    MASKS,
    SQUARE,
    B,
    arrays,
    check_forward,
    described,
    filled,
    forward,
    runs_forward,
)
from tests.on_gpu import bits, host, needs_gpu, poisoned, sent
from tileattn import reference
from tileattn.backends.cupy import describe
from tileattn.call.prepared import CALLS
from tileattn.kernels.cuda.plan.plan import plan_forward
from tileattn.testing import assert_attention_close, error_bound

pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread", "on_hopper")]


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("mask", ["few", "dense", "documents"])
@pytest.mark.parametrize(("D", "Dv"), SQUARE)
def test_masked_out_values_do_not_matter(D: int, Dv: int, mask: str, wrong: float) -> None:
    """Two values are not finite: rows that attend to neither keep their bits."""
    Nq, Nk = 700, 900
    q, k, v = arrays(DTYPES[1], D, Dv, Nq, Nk)[:3]
    block_mask = MASKS[mask](Nq, Nk)
    before = forward(q, k, v, block_mask=block_mask)
    keys = np.array([5, 300])
    v[:, :, keys, 3] = wrong
    after = forward(q, k, v, block_mask=block_mask)
    wanted = reference.forward(q, k, v, block_mask=block_mask)
    assert_attention_close(after, wanted, error_bound(q, k, v, block_mask=block_mask))
    b, h, i = np.ix_(range(B), range(HQ), range(Nq))
    reached = np.stack([block_mask.visible(b, h, i, j) for j in keys.tolist()]).any(axis=0)
    others = np.broadcast_to(~reached, (B, HQ, Nq))
    assert 0 < others.sum() < others.size
    assert bits(x[others] for x in after) == bits(x[others] for x in before)


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        *({"causal": True, "q_offset": offset} for offset in (0, 64, 101, -30)),
        *({"window": (None, 40)}, {"window": ("most", 64)}, {"kv_lengths": [833, 700]}),
    ],
    ids=str,
)
@pytest.mark.parametrize(("D", "Nq", "Nk", "most"), [(64, 260, 4500, 4200), (128, 600, 900, 200)])
def test_half_tiles(
    D: int, Nq: int, Nk: int, most: int, options: dict[str, Any], dtype: Any
) -> None:
    """The last tile is masked out by half; a call with a list of tiles takes it whole.

    At D = 64 tiles have halves where queries attend to many keys.
    """
    q, k, v = arrays(dtype, D, D, Nq, Nk)[:3]
    if options.get("window", ())[:1] == ("most",):
        options = {"window": (most, 64)}
    check_forward(q, k, v, **options)
    whole = forward(q, k, v, **options, block_mask=MASKS["everything"](Nq, Nk))
    assert bits(forward(q, k, v, **options)) == bits(whole)
    v[:, :, 200, 3] = math.inf  # in the half that is masked out for some
    whole = forward(q, k, v, **options, block_mask=MASKS["everything"](Nq, Nk))
    assert bits(forward(q, k, v, **options)) == bits(whole)


@pytest.mark.parametrize("causal", [True, False])
def test_late_thread_blocks(causal: bool) -> None:
    """More of them than SMs: bits are those of one for each SM, which takes tiles from a list."""
    q, k, v = arrays(DTYPES[1], 64, 64, 6200, 6200)[:3]
    gpu = describe.device_of(0)
    plan = plan_forward(*described("forward", sent(q), sent(k), sent(v), causal=causal), gpu)
    assert plan.launches[-1].grid > gpu.sm_count
    for value in (0, math.inf):  # the latter is computed in a NaN-safe pass
        v[0, 1, 77, 3] = value
        listed = forward(q, k, v, causal=causal, block_mask=MASKS["everything"](6200, 6200))
        assert bits(forward(q, k, v, causal=causal)) == bits(listed)


@pytest.mark.parametrize(("D", "Dv"), [*SQUARE, (192, 128), (256, 256)])
def test_claimed_work_tiles(D: int, Dv: int, request: pytest.FixtureRequest) -> None:
    """Bits are those of a call in which each thread block has one, or none, in every pass."""
    q, k, v = arrays(DTYPES[1], D, Dv, 700, 700)[:3]
    problem, layout = described("forward", sent(q), sent(k), sent(v), causal=True)
    plan = plan_forward(problem, layout, describe.device_of(0))
    alone = []
    for value in (0, math.inf, math.nan):  # the others are computed in NaN-safe passes
        v[0, 1, [77, 500], 3] = value
        alone.append(bits(forward(q, k, v, causal=True)))
    request.getfixturevalue("few_sms")
    few = plan_forward(problem, layout, describe.device_of(0))
    assert ["next_tiles" in x.workspace.starts for x in (plan, few)] == [False, True]
    for value, expected in zip((0, math.inf, math.nan), alone, strict=True):
        v[0, 1, [77, 500], 3] = value
        assert bits(forward(q, k, v, causal=True)) == expected


TALL: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "lengths": {"kv_lengths": [530]},
    "window": {"window": (300, 40), "q_offset": -300},
    "softcap": {"softcap": 2.0, "causal": True, "q_offset": 0},
    "dropout": {"dropout_p": 0.3},
    "bias": {"bias": np.random.default_rng(1).standard_normal((2, 1, 710)).astype(np.float16)},
}


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize("options", TALL)
@pytest.mark.parametrize(("D", "Dv", "Nk"), [(128, 128, 710), (96, 96, 710), (72, 72, 700)])
def test_tall_tiles(D: int, Dv: int, Nk: int, options: str) -> None:
    q, k, v = normal((1, 2, 1, 1150, Nk, D, Dv), DTYPES[1])[:3]
    given = {name: x[..., :Nk] if name == "bias" else x for name, x in TALL[options].items()}
    there = {name: sent(x) for name, x in given.items()}
    call = described("forward", sent(q), sent(k), sent(v), **there)
    rows = 192 if options != "bias" or D != 96 else 128  # there is no room for both
    assert plan_forward(*call, describe.device_of(0)).launches[-1].key.block_q == rows
    check_forward(q, k, v, **given)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("D", "Dv", "Nk"), [(128, 128, 1100), (80, 80, 1100), (80, 80, 700)])
def test_non_finite_values_in_tall_tiles(D: int, Dv: int, Nk: int, causal: bool) -> None:
    """Bits are those of a call of few heads, and what is masked out does not matter."""
    q, k, v = normal((2, 4, 2, 8200, Nk, D, Dv), DTYPES[0])[:3]
    v[0, 1, [77, 500], 3] = math.inf, math.nan
    both = forward(q, k, v, causal=causal, q_offset=-7000)
    alone = forward(q[:1, 2:], k[:1, 1:], v[:1, 1:], causal=causal, q_offset=-7000)
    assert bits(alone) == bits((both.out[:1, 2:], both.lse[:1, 2:]))
    expected = reference.forward(q[:1, 2:3], k[:1, 1:], v[:1, 1:], causal=causal, q_offset=-7000)
    seen = np.isfinite(both.out[:1, 2:3].astype(np.float32))
    assert (seen == np.isfinite(expected.out.astype(np.float32))).all()
    assert np.isfinite(both.out[1].astype(np.float32)).all()


def test_large_scores_rescale() -> None:
    """Maxima that rise by more and by less than the slack, from tile to tile."""
    q, k, v = arrays(DTYPES[0], 64, 64, 200, 1000)[:3]
    k *= np.linspace(0.1, 12, 1000, dtype=np.float16)[:, None]
    check_forward(q, k, v, scale=1.0)
    check_forward(q, k[:, :, ::-1].copy(), v, scale=1.0)


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"window": (500, 40)}, {"causal": True}], ids=str)
@pytest.mark.parametrize(("D", "Dv"), [*SQUARE, (192, 128), (256, 256)])
def test_scores_that_rise_too_fast_in_some_rows(
    D: int, Dv: int, options: dict[str, Any], dtype: Any
) -> None:
    """Exponentials overflow there: other rows, whose maxima rise by less, keep their bits."""
    q, k, v = arrays(dtype, D, Dv, 700, 900)[:3]
    there = {"scale": 1 / math.sqrt(D), **options}
    k *= np.linspace(0.1, 12, 900, dtype=dtype)[:, None]
    before = forward(q, k, v, **there)
    assert_attention_close(
        before, reference.forward(q, k, v, **there), error_bound(q, k, v, **there)
    )
    fast: NDArray[np.bool_] = np.zeros((B, HQ, 700), bool)
    fast[0, 1, 333] = fast[1, 4, 600] = fast[1, 4, 2] = True
    q[fast] *= 32
    after = forward(q, k, v, **there)
    assert_attention_close(
        after, reference.forward(q, k, v, **there), error_bound(q, k, v, **there)
    )
    assert bits(x[~fast] for x in after) == bits(x[~fast] for x in before)


@pytest.mark.parametrize("low", [False, True])
def test_sums_that_overflow_in_some_rows(low: bool) -> None:
    """Large finite values: with exponentials above 1 sums overflow that the formula's do not."""
    q, k, v = (np.zeros((1, 1, n, 64), DTYPES[1]) for n in (64, 200, 200))
    rows = np.arange(64) % 16 < 8
    q[..., 0] = np.where(rows == low, 5, -5)
    k[:, :, 150, 0] = 1  # when the first tile's maximum is known
    v[:, :, 150] = 2e38
    check_forward(q, k, v, scale=1.0)
    assert np.isfinite(forward(q, k, v, scale=1.0).out.astype(np.float32)).all()


@pytest.mark.usefixtures("few_sms")
def test_the_same_bits_on_every_run() -> None:
    q, k, v = map(sent, arrays(DTYPES[1], 128, 128, 1000, 1000)[:3])
    first = bits(tileattn.forward(q, k, v, causal=True))
    for _ in range(20):
        with poisoned():
            assert bits(tileattn.forward(q, k, v, causal=True)) == first


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("D", [64, 128])
def test_the_same_bits_when_the_first_sweep_breaks_off(D: int, alibi: bool, dtype: Any) -> None:
    """NaN in some heads breaks it off; scores of others rise, from far below zero with ALiBi."""
    q, k, v = arrays(dtype, D, D, 4096, 4096)[:3]
    k *= np.linspace(0.1, 12, 4096, dtype=dtype)[:, None]
    q, k, v = map(sent, (q, k, v))
    options: dict[str, Any] = {"causal": True}
    if alibi:
        options["alibi_slopes"] = sent(np.ones(HQ, np.float32))
    assert runs_forward(q, k, v, **options)
    before = host(tileattn.forward(q, k, v, **options))
    v[0, 0, 5, 3] = math.nan
    after = tileattn.forward(q, k, v, **options)
    first = bits(after)
    spoiled: NDArray[np.bool_] = np.zeros((B, HQ), bool)
    spoiled[0, : HQ // HKV] = True
    after = host(after)
    assert np.isnan(after.out[spoiled][:, 5:, 3].astype(np.float32)).all()
    assert bits(x[~spoiled] for x in after) == bits(x[~spoiled] for x in before)
    for _ in range(20):
        with poisoned():
            assert bits(tileattn.forward(q, k, v, **options)) == first


FAR: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "alibi": {"alibi_slopes": (HQ,)},
}
"""Options of calls with scores beyond 2**12 in units of log 2, which are 1/8 of products.

Keys have 16 in their first column: a query with -1792 there has scores about -3600.
"""


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize("wrong", [0.5, math.nan])
@pytest.mark.parametrize("options", FAR)
@pytest.mark.parametrize(("D", "Dv"), [*SQUARE, (192, 128), (256, 256)])
def test_heads_with_large_scores(D: int, Dv: int, options: str, wrong: float) -> None:
    """They and the others are within their own bounds, with the bits that they have alone."""
    q, k, v = arrays(DTYPES[D % 128 == 0], D, Dv, 700, 900)[:3]
    there = {"scale": 0.125, **filled(FAR[options], 900)}
    k[:, 0, :, 0], v[0, 0, 600, 3] = 16, wrong
    q[0, 0] *= 2000
    q[0, 1, :, 0] = -1792
    whole = forward(q, k, v, **there)
    for _ in range(5):
        again = forward(q, k, v, **there)
        assert bits(again) == bits(whole)
    for heads, kv in (np.s_[:1, :1], np.s_[1:2, :1], np.s_[2:3, :1], np.s_[3:, 1:]):
        mine = q[:, heads].copy(), k[:, kv].copy(), v[:, kv].copy()
        some = {n: x[heads] if n == "alibi_slopes" else x for n, x in there.items()}
        alone = forward(*mine, **some)
        assert bits(alone) == bits(x[:, heads] for x in whole)
        bounds = error_bound(*mine, **some)
        assert_attention_close(alone, reference.forward(*mine, **some), bounds)


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize("options", FAR)
@pytest.mark.parametrize(("D", "Dv"), SQUARE)
def test_rows_with_large_scores(D: int, Dv: int, options: str) -> None:
    """Other rows keep their bits, even of the same warp."""
    q, k, v = arrays(DTYPES[0], D, Dv, 700, 900)[:3]
    there = {"scale": 0.125, **filled(FAR[options], 900)}
    k[..., 0] = 16
    before = forward(q, k, v, **there)
    far: NDArray[np.bool_] = np.zeros((B, HQ, 700), bool)
    far[0, 1, 333] = far[1, 4, 600] = far[1, 4, 2] = True
    q[0, 1, 333] *= 2000
    q[1, 4, [2, 600], 0] = -1792
    after = forward(q, k, v, **there)
    for heads, kv in (np.s_[1:2, :1], np.s_[4:5, 1:]):
        mine = q[:, heads], k[:, kv], v[:, kv]
        some = {n: x[heads] if n == "alibi_slopes" else x for n, x in there.items()}
        found = tileattn.Attention(after.out[:, heads], after.lse[:, heads])
        assert_attention_close(found, reference.forward(*mine, **some), error_bound(*mine, **some))
    assert bits(x[~far] for x in after) == bits(x[~far] for x in before)


@pytest.mark.usefixtures("few_sms")
def test_a_head_does_not_depend_on_the_others() -> None:
    q, k, v = map(sent, arrays(DTYPES[1], 64, 64, 700, 700)[:3])
    whole = tileattn.forward(q, k, v, causal=True)
    for b, kv in itertools.product(range(B), range(HKV)):
        heads = slice(3 * kv, 3 * kv + 3)
        mine = q[b : b + 1, heads].copy(), k[b : b + 1, kv : kv + 1].copy()
        alone = tileattn.forward(*mine, v[b : b + 1, kv : kv + 1].copy(), causal=True)
        part = tileattn.Attention(whole.out[b : b + 1, heads], whole.lse[b : b + 1, heads])
        assert bits(alone) == bits(part)


def test_more_work_tiles_than_flags() -> None:
    """Many small work tiles for each SM: some are not finite, some far below zero."""
    import cupy

    rng = cupy.random.default_rng(0)
    heads = 132 * 2100
    shape = (1, heads, 2, 64)
    q, k, v = (rng.standard_normal(shape, np.float32).astype(np.float16) for _ in "qkv")
    before = tileattn.forward(q, k, v)
    wrong, low = [7, heads // 2, heads - 3], [8, heads // 3, heads - 200]
    v[0, wrong, 1] = math.nan
    q[0, low, :, 0], k[0, low, :, 0] = -1792, 16
    after = tileattn.forward(q, k, v)
    right = np.setdiff1d(np.arange(heads), wrong + low)
    assert cupy.isnan(after.out[0, wrong]).all()
    there = [x[:, low].get() for x in (q, k, v)]
    found = tileattn.Attention(after.out[:, low].get(), after.lse[:, low].get())
    assert_attention_close(found, reference.forward(*there), error_bound(*there))
    assert (after.out[0, right] == before.out[0, right]).all()
    assert (after.lse[0, right] == before.lse[0, right]).all()


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize("warm", [False, True])
def test_captured_in_a_graph(warm: bool) -> None:
    import cupy

    q, k, v = map(sent, arrays(DTYPES[1], 128, 128, 700, 700)[:3])
    wanted = bits(tileattn.forward(q, k, v, causal=True))
    if not warm:
        CALLS.clear()  # the kernel is loaded, but the plan is made in the capture
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.Stream(non_blocking=True) as stream, cupy.cuda.using_allocator(pool.malloc):
        stream.begin_capture()
        result = tileattn.forward(q, k, v, causal=True)
        graph = stream.end_capture()
        CALLS.clear()
        for _ in range(3):
            result.out.fill(7)
            graph.launch(stream)
            stream.synchronize()
            assert bits(result) == wanted


def test_new_arrays_in_a_new_thread() -> None:
    """Tensor maps are encoded there, where no CUDA context is current yet."""
    q, k, v = map(sent, arrays(DTYPES[1], 64, 64, 300, 300)[:3])
    wanted = bits(tileattn.forward(q, k, v))
    others = q.copy(), k.copy(), v.copy()
    found: list[list[bytes]] = []
    thread = threading.Thread(target=lambda: found.append(bits(tileattn.forward(*others))))
    thread.start()
    thread.join()
    assert found == [wanted]


def test_rows_that_overlap() -> None:
    """A view whose rows start 16 bytes apart, whichever kernel runs it."""
    import cupy

    line = cupy.asarray(np.random.default_rng(0).standard_normal(8 * 300 + 64).astype(np.float16))
    x = cupy.lib.stride_tricks.as_strided(line, (1, 1, 300, 64), (16, 16, 16, 2))
    q, k, v = x[:, :, :100], x, x
    attention = host(tileattn.forward(q, k, v))
    there = q.get(), k.get(), v.get()
    assert_attention_close(attention, reference.forward(*there), error_bound(*there))


def test_out_whose_rows_are_not_aligned() -> None:
    q, k, v = arrays(DTYPES[1], 64, 64, 100, 200)[:3]
    out = sent(np.zeros((B, HQ, 100, 68), q.dtype))[..., :64]
    attention = host(tileattn.forward(sent(q), sent(k), sent(v), out=out))
    assert_attention_close(attention, reference.forward(q, k, v), error_bound(q, k, v))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (90, 30), "softcap": 3.0}, {"kv_lengths": [620, 620]}],
    ids=str,
)
@pytest.mark.parametrize(("D", "Dv"), [(128, 128), (80, 96)])
def test_tall_tiles_and_those_that_stand_in_give_the_same_bits(
    D: int, Dv: int, options: dict[str, Any], dtype: Any
) -> None:
    """Many heads run on tall tiles, few heads on others; NaN-safe passes compute some heads."""
    group, Nq, Nk = 6, 384, 700
    q, k, v = normal((2, 28 * group, 28, Nq, Nk, D, Dv), dtype)[:3]
    q[1, :group] *= 40
    k[1, 5, 7, 0] = math.nan

    def tile(*given: Any, **options: Any) -> tuple[int, int]:
        plan = plan_forward(*described("forward", *given, **options), describe.device_of(0))
        return plan.launches[0].key.block_q, plan.launches[0].key.block_k

    def run(*given: Any, **options: Any) -> tuple[tuple[int, int], Any]:
        there = tuple(map(sent, given))
        return tile(*there, **options), forward(*given, **options)

    (tall, keys), together = run(q, k, v, **options)
    some = {name: x[:1] if name == "kv_lengths" else x for name, x in options.items()}
    for b, h in ((0, 0), (1, 0), (1, 5), (1, 6)):
        rows, shared = np.s_[b : b + 1, h * group : (h + 1) * group], np.s_[b : b + 1, h : h + 1]
        low, alone = run(q[rows], k[shared], v[shared], **some)
        assert low == (tall - 64, keys)
        assert bits(alone) == bits((together.out[rows], together.lse[rows]))
