"""Many rows that share keys, over splits of them: forward_sm90 and forward_combine."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tests.gpu.test_split import LENGTHS, B, check, drawn, kernels, spoil
from tests.on_gpu import bits, host, needs_gpu, sent
from tileattn import reference
from tileattn.testing import assert_attention_close, error_bound

pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread")]

BF16 = ml_dtypes.bfloat16
ROWS = [(40, 1, 1), (128, 1, 1), (24, 2, 3), (16, 2, 16), (5, 1, 25), (2, 2, 64)]  # Hq, Hkv, Nq


@pytest.fixture(autouse=True)
def hopper() -> None:
    """Skip where the GPU has no wgmma."""
    q = drawn(40, 1, 1, 64, 64, np.float16)
    if "forward_sm90" not in kernels(q, {"kv_lengths": LENGTHS}):
        pytest.skip("the GPU is not of compute capability 9.0")


def options(name: str, Hq: int) -> dict[str, Any]:
    given: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"causal": True, "sinks": np.linspace(-1, 1, Hq)},
        "window": {"window": (300, 2), "softcap": 3.0},
        "offset": {"q_offset": [-2, 5, 9000], "causal": True},
        "left": {"window": (1500, None), "q_offset": 1900, "scale": -0.2},
        "far": {"scale": 3000.0},
    }
    return {"kv_lengths": LENGTHS} | given[name]


def taken(arrays: list[Any], given: dict[str, Any]) -> tileattn.Attention:
    said = kernels(arrays, given)
    assert said.startswith("forward_sm90"), said
    assert "forward_combine" in said
    return check(arrays, given)


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("name", ["plain", "causal", "window", "offset", "left", "far"])
def test_options(name: str, rows: tuple[int, int, int]) -> None:
    taken(drawn(*rows, 64, 64, np.float16), options(name, rows[0]))


@pytest.mark.parametrize("dtype", [np.float16, BF16], ids=lambda x: x.__name__)
@pytest.mark.parametrize(
    "dims", [(128, 128), (256, 256), (192, 128), (64, 128), (96, 192), (24, 40)], ids=str
)
def test_dtypes_and_head_dimensions(dims: tuple[int, int], dtype: Any) -> None:
    for Hq, Nq in ((64, 2), (7, 9)):
        arrays = drawn(Hq, 1, Nq, *dims, dtype, capacity=9000)
        taken(arrays, {"kv_lengths": np.array([8999, 1, 4097]), "causal": True})


def test_the_options_that_other_kernels_take() -> None:
    given = {"kv_lengths": LENGTHS, "alibi_slopes": np.linspace(0.1, 1, 40)}
    arrays = drawn(40, 1, 1, 64, 64, np.float16)
    assert kernels(arrays, given).startswith("forward_split")
    check(arrays, given)


def test_strided_arrays_and_no_lengths() -> None:
    arrays = drawn(48, 1, 2, 128, 64, BF16, capacity=2500)
    there = [sent(np.repeat(x, 2, axis=2))[:, :, ::2] for x in arrays]
    found = tileattn.forward(*there, causal=True)
    bound = error_bound(*arrays, causal=True)
    assert_attention_close(host(found), reference.forward(*arrays, causal=True), bound)


@pytest.mark.parametrize("dtype", [np.float16, BF16], ids=lambda x: x.__name__)
def test_what_is_not_finite(dtype: Any) -> None:
    """Masked out it changes nothing; attended to it propagates, in its rows alone."""
    q, k, v = drawn(24, 2, 4, 64, 64, dtype)
    spoil(k, v)
    for given in ({"causal": True}, {"window": (600, 0)}):
        taken([q, k, v], {"kv_lengths": LENGTHS} | given)


@pytest.mark.parametrize("scale", [2.0, 300.0])
def test_scores_far_below_zero(scale: float) -> None:
    q, k, v = drawn(20, 1, 3, 64, 64, np.float16)
    taken([abs(q), -abs(k), v], {"kv_lengths": LENGTHS, "causal": True, "scale": scale})


def test_what_is_masked_out_leaves_the_bits() -> None:
    q, k, v = drawn(64, 1, 2, 128, 128, BF16)
    given: dict[str, Any] = {"kv_lengths": sent(LENGTHS), "causal": True}
    clean = bits(tileattn.forward(*map(sent, (q, k, v)), **given))
    for b, n in enumerate(LENGTHS):
        k[b, :, n:], v[b, :, n:] = np.nan, np.inf
    for _ in range(3):
        assert bits(tileattn.forward(*map(sent, (q, k, v)), **given)) == clean


@pytest.mark.parametrize("rows", [(48, 1, 2), (24, 3, 5)], ids=str)
def test_the_same_bits_in_any_batch(rows: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (sent(x) for x in drawn(*rows, 128, 128, np.float16, capacity=5000))
    lengths = np.array([4700, 0, 1025])
    batch = tileattn.forward(q, k, v, kv_lengths=lengths, causal=True)
    for b in range(B):
        n = int(lengths[b])
        alone = tileattn.forward(*(x[b : b + 1] for x in (q, k, v)), kv_lengths=[n], causal=True)
        assert bits([x[b : b + 1] for x in batch]) == bits(alone)
        place = rng.permutation(np.array([b] * 50 + [0] * 30 + [2] * 20))  # several splits an SM
        others = np.where(place == b, n, rng.integers(0, 5000, place.size))
        among = tileattn.forward(*(x[place] for x in (q, k, v)), kv_lengths=others, causal=True)
        for at in np.flatnonzero(place == b)[[0, -1]]:
            assert bits([x[at : at + 1] for x in among]) == bits(alone)


def test_a_graph_replays_other_lengths() -> None:
    import cupy

    arrays = drawn(64, 1, 2, 128, 128, BF16)
    q, k, v = map(sent, arrays)
    lengths, out = sent(LENGTHS), cupy.empty(q.shape, q.dtype)
    pool = cupy.cuda.MemoryPool()  # nobody else gets what a replay writes to
    with cupy.cuda.Stream(non_blocking=True) as stream:
        with cupy.cuda.using_allocator(pool.malloc):
            tileattn.forward(q, k, v, kv_lengths=lengths, out=out)
            stream.begin_capture()
            tileattn.forward(q, k, v, kv_lengths=lengths, out=out)
            graph = stream.end_capture()
        for given in ([7, 2400, 0], [2400, 1025, 1024], [0, 0, 0]):
            lengths.set(np.array(given))
            graph.launch(stream)
            stream.synchronize()
            found = tileattn.forward(q, k, v, kv_lengths=given)
            assert bits([out]) == bits([found.out])
            expected = reference.forward(*arrays, kv_lengths=given)
            assert_attention_close(host(found), expected, error_bound(*arrays, kv_lengths=given))
