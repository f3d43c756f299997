"""Kernels that join the splits of a row, on the CPU, whichever split is largest."""

from pathlib import Path

import numpy as np
import pytest

from tests.kernels.cuda.plan.planning import H200, asked, forward
from tests.kernels.cuda.src.softmax_on_host import combined
from tileattn.kernels.cuda.families.split import COMBINE, FOLD

LOG2_E = np.log2(np.e)
SIZES = {"B": 16, "Hq": 8, "Hkv": 4, "Nq": 3, "D": 32, "Dv": 64}


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        *((COMBINE, x) for x in ("float16", "bfloat16", "float32")),
        (FOLD, "float16"),
        (FOLD, "bfloat16"),
    ],
)
@pytest.mark.parametrize("groups", [2, 9])
def test_each_split_may_be_the_largest(
    groups: int, kernel: str, dtype: str, tmp_path: Path
) -> None:
    """Its shift is so large that the result would overflow without it."""
    options = {"kv_lengths", *({"invariant"} if kernel == FOLD else ())}
    problem = asked(dtype, options, **SIZES, Nk=1 << 20)
    keys = forward(problem, H200).fields["group_keys"] * groups
    problem = asked(dtype, options, **SIZES, Nk=keys)
    plan = forward(problem, H200)
    join = plan.launches[-1].key
    assert (join.kernel, join.warps_m, join.warps_n) == (kernel, 8, 1)
    splits = plan.fields["splits"]
    rows = problem.B * problem.Hq * problem.Nq
    rng = np.random.default_rng(groups)
    s = rng.standard_normal((rows, splits, 8)) * 3  # scores with their scale, in units of log 2
    s[np.arange(rows), np.arange(rows) % splits] += 140
    v = rng.standard_normal((rows, splits, 8, 64))
    m = s.max(2)
    p = np.exp2(s - m[..., None])
    power = 2.0**11 if dtype == "float16" else 1.0  # FORWARD_P_LOG2
    total_of, acc = p.sum(2) * power, np.einsum("rpk,rpkd->rpd", p, v) * power
    large = rng.random((rows, splits)) < 0.5  # whose maxima are in units of scores
    sums = np.stack(
        [np.where(large, m / (problem.scale * LOG2_E), m), np.where(large, -total_of, total_of)], 2
    )
    out, lse = combined(tmp_path, plan, sums, acc)
    p = np.exp2(s - s.max((1, 2), keepdims=True))
    total = p.sum((1, 2))
    exact = np.einsum("rpk,rpkd->rd", p, v) / total[:, None]
    size = np.einsum("rpk,rpkd->rd", p, np.abs(v)) / total[:, None]
    # Half a unit in the last place, and the rounding of maxima of 140 in float32.
    digits = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 0.0}[dtype] + 2.0**-14
    assert (np.abs(out - exact) <= digits * size).all()
    exact_lse = (np.log2(total) + s.max((1, 2))) / LOG2_E
    assert (np.abs(lse - exact_lse) <= 2.0**-20 * np.abs(exact_lse)).all()
