"""Attention on JAX arrays: the library's bits, gradients, transformations."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402 - JAX may be absent

import tileattn  # noqa: E402 - as above
from tests.arrays import normal  # noqa: E402 - as above
from tileattn import Attention, Gradients, UnsupportedError, reference  # noqa: E402 - as above
from tileattn.jax import attention, host_call  # noqa: E402 - as above
from tileattn.testing import assert_attention_close, error_bound  # noqa: E402 - as above

SIZES = (2, 4, 2, 37, 53, 16, 24)
RNG = np.random.default_rng(0)

OPTIONS: dict[str, Any] = {
    "bias": RNG.normal(size=(4, 1, 53)).astype(np.float32),
    "sinks": np.ones(4, np.float32),
    "window": (9, 30),
    "dropout_p": 0.2,
    "seed": 3,
    "score_mod": lambda s, b, h, i, j, t: s + t[h, abs(i - j)],
    "mask_mod": lambda b, h, i, j, t: j < i + 30,
    "aux": (RNG.normal(size=(4, 90)).astype(np.float32),),
}


def given(dtype: str = "float32") -> Any:
    return normal(SIZES, jnp.dtype(dtype))


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("backend", ["numpy", pytest.param("llvm", marks=pytest.mark.slow)])
def test_the_bits_are_the_library_s(options: dict[str, Any], dtype: str, backend: str) -> None:
    q, k, v, dout = given(dtype)
    options = {**options, "backend": backend}
    expected = tileattn.forward(q, k, v, **options)
    found = attention(*map(jnp.asarray, (q, k, v)), return_lse=True, **options)
    for x, y in zip(found, expected, strict=True):
        assert np.asarray(x).tobytes() == y.tobytes()
    learned = {name: options[name] for name in ("bias", "sinks", "aux") if name in options}

    def product(arrays: Any, learned: Any) -> Any:
        out = attention(*arrays, **(options | learned))
        return jnp.vdot(out.astype(jnp.float32), dout.astype(np.float32))

    arrays = tuple(map(jnp.asarray, (q, k, v)))
    into, more = jax.jit(jax.grad(product, (0, 1)))(arrays, learned)
    grads = tileattn.backward(dout, q, k, v, *expected, **options)
    for x, y in zip(into, grads, strict=False):
        assert np.asarray(x).tobytes() == y.tobytes()
    for name, x in more.items():
        y = getattr(grads, f"d{name}")
        for a, b in zip(jax.tree.leaves(x), y if name == "aux" else (y,), strict=True):
            assert np.asarray(a).tobytes() == b.tobytes()


def test_against_the_oracle_in_float64() -> None:
    with jax.enable_x64(True):
        q, k, v, dout = normal(SIZES, np.float64)
        dlse = RNG.normal(size=dout.shape[:-1])

        def call(*rows: Any) -> Any:
            return attention(*rows, causal=True, return_lse=True)

        found, pullback = jax.vjp(call, *map(jnp.asarray, (q, k, v)))
        assert found.out.dtype == np.float64
        bounds = error_bound(q, k, v, dout, dlse=dlse, causal=True)
        expected = reference.backward(dout, q, k, v, dlse=dlse, causal=True)
        dq, dk, dv = map(np.asarray, pullback(Attention(dout, dlse)))
        grads = Gradients(dq, dk, dv, None, None)
        assert_attention_close(grads, expected, bounds)


def test_equal_calls_outside_of_jit_share_a_program() -> None:
    q, k, v, _ = normal(SIZES)
    for scale in (0.37, 0.73):  # which no other test has
        options: dict[str, Any] = {"causal": True, "scale": scale}
        bounds, programs = error_bound(q, k, v, **options), []
        for sign in (1, -1):
            found = attention(sign * q, k, v, return_lse=True, **options)
            expected = reference.forward(sign * q, k, v, **options)
            assert_attention_close(Attention(*map(np.asarray, found)), expected, bounds)
            programs.append(host_call._compiled.cache_info().misses)
        assert programs[0] == programs[1]


@pytest.mark.parametrize("precision", ["bfloat16", "tensorfloat32", "highest"])
def test_jax_default_matmul_precision_changes_no_bit(precision: str) -> None:
    q, k, v, dout = map(jnp.asarray, normal(SIZES))

    def both(*rows: Any) -> Any:
        out, pullback = jax.vjp(lambda *x: attention(*x, causal=True), *rows)
        return out, *pullback(dout)

    expected = both(q, k, v)
    with jax.default_matmul_precision(precision):
        found = both(q, k, v)
        program = str(jax.make_jaxpr(both)(q, k, v))
    assert "dot_general" not in program  # on a CPU the setting may change no matmul
    for x, y in zip(found, expected, strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


# --- transformations ------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [(1, 0, 2, -1), (None, 1, -2, 0), (4, 3, 0, 1)], ids=str)
def test_vmap_over_any_axis(axes: Any) -> None:
    """There are as many elements as batch entries, so that no shape reveals a wrong axis."""
    elements = [np.stack([x, 2 * x]) for x in given()]
    elements[3] = RNG.normal(size=(2, 2, 1, 37, 53)).astype(np.float32)
    one_by_one = [x if axis is not None else x[:1] for x, axis in zip(elements, axes, strict=True)]
    moved = [
        jnp.asarray(x[0] if axis is None else np.moveaxis(x, 0, axis))
        for x, axis in zip(one_by_one, axes, strict=True)
    ]

    def call(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return attention(q, k, v, bias=bias)

    def gradients(*arrays: Any) -> Any:
        return jax.grad(lambda *x: call(*x).sum(), (0, 1, 2, 3))(*arrays)

    expected = [[jnp.asarray(x[n % len(x)]) for x in one_by_one] for n in range(2)]
    out = jax.vmap(call, axes, out_axes=2)(*moved)
    grads = jax.jit(jax.vmap(gradients, axes))(*moved)
    for n, arrays in enumerate(expected):
        assert np.array_equal(out[:, :, n], call(*arrays))
        for found, alone in zip(grads, gradients(*arrays), strict=True):
            assert np.array_equal(found[n], alone)


def test_scan_checkpoint_and_a_loop_over_steps() -> None:
    q, k, v = (jnp.asarray(x) for x in given()[:3])

    def loss(q: Any) -> Any:
        return attention(q, k, v, causal=True).sum()

    plain = jax.grad(loss)(q)
    assert np.array_equal(jax.grad(jax.checkpoint(loss))(q), plain)
    _, losses = jax.lax.scan(lambda carry, x: (carry, loss(x)), 0, jnp.stack([q, 2 * q]))
    np.testing.assert_array_equal(losses, [loss(q), loss(2 * q)])


def test_shard_map_on_one_device() -> None:
    q, k, v = (jnp.asarray(x) for x in given()[:3])
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    mapped = jax.shard_map(attention, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    assert np.array_equal(jax.jit(mapped)(q, k, v), attention(q, k, v))


def test_other_values_are_not_compiled_again() -> None:
    q, k, v = (jnp.asarray(x) for x in given()[:3])
    traced = []

    def step(q: Any, lengths: Any) -> Any:
        traced.append(1)
        return attention(q, k, v, kv_lengths=lengths, causal=True)

    compiled = jax.jit(step)
    for lengths in ([53, 9], [1, 53]):
        found = compiled(q, jnp.array(lengths))
        assert np.array_equal(found, attention(q, k, v, kv_lengths=lengths, causal=True))
    assert len(traced) == 1


def test_new_seeds_are_not_compiled_again() -> None:
    q, k, v = (jnp.asarray(x) for x in given()[:3])
    traced = []

    def step(q: Any, seed: Any) -> Any:
        traced.append(1)
        return attention(q, k, v, dropout_p=0.4, seed=seed).sum()

    gradient = jax.grad(step)
    compiled = jax.jit(gradient)
    seeds = 3, 5, 2**31 - 1
    found = [compiled(q, jnp.array(seed)) for seed in seeds]
    assert len(traced) == 1
    assert np.array_equal(found, [gradient(q, seed) for seed in seeds])
    misses = host_call._compiled.cache_info().misses
    outs = [attention(q, k, v, dropout_p=0.4, seed=jnp.uint32(n)) for n in (2, 2**32 - 1)]
    assert host_call._compiled.cache_info().misses == misses + 1
    words = jnp.array([2, 2**32 - 1], np.uint32)
    each = jax.vmap(lambda seed: attention(q, k, v, dropout_p=0.4, seed=seed))(words)
    assert np.array_equal(each, jnp.stack(outs))
    with pytest.raises(TypeError, match="seed must be an integer"):
        attention(q, k, v, dropout_p=0.4, seed=jnp.array([1]))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"seed must be .*; got -1"):
        attention(q, k, v, dropout_p=0.4, seed=jnp.array(-1)).block_until_ready()


@pytest.mark.parametrize("shape", [(0, 4, 5, 8), (1, 0, 5, 8), (1, 4, 0, 8)])
def test_sizes_of_zero(shape: tuple[int, ...]) -> None:
    x = jnp.zeros(shape)
    assert attention(x, x, x).shape == shape
    assert jax.grad(lambda q: attention(q, x, x).sum())(x).shape == shape


def test_long_calls_do_not_wait_for_themselves() -> None:
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2, 3000, 64))
    step = jax.jit(jax.grad(lambda q: attention(q, k, v).sum()))
    assert all(jnp.isfinite(step(q + n)).all() for n in range(3))


# --- functions are read once, by the call -------------------------------------------------------


def in_a_loop(q: Any) -> Any:
    x = q
    for slope in (0.5, 2.0):
        x = attention(x, q, q, score_mod=lambda s, b, h, i, j: s - slope * abs(i - j))  # noqa: B023 - on purpose
    return x


def one_by_one(q: Any) -> Any:
    def decaying(slope: float) -> Any:
        return lambda s, b, h, i, j: s - slope * abs(i - j)

    return attention(attention(q, q, q, score_mod=decaying(0.5)), q, q, score_mod=decaying(2.0))


@pytest.mark.parametrize(
    "transformed",
    [
        lambda f: f,
        jax.jit,
        jax.checkpoint,
        lambda f: jax.grad(lambda q: jnp.vdot(f(q), q)),
        lambda f: jax.jit(jax.grad(lambda q: jnp.vdot(f(q), q))),
        lambda f: lambda q: jax.vmap(f)(q[None])[0],
        lambda f: lambda q: jax.lax.scan(lambda x, _: (f(x), None), q, None, 2)[0],
    ],
    ids=["eager", "jit", "checkpoint", "grad", "jit of grad", "vmap", "scan"],
)
def test_the_functions_of_a_loop_differ(transformed: Any) -> None:
    q = jnp.asarray(given()[0])
    found, expected = (transformed(f)(q) for f in (in_a_loop, one_by_one))
    assert np.array_equal(found, expected)


def test_a_pullback_differentiates_what_forward_has_read() -> None:
    class Layer:
        width = 5

    q = jnp.asarray(given()[0])

    def call(q: Any) -> Any:
        return attention(q, q, q, mask_mod=lambda b, h, i, j: abs(i - j) < Layer.width)

    expected = jax.vjp(call, q)[1](q)
    _, pullback = jax.vjp(call, q)
    program = jax.jit(call)
    first = program(q)
    Layer.width = 20
    assert np.array_equal(pullback(q)[0], expected[0])
    assert np.array_equal(program(q), first)
    assert not np.array_equal(call(q), first)


def test_equal_functions_share_a_program_and_keep_nothing_alive() -> None:
    class Layer:
        def __init__(self) -> None:
            self.width = 4

    q, gone = jnp.asarray(given()[0]), []
    programs = set()
    for _ in range(3):
        layer = Layer()
        gone.append(weakref.ref(layer))
        attention(
            q, q, q, mask_mod=lambda b, h, i, j, layer=layer: i - j < layer.width
        ).block_until_ready()
        programs.add(host_call._compiled.cache_info().misses)
    del layer
    gc.collect()
    assert len(programs) == 1
    assert [x() for x in gone] == [None] * 3


# --- errors ---------------------------------------------------------------------------------------


def test_errors_come_where_the_call_is_written() -> None:
    q, k, v = (jnp.asarray(x) for x in given()[:3])
    with pytest.raises(ValueError, match="k must have the head dimension of q, 16; got 8"):
        jax.jit(attention)(q, k[..., :8], v)
    with pytest.raises(TypeError, match="unknown option 'is_causal'"):
        attention(q, k, v, is_causal=True)
    with pytest.raises(TypeError, match="scale must be a Python value"):
        jax.jit(lambda scale: attention(q, k, v, scale=scale))(1.0)
    with pytest.raises(UnsupportedError, match=r"stop_gradient\(alibi_slopes\)"):
        jax.grad(lambda x: attention(q, k, v, alibi_slopes=x).sum())(jnp.ones(4))
    slopes = jnp.ones(4)
    stopped: Callable[..., Any] = jax.lax.stop_gradient
    jax.grad(lambda x: attention(q, k, v, alibi_slopes=stopped(x)).sum())(slopes)


def test_errors_of_values_come_from_the_program() -> None:
    q, k, v = (jnp.asarray(x) for x in given()[:3])
    with pytest.raises(jax.errors.JaxRuntimeError, match="kv_lengths must be from 0 to"):
        jax.jit(lambda n: attention(q, k, v, kv_lengths=n))(jnp.array([60, 3])).block_until_ready()


@pytest.mark.parametrize(
    "options",
    [
        {"q_offset": 1 << 40},
        {"kv_lengths": np.array([(1 << 32) + 3, 3])},
        {"q_offset": [1 << 32] * 2},
    ],
    ids=str,
)
def test_integers_are_not_cut_to_the_bits_that_jax_has(options: dict[str, Any]) -> None:
    q, k, v = (jnp.asarray(x) for x in given()[:3])
    (name,) = options
    with pytest.raises(
        ValueError, match=rf"{name} must (hold integers that fit in int32|be from 0 to)"
    ):
        attention(q, k, v, **options)


def test_integers_of_the_host_are_checked_where_the_call_is_written() -> None:
    q, k, v = (jnp.asarray(x) for x in given()[:3])
    with pytest.raises(ValueError, match="kv_lengths must be from 0 to Nk = 53; got 60"):
        jax.jit(lambda q: attention(q, k, v, kv_lengths=[60, 3])).trace(q)
    found = jax.jit(lambda n: attention(q, k, v, kv_lengths=[n, 3]))(9)
    assert np.array_equal(found, attention(q, k, v, kv_lengths=[9, 3]))


@pytest.mark.parametrize(
    ("option", "value"), [("scale", 0.25), ("softcap", 2.0), ("dropout_p", 0.5), ("seed", 3)]
)
def test_numbers_may_be_in_arrays_without_axes(option: str, value: float) -> None:
    q, k, v = (jnp.asarray(x) for x in given()[:3])
    options: dict[str, Any] = {"dropout_p": 0.25, option: value}
    expected = attention(q, k, v, **options)
    for array in (np.array(value), jnp.array(value)):
        assert np.array_equal(attention(q, k, v, **(options | {option: array})), expected)


def test_second_derivatives_are_refused() -> None:
    q, k, v = (jnp.asarray(x) for x in given()[:3])
    with pytest.raises(UnsupportedError, match="second derivatives"):
        jax.grad(lambda q: jax.grad(lambda q: attention(q, k, v).sum())(q).sum())(q)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: attention(q, k, v), (q,), (q,))


def test_other_devices_are_refused_when_the_program_is_made() -> None:
    """Nothing is copied to the host silently; compiling a program for a GPU needs no GPU."""
    q, k, v = (jnp.asarray(x) for x in given()[:3])
    traced = jax.jit(attention).trace(q, k, v)
    with pytest.raises(
        UnsupportedError, match="arrays must be on 'cpu' or 'cuda'; got arrays on 'tpu'"
    ):
        traced.lower(lowering_platforms=("tpu",))
    assert "tileattn_call" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_the_library_names_this_module() -> None:
    x = jnp.zeros((3, 8))
    with pytest.raises(TypeError, match=r"an array of JAX: tileattn.jax.attention takes it"):
        tileattn.forward(x, x, x)
    with pytest.raises(TypeError, match=r"a tracer of jax.jit, jax.grad or the like: tileattn.jax"):
        jax.jit(tileattn.forward)(x, x, x)
