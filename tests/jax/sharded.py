"""Attention on several devices; ``test_ring.py`` runs these tests in a process that has them."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import tileattn
from tests.arrays import normal
from tileattn import Attention, Gradients, UnsupportedError, reference
from tileattn.distributed import Layout
from tileattn.jax import attention, ring_attention
from tileattn.testing import assert_attention_close, error_bound

SIZES = (2, 4, 2, 24, 48, 16, 24)
MORE_QUERIES = (2, 6, 3, 48, 24, 8, 12)
RNG = np.random.default_rng(0)
ROWS = PartitionSpec(None, None, "x")
LEARNED = ("q", "k", "v", "bias", "sinks", "aux")
SLOW = pytest.mark.slow  # each of these calls takes a second to compile


def drawn(*shape: int) -> Any:
    return RNG.normal(size=shape).astype(np.float32)


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True, "softcap": 3.0, "scale": 0.2},
    "bias": {"bias": drawn(4, 24, 48), "window": (9, 30)},
    "shared bias": {"bias": drawn(2, 1, 1, 48), "sinks": drawn(4)},
    "mask": {"mask": RNG.random((2, 1, 24, 48)) < 0.7, "sinks": np.ones(4, np.float32)},
    "no key": {
        "kv_lengths": [0, 5],
        "sinks": np.array([0.5, -np.inf, 1, 2], np.float32),
        "q_offset": 0,
    },
    "lengths": {"kv_lengths": [48, 20], "q_offset": [3, 9], "causal": True},
    "alibi": {
        "alibi_slopes": np.linspace(0.1, 1, 4, dtype=np.float32),
        "dropout_p": 0.2,
        "seed": 3,
    },
    "functions": {
        "score_mod": lambda s, b, h, i, j, t: s + t[h, abs(i - j)],
        "mask_mod": lambda b, h, i, j, t: j < i + 30,
        "aux": (drawn(4, 90),),
        "origin": (0, 0, 2, 1),
    },
}


def mesh_of(devices: int) -> Any:
    return jax.make_mesh((devices,), ("x",), (AxisType.Auto,), devices=jax.devices()[:devices])


def order(layout: str, devices: int, n: int) -> Any:
    """Return the tokens in the order of the devices."""
    if layout == "contiguous":
        return np.arange(n)
    return np.concatenate(
        [np.arange(*ends) for part in Layout.zigzag(n, devices).parts for ends in part]
    )


def has_rows(x: Any) -> bool:
    return bool(x.ndim > 1 and x.shape[-2] > 1)


def check(
    devices: int,
    layout: str,
    dtype: Any = np.float32,
    sizes: tuple[int, ...] = SIZES,
    *,
    check_vma: bool = True,
    **options: Any,
) -> None:
    """Compare the gathered results of both passes under jit with the oracle."""
    q, k, v, dout = normal(sizes, dtype)
    dlse = normal(sizes)[3][..., 0].astype(np.float64 if dtype == np.float64 else np.float32)
    queries, keys = (order(layout, devices, n) for n in sizes[3:5])
    given = {"q": q[..., queries, :], "k": k[..., keys, :], "v": v[..., keys, :]}
    specs = dict.fromkeys("qkv", ROWS)
    static = dict(options)
    for name in ("bias", "mask", "sinks", "aux", "alibi_slopes"):
        if name in options:
            x = static.pop(name)
            of_rows = name in ("bias", "mask") and has_rows(x)
            given[name] = x[..., queries, :] if of_rows else x
            axes = (*(None,) * (x.ndim - 2), "x") if of_rows else ()
            specs[name] = PartitionSpec(*axes)
    learned, fixed = (
        {n: x for n, x in given.items() if (n in LEARNED) is y} for y in (True, False)
    )

    def on_device(given: Any) -> Any:
        return ring_attention(**given, axis_name="x", layout=layout, return_lse=True, **static)

    mapped = jax.shard_map(
        on_device,
        mesh=mesh_of(devices),
        in_specs=(specs,),
        out_specs=Attention(ROWS, ROWS),
        check_vma=check_vma,
    )

    def both(learned: Any, upstream: Any) -> Any:
        found, pullback = jax.vjp(lambda x: mapped(x | fixed), learned)
        return found, pullback(upstream)[0]

    (out, lse), grads = jax.jit(both)(learned, Attention(dout[..., queries, :], dlse[..., queries]))
    q_rows, k_rows = np.argsort(queries), np.argsort(keys)
    out, lse = np.asarray(out)[..., q_rows, :], np.asarray(lse)[..., q_rows]
    found = {f"d{name}": jax.tree.map(np.asarray, x) for name, x in grads.items()}
    for name, rows in (("dq", q_rows), ("dk", k_rows), ("dv", k_rows)):
        found[name] = found[name][..., rows, :]
    if "bias" in options and has_rows(options["bias"]):
        found["dbias"] = found["dbias"][..., q_rows, :]
    bounds = error_bound(q, k, v, dout, dlse=dlse, **options)
    expected = reference.backward(dout, q, k, v, dlse=dlse, **options)
    assert_attention_close(Attention(out, lse), reference.forward(q, k, v, **options), bounds)
    absent = dict.fromkeys(("dbias", "dsinks", "daux"))
    assert_attention_close(Gradients(**(absent | found)), expected, bounds)


@pytest.mark.parametrize(
    ("devices", "layout"),
    [
        (2, "contiguous"),
        pytest.param(1, "zigzag", marks=SLOW),
        pytest.param(3, "contiguous", marks=SLOW),
        (4, "zigzag"),
    ],
)
def test_any_number_of_devices(devices: int, layout: str) -> None:
    check(devices, layout, causal=True)


def test_functions_capture_arrays() -> None:
    q, k, v, _ = normal(SIZES, np.float32)
    table = drawn(4, 90)
    options: dict[str, Any] = {"score_mod": lambda s, b, h, i, j: s + table[h, i - j]}
    call = partial(ring_attention, axis_name="x", return_lse=True, **options)
    results = Attention(ROWS, ROWS)
    mapped = jax.shard_map(call, mesh=mesh_of(2), in_specs=(ROWS,) * 3, out_specs=results)
    found = Attention(*map(np.asarray, jax.jit(mapped)(q, k, v)))
    bounds = error_bound(q, k, v, **options)
    assert_attention_close(found, reference.forward(q, k, v, **options), bounds)


@pytest.fixture
def with_float64() -> Iterator[None]:
    """Switch float64 on for all threads, including those of devices."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=SLOW), "bfloat16"])
def test_partial_results_are_wide(dtype: str) -> None:
    check(4, "contiguous", jnp.dtype(dtype), MORE_QUERIES, causal=True)


@pytest.mark.usefixtures("with_float64")
def test_float64() -> None:
    check(4, "contiguous", np.float64, MORE_QUERIES, causal=True)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=() if name in ("functions", "no key") else SLOW)
        for name, options in OPTIONS.items()
    ],
)
def test_options_are_by_indices_of_the_whole(options: dict[str, Any]) -> None:
    check(3, "zigzag", **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["bias", "shared bias"])
def test_without_jax_s_check_of_axes(options: str) -> None:
    check(2, "contiguous", check_vma=False, **OPTIONS[options])


def sharded(call: Any, devices: int = 4) -> Any:
    """Map a call of q, k and v over sequences that are sharded."""
    return jax.shard_map(call, mesh=mesh_of(devices), in_specs=(ROWS,) * 3, out_specs=ROWS)


def test_traced_lengths_and_offsets() -> None:
    q, k, v = map(jnp.asarray, normal(SIZES)[:3])

    def call(lengths: Any, offset: Any) -> Any:
        given = {"axis_name": "x", "causal": True, "kv_lengths": lengths, "q_offset": offset}
        return sharded(partial(ring_attention, return_lse=True, **given))(q, k, v)

    for lengths, offset in (([48, 7], 3), ([0, 30], 20)):
        options: dict[str, Any] = {"causal": True, "kv_lengths": lengths, "q_offset": offset}
        arrays = [np.asarray(x) for x in (q, k, v)]
        expected, bounds = reference.forward(*arrays, **options), error_bound(*arrays, **options)
        found = Attention(*map(np.asarray, jax.jit(call)(jnp.array(lengths), jnp.array(offset))))
        assert_attention_close(found, expected, bounds)


def test_a_mesh_of_two_axes() -> None:
    """The batch is sharded, too, and the loss is computed on the devices."""
    q, k, v, dout = normal(SIZES)
    mesh = jax.make_mesh((2, 2), ("batch", "x"), (AxisType.Auto,) * 2)
    spec = PartitionSpec("batch", None, "x")

    def loss(bias: Any, q: Any, k: Any, v: Any, dout: Any) -> Any:
        out = ring_attention(q, k, v, axis_name="x", bias=bias)
        return jax.lax.psum((out * dout).sum(), ("batch", "x"))

    bias = drawn(4, 1, 48)
    specs = PartitionSpec(), spec, spec, spec, spec
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    found = jax.jit(jax.grad(mapped))(bias, q, k, v, dout)
    expected = reference.backward(dout, q, k, v, bias=bias)
    grads = expected._replace(dbias=np.asarray(found))
    bounds = error_bound(q, k, v, dout, bias=bias)
    assert_attention_close(grads, expected, bounds, names=("dbias",))


def test_one_call_for_each_device() -> None:
    """A bias that devices share gets the sum of their gradients."""
    q, k, v, dout = (np.concatenate([x, -x]) for x in normal(SIZES))
    spec, bias = PartitionSpec("x"), OPTIONS["bias"]["bias"]

    def call(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return attention(q, k, v, bias=bias)

    specs = spec, spec, spec, PartitionSpec()
    mapped = jax.shard_map(call, mesh=mesh_of(4), in_specs=specs, out_specs=spec)
    dq, dbias = jax.jit(jax.grad(lambda q, bias: (mapped(q, k, v, bias) * dout).sum(), (0, 1)))(
        q, bias
    )
    expected = reference.backward(dout, q, k, v, bias=bias)
    grads = expected._replace(dq=np.asarray(dq), dbias=np.asarray(dbias))
    bounds = error_bound(q, k, v, dout, bias=bias)
    assert_attention_close(grads, expected, bounds, names=("dq", "dbias"))


@pytest.mark.slow
def test_long_sequences_do_not_wait_for_one_another() -> None:
    spec = NamedSharding(mesh_of(4), ROWS)
    x = jax.random.normal(jax.random.key(0), (3, 1, 2, 4096, 64))
    q, k, v = (jax.device_put(y, spec) for y in x)
    call = sharded(partial(ring_attention, axis_name="x", causal=True))
    step = jax.jit(jax.grad(lambda q: call(q, k, v).sum()))
    assert all(jnp.isfinite(step(q + n)).all() for n in range(3))


def test_new_numbers_on_sharded_arrays() -> None:
    """Outside of jit; each device gets the numbers, and computes a part."""
    q, k, v, _ = normal(SIZES)
    batch = NamedSharding(mesh_of(2), PartitionSpec("x"))
    arrays = [jax.device_put(x, batch) for x in (q, k, v)]
    for scale in (0.25, 0.5):
        out = attention(*arrays, scale=scale, backend="numpy")
        assert out.sharding.is_equivalent_to(batch, out.ndim)
        expected = tileattn.forward(q, k, v, scale=scale, backend="numpy")
        np.testing.assert_array_equal(out, expected.out)


def test_empty_blocks_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = normal((1, 2, 2, 16, 16, 8, 8))[:3]
    computed, forward = [], tileattn.forward

    def counted(*arrays: Any, **options: Any) -> Any:
        computed.append(1)
        return forward(*arrays, **options)

    monkeypatch.setattr(tileattn, "forward", counted)
    for options, blocks in (
        ({"causal": True, "layout": "zigzag"}, 36),
        ({"window": (4, 0)}, 7),
        ({"kv_lengths": 5, "q_offset": 0}, 8),
    ):
        computed.clear()
        given: Any = {"axis_name": "x", **options}
        jax.jit(sharded(partial(ring_attention, **given)))(q, k, v).block_until_ready()
        assert len(computed) == blocks, options


@pytest.mark.parametrize(("window", "visits"), [((0, 0), 0), ((4, 0), 1), ((5, 0), 2), (None, 3)])
def test_keys_travel_as_far_as_the_window_reaches(window: Any, visits: int) -> None:
    q, k, v = normal((1, 2, 2, 16, 16, 8, 8))[:3]
    call = sharded(partial(ring_attention, axis_name="x", window=window))
    text = str(jax.make_jaxpr(call)(q, k, v))
    assert ("ppermute" in text) is (visits > 0)
    assert visits == 0 or f"length={visits}" in text


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tree_mask": np.ones((2, 6, 6), bool)}, UnsupportedError, "tree_mask does not go with"),
        ({"prefix": 3}, UnsupportedError, "prefix does not go with a sequence"),
        ({"cu_seqlens_q": [0, 12]}, UnsupportedError, "cu_seqlens_q does not go with a sequence"),
        ({"layout": "star"}, ValueError, "layout must be 'contiguous' or 'zigzag'; got 'star'"),
        (
            {"axis_name": "y"},
            ValueError,
            "axis_name must be an axis of jax.shard_map's mesh; got 'y'",
        ),
        ({"kv_lengths": 49}, ValueError, "kv_lengths must be from 0 to Nk = 48; got 49"),
        ({"mask": np.ones((6, 12), bool)}, ValueError, "mask must broadcast to"),
        ({"is_causal": True}, TypeError, "unknown option 'is_causal'"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"axis_name": "x", **options}
    with pytest.raises(error, match=message):
        jax.jit(sharded(partial(ring_attention, **given)))(*normal(SIZES)[:3])


def test_zigzag_halves_the_tokens_of_a_device() -> None:
    q, k, v = normal((1, 2, 2, 12, 16, 8, 8))[:3]
    call = sharded(partial(ring_attention, axis_name="x", layout="zigzag"))
    with pytest.raises(ValueError, match="q must have an even number of tokens on each device"):
        jax.jit(call)(q, k, v)
