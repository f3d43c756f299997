"""float32 on float16 tensor cores, forward: two numbers for each element.

Every call must run `forward_float32_sm90`, or `forward` with split numbers. Which heads they leave
to `forward` without splits shows in no plan: there the results are that kernel's, within the same
bound.
"""

import math
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.arrays import Array
from tests.gpu.float32 import (
    AMPLITUDES,
    GROUP,
    HQ,
    MODIFIED,
    NK,
    NQ,
    PLAIN,
    SQUARE,
    SUBNORMAL,
    UNEVEN,
    WRONG,
    B,
    drawn,
    moderate,
    uneven,
    use_generic_kernels,
)
from tests.gpu.hopper import described
from tests.on_gpu import bits, captured, host, needs_gpu, poisoned, sent, sent_options
from tileattn import Attention, reference
from tileattn.backends.cupy import describe
from tileattn.call.prepared import CALLS
from tileattn.kernels.cuda.families.float32 import FLOAT32_FORWARD
from tileattn.kernels.cuda.families.float32_generic import MAX_DIM
from tileattn.kernels.cuda.plan.plan import plan_forward
from tileattn.testing import assert_attention_close, error_bound

pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread", "kernel")]


@pytest.fixture(params=[FLOAT32_FORWARD, "forward"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run the Hopper kernel, or the generic one; yield its name."""
    name: str = request.param
    if name == FLOAT32_FORWARD:
        request.getfixturevalue("on_hopper")
    else:
        use_generic_kernels(monkeypatch)
    CALLS.clear()
    yield name
    CALLS.clear()


def forward(q: Any, k: Any, v: Any, **options: Any) -> Attention:
    """Call the kernel on the GPU; arrays that are there already keep their strides."""
    given, there = [*map(sent, (q, k, v))], sent_options(options)
    plan = plan_forward(*described("forward", *given, **there), describe.device_of(0))
    assert any(launch.key.split_floats for launch in plan.launches), str(plan)
    with poisoned():
        attention: Attention = host(tileattn.forward(*given, **there))
    return attention


def check(q: Array, k: Array, v: Array, **options: Any) -> Attention:
    """Compare the results with the oracle."""
    attention = forward(q, k, v, **options)
    with np.errstate(all="ignore"):
        bounds = error_bound(q, k, v, **options)
        expected = reference.forward(q, k, v, **options)
    assert_attention_close(attention, expected, bounds)
    return attention


def part(attention: Attention, *at: Any) -> list[bytes]:
    return bits(np.ascontiguousarray(x[at]) for x in attention)


@pytest.mark.parametrize("options", PLAIN)
@pytest.mark.parametrize(("D", "Dv"), SQUARE)
def test_masks_by_position(D: int, Dv: int, options: str) -> None:
    check(*drawn(D, Dv)[:3], **PLAIN[options])


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize("options", MODIFIED)
def test_options_and_alignments(options: str, kernel: str) -> None:
    dims, there = MODIFIED[options]
    most = MAX_DIM if kernel == "forward" else max(dims)  # the generic kernel splits no wider heads
    check(*drawn(*(min(dim, most) for dim in dims))[:3], **there)


@pytest.mark.parametrize(
    "lengths", [(128, 128), (129, 259), (200, 515), (513, 130), (400, 330), (130, 8300)]
)
def test_lengths(lengths: tuple[int, int]) -> None:
    """The first of 400 causal queries attend to nothing. 4096 keys are a group of sums."""
    q, k, v = drawn(Nq=lengths[0], Nk=lengths[1])[:3]
    check(q, k, v)
    if lengths[1] > 200:  # else most queries attend to too few keys
        check(q, k, v, causal=True)


def test_strides() -> None:
    """Broadcast, reversed and permuted axes, columns of wider rows; `out` as given."""
    import cupy

    q, k, v = map(sent, drawn()[:3])
    k = cupy.broadcast_to(k[:1], k.shape)[:, :, ::-1]
    v = cupy.concatenate([v, v], axis=-1).swapaxes(1, 2).copy().swapaxes(1, 2)[..., 32:96]
    there = q.get(), np.ascontiguousarray(k.get()), np.ascontiguousarray(v.get())
    expected = check(*there)
    assert bits(forward(q, k, v)) == bits(expected)
    out = cupy.full((B, HQ, NQ, 68), 7, np.float32)
    tileattn.forward(q, k, v, out=out[..., 4:])
    assert (out[..., 4:].get() == expected.out).all()
    assert (out[..., :4] == 7).all()


def test_odd_columns_of_wider_rows() -> None:
    """The kernel reads nothing past the last column, where wider rows have NaN."""
    q, k, v = drawn()[:3]
    q[..., -1] = k[..., -1] = np.nan
    expected = check(np.ascontiguousarray(q[..., :-1]), np.ascontiguousarray(k[..., :-1]), v)
    assert bits(forward(sent(q)[..., :-1], sent(k)[..., :-1], sent(v))) == bits(expected)


# --- sizes of the elements ------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", AMPLITUDES, ids=str)
def test_amplitudes(sizes: tuple[float, float, float]) -> None:
    q, k, v = (x * np.float32(size) for x, size in zip(drawn()[:3], sizes, strict=True))
    check(q, k, v, scale=moderate(q, k))


@pytest.mark.parametrize(
    ("name", "where"),
    [*product(UNEVEN, ("q", "k", "v", "qkv")), *((SUBNORMAL, x) for x in ("k", "v", "qv"))],
)
def test_elements_of_different_sizes(name: str, where: str) -> None:
    arrays = zip("qkv", drawn()[:3], strict=True)
    q, k, v = (uneven(name, x) if of in where else x for of, x in arrays)
    if name == SUBNORMAL:
        (k if "q" in where else q)[...] *= np.float32(1e10)
    check(q, k, v, scale=moderate(q, k), causal=True)


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize(("D", "Dv"), SQUARE)
def test_heads_with_large_scores(D: int, Dv: int) -> None:
    """They are within their bounds, and other heads keep their bits, also of the same keys."""
    q, k, v = drawn(D, Dv)[:3]
    before = forward(q, k, v, causal=True)
    q[0, 1] *= 3000
    k[1, 1] *= np.linspace(0.1, 400, NK, dtype=np.float32)[:, np.newaxis]
    after = check(q, k, v, causal=True)
    others = np.ones((B, HQ), bool)
    others[0, 1] = others[1, GROUP:] = False
    assert part(after, others) == part(before, others)


# --- NaN and infinity -----------------------------------------------------------------------------


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("where", "qkv")
@pytest.mark.parametrize("options", ["plain", "causal", "window"])
def test_what_is_not_finite(options: str, where: str, wrong: float) -> None:
    """It acts as in the formula, and heads that do not attend to it keep their bits."""
    q, k, v = drawn()[:3]
    before = forward(q, k, v, **PLAIN[options])
    {"q": q, "k": k, "v": v}[where][1, 1, [5, 190], [3, 60]] = wrong
    after = check(q, k, v, **PLAIN[options])
    others = np.ones((B, HQ), bool)
    others[1, 1 if where == "q" else slice(GROUP, None)] = False
    assert part(after, others) == part(before, others)


@pytest.mark.parametrize("wrong", WRONG)
def test_keys_that_no_query_attends_to(wrong: float) -> None:
    """Past the lengths they change no bit. In a tile with attended keys the bounds hold."""
    q, k, v = drawn()[:3]
    lengths: dict[str, Any] = {"kv_lengths": [300, 131]}
    before = forward(q, k, v, **lengths)
    for x in (k, v):
        x[0, :, 300:] = x[1, :, 131:] = wrong
    assert bits(forward(q, k, v, **lengths)) == bits(before)
    q, k, v = drawn(Nq=150, Nk=400)[:3]
    window: dict[str, Any] = {"window": (150, 0)}
    bounds, expected = error_bound(q, k, v, **window), reference.forward(q, k, v, **window)
    k[..., :97, :] = v[..., :97, :] = wrong  # the first query attends to keys from 100 on
    assert_attention_close(forward(q, k, v, **window), expected, bounds)


# --- the same bits --------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("D", "Dv"), SQUARE)
def test_the_same_bits_in_any_batch(
    D: int, Dv: int, causal: bool, request: pytest.FixtureRequest
) -> None:
    """Query heads alone, with one work tile or several for each thread block; some heads fail."""
    q, k, v = drawn(D, Dv)[:3]
    q[0, 1] *= 3000
    v[1, 1, 7] = math.inf
    whole = forward(q, k, v, causal=causal)
    request.getfixturevalue("few_sms")
    for _ in range(5):
        assert bits(forward(q, k, v, causal=causal)) == bits(whole)
    for b, h in np.ndindex(B, HQ):
        mine, shared = np.s_[b : b + 1, h : h + 1], np.s_[b : b + 1, h // GROUP : h // GROUP + 1]
        alone = forward(q[mine].copy(), k[shared].copy(), v[shared].copy(), causal=causal)
        assert bits(alone) == part(whole, *mine)


@pytest.mark.parametrize("lengths", [(128, 333, 1, 0, 70), (5, 40)], ids=str)
def test_packed_sequences(lengths: tuple[int, ...]) -> None:
    """Bits depend neither on the other sequences nor on what follows in the last tile."""
    ends = np.cumsum([0, *lengths])
    q, k, v = (x[0, :, : ends[-1]] for x in drawn(Nq=600, Nk=600)[:3])
    options: dict[str, Any] = {"cu_seqlens_q": ends, "causal": True}
    whole = check(q, k, v, **options)
    for first, end in pairwise(ends):
        rows = np.s_[:, first:end]
        spoiled = [np.full_like(x, math.nan) for x in (q, k, v)]
        for x, clean in zip(spoiled, (q, k, v), strict=True):
            x[rows] = clean[rows]
        assert part(forward(*spoiled, **options), *rows) == part(whole, *rows)
        if end > first:
            one = {"cu_seqlens_q": np.array([0, end - first]), "causal": True}
            alone = forward(*(x[rows].copy() for x in (q, k, v)), **one)
            assert bits(alone) == part(whole, *rows)


@pytest.mark.parametrize("kernel", [FLOAT32_FORWARD], indirect=True)
def test_gradients_beside_a_spoiled_sequence() -> None:
    """Its rows are in the last tile of the sequence before: neither values nor bits change."""
    ends = np.array([0, 70, 200])
    q, k, v, dout = (x[0, :, :200].copy() for x in drawn(Nq=200, Nk=200)[:4])

    def gradients() -> list[bytes]:
        given: list[Any] = [*map(sent, (q, k, v))]
        there: dict[str, Any] = {"cu_seqlens_q": ends, "causal": True}
        with poisoned():
            out, lse = tileattn.forward(*given, **there)
            found = tileattn.backward(*[sent(dout), *given, out, lse], **there)
        return [x.get()[:, :70].tobytes() for x in (found.dq, found.dk, found.dv)]

    clean = gradients()
    q[:, 70:] = k[:, 70:] = v[:, 70:] = dout[:, 70:] = math.nan
    assert gradients() == clean


def test_a_score_mod_that_hides_nan() -> None:
    """A tile of keys that cannot be split fails its heads also if no result is NaN."""
    q, k, v = drawn()[:3]
    k[:, :, 70] *= np.float32(2.0**-30)
    check(q, k, v, score_mod=lambda s, *_: np.where(s > 0, s, 0.0))


def test_in_a_graph() -> None:
    """Replays clear the flags of heads: one that has failed is computed as any other again."""
    q, k, v = map(sent, drawn()[:3])
    clean, spoiled = v.copy(), v.copy()
    spoiled[0, 0, 5, 3] = math.nan
    with captured(lambda: tileattn.forward(q, k, v)) as (results, replay):
        for values in (clean, spoiled, clean):
            v[...] = values
            replay()
            assert bits(results) == bits(tileattn.forward(q, k, v))
