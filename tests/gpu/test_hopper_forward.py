"""The Hopper forward kernel, tested against the oracle and the generic kernel."""

import itertools
import math
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import tileattn
from tests.gpu.hopper import (
    DTYPES,
    HKV,
    HQ,
    LENGTHS,
    MASKS,
    OPTIONS,
    PARTS,
    B,
    arrays,
    described,
    filled,
    in_turn,
    sent,
    visible,
)
from tests.on_gpu import bits, host, needs_gpu, poisoned
from tileattn import reference
from tileattn.backends.cupy import describe
from tileattn.dispatch import CALLS
from tileattn.kernels.launch.plan import plan_forward
from tileattn.testing import assert_attention_close, error_bound

pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread", "on_hopper")]

Array = NDArray[Any]

DIMENSIONS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
ODD_DIMENSIONS = [(8, 8), (40, 24), (64, 128), (72, 200), (128, 64), (256, 32), (24, 96)]


def kernel(q: Any, k: Any, v: Any, **options: Any) -> str:
    """Name the kernel that runs a call; to explain it would compile those of both passes."""
    problem, layout = described("forward", q, k, v, **options)
    return plan_forward(problem, layout, describe.device_of(0)).launches[0].key.kernel


def called(q: Array, k: Array, v: Array, **options: Any) -> tileattn.Attention:
    """Call the forward pass on copies on the GPU, and see to it that the kernel runs it."""
    given, there = (sent(q), sent(k), sent(v)), {name: sent(x) for name, x in options.items()}
    assert kernel(*given, **there) == "forward_sm90"
    with poisoned():
        attention: tileattn.Attention = host(tileattn.forward(*given, **there))
    return attention


def hold(q: Array, k: Array, v: Array, **options: Any) -> None:
    bounds = error_bound(q, k, v, **options)
    wanted = reference.forward(q, k, v, **options)
    assert_attention_close(called(q, k, v, **options), wanted, bounds)


@pytest.mark.parametrize(("D", "Dv", "options", "dtype"), in_turn(DIMENSIONS), ids=str)
def test_every_option_at_every_head_dimension(D: int, Dv: int, options: str, dtype: Any) -> None:
    Nq, Nk = 333, 410
    hold(*arrays(dtype, D, Dv, Nq, Nk), **filled(OPTIONS[options], Nk))


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_many_work_tiles(D: int, Dv: int, options: str) -> None:
    Nq, Nk = 400, 530
    hold(*arrays(DTYPES[1], D, Dv, Nq, Nk), **filled(OPTIONS[options], Nk))


@pytest.mark.usefixtures("few")
def test_many_work_tiles_with_lengths_and_offsets_on_the_gpu() -> None:
    """The table is made before anybody knows them."""
    places = {"kv_lengths": np.array([300, 777]), "q_offset": np.array([-50, 60])}
    hold(*arrays(DTYPES[0], 128, 128, 700, 810), causal=True, **places)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", ["plain", "causal", "window", "lengths", "all"])
@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 128), (192, 192), (256, 256)])
def test_block_masks(D: int, Dv: int, options: str, mask: str) -> None:
    Nq, Nk = 420, 700
    there = filled(OPTIONS[options], Nk)
    hold(*arrays(DTYPES[1], D, Dv, Nq, Nk), block_mask=MASKS[mask](Nq, Nk), **there)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", ["plain", "causal"])
@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 128)])
def test_block_masks_in_many_turns(D: int, Dv: int, options: str, mask: str) -> None:
    Nq, Nk = 500, 600
    hold(
        *arrays(DTYPES[0], D, Dv, Nq, Nk),
        block_mask=MASKS[mask](Nq, Nk),
        **filled(OPTIONS[options], Nk),
    )


@pytest.mark.parametrize(("Nq", "Nk"), LENGTHS)
@pytest.mark.parametrize("mask", MASKS)
def test_block_masks_at_lengths_that_no_tile_divides(mask: str, Nq: int, Nk: int) -> None:
    hold(*arrays(DTYPES[1], 64, 64, Nq, Nk), block_mask=MASKS[mask](Nq, Nk))


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("mask", ["few", "dense", "documents"])
@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 128)])
def test_what_a_block_mask_hides_does_not_matter(D: int, Dv: int, mask: str, wrong: float) -> None:
    """The values of two keys are not finite: rows that see neither keep their bits."""
    Nq, Nk = 700, 900
    q, k, v = arrays(DTYPES[1], D, Dv, Nq, Nk)
    block_mask = MASKS[mask](Nq, Nk)
    before = called(q, k, v, block_mask=block_mask)
    keys = np.array([5, 300])
    v[:, :, keys, 3] = wrong
    after = called(q, k, v, block_mask=block_mask)
    wanted = reference.forward(q, k, v, block_mask=block_mask)
    assert_attention_close(after, wanted, error_bound(q, k, v, block_mask=block_mask))
    b, h, i = np.ix_(range(B), range(HQ), range(Nq))
    sees = np.stack([block_mask.visible(b, h, i, j) for j in keys.tolist()]).any(axis=0)
    blind = np.broadcast_to(~sees, (B, HQ, Nq))
    assert 0 < blind.sum() < blind.size
    assert after.out[blind].tobytes() == before.out[blind].tobytes()
    assert after.lse[blind].tobytes() == before.lse[blind].tobytes()


@pytest.mark.parametrize(("Nq", "Nk"), LENGTHS)
@pytest.mark.parametrize("options", ["plain", "causal", "offset", "all"])
@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 128), (256, 256)])
def test_lengths_that_no_tile_divides(D: int, Dv: int, options: str, Nq: int, Nk: int) -> None:
    hold(*arrays(DTYPES[1], D, Dv, Nq, Nk), **filled(OPTIONS[options], Nk))


@pytest.mark.parametrize("options", ["plain", "lengths"])
@pytest.mark.parametrize(("D", "Dv"), [(128, 128), (96, 72)])
@pytest.mark.usefixtures("few")
def test_wide_tiles(D: int, Dv: int, options: str) -> None:
    Nq, Nk = 300, 6 * 176 - 7
    hold(*arrays(DTYPES[1], D, Dv, Nq, Nk), **filled(OPTIONS[options], Nk))


@pytest.mark.parametrize(("D", "Dv"), ODD_DIMENSIONS)
def test_columns_beyond_the_array_are_zero(D: int, Dv: int) -> None:
    hold(*arrays(DTYPES[0], D, Dv, 150, 270), causal=True, q_offset=120)


@pytest.mark.parametrize("_part", range(PARTS))
@settings(max_examples=60 // PARTS, deadline=None)
@given(
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    dims=st.sampled_from(DIMENSIONS + ODD_DIMENSIONS),
    Nq=st.integers(1, 700),
    Nk=st.integers(1, 700),
)
def test_any_combination(
    data: Any, dtype: Any, dims: tuple[int, int], Nq: int, Nk: int, _part: int
) -> None:
    options: dict[str, Any] = {}
    for some in data.draw(st.lists(st.sampled_from(list(OPTIONS)), max_size=3)):
        options |= OPTIONS[some]
    if "window" in options:
        options.pop("causal", None)
    hold(*arrays(dtype, *dims, Nq, Nk, data.draw(st.integers(0, 99))), **filled(options, Nk))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("D", "Dv"), DIMENSIONS)
def test_both_kernels_agree_with_the_oracle(D: int, Dv: int, causal: bool, request: Any) -> None:
    q, k, v = arrays(DTYPES[1], D, Dv, 400, 600)
    mine = called(q, k, v, causal=causal, q_offset=200)
    request.getfixturevalue("generic")
    given = sent(q), sent(k), sent(v)
    assert kernel(*given, causal=causal, q_offset=200) == "forward"
    theirs = host(tileattn.forward(*given, causal=causal, q_offset=200))
    bounds = error_bound(q, k, v, causal=causal, q_offset=200)
    wanted = reference.forward(q, k, v, causal=causal, q_offset=200)
    assert_attention_close(mine, wanted, bounds)
    assert_attention_close(theirs, wanted, bounds)


def test_strides() -> None:
    """Heads and rows in another order, rows that are parts of longer ones, and out likewise."""
    import cupy

    q, k, v = arrays(DTYPES[1], 128, 128, 200, 300)
    wide = [cupy.full((B, *x.shape[2:0:-1], 264), math.nan, x.dtype) for x in (q, k, v)]
    views = [w.transpose(0, 2, 1, 3)[..., 64:192] for w in wide]
    for view, x in zip(views, (q, k, v), strict=True):
        view[...] = cupy.asarray(x)
    whole = cupy.full((B, 200, HQ, 136), 7, q.dtype)
    out = whole.transpose(0, 2, 1, 3)[..., :128]
    assert kernel(*views, causal=True) == "forward_sm90"
    lse = tileattn.forward(*views, causal=True, out=out).lse
    plain = tileattn.forward(*map(cupy.asarray, (q, k, v)), causal=True)
    assert bits((out, lse)) == bits(plain)
    assert (whole[..., 128:] == 7).all()


@pytest.mark.parametrize("turns", ["one", "few"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("options", ["offset", "window", "left", "lengths", "all"])
@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 128), (256, 256)])
def test_masked_out_entries_do_not_matter(
    D: int, Dv: int, options: str, wrong: float, turns: str, request: Any
) -> None:
    if turns == "few":
        request.getfixturevalue("few")
    Nq, Nk = 300, 700
    q, k, v = arrays(DTYPES[1], D, Dv, Nq, Nk)
    there = filled(OPTIONS[options], Nk)
    seen = visible(Nq, Nk, there)
    unseen: NDArray[np.bool_] = np.logical_not(seen.any(axis=1))  # (B, Nk)
    blind: NDArray[np.bool_] = np.logical_not(seen.any(axis=2))
    before = called(q, k, v, **there)
    assert unseen.any()
    for b in range(B):
        k[b][:, unseen[b]], v[b][:, unseen[b]] = wrong, wrong
        q[b][:, blind[b]] = wrong
    after = called(q, k, v, **there)
    assert after.out.tobytes() == before.out.tobytes()
    assert after.lse.tobytes() == before.lse.tobytes()


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_seen_and_not_finite_passes_as_ieee_has_it(where: str, wrong: float) -> None:
    """Rows that see it are as the oracle has them; the others keep their bits."""
    q, k, v = arrays(DTYPES[1], 128, 128, 500, 500)
    before = called(q, k, v, causal=True)
    x = {"q": q, "k": k, "v": v}[where]
    x[1, 1, 333, 5] = wrong
    after = called(q, k, v, causal=True)
    wanted = reference.forward(q, k, v, causal=True)
    assert_attention_close(after, wanted, error_bound(q, k, v, causal=True))
    assert not np.isfinite(after.out[1].astype(np.float32)).all()
    assert after.out[0].tobytes() == before.out[0].tobytes()
    assert after.out[1, :, :333].tobytes() == before.out[1, :, :333].tobytes()
    assert after.lse[1, :, :333].tobytes() == before.lse[1, :, :333].tobytes()


def test_large_scores_rescale() -> None:
    """Maxima that rise by more and by less than the slack, from tile to tile."""
    q, k, v = arrays(DTYPES[0], 64, 64, 200, 1000)
    k *= np.linspace(0.1, 12, 1000, dtype=np.float16)[:, None]
    hold(q, k, v, scale=1.0)
    hold(q, k[:, :, ::-1].copy(), v, scale=1.0)


@pytest.mark.parametrize("low", [False, True])
def test_sums_that_overflow_in_some_rows(low: bool) -> None:
    """Large finite values: weights above 1 make sums overflow that the plain formula does not."""
    q, k, v = (np.zeros((1, 1, n, 64), DTYPES[1]) for n in (64, 200, 200))
    rows = np.arange(64) % 16 < 8
    q[..., 0] = np.where(rows == low, 5, -5)
    k[:, :, 150, 0] = 1  # where the first tile's maximum has been told
    v[:, :, 150] = 2e38
    hold(q, k, v, scale=1.0)
    assert np.isfinite(called(q, k, v, scale=1.0).out.astype(np.float32)).all()


@pytest.mark.usefixtures("few")
def test_the_same_bits_on_every_run() -> None:
    q, k, v = map(sent, arrays(DTYPES[1], 128, 128, 1000, 1000))
    first = bits(tileattn.forward(q, k, v, causal=True))
    for _ in range(20):
        with poisoned():
            assert bits(tileattn.forward(q, k, v, causal=True)) == first


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [64, 128])
def test_the_same_bits_whenever_the_first_sweep_is_broken_off(D: int, dtype: Any) -> None:
    """NaN in some heads breaks it off; rows of others are far below zero in their first tiles."""
    q, k, v = map(sent, arrays(dtype, D, D, 4096, 4096))
    options = {"causal": True, "alibi_slopes": sent(np.ones(HQ, np.float32))}
    assert kernel(q, k, v, **options) == "forward_sm90"
    before = host(tileattn.forward(q, k, v, **options))
    v[0, 0, 5, 3] = math.nan
    after = tileattn.forward(q, k, v, **options)
    first = bits(after)
    spoiled: NDArray[np.bool_] = np.zeros((B, HQ), bool)
    spoiled[0, : HQ // HKV] = True
    after = host(after)
    assert np.isnan(after.out[spoiled][:, 5:, 3].astype(np.float32)).all()
    assert after.out[~spoiled].tobytes() == before.out[~spoiled].tobytes()
    assert after.lse[~spoiled].tobytes() == before.lse[~spoiled].tobytes()
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


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("wrong", [0.5, math.nan])
@pytest.mark.parametrize("options", FAR)
@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_heads_with_large_scores(D: int, Dv: int, options: str, wrong: float) -> None:
    """They and the others are within their own bounds, with the bits that they have alone."""
    q, k, v = arrays(DTYPES[D % 128 == 0], D, Dv, 700, 900)
    there = {"scale": 0.125, **filled(FAR[options], 900)}
    k[:, 0, :, 0], v[0, 0, 600, 3] = 16, wrong
    q[0, 0] *= 2000
    q[0, 1, :, 0] = -1792
    whole = called(q, k, v, **there)
    for _ in range(5):
        again = called(q, k, v, **there)
        assert again.out.tobytes() == whole.out.tobytes()
        assert again.lse.tobytes() == whole.lse.tobytes()
    for heads, kv in (np.s_[:1, :1], np.s_[1:2, :1], np.s_[2:3, :1], np.s_[3:, 1:]):
        mine = q[:, heads].copy(), k[:, kv].copy(), v[:, kv].copy()
        some = {n: x[heads] if n == "alibi_slopes" else x for n, x in there.items()}
        alone = called(*mine, **some)
        assert alone.out.tobytes() == whole.out[:, heads].tobytes()
        assert alone.lse.tobytes() == whole.lse[:, heads].tobytes()
        bounds = error_bound(*mine, **some)
        assert_attention_close(alone, reference.forward(*mine, **some), bounds)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("options", FAR)
@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 128)])
def test_rows_with_large_scores(D: int, Dv: int, options: str) -> None:
    """Other rows keep their bits, even of the same warp."""
    q, k, v = arrays(DTYPES[0], D, Dv, 700, 900)
    there = {"scale": 0.125, **filled(FAR[options], 900)}
    k[..., 0] = 16
    before = called(q, k, v, **there)
    far: NDArray[np.bool_] = np.zeros((B, HQ, 700), bool)
    far[0, 1, 333] = far[1, 4, 600] = far[1, 4, 2] = True
    q[0, 1, 333] *= 2000
    q[1, 4, [2, 600], 0] = -1792
    after = called(q, k, v, **there)
    for heads, kv in (np.s_[1:2, :1], np.s_[4:5, 1:]):
        mine = q[:, heads], k[:, kv], v[:, kv]
        some = {n: x[heads] if n == "alibi_slopes" else x for n, x in there.items()}
        found = tileattn.Attention(after.out[:, heads], after.lse[:, heads])
        assert_attention_close(found, reference.forward(*mine, **some), error_bound(*mine, **some))
    assert after.out[~far].tobytes() == before.out[~far].tobytes()
    assert after.lse[~far].tobytes() == before.lse[~far].tobytes()


@pytest.mark.usefixtures("few")
def test_a_head_does_not_depend_on_its_company() -> None:
    q, k, v = map(sent, arrays(DTYPES[1], 64, 64, 700, 700))
    whole = tileattn.forward(q, k, v, causal=True)
    for b, kv in itertools.product(range(B), range(HKV)):
        heads = slice(3 * kv, 3 * kv + 3)
        mine = q[b : b + 1, heads].copy(), k[b : b + 1, kv : kv + 1].copy()
        alone = tileattn.forward(*mine, v[b : b + 1, kv : kv + 1].copy(), causal=True)
        part = tileattn.Attention(whole.out[b : b + 1, heads], whole.lse[b : b + 1, heads])
        assert bits(alone) == bits(part)


def test_more_turns_than_are_remembered_apart() -> None:
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


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("warm", [False, True])
def test_captured_in_a_graph(warm: bool) -> None:
    import cupy

    q, k, v = map(sent, arrays(DTYPES[1], 128, 128, 700, 700))
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


def test_a_thread_of_its_own_may_bring_new_arrays() -> None:
    """Maps are encoded there, where nothing has told the driver of a context yet."""
    q, k, v = map(sent, arrays(DTYPES[1], 64, 64, 300, 300))
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
    q, k, v = arrays(DTYPES[1], 64, 64, 100, 200)
    out = sent(np.zeros((B, HQ, 100, 68), q.dtype))[..., :64]
    attention = host(tileattn.forward(sent(q), sent(k), sent(v), out=out))
    assert_attention_close(attention, reference.forward(q, k, v), error_bound(q, k, v))
