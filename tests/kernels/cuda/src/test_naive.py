"""``naive.cuh`` on the CPU: rows of any length, with and without masked-out NaN."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels.cuda.plan.planning import H200, asked, backward, forward
from tests.kernels.cuda.src.on_host import LAUNCH, built, parameter_block, pointer, sources
from tests.kernels.cuda.src.softmax_on_host import key_texts
from tileattn import reference
from tileattn.kernels.cuda.plan.plan import LaunchPlan
from tileattn.testing import assert_attention_close, error_bound

Array = NDArray[Any]

_HOLD = 'asm volatile("" : "+l"(q), "+l"(k), "+l"(v), "+l"(dout));'  # no C++ of a CPU
SIZES = {"B": 2, "Hq": 4, "Hkv": 2, "Nq": 5, "Nk": 7}
# A lane, which is a warp here, has 16 columns at a time. No other kernel takes 513 and more.
COLUMNS = [(513, 513), (530, 520), (520, 544)]


def run(folder: Path, plan: LaunchPlan, kernel: str, arrays: dict[str, Array]) -> None:
    """Run a kernel of a plan on the CPU, on these arrays."""
    launch = next(x for x in plan.launches if x.key.kernel == kernel)
    texts = sources(f"{kernel}.cu") | key_texts(launch.key)
    assert _HOLD in texts["head.cuh"]
    texts["head.cuh"] = texts["head.cuh"].replace(_HOLD, "")
    folder = folder / kernel
    folder.mkdir()
    library = built(folder, texts | {"run.cpp": LAUNCH.format(kernel=kernel)}, "run.cpp")
    library.launch(pointer(parameter_block(plan.fields, arrays)), launch.grid)


@pytest.mark.parametrize(("D", "Dv"), COLUMNS)
def test_both_passes_of_every_column(D: int, Dv: int, tmp_path: Path) -> None:
    dtype = "float32"  # the stand-ins of exponentials have no more digits
    problem = asked(dtype, {"causal"}, **SIZES, D=D, Dv=Dv, window=(None, 0), scale=D**-0.5)
    rng = np.random.default_rng(D)
    B, Hq, Hkv, Nq, Nk = SIZES.values()
    shapes = {"q": (B, Hq, Nq, D), "k": (B, Hkv, Nk, D), "v": (B, Hkv, Nk, Dv)}
    given = {name: rng.standard_normal(x).astype(dtype) for name, x in shapes.items()}
    dout = rng.standard_normal((B, Hq, Nq, Dv)).astype(dtype)
    wanted = reference.forward(*given.values(), causal=True)
    found = {"out": np.full_like(dout, np.nan), "lse": np.full((B, Hq, Nq), np.nan, dtype)}
    run(tmp_path, forward(problem, H200), "naive_forward", given | found)
    bounds = error_bound(given["q"], given["k"], given["v"], dout, causal=True)
    assert_attention_close(found, wanted, bounds)
    plan = backward(problem, H200)
    rows = plan.fields["rows"]
    padded = np.zeros((2, B, Hq, rows), dtype)
    power = 8  # BACKWARD_P_LOG2 of float32: P has it, and delta its inverse
    padded[0, ..., :Nq] = wanted.lse / np.log(2) - power
    padded[1, ..., :Nq] = (dout * wanted.out).sum(-1) / 2**power
    more = {"dout": dout, "lse_log2": padded[0], "delta": padded[1]}
    more["head_flags"] = np.zeros(2 + B * Hkv, np.uint32)  # two words for all heads first
    grads = {f"d{name}": np.full_like(x, np.nan) for name, x in given.items()}
    for kernel in ("naive_dq", "naive_dkdv"):
        run(tmp_path, plan, kernel, given | more | grads)
    exact = reference.backward(dout, *given.values(), causal=True)
    assert_attention_close(grads, exact, bounds)


def test_masked_out_values_do_not_count(tmp_path: Path) -> None:
    """NaN in the values of a key reaches only the query that attends to it."""
    problem = asked(
        "float32", {"causal"}, **SIZES, D=513, Dv=513, window=(None, 0), scale=513**-0.5
    )
    rng = np.random.default_rng(0)
    B, Hq, Hkv, Nq, Nk = SIZES.values()
    q = rng.standard_normal((B, Hq, Nq, 513)).astype("float32")
    k, v = (rng.standard_normal((B, Hkv, Nk, 513)).astype("float32") for _ in range(2))
    bounds = error_bound(q, k, v, causal=True)
    v[:, :, -1, 500] = np.nan
    out, lse = np.zeros((B, Hq, Nq, 513), "float32"), np.zeros((B, Hq, Nq), "float32")
    arrays = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    run(tmp_path, forward(problem, H200), "naive_forward", arrays)
    wanted = reference.forward(q, k, v, causal=True)
    places = np.isnan(wanted.out)
    assert places.sum() == B * Hq
    assert places[:, :, -1, 500].all()
    assert_attention_close((out, lse), wanted, bounds)
