"""JAX arrays on a GPU: results, transformations, memory and errors."""

import functools
import gc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.arrays import normal
from tests.on_gpu import needs_gpu
from tileattn import Attention, BlockMask, Gradients, reference
from tileattn.testing import assert_attention_close, error_bound

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402 - JAX may be absent

from tileattn.jax import (  # noqa: E402 - as above
    attention,
    callbacks,
    cuda,
    host_call,
    numbers,
    ring_attention,
)


@functools.cache
def _no_gpu() -> str | None:
    """Why JAX has no GPU; looked at when a test runs, for it starts JAX."""
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        return str(error)
    return None


@pytest.fixture(autouse=True)
def _on_gpu() -> None:
    if _no_gpu() is not None:
        pytest.skip(f"JAX finds no GPU: {_no_gpu()}")


pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread")]

SIZES = (2, 4, 2, 67, 131, 64, 64)
RNG = np.random.default_rng(0)
HALF = np.dtype(ml_dtypes.bfloat16)


def drawn(*shape: int) -> Any:
    return RNG.normal(size=shape).astype(np.float32)


def relative(s: Any, _b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return s + table[h, abs(i - j)]


def near(_b: Any, _h: Any, i: Any, j: Any, _table: Any) -> Any:
    return j < i + 90


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "softcap": 3.0, "scale": 0.2},
    "bias": {"bias": drawn(4, 67, 131), "window": (30, 9)},
    "mask": {"mask": RNG.random((2, 1, 67, 131)) < 0.7, "sinks": drawn(4)},
    "lengths": {"kv_lengths": [131, 40], "q_offset": [64, 3], "causal": True},
    "alibi": {
        **{"alibi_slopes": np.linspace(0.1, 1, 4, dtype=np.float32)},
        **{"dropout_p": 0.2, "seed": 3},
    },
    "block mask": {"block_mask": BlockMask(np.tri(5, 9, dtype=np.bool_), (16, 16))},
    "functions": {
        "score_mod": relative,
        "mask_mod": near,
        "aux": (drawn(4, 131),),
    },
}
LEARNED = ("bias", "sinks", "aux")


def sent(tree: Any) -> Any:
    return jax.device_put(tree, jax.devices("cuda")[0])


def both(call: Any, given: dict[str, Any], upstream: Any) -> Any:
    """Run both passes of a call under jit; give out, lse and the gradients by name."""

    def passes(given: Any, upstream: Any) -> Any:
        (out, lse), pullback = jax.vjp(call, given)
        return out, lse, pullback(upstream)[0]

    return jax.jit(passes)(given, upstream)


def check(dtype: Any, sizes: tuple[int, ...] = SIZES, **options: Any) -> None:
    """Hold both passes to the oracle."""
    q, k, v, dout = normal(sizes, dtype)
    dlse = normal(sizes)[3][..., 0].astype(np.float64 if dtype == np.float64 else np.float32)
    learned = {"q": q, "k": k, "v": v}
    learned |= {name: options[name] for name in LEARNED if name in options}
    rest = {name: x for name, x in options.items() if name not in LEARNED}

    def call(given: Any) -> Any:
        return tuple(attention(**given, **rest, return_lse=True))

    out, lse, grads = both(call, sent(learned), sent((dout, dlse)))
    assert {x.platform for x in out.devices()} == {"gpu"}
    one = {f"d{name}": np.asarray(x) for name, x in grads.items() if name != "aux"}
    daux = tuple(map(np.asarray, grads["aux"])) if "aux" in grads else None
    found = Gradients(**({"dbias": None, "dsinks": None} | one), daux=daux)
    bounds = error_bound(q, k, v, dout, dlse=dlse, **options)
    expected = reference.forward(q, k, v, **options)
    assert_attention_close(Attention(np.asarray(out), np.asarray(lse)), expected, bounds)
    grads_expected = reference.backward(dout, q, k, v, dlse=dlse, **options)
    assert_attention_close(found, grads_expected, bounds)


@pytest.mark.parametrize("dtype", [HALF, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict[str, Any], dtype: Any) -> None:
    check(dtype, **options)


def test_float16_and_float64() -> None:
    check(np.dtype(np.float16), causal=True)
    with jax.enable_x64(True):
        check(np.dtype(np.float64), causal=True)


def test_gradients_of_different_sizes() -> None:
    check(HALF, (2, 6, 3, 131, 67, 64, 32), causal=True)
    check(HALF, (2, 4, 4, 131, 131, 64, 64))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=str)
def test_beside_jax_s_own(dtype: Any) -> None:
    q, k, v = sent(jax.random.normal(jax.random.key(1), (3, 2, 4, 256, 64), dtype))

    def theirs(q: Any, k: Any, v: Any) -> Any:
        rows = (x.swapaxes(1, 2) for x in (q, k, v))
        return jax.nn.dot_product_attention(*rows, is_causal=True).swapaxes(1, 2)

    def grads(f: Any) -> Any:
        return jax.jit(jax.grad(lambda *x: f(*x).astype(jnp.float32).sum(), (0, 1, 2)))

    # Theirs has the error of float32 in both cases, which is far within the bounds.
    there = (np.asarray(x) for x in (q, k, v, jnp.ones_like(q)))
    bounds = error_bound(*there, causal=True)
    with jax.default_matmul_precision("highest"):
        wide = [x.astype(jnp.float32) for x in (q, k, v)]
        expected = jax.jit(theirs)(*wide), *grads(theirs)(*wide)
    ours = functools.partial(attention, causal=True)
    found = ours(q, k, v), *grads(ours)(q, k, v)
    for name, x, y in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        error = np.linalg.norm(np.asarray(x, np.float64) - np.asarray(y, np.float64))
        assert error <= bounds[name].error, (name, error, bounds[name])


def check_dq_of_sum(found: Any, q: Any, k: Any, v: Any, **options: Any) -> None:
    """Hold the gradient of the sum of a call's output to the oracle."""
    q, k, v = map(np.asarray, (q, k, v))
    dout = np.ones_like(q)
    expected = reference.backward(dout, q, k, v, **options).dq
    bound = error_bound(q, k, v, dout, **options)["dq"]
    assert np.linalg.norm(np.asarray(found) - expected) <= bound.error


def test_new_seeds_are_not_compiled_again() -> None:
    q, k, v, _ = sent(normal(SIZES, HALF))
    traced = []

    def dropped(seed: Any) -> Any:
        traced.append(1)
        return attention(q, k, v, dropout_p=0.3, seed=seed)

    compiled = jax.jit(dropped)
    for seed in (3, 4, 2**31 - 1):
        expected = attention(q, k, v, dropout_p=0.3, seed=seed)
        assert np.array_equal(compiled(jnp.array(seed)), expected)
    assert len(traced) == 1


def test_new_numbers_are_not_read_from_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA passes their array on, whose address the host knows; it need not wait."""
    known = []

    def spied(array: Any) -> bytes:
        known.append(array.data.ptr in numbers._copied_to)
        return numbers.bytes_of(array)

    monkeypatch.setattr(callbacks, "bytes_of", spied)
    q, k, v, _ = sent(normal(SIZES, HALF))
    programs = set()
    for slope in (0.5, 0.25, -3.0):

        def sloped(s: Any, _b: Any, _h: Any, i: Any, j: Any, slope: float = slope) -> Any:
            return s - slope * abs(i - j)

        options: dict[str, Any] = {"score_mod": sloped}
        dq = jax.grad(lambda q, options=options: attention(q, k, v, **options).sum())(q)
        check_dq_of_sum(dq, q, k, v, **options)
        programs.add(host_call._compiled.cache_info().misses)
    assert known == [True] * 6
    assert len(programs) == 1


def test_vmap_makes_a_call_for_each_element() -> None:
    q, k, v = sent(jax.random.normal(jax.random.key(0), (3, 3, 2, 4, 67, 64)))
    bias = sent(jax.random.normal(jax.random.key(1), (3, 4, 1, 67)))

    def call(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return attention(q, k, v, bias=bias)

    found = jax.jit(jax.vmap(call, (0, 0, None, 0)))(q, k, v[0], bias)
    for n in range(3):
        assert jnp.array_equal(found[n], call(q[n], k[n], v[0], bias[n]))
    summed = jax.grad(lambda q: jax.vmap(call)(q, k, v, bias).sum())(q)
    check_dq_of_sum(summed[1], q[1], k[1], v[1], bias=np.asarray(bias[1]))


def test_scan_and_checkpoint() -> None:
    q, k, v = sent(jax.random.normal(jax.random.key(0), (3, 2, 4, 67, 64)))

    def call(q: Any) -> Any:
        return attention(q, k, v, causal=True)

    def loss(q: Any) -> Any:
        return call(q).sum()

    check_dq_of_sum(jax.grad(jax.checkpoint(loss))(q), q, k, v, causal=True)
    step: Any = jax.jit(lambda x: jax.lax.scan(lambda carry, y: (carry, call(y)), 0, x)[1])
    assert jnp.array_equal(step(jnp.stack([q, 2 * q])), jnp.stack([call(q), call(2 * q)]))


def test_results_follow_what_is_before_them_and_precede_what_is_after() -> None:
    """Long work before a call, and memory that is given to others behind it."""
    x = sent(jax.random.normal(jax.random.key(0), (1, 8, 1024, 64), jnp.bfloat16))
    big = sent(jax.random.normal(jax.random.key(1), (4096, 4096)) / 256)

    def work(x: Any, big: Any) -> Any:
        for _ in range(10):
            big = big @ big
        late = x + (0 * big[0, 0]).astype(x.dtype)
        out = attention(late, late, late, causal=True)
        return attention(out, late, late) * 2

    plain = attention(attention(x, x, x, causal=True), x, x) * 2
    step = jax.jit(work)
    results = [step(x, big) for _ in range(4)]
    assert all(jnp.array_equal(y, plain) for y in results)


def test_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are computed in the program's memory; memory besides is XLA's."""
    import cupy

    moved: list[str] = []
    place = cuda.Memory.place

    def watched(self: Any, found: Any, results: Any) -> None:
        moved.extend(
            str(x.shape) for x, y in zip(found, results, strict=True) if x.data.ptr != y.data.ptr
        )
        place(self, found, results)

    q, k, v = sent(jax.random.normal(jax.random.key(0), (3, 2, 4, 131, 64), jnp.bfloat16))
    step = jax.jit(jax.value_and_grad(lambda *x: attention(*x, causal=True).sum(), (0, 1, 2)))
    jax.block_until_ready(step(q, k, v))
    monkeypatch.setattr(cuda.Memory, "place", watched)
    pool = cupy.get_default_memory_pool()
    gc.collect()  # what earlier tests have left must not be freed meanwhile
    before = pool.used_bytes(), pool.total_bytes()
    jax.block_until_ready(step(q, k, v))
    assert moved == []
    assert (pool.used_bytes(), pool.total_bytes()) == before


def test_results_in_the_places_of_each_other_are_moved() -> None:
    import cupy

    pool, kept = cupy.get_default_memory_pool(), []

    class Frame:
        device = stream = 0

        def allocate(self, nbytes: int) -> Any:
            kept.append(pool.malloc(nbytes))
            return kept[-1].ptr, ()

        def free(self) -> None:
            """Nothing."""

    with cuda.Memory(Frame()) as memory:  # type: ignore[arg-type]  # as much as it needs here
        a, b = cupy.arange(5), cupy.arange(5, 10)
        memory.place([b, a], [a, b])
    assert (a.get().tolist(), b.get().tolist()) == ([5, 6, 7, 8, 9], [0, 1, 2, 3, 4])


def test_ring_attention_on_one_device() -> None:
    q, k, v = sent(jax.random.normal(jax.random.key(0), (3, 2, 4, 128, 64)))
    mesh = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    spec = jax.sharding.PartitionSpec(None, None, "x")
    call = functools.partial(ring_attention, axis_name="x", causal=True)
    mapped = jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    found, rows = np.asarray(jax.jit(mapped)(q, k, v)), [np.asarray(x) for x in (q, k, v)]
    expected = reference.forward(*rows, causal=True).out
    assert np.linalg.norm(found - expected) <= error_bound(*rows, causal=True)["out"].error


def test_errors_come_from_the_program() -> None:
    q, k, v = sent(jax.random.normal(jax.random.key(0), (3, 2, 4, 67, 64)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="origin must be integers"):
        attention(q, k, v, dropout_p=0.5, origin=(0, 0, 2, 1)).block_until_ready()
    assert jnp.isfinite(attention(q, k, v)).all()


@pytest.mark.parametrize("shape", [(0, 4, 5, 8), (1, 0, 5, 8), (1, 4, 0, 8)])
def test_sizes_of_zero(shape: tuple[int, ...]) -> None:
    x = sent(jnp.zeros(shape))
    assert attention(x, x, x).shape == shape
    assert jax.grad(lambda q: attention(q, x, x).sum())(x).shape == shape
