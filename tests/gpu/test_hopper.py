"""The Hopper kernels of both passes, tested against the oracle and the generic kernels."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tileattn
from tests.conftest import Runner
from tests.gpu.hopper import (
    DTYPES,
    HQ,
    LENGTHS,
    OPTIONS,
    SQUARE,
    WIDE,
    B,
    arrays,
    both,
    check,
    filled,
    runs_backward,
    runs_forward,
)
from tests.nonfinite import NAMES, WRONG, check_visible
from tests.on_gpu import bits, host, needs_gpu, poisoned, sent
from tileattn import reference
from tileattn.testing import assert_attention_close, error_bound

pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread", "on_hopper")]

DIMENSIONS = [*SQUARE, (128, 64), (64, 128), (96, 96), (40, 40), (80, 80), (32, 32), (112, 48)]
DIMENSIONS += WIDE
ODD_DIMENSIONS = [(8, 8), (40, 24), (72, 120), (128, 8), (24, 96), (16, 128), (72, 200)]
ODD_DIMENSIONS += [(136, 8), (200, 136), (8, 256), (248, 184), (256, 32)]
PARTS = 6  # of a property's examples, for processes that work side by side

every_option = pytest.mark.parametrize("options", OPTIONS)
# Each option at each pair of head dimensions, in either dtype at every other one.
EVERY = [
    (*dims, name, DTYPES[(i + j) % 2])
    for i, dims in enumerate(DIMENSIONS)
    for j, name in enumerate(OPTIONS)
]


@pytest.mark.parametrize(("D", "Dv", "options", "dtype"), EVERY, ids=str)
def test_every_option_at_every_head_dimension(D: int, Dv: int, options: str, dtype: Any) -> None:
    Nq, Nk = 333, 410
    dlse = np.random.default_rng(3).standard_normal((B, HQ, Nq)).astype(np.float32)
    check(arrays(dtype, D, Dv, Nq, Nk), dlse=dlse, **filled(OPTIONS[options], Nk))


@pytest.mark.usefixtures("few_sms")
@every_option
@pytest.mark.parametrize(("D", "Dv"), [*SQUARE, (64, 128), (80, 80), (32, 32), *WIDE])
def test_many_work_tiles(D: int, Dv: int, options: str) -> None:
    Nq, Nk = 400, 660
    check(arrays(DTYPES[1], D, Dv, Nq, Nk), **filled(OPTIONS[options], Nk))


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize("lengths", [[0, 777], [300, 777]])
def test_lengths_and_offsets_on_the_gpu(lengths: list[int]) -> None:
    """Work tiles are assigned before anybody knows them."""
    places: dict[str, Any] = {"kv_lengths": np.array(lengths), "q_offset": np.array([-50, 60])}
    check(arrays(DTYPES[0], 128, 128, 700, 810), causal=True, **places)


@pytest.mark.parametrize(("Nq", "Nk"), [*LENGTHS, (127, 131), (1021, 67), (64, 1), (128, 128)])
@pytest.mark.parametrize("options", ["plain", "causal", "offset", "all"])
@pytest.mark.parametrize(("D", "Dv"), [*SQUARE, *WIDE[:3]])
def test_lengths_that_no_tile_divides(D: int, Dv: int, options: str, Nq: int, Nk: int) -> None:
    there = filled(OPTIONS[options], Nk)
    if Nq == 1:
        there.pop("kv_lengths", None)  # forward_split has a query with lengths
    check(arrays(DTYPES[1], D, Dv, Nq, Nk), **there)


@pytest.mark.parametrize(("Nq", "Nk"), [(0, 300), (300, 0), (0, 0)])
def test_empty_arrays_are_left_to_the_generic_kernels(Nq: int, Nk: int) -> None:
    check(arrays(DTYPES[0], 64, 64, Nq, Nk), own=False)


@pytest.mark.parametrize(("D", "Dv"), ODD_DIMENSIONS)
def test_head_dimensions_below_their_bucket(D: int, Dv: int) -> None:
    check(arrays(DTYPES[0], D, Dv, 150, 270), causal=True, q_offset=120)


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
    check(arrays(dtype, *dims, Nq, Nk, data.draw(st.integers(0, 99))), **filled(options, Nk))


@pytest.mark.usefixtures("generic_kernels")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("D", "Dv"), DIMENSIONS)
def test_the_generic_kernels_agree(D: int, Dv: int, causal: bool) -> None:
    """They are tested against the oracle too, in calls that they otherwise do not get here."""
    check(arrays(DTYPES[1], D, Dv, 400, 600), own=False, causal=causal, q_offset=200)


def test_strides() -> None:
    """Heads and rows in another order, and rows that are parts of longer ones."""
    import cupy

    def strided(x: Any) -> Any:
        wide = cupy.full((B, *x.shape[2:0:-1], x.shape[3] + 136), math.nan, x.dtype)
        view = wide.transpose(0, 2, 1, 3)[..., 64 : 64 + x.shape[3]]
        view[...] = cupy.asarray(x)
        return view

    made = arrays(DTYPES[1], 128, 64, 200, 300)
    q, k, v, dout = map(strided, made)
    whole = cupy.full((B, 200, HQ, 136), 7, q.dtype)
    out = whole.transpose(0, 2, 1, 3)[..., :64]
    assert runs_forward(q, k, v, causal=True)
    assert runs_backward(q, k, v, dout, causal=True)
    lse = tileattn.forward(q, k, v, causal=True, out=out).lse
    assert (whole[..., 64:] == 7).all()
    grads = host(tileattn.backward(dout, q, k, v, out.copy(), lse, causal=True))
    plain, of_plain = both(made, causal=True)
    assert bits((out, lse)) == bits(plain)
    assert bits((grads.dk, grads.dv)) == bits((of_plain.dk, of_plain.dv))
    expected = reference.backward(made[3], *made[:3], causal=True)
    assert_attention_close(grads, expected, error_bound(*made, causal=True))


# --- NaN and infinity: gpu/test_nonfinite.py has more -------------------------------------------


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("where", NAMES)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("D", [80, 128, 256])
def test_non_finite_values_propagate_as_in_the_formula(
    D: int, where: str, wrong: float, options: dict[str, Any]
) -> None:
    """The other batch entry stays finite, and other heads keep their bits."""
    made = arrays(DTYPES[1], D, D, 500, 500)
    before, of_before = both(made, **options)
    x = dict(zip(NAMES, made, strict=True))[where]
    x[1, -1, 333, 5] = wrong
    assert runs_backward(*map(sent, made), **options)
    with poisoned():
        after, grads = check_visible(Runner("cupy"), made, options, deterministic=False)
    assert bits(y[0] for y in after) == bits(y[0] for y in before)
    assert np.isfinite(grads.dq[0].astype(np.float32)).all()
    for ours, theirs in ((grads.dk, of_before.dk), (grads.dv, of_before.dv)):
        assert bits((ours[0], ours[1, :-1])) == bits((theirs[0], theirs[1, :-1]))
    assert not all(np.isfinite(y[1].astype(np.float32)).all() for y in grads[:3])
