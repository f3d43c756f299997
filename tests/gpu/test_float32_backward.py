"""float32 on float16 tensor cores, backward: two numbers for each element.

Every call must run the kernels of a pair: those for Hopper, or the generic ones. Which heads they
leave to the generic kernels for float32 shows in no plan: there the results are those kernels',
within the same bound.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.arrays import Given, normal
from tests.gpu.float32 import (
    AMPLITUDES,
    GROUP,
    HKV,
    MODIFIED,
    NK,
    PLAIN,
    SQUARE,
    UNEVEN,
    WRONG,
    B,
    drawn,
    moderate,
    uneven,
    use_generic_kernels,
)
from tests.gpu.hopper import described
from tests.on_gpu import bits, host, needs_gpu, poisoned, sent, sent_options
from tileattn import Attention, Gradients, reference
from tileattn.backends.cupy import describe
from tileattn.call.prepared import CALLS
from tileattn.kernels.cuda.families.float32 import FLOAT32_BACKWARD, FLOAT32_DQ
from tileattn.kernels.cuda.families.float32_generic import MAX_DIM, SPLIT_BACKWARD, SPLIT_DQ
from tileattn.kernels.cuda.families.tiles import MAX_HEAD_DIM
from tileattn.kernels.cuda.plan.plan import plan_backward
from tileattn.testing import assert_attention_close, error_bound

pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread", "most")]

DIMS = [*SQUARE, (256, 256), (176, 40), (64, 208)]


@pytest.fixture(params=["Hopper", "generic"])
def most(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Run the Hopper or the generic kernels; yield their largest head dimension."""
    hopper = request.param == "Hopper"
    if hopper:
        request.getfixturevalue("on_hopper")
    else:
        use_generic_kernels(monkeypatch)
    CALLS.clear()
    yield MAX_HEAD_DIM if hopper else MAX_DIM
    CALLS.clear()


def gradients(given: Given, **options: Any) -> tuple[Attention, Gradients]:
    """Call both passes on the GPU; the kernels for split numbers must run the backward pass."""
    q, k, v, dout = map(sent, given)
    there = sent_options(options)
    call = described("backward", q, k, v, dout=dout, **there)
    plan = plan_backward(*call, describe.device_of(0))
    kernels = {launch.key.kernel for launch in plan.launches}
    pairs = {FLOAT32_BACKWARD, FLOAT32_DQ}, {SPLIT_BACKWARD, SPLIT_DQ}
    assert any(pair <= kernels for pair in pairs), str(plan)
    with poisoned():
        out, lse = tileattn.forward(q, k, v, **there)
        grads = tileattn.backward(dout, q, k, v, out, lse, **there)
    return host(Attention(out, lse)), host(grads)


def check(given: Given, **options: Any) -> Gradients:
    """Compare both passes with the oracle."""
    q, k, v, dout = given
    attention, grads = gradients(given, **options)
    with np.errstate(all="ignore"):
        bounds = error_bound(q, k, v, dout, **options)
        expected = reference.backward(dout, q, k, v, **options)
    assert_attention_close(attention, reference.forward(q, k, v, **options), bounds)
    assert_attention_close(grads, expected, bounds)
    return grads


def square(wide: bool, most: int) -> tuple[int, int]:
    """Return narrow or the widest head dimensions."""
    return (most, most) if wide else (64, 64)


def part(grads: Gradients, b: Any, kv: int) -> list[bytes]:
    """Return the bits of the gradients of a key head."""
    heads = np.s_[b, kv * GROUP : (kv + 1) * GROUP]
    of_keys = (x[b, kv] for x in (grads.dk, grads.dv))
    return bits(np.ascontiguousarray(x) for x in (grads.dq[heads], *of_keys))


@pytest.mark.parametrize("options", PLAIN)
@pytest.mark.parametrize(("D", "Dv"), DIMS)
def test_masks_by_position(D: int, Dv: int, options: str, most: int) -> None:
    check(drawn(min(D, most), min(Dv, most)), **PLAIN[options])


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize("options", MODIFIED)
def test_options_and_alignments(options: str, most: int) -> None:
    dims, there = MODIFIED[options]
    check(drawn(*(min(dim, most) for dim in dims)), **there)


@pytest.mark.parametrize("options", [name for name in MODIFIED if "columns" not in name])
def test_options_of_wide_heads(options: str, most: int) -> None:
    check(drawn(min(200, most), most), **MODIFIED[options][1])


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    "lengths",
    [(128, 128), (129, 259), (200, 515), (513, 130), (400, 330), (130, 4300), (4300, 130)],
)
def test_lengths(lengths: tuple[int, int], wide: bool, most: int) -> None:
    """The first of 400 causal queries attend to nothing. 4096 rows are a group of sums, or two."""
    given = drawn(*square(wide, most), Nq=lengths[0], Nk=lengths[1])
    check(given)
    if lengths[1] > 200:  # else most queries attend to too few keys
        check(given, causal=True)


@pytest.mark.parametrize(("Nq", "Nk"), [(200, 65536), (65536, 200), (9000, 1200)])
@pytest.mark.parametrize("wide", [False, True])
def test_sums_over_many_rows(wide: bool, Nq: int, Nk: int, most: int) -> None:
    """Each addition to a long sum rounds all of it, so groups of tiles have sums of their own.

    The generic kernels split 65,536 queries over 200 keys, but not 9,000 over 1,200.
    """
    q, k, v, dout = normal((1, 1, 1, Nq, Nk, *square(wide, most)))
    grads = gradients((q, k, v, dout))[1]
    expected = reference.backward(dout, q, k, v)
    for found, exact in zip(grads[:3], expected[:3], strict=True):
        assert np.linalg.norm(found - exact) < 1e-6 * np.linalg.norm(exact)


@pytest.mark.parametrize(
    "sizes", [x for x in AMPLITUDES if x[2] <= 1e10 or max(x[:2]) <= 1], ids=str
)
def test_amplitudes(sizes: tuple[float, float, float]) -> None:
    *arrays, dout = drawn()
    q, k, v = (x * np.float32(size) for x, size in zip(arrays, sizes, strict=True))
    check((q, k, v, dout), scale=moderate(q, k))


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_amplitudes_of_dout(size: float) -> None:
    q, k, v, dout = drawn()
    check((q, k, v, dout * np.float32(size)), causal=True)


@pytest.mark.parametrize(("name", "where"), product(UNEVEN, ("q", "k", "v", "d", "qkvd")))
def test_elements_of_different_sizes(name: str, where: str) -> None:
    q, k, v, dout = (
        uneven(name, x) if of in where else x for of, x in zip("qkvd", drawn(), strict=True)
    )
    check((q, k, v, dout), scale=moderate(q, k), causal=True)


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("where", range(4))
def test_what_is_not_finite(where: int, wrong: float, wide: bool, most: int) -> None:
    """Key heads that do not share its keys keep their bits.

    `test_nonfinite.py` checks the gradients of the others, after Hopper's kernels.
    """
    given = drawn(*square(wide, most))
    before = gradients(given, causal=True)[1]
    given[where][1, 1, [5, 190], [3, 60]] = wrong
    after = gradients(given, causal=True)[1]
    wrong_head = 1 // GROUP if where in (0, 3) else 1
    for b, kv in np.ndindex(B, HKV):
        same = part(after, b, kv) == part(before, b, kv)
        assert same is ((b, kv) != (1, wrong_head))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_the_same_bits_in_any_batch(
    causal: bool, wide: bool, most: int, request: pytest.FixtureRequest
) -> None:
    """Key heads alone, with one work tile or several for each thread block; some heads fail."""
    given = q, k, v, dout = drawn(*square(wide, most))
    q[0, 1] *= 3000
    k[1, 1] *= np.linspace(0.1, 400, NK, dtype=np.float32)[:, np.newaxis]
    whole = gradients(given, causal=causal)[1]
    request.getfixturevalue("few_sms")
    for _ in range(5):
        assert bits(gradients(given, causal=causal)[1]) == bits(whole)
    for b, kv in np.ndindex(B, HKV):
        heads = np.s_[b : b + 1, kv * GROUP : (kv + 1) * GROUP]
        keys = np.s_[b : b + 1, kv : kv + 1]
        alone = gradients(
            (q[heads].copy(), k[keys].copy(), v[keys].copy(), dout[heads].copy()), causal=causal
        )[1]
        assert part(alone, 0, 0) == part(whole, b, kv)


@pytest.mark.parametrize("causal", [True, False])
def test_splits_of_queries(causal: bool) -> None:
    """16 heads share few keys: several work tiles of the generic kernel have a block of keys."""
    given = q, *_ = normal((1, 32, 2, 1400, 1400, 64, 64), np.float32)
    q[0, 3, 1390] *= 1e6  # other kernels compute the first key head
    grads = check(given, causal=causal)
    for _ in range(5):
        assert bits(gradients(given, causal=causal)[1]) == bits(grads)
