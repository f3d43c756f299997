"""NaN and infinity on the GPU: masked out, they change no bit; attended, they act as in the oracle.

Tests of one set of kernels stand together: what one has compiled, the next finds on disk.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.arrays import Given
from tests.conftest import Runner
from tests.gpu.hopper import described
from tests.nonfinite import (
    WRONG,
    arrays,
    check_masked_out,
    check_reach,
    check_spoiled,
    masks,
)
from tests.on_gpu import needs_gpu, poisoned, sent
from tileattn.backends.cupy import describe
from tileattn.kernels.cuda.families.hopper import HOPPER_BACKWARDS
from tileattn.kernels.cuda.families.wide import WIDE
from tileattn.kernels.cuda.plan.plan import plan_backward, plan_forward

pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread")]

BF16 = ml_dtypes.bfloat16
PLAIN = ("causal", "window", "lengths", "no length")
MASKS = ("mask", "mask of keys", "mask of queries")
BLOCKS = ("block mask", "mixed blocks")
EXAMPLES = 5
BLOCK = (40, 56)  # no tile divides it


class Kernels(NamedTuple):
    """Calls that run the same kernels: dtype, head dimensions, kinds of masks, numbers of rows.

    ``deterministic`` is None where both orders of dq's sums are tried.
    """

    dtype: Any
    dims: tuple[int, int]
    kinds: tuple[str, ...] = PLAIN
    lengths: tuple[int, int] = (203, 331)
    deterministic: bool | None = None


KERNELS = (
    Kernels(np.float16, (64, 64), lengths=(203, 691)),
    Kernels(BF16, (128, 128), lengths=(333, 270)),
    Kernels(np.float16, (192, 128)),
    Kernels(BF16, (256, 256)),
    Kernels(BF16, (320, 264)),
    Kernels(np.float32, (64, 64)),
    Kernels(np.float32, (128, 128), deterministic=False),
    Kernels(np.float32, (192, 128), deterministic=True),
    Kernels(np.float32, (256, 256), deterministic=False),
    Kernels(np.float64, (64, 64), deterministic=False),
    Kernels(np.float64, (256, 192)),
    Kernels(np.float16, (64, 64), MASKS, deterministic=False),
    Kernels(np.float32, (64, 64), MASKS, deterministic=True),
    Kernels(BF16, (128, 128), BLOCKS, (333, 270), deterministic=False),
    Kernels(np.float32, (64, 64), BLOCKS, deterministic=False),
    Kernels(np.float16, (64, 64), ("bias",), deterministic=False),
    Kernels(np.float64, (64, 64), ("bias",), deterministic=True),
    Kernels(BF16, (64, 64), ("dropout",), deterministic=True),
    Kernels(np.float32, (128, 128), ("dropout",), deterministic=False),
    Kernels(np.float16, (128, 128), ("softcap",)),
    Kernels(np.float32, (64, 64), ("softcap",), deterministic=False),
    Kernels(BF16, (128, 128), ("all",), deterministic=False),
    Kernels(np.float32, (64, 64), ("all",), deterministic=True),
)


def name_of(kernels: Kernels) -> str:
    D, Dv = kernels.dims
    return f"{np.dtype(kernels.dtype).name} {D} {Dv} {kernels.kinds[0]}"


@pytest.fixture(scope="module", params=KERNELS, ids=name_of)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    found: Kernels = request.param
    return found


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner("cupy")


@pytest.fixture(autouse=True)
def memory_is_poisoned() -> Iterator[None]:
    with poisoned():
        yield


def orders(kernels: Kernels) -> tuple[bool, ...]:
    return (False, True) if kernels.deterministic is None else (kernels.deterministic,)


def call_of(kernels: Kernels, kind: str) -> tuple[Given, dict[str, Any]]:
    made = arrays(kernels.lengths, kernels.dtype, kernels.dims)
    return made, masks(kernels.lengths, BLOCK)[kind]


def repaired(call: Given, options: dict[str, Any]) -> set[str]:
    """Return the names of results that kernels sum again, in another order, after NaN."""
    q, k, v, dout = map(sent, call)
    there = {name: sent(x) for name, x in options.items()}
    device = describe.device_of(0)
    launches = plan_forward(*described("forward", q, k, v, **there), device).launches
    found = {"out", "lse"} if any(x.key.kernel == WIDE for x in launches) else set()
    if any(x.key.split_floats for x in launches):
        found = {"out", "lse", "dbias"}  # a kernel computes dbias from out and lse
    launches = plan_backward(*described("backward", q, k, v, dout=dout, **there), device).launches
    if any(x.key.pair or x.key.split_floats or x.key.kernel in HOPPER_BACKWARDS for x in launches):
        found |= {"dq", "dk", "dv"}
    return found


def test_masked_out_values_and_values_of_other_rows(kernels: Kernels, runner: Runner) -> None:
    """Each kind of mask in turn, and each wrong value at least once."""
    order = orders(kernels)
    for n in range(max(len(kernels.kinds), len(WRONG))):
        call, options = call_of(kernels, kernels.kinds[n % len(kernels.kinds)])
        loose, wrong = repaired(call, options), WRONG[n % len(WRONG)]
        how = {"deterministic": order[n % len(order)]}
        check_masked_out(runner, call, options, wrong, loose=loose, **how)
        if n < 2:
            check_reach(runner, call, options, "kv"[n], wrong, **how)


@given(data=st.data(), seed=st.integers(0, 1 << 20))
@settings(max_examples=EXAMPLES)
def test_random_non_finite_values_propagate_as_in_the_formula(
    kernels: Kernels, runner: Runner, data: Any, seed: int
) -> None:
    call, options = call_of(kernels, data.draw(st.sampled_from(kernels.kinds)))
    order = data.draw(st.sampled_from(orders(kernels)))
    check_spoiled(runner, call, options, np.random.default_rng(seed), deterministic=order)
