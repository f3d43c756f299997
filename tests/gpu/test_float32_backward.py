"""float32 on Hopper's tensor cores, backward: two float16 numbers for each element.

Every call must run `backward_float32_sm90` and `backward_float32_dq_sm90`. Which heads they leave
to the generic kernels shows in no plan: there the results are the generic kernels', within the same
bound.
"""

from itertools import product
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.arrays import Given
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
)
from tests.gpu.hopper import described
from tests.on_gpu import bits, host, needs_gpu, poisoned, sent, sent_options
from tileattn import Attention, Gradients, reference
from tileattn.backends.cupy import describe
from tileattn.kernels.cuda.families.float32 import FLOAT32_BACKWARD, FLOAT32_DQ
from tileattn.kernels.cuda.plan.plan import plan_backward
from tileattn.testing import assert_attention_close, error_bound

pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread", "on_hopper")]

DIMS = [*SQUARE, (256, 256), (176, 40), (64, 208)]


def gradients(given: Given, **options: Any) -> tuple[Attention, Gradients]:
    """Call both passes on the GPU; the kernels for split numbers must run the backward pass."""
    q, k, v, dout = map(sent, given)
    there = sent_options(options)
    call = described("backward", q, k, v, dout=dout, **there)
    plan = plan_backward(*call, describe.device_of(0))
    kernels = [launch.key.kernel for launch in plan.launches]
    assert {FLOAT32_BACKWARD, FLOAT32_DQ} <= {*kernels}, str(plan)
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


def part(grads: Gradients, b: Any, kv: int) -> list[bytes]:
    """Return the bits of the gradients of a key head."""
    heads = np.s_[b, kv * GROUP : (kv + 1) * GROUP]
    of_keys = (x[b, kv] for x in (grads.dk, grads.dv))
    return bits(np.ascontiguousarray(x) for x in (grads.dq[heads], *of_keys))


@pytest.mark.parametrize("options", PLAIN)
@pytest.mark.parametrize(("D", "Dv"), DIMS)
def test_masks_by_position(D: int, Dv: int, options: str) -> None:
    check(drawn(D, Dv), **PLAIN[options])


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize("options", MODIFIED)
def test_options_and_alignments(options: str) -> None:
    dims, there = MODIFIED[options]
    check(drawn(*dims), **there)


@pytest.mark.parametrize("options", [name for name in MODIFIED if "columns" not in name])
def test_options_of_wide_heads(options: str) -> None:
    check(drawn(200, 256), **MODIFIED[options][1])


@pytest.mark.parametrize("dims", [(64, 64), (256, 256)], ids=str)
@pytest.mark.parametrize(
    "lengths", [(128, 128), (129, 259), (200, 515), (513, 130), (400, 330), (130, 4300)]
)
def test_lengths(lengths: tuple[int, int], dims: tuple[int, int]) -> None:
    """The first of 400 causal queries attend to nothing. 4096 keys are a group of sums."""
    given = drawn(*dims, Nq=lengths[0], Nk=lengths[1])
    check(given)
    if lengths[1] > 200:  # else most queries attend to too few keys
        check(given, causal=True)


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
@pytest.mark.parametrize("dims", [(64, 64), (256, 256)], ids=str)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("where", range(4))
def test_what_is_not_finite(where: int, wrong: float, dims: tuple[int, int]) -> None:
    """Key heads that do not share its keys keep their bits.

    `test_nonfinite.py` checks the gradients of the others.
    """
    given = drawn(*dims)
    before = gradients(given, causal=True)[1]
    given[where][1, 1, [5, 190], [3, 60]] = wrong
    after = gradients(given, causal=True)[1]
    wrong_head = 1 // GROUP if where in (0, 3) else 1
    for b, kv in np.ndindex(B, HKV):
        same = part(after, b, kv) == part(before, b, kv)
        assert same is ((b, kv) != (1, wrong_head))


@pytest.mark.parametrize("dims", [(64, 64), (256, 256)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_the_same_bits_in_any_batch(
    causal: bool, dims: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    """Key heads alone, with one work tile or several for each thread block; some heads fail."""
    given = q, k, v, dout = drawn(*dims)
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
