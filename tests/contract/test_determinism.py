"""Bitwise reproducible and batch-invariant: repeated runs, threads, other heads."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.arrays import Given, normal
from tests.conftest import Runner
from tileattn import Attention, Gradients

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "bias of keys": {"bias": np.linspace(-1, 1, 300, dtype=np.float32)},
    "mask": {"mask": np.random.default_rng(2).random((300, 300)) < 0.5},
    "dropout": {"dropout_p": 0.3, "seed": 5},
}


def both(backend: Runner, arrays: Given, **options: Any) -> tuple[Attention, Gradients]:
    q, k, v, dout = arrays
    attention = backend.forward(q, k, v, **options)
    return attention, backend.backward(dout, q, k, v, *attention, **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_the_same_call_gives_the_same_bits(backend: Runner, options: dict[str, Any]) -> None:
    arrays = normal((2, 4, 2, 300, 300, 40, 24))
    expected = both(backend, arrays, **options)
    for _ in range(3):
        again = both(backend, arrays, **options)
        for ours, theirs in zip((*again[0], *again[1]), (*expected[0], *expected[1]), strict=True):
            np.testing.assert_array_equal(ours, theirs)


DIGEST = """
import hashlib
import numpy as np
import tileattn
from tileattn.backends import threads

rng = np.random.default_rng(0)
q, dout = rng.normal(size=(2, 2, 4, 700, 48)).astype(np.float32)
k, v = rng.normal(size=(2, 2, 2, 900, 48)).astype(np.float32)
options = {"causal": True, "bias": rng.normal(size=(4, 1, 900)).astype(np.float32)}
attention = tileattn.forward(q, k, v, **options)
grads = tileattn.backward(dout, q, k, v, *attention, **options)
digest = hashlib.sha256()
for x in (*attention, *grads[:4]):
    digest.update(x.tobytes())
print(threads.worker_count(), digest.hexdigest())
"""


@pytest.mark.usefixtures("cpu_backend")
def test_any_number_of_threads_gives_the_same_bits() -> None:
    """BLAS may use as many threads as it likes; the package holds it to one where it matters."""
    root = str(Path(__file__).parents[2])
    found = set()
    for threads, blas in (("1", "1"), ("2", "2"), ("3", "1"), ("3", "2")):
        settings = {
            "TILEATTN_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": blas,
            "MKL_NUM_THREADS": blas,
            "PYTHONPATH": root,
        }
        command = [sys.executable, "-c", DIGEST]
        done = subprocess.run(
            command, env=os.environ | settings, capture_output=True, text=True, check=True
        )
        workers, digest = done.stdout.split()
        assert workers == threads
        found.add(digest)
    assert len(found) == 1


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((4, 6, 3, 1, 900, 64, 67), np.float32),
        ((4, 6, 3, 7, 900, 32, 35), np.float32),
        ((4, 6, 3, 130, 90, 16, 19), np.float32),
        ((4, 6, 3, 200, 300, 16, 19), np.float32),
        ((4, 6, 3, 33, 513, 128, 131), np.float32),
        ((4, 4, 1, 256, 600, 64, 48), np.float32),
        ((4, 6, 3, 150, 290, 40, 43), np.float64),
        ((4, 6, 3, 61, 77, 24, 20), np.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
def test_a_head_has_the_same_bits_whatever_the_others_hold(
    backend: Runner, sizes: tuple[int, ...], dtype: Any, causal: bool
) -> None:
    """The other entries and heads hold large, infinite and NaN numbers; alone, a head has none."""
    q, k, v, dout = normal(sizes, dtype)
    group = sizes[1] // sizes[2]
    last = sizes[2] - 1
    q[1] *= 30
    q[:, group * last] *= 20
    q[2, 0, 0, 0] = np.nan
    k[1, 0, 0, 0] = np.inf
    v[1, last, -1, -1] = np.nan
    attention, grads = both(backend, (q, k, v, dout), causal=causal)
    for b, h in ((0, 0), (2, last), (3, last)):
        queries = np.s_[b : b + 1, h * group : (h + 1) * group]
        keys = np.s_[b : b + 1, h : h + 1]
        alone, of_alone = both(
            backend, (q[queries], k[keys], v[keys], dout[queries]), causal=causal
        )
        for name, ours, theirs in (
            ("out", alone.out, attention.out[queries]),
            ("lse", alone.lse, attention.lse[queries]),
            ("dq", of_alone.dq, grads.dq[queries]),
            ("dk", of_alone.dk, grads.dk[keys]),
            ("dv", of_alone.dv, grads.dv[keys]),
        ):
            np.testing.assert_array_equal(ours, theirs, err_msg=name)
        if backend.name == "cupy" and sizes[3] < 64:
            continue  # few queries: how many rows share keys decides the kernel, and so the bits
        one = np.s_[b : b + 1, h * group + group - 1 : (h + 1) * group]
        single = backend.forward(q[one], k[keys], v[keys], causal=causal)
        np.testing.assert_array_equal(single.out, attention.out[one])


@pytest.mark.parametrize("Nq", [29, 270])
def test_inputs_are_never_written(backend: Runner, Nq: int) -> None:
    """Read-only inputs are taken, and hold afterwards what they held before."""
    rng = np.random.default_rng(0)
    q, k, v, dout = normal((2, 4, 2, Nq, 300, 8, 12))
    options: dict[str, Any] = {
        "bias": rng.normal(size=(Nq, 300)).astype(np.float32),
        "mask": rng.random((4, Nq, 300)) < 0.7,
        "alibi_slopes": rng.random(4),
        "sinks": rng.normal(size=4),
        "kv_lengths": np.array([200, 300]),
        "q_offset": np.array([1, 2]),
        "softcap": 3.0,
        "dropout_p": 0.1,
    }
    dlse = rng.normal(size=(2, 4, Nq)).astype(np.float32)
    attention = backend.forward(q, k, v, **options)
    inputs = {"q": q, "k": k, "v": v, "dout": dout, "dlse": dlse, **attention._asdict()}
    inputs |= {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    before = {name: x.copy() for name, x in inputs.items()}
    for x in inputs.values():
        x.setflags(write=False)
    again = backend.forward(q, k, v, **options)
    grads = backend.backward(dout, q, k, v, *attention, dlse=dlse, **options)
    for name, x in inputs.items():
        np.testing.assert_array_equal(x, before[name], err_msg=name)
    for result in (*again, *grads):
        assert result.flags.writeable
        assert not any(np.shares_memory(result, x) for x in inputs.values())


@pytest.mark.parametrize("window", [(700, 700), (None, 700), (700, 0)])
def test_a_packed_sequence_has_the_same_bits_beside_another(
    backend: Runner, window: tuple[int | None, int | None]
) -> None:
    """Also where a window spans all keys of one sequence, and not as many as both have."""
    q, k, v, _ = normal((1, 2, 2, 900, 900, 40, 24))
    both = backend.forward(q, k, v, window=window, **packed_at(0, 600, 900))
    q, k, v = (x[:, :, :600] for x in (q, k, v))
    alone = backend.forward(q, k, v, window=window, **packed_at(0, 600))
    for ours, theirs in zip(alone, both, strict=True):
        np.testing.assert_array_equal(ours, theirs[:, :, :600])


def packed_at(*places: int) -> dict[str, Any]:
    return {name: np.array(places) for name in ("cu_seqlens_q", "cu_seqlens_k")}
