"""The Hopper backward kernels, tested against the oracle and the generic kernels."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import tileattn
from tests.gpu import hopper
from tests.gpu.hopper import DTYPES, HKV, HQ, LENGTHS, OPTIONS, PARTS, B, filled, in_turn, sent
from tests.on_gpu import bits, host, needs_gpu, poisoned
from tileattn import Gradients, reference
from tileattn.backends.cupy import describe
from tileattn.kernels.config.hopper import HOPPER_BACKWARDS
from tileattn.kernels.launch.plan import plan_backward
from tileattn.testing import assert_attention_close, error_bound

pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread", "on_hopper")]

Array = NDArray[Any]
Given = tuple[Array, Array, Array, Array]
"""q, k, v and dout."""

WIDE = [(256, 256), (192, 192), (192, 128), (128, 192), (256, 64)]
DIMENSIONS = [(64, 64), (128, 128), (128, 64), (64, 128), (96, 96), (40, 40), *WIDE]
ODD_DIMENSIONS = [(8, 8), (40, 24), (72, 120), (128, 8), (24, 96), (16, 128)]
ODD_DIMENSIONS += [(136, 8), (200, 136), (8, 256), (248, 184)]
GRADIENTS = ("dq", "dk", "dv")


def arrays(dtype: Any, D: int, Dv: int, Nq: int, Nk: int, seed: int = 0) -> Given:
    rng = np.random.default_rng(seed + 1000)
    dout = rng.standard_normal((B, HQ, Nq, Dv)).astype(dtype)
    return *hopper.arrays(dtype, D, Dv, Nq, Nk, seed), dout


def served(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> bool:
    """Whether one of the kernels runs a call whose arrays are on the GPU."""
    problem, layout = hopper.described("backward", q, k, v, dout=dout, **options)
    launches = plan_backward(problem, layout, describe.device_of(0)).launches
    return any(launch.key.kernel in HOPPER_BACKWARDS for launch in launches)


def called(
    given: Given,
    *,
    own: bool = True,
    dlse: Array | None = None,
    deterministic: bool = False,
    **options: Any,
) -> Gradients:
    """Call both passes on copies on the GPU; see to it whether the kernel runs the backward."""
    q, k, v, dout = map(sent, given)
    there = {name: sent(x) for name, x in options.items()}
    assert served(q, k, v, dout, **there) is own
    out, lse = tileattn.forward(q, k, v, **there)
    more = {"dlse": sent(dlse), "deterministic": deterministic}
    with poisoned():
        grads: Gradients = host(tileattn.backward(dout, q, k, v, out, lse, **more, **there))
    return grads


def hold(
    given: Given,
    *,
    dlse: Array | None = None,
    own: bool = True,
    deterministic: bool = False,
    **options: Any,
) -> Gradients:
    q, k, v, dout = given
    bounds = error_bound(q, k, v, dout, dlse=dlse, **options)
    wanted = reference.backward(dout, q, k, v, dlse=dlse, **options)
    grads = called(given, own=own, dlse=dlse, deterministic=deterministic, **options)
    assert_attention_close(grads, wanted, bounds)
    return grads


def hold_repeats(given: Given, times: int, **options: Any) -> None:
    """Hold results to the oracle, and dk and dv of more calls to the first's bits."""
    first = hold(given, **options)
    for _ in range(times):
        again = called(given, **options)
        assert again.dk.tobytes() == first.dk.tobytes()
        assert again.dv.tobytes() == first.dv.tobytes()
        assert np.isfinite(again.dq.astype(np.float32)).all()


@pytest.mark.parametrize(("D", "Dv", "options", "dtype"), in_turn(DIMENSIONS), ids=str)
def test_every_option_at_every_head_dimension(D: int, Dv: int, options: str, dtype: Any) -> None:
    Nq, Nk = 333, 410
    dlse = np.random.default_rng(3).standard_normal((B, HQ, Nq)).astype(np.float32)
    hold(arrays(dtype, D, Dv, Nq, Nk), dlse=dlse, **filled(OPTIONS[options], Nk))


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 128), (64, 128), *WIDE])
def test_many_work_tiles(D: int, Dv: int, options: str) -> None:
    Nq, Nk = 400, 660
    hold(arrays(DTYPES[1], D, Dv, Nq, Nk), **filled(OPTIONS[options], Nk))


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (128, 64), (64, 128), (72, 24)])
@pytest.mark.parametrize("window", [(None, None), (1, 0), (30, 200), (None, 0)])
def test_turns_of_one_tile_and_of_none(
    dims: tuple[int, int], window: tuple[int | None, int | None]
) -> None:
    """What is staged of one turn must be written before the next one needs the room."""
    made = arrays(DTYPES[1], *dims, 60, 1500)
    options: dict[str, Any] = {"window": window, "kv_lengths": [1500, 300], "q_offset": [1300, 90]}
    hold_repeats(made, 20, **options)


@pytest.mark.usefixtures("few")
def test_lengths_and_offsets_on_the_gpu() -> None:
    places: dict[str, Any] = {"kv_lengths": np.array([0, 777]), "q_offset": np.array([-50, 60])}
    hold(arrays(DTYPES[0], 128, 128, 700, 810), causal=True, **places)


@pytest.mark.parametrize(("Nq", "Nk"), [*LENGTHS, (127, 131), (1021, 67), (64, 1), (128, 128)])
@pytest.mark.parametrize("options", ["plain", "causal", "offset", "all"])
@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 128), *WIDE[:3]])
def test_lengths_that_no_tile_divides(D: int, Dv: int, options: str, Nq: int, Nk: int) -> None:
    hold(arrays(DTYPES[1], D, Dv, Nq, Nk), **filled(OPTIONS[options], Nk))


@pytest.mark.parametrize(("Nq", "Nk"), [(0, 300), (300, 0), (0, 0)])
def test_arrays_without_rows_are_left_to_the_generic_kernels(Nq: int, Nk: int) -> None:
    hold(arrays(DTYPES[0], 64, 64, Nq, Nk), own=False)


@pytest.mark.parametrize(("D", "Dv"), ODD_DIMENSIONS)
def test_columns_beyond_the_array_are_zero(D: int, Dv: int) -> None:
    hold(arrays(DTYPES[0], D, Dv, 150, 270), causal=True, q_offset=120)


@pytest.mark.parametrize("group", [1, 2, 6])
@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 128), *WIDE[:3]])
def test_heads_that_share_keys(D: int, Dv: int, group: int) -> None:
    rng = np.random.default_rng(4)
    heads, kv = 6, 6 // group
    shapes = ((1, heads, 257, D), (1, kv, 301, D), (1, kv, 301, Dv), (1, heads, 257, Dv))
    q, k, v, dout = (rng.standard_normal(shape).astype(DTYPES[1]) for shape in shapes)
    hold((q, k, v, dout), window=(100, 20))


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
    hold(arrays(dtype, *dims, Nq, Nk, data.draw(st.integers(0, 99))), **filled(options, Nk))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("D", "Dv"), DIMENSIONS)
def test_both_ways_agree_with_the_oracle(D: int, Dv: int, causal: bool, request: Any) -> None:
    made = arrays(DTYPES[1], D, Dv, 400, 600)
    options: dict[str, Any] = {"causal": causal, "q_offset": 200}
    hold(made, **options)
    request.getfixturevalue("generic")
    hold(made, own=False, **options)


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["causal", "lengths", "left"])
@pytest.mark.parametrize("D", [128, 192, 256])
def test_every_byte_is_written_and_the_same_on_every_run(D: int, options: str) -> None:
    """But for dq, which is summed in any order; keys without a query have gradients of zero."""
    hold_repeats(arrays(DTYPES[1], D, D, 500, 1000), 10, **filled(OPTIONS[options], 1000))


def test_strides() -> None:
    """Heads and rows in another order, and rows that are parts of longer ones."""
    import cupy

    made = arrays(DTYPES[1], 128, 64, 200, 300)
    views = []
    for x in made:
        wide = cupy.full((B, *x.shape[2:0:-1], x.shape[3] + 136), math.nan, x.dtype)
        view = wide.transpose(0, 2, 1, 3)[..., 64 : 64 + x.shape[3]]
        view[...] = cupy.asarray(x)
        views.append(view)
    q, k, v, dout = views
    assert served(q, k, v, dout, causal=True)
    grads = host(
        tileattn.backward(dout, q, k, v, *tileattn.forward(q, k, v, causal=True), causal=True)
    )
    plain = called(made, causal=True)
    assert grads.dk.tobytes() == plain.dk.tobytes()
    assert grads.dv.tobytes() == plain.dv.tobytes()
    wanted = reference.backward(made[3], *made[:3], causal=True)
    assert_attention_close(grads, wanted, error_bound(*made, causal=True))


@pytest.mark.parametrize(("shape", "own"), [((), True), ((1, 1, 1, 64), False)])
def test_a_gradient_that_is_broadcast(shape: tuple[int, ...], own: bool) -> None:
    """One number is copied to rows first; one row has no boxes."""
    import cupy

    q, k, v, dout = arrays(DTYPES[0], 64, 64, 100, 200)
    there = cupy.broadcast_to(cupy.ones(shape, q.dtype), dout.shape)
    given = sent(q), sent(k), sent(v)
    assert served(*given, there) is own
    grads = host(tileattn.backward(there, *given, *tileattn.forward(*given)))
    dout[...] = 1
    assert_attention_close(grads, reference.backward(dout, q, k, v), error_bound(q, k, v, dout))


def test_captured_in_a_graph() -> None:
    """Sums and marks are zeros again whenever it is replayed."""
    import cupy

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
    tileattn.backward(dout, q, k, v, out, lse, causal=True)  # loads the kernels
    cupy.cuda.Device().synchronize()
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.Stream(non_blocking=True) as stream, cupy.cuda.using_allocator(pool.malloc):
        stream.begin_capture()
        grads = tileattn.backward(dout, q, k, v, out, lse, causal=True)
        graph = stream.end_capture()
        for n in (0, 1, 0, 0, 1):
            *there, wanted, bounds = results[n]
            for x, value in zip((k, out, lse), there, strict=True):
                x[...] = value
            for x in grads[:3]:
                x.fill(7)
            graph.launch(stream)
            stream.synchronize()
            assert_attention_close(host(grads), wanted, bounds)


# --- a fixed order ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 128), (128, 64)])
def test_a_fixed_order_gives_the_same_bits_whoever_works(
    D: int, Dv: int, options: str, request: Any
) -> None:
    """As many blocks of threads as there are blocks of keys, or five that take turns."""
    Nq, Nk = 500, 1100
    made, there = arrays(DTYPES[1], D, Dv, Nq, Nk), filled(OPTIONS[options], Nk)
    many = hold(made, deterministic=True, **there)
    request.getfixturevalue("few")
    few = called(made, deterministic=True, **there)
    for name in GRADIENTS:
        assert getattr(few, name).tobytes() == getattr(many, name).tobytes()


def test_a_fixed_order_gives_the_same_bits_under_any_load() -> None:
    """Two at a time, which do not wait for each other's blocks of threads, and products beside."""
    import cupy

    rng = cupy.random.default_rng(0)
    shape = (2, 12, 2500, 128)
    q, k, v, dout = (rng.standard_normal(shape, np.float32).astype(np.float16) for _ in range(4))
    assert served(q, k, v, dout, causal=True)
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


# --- what is not finite -------------------------------------------------------------------------


@pytest.mark.parametrize("turns", ["one", "few"])
@pytest.mark.parametrize("options", ["offset", "window", "left", "lengths", "all"])
@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 128), *WIDE[:3]])
def test_masked_out_entries_do_not_matter(
    D: int, Dv: int, options: str, turns: str, request: Any
) -> None:
    if turns == "few":
        request.getfixturevalue("few")
    Nq, Nk = 300, 700
    made = arrays(DTYPES[1], D, Dv, Nq, Nk)
    q, k, v, dout = made
    there = filled(OPTIONS[options], Nk)
    bounds = error_bound(*made, **there)
    wanted = reference.backward(dout, q, k, v, **there)
    seen = hopper.visible(Nq, Nk, there)
    unseen, blind = np.logical_not(seen.any(axis=1)), np.logical_not(seen.any(axis=2))
    assert unseen.any()
    for wrong in (math.nan, math.inf, -math.inf):
        for b in range(B):
            k[b][:, unseen[b]], v[b][:, unseen[b]] = wrong, wrong
            q[b][:, blind[b]], dout[b][:, blind[b]] = wrong, wrong
        grads = called(made, **there)
        # The gradient of a sink is a sum over all queries, blind ones too.
        assert_attention_close(grads, wanted, bounds, names=GRADIENTS)
        for b in range(B):
            assert not grads.dk[b][:, unseen[b]].any()
            assert not grads.dv[b][:, unseen[b]].any()
            assert not grads.dq[b][:, blind[b]].any()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_gradients_at_scores_beyond_float16(D: int, deterministic: bool) -> None:
    """The Hopper kernels make infinity of some of them; what comes after them has room."""
    q, k, v, dout = arrays(np.float16, D, D, 300, 300)
    given = 0.01 * q, 0.01 * k, 2000 * v, 2000 * dout
    q, k, v, dout = (x.astype(np.float16) for x in given)
    grads = hold((q, k, v, dout), deterministic=deterministic)
    assert all(np.isfinite(x).all() for x in (grads.dq, grads.dk, grads.dv))
    shared = np.repeat(v.astype(np.float64), HQ // HKV, axis=1)
    dP = dout.astype(np.float64) @ shared.swapaxes(2, 3)
    assert abs(dP / 300).max() > 1.1 * float(np.finfo(np.float16).max)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("D", [128, 256])
def test_what_is_seen_and_not_finite_passes_as_ieee_has_it(
    D: int, where: str, wrong: float, options: dict[str, Any]
) -> None:
    """As in the oracle, infinities that may cancel apart; other heads keep their bits."""
    made = arrays(DTYPES[1], D, D, 500, 500)
    clean = called(made, **options)
    x = dict(zip(("q", "k", "v", "dout"), made, strict=True))[where]
    x[1, x.shape[1] - 1, 333, 5] = wrong
    grads = called(made, **options)
    wanted = reference.backward(made[3], *made[:3], **options)
    if math.isnan(wrong):
        assert_attention_close(grads, wanted, error_bound(*made, **options))
    passed = False
    for name in GRADIENTS:
        ours, theirs = getattr(grads, name).astype(np.float32), getattr(wanted, name)
        passed |= not np.isfinite(ours[1]).all()
        assert not (np.isfinite(ours) & ~np.isfinite(theirs)).any()
        assert np.isfinite(ours[0]).all()
    assert passed
    for ours, theirs in ((grads.dk, clean.dk), (grads.dv, clean.dv)):
        assert ours[0].tobytes() == theirs[0].tobytes()
        assert ours[1, : HKV - 1].tobytes() == theirs[1, : HKV - 1].tobytes()


def test_marks_of_many_heads() -> None:
    """Only the heads that meet what is not finite are computed again."""
    import cupy

    rng = cupy.random.default_rng(0)
    heads = 132 * 40
    shape = (2, heads, 5, 64)
    q, k, v, dout = (rng.standard_normal(shape, np.float32).astype(np.float16) for _ in range(4))
    assert served(q, k, v, dout)
    before = tileattn.backward(dout, q, k, v, *tileattn.forward(q, k, v))
    wrong = [7, heads // 2, heads - 3]
    v[1, wrong, 1] = math.nan
    after = tileattn.backward(dout, q, k, v, *tileattn.forward(q, k, v))
    right = np.setdiff1d(np.arange(heads), wrong)
    for ours, theirs in ((after.dk, before.dk), (after.dv, before.dv)):
        assert bits((ours[0], ours[1, right])) == bits((theirs[0], theirs[1, right]))
    assert cupy.isnan(after.dk[1, wrong]).all()
    assert cupy.isnan(after.dq[1, wrong]).all()
    assert cupy.isfinite(after.dv).all()  # its weights are those of finite scores
    assert cupy.isfinite(after.dq[1, right]).all()
