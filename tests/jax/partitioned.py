"""Calls under plain ``jax.jit`` on arrays that are sharded over a mesh; run with four devices."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import tileattn
from tileattn import Attention, BlockMask, Gradients, reference
from tileattn.jax import attention
from tileattn.testing import assert_attention_close, error_bound

B, HQ, HKV, NQ, NK, D, DV = 4, 8, 4, 12, 19, 8, 16
RNG = np.random.default_rng(0)
DIFFERENTIABLE = "bias", "sinks", "aux"

MESHES = {"one axis": ((4,), ("x",)), "two axes": ((2, 2), ("x", "y"))}
# How q, k and v are sharded, and which shapes of q each device is given.
SHARDINGS: list[tuple[str, tuple[Any, ...], tuple[Any, ...], tuple[int, int]]] = [
    ("one axis", ("x",), ("x",), (1, 8)),
    ("one axis", (None, "x"), (None, "x"), (4, 2)),
    ("one axis", ("x",), (), (1, 8)),
    ("one axis", (None, "x"), (), (4, 2)),
    ("one axis", (None, None, "x"), (None, None, None, "x"), (4, 8)),
    ("two axes", ("x", "y"), ("x", "y"), (2, 4)),
    ("two axes", (("x", "y"),), (("x", "y"),), (1, 8)),
    ("two axes", (None, ("y", "x")), (None, ("y", "x")), (4, 2)),
    ("two axes", ("y", None, "x"), ("y",), (2, 8)),
    ("two axes", ("x",), (None, "y"), (2, 4)),
]
# What does not depend on the indices of batch entries and heads: each device computes a part.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"softcap": 4.0, "scale": 0.4, "window": (9, 2)},
    "bias of all": {"bias": RNG.standard_normal((B, HQ, NQ, NK)).astype(np.float32)},
    "bias of heads": {"bias": RNG.standard_normal((HQ, NQ, NK)).astype(np.float32)},
    "bias of the batch": {"bias": RNG.standard_normal((B, 1, 1, NK)).astype(np.float32)},
    "bias of keys": {"bias": RNG.standard_normal(NK).astype(np.float32), "causal": True},
    "mask": {"mask": RNG.random((B, 1, NQ, NK)) < 0.7},
    "lengths": {"kv_lengths": np.array([19, 4, 0, 7]), "q_offset": np.array([3, 1, 0, 9])},
    "one offset": {"q_offset": np.array(3), "causal": True},
    "sinks": {"sinks": RNG.standard_normal(HQ).astype(np.float32), "causal": True},
    "slopes": {"alibi_slopes": RNG.random((B, HQ)).astype(np.float32)},
    "slopes of heads": {"alibi_slopes": RNG.random(HQ).astype(np.float32)},
}
# What does: arrays are gathered, and each device computes all.
INDEXED: dict[str, dict[str, Any]] = {
    "dropout": {"dropout_p": 0.3, "seed": 5},
    "origin": {"dropout_p": 0.3, "origin": np.array([1, 2, 3, 4])},
    "functions": {
        "score_mod": lambda s, b, h, i, j, t: s + t[h, abs(i - j)] * (b + 1),
        "mask_mod": lambda b, h, i, j, _t: (b + h + i + j) % 3 > 0,
        "aux": (RNG.standard_normal((HQ, NK)).astype(np.float32),),
    },
    "block mask": {"block_mask": BlockMask(RNG.random((B, HQ, 2, 3)) < 0.6, block_size=(8, 8))},
}
seen: set[tuple[str, int, int]] = set()  # passes, batch entries and heads of calls


def spied(name: str) -> Any:
    run = getattr(tileattn, name)

    def spy(first: Any, *args: Any, **options: Any) -> Any:
        seen.add((name, *first.shape[:2]))
        return run(first, *args, **options)

    return spy


def given(dtype: Any, Hkv: int) -> list[Any]:
    rng = np.random.default_rng(1)
    shapes = (B, HQ, NQ, D), (B, Hkv, NK, D), (B, Hkv, NK, DV), (B, HQ, NQ, DV)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def check(
    mesh: Any,
    sharding: Any,
    options: dict[str, Any],
    part: Any,
    backward: Any,
    dtype: Any = np.float32,
    Hkv: int = HKV,
) -> None:
    """Compare both passes with the oracle, and check which part each device computes."""
    q, k, v, dout = given(dtype, Hkv)
    dlse = np.random.default_rng(2).standard_normal((B, HQ, NQ)).astype(np.float32)
    rows, keys = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in sharding)
    arrays = [jax.device_put(x, s) for x, s in ((q, rows), (k, keys), (v, keys))]
    learned = {n: jax.tree.map(jnp.asarray, options[n]) for n in DIFFERENTIABLE if n in options}
    others = {n: x for n, x in options.items() if n not in learned}

    def both(q: Any, k: Any, v: Any, learned: Any, dout: Any, dlse: Any) -> Any:
        def call(q: Any, k: Any, v: Any, learned: Any) -> Any:
            return attention(q, k, v, return_lse=True, **others, **learned)

        found, pullback = jax.vjp(call, q, k, v, learned)
        return found, pullback(Attention(dout, dlse))

    seen.clear()
    found, grads = jax.jit(both)(*arrays, learned, dout, dlse)
    jax.block_until_ready((found, grads))
    assert seen == {("forward", *part), ("backward", *backward)}, seen
    bounds = error_bound(q, k, v, dout, dlse=dlse, **options)
    out, lse, dq, dk, dv = map(np.asarray, (*found, *grads[:3]))
    dbias, dsinks = (
        None if n not in learned else np.asarray(grads[3][n]) for n in ("bias", "sinks")
    )
    daux = tuple(map(np.asarray, grads[3]["aux"])) if "aux" in learned else None
    expected = reference.backward(dout, q, k, v, dlse=dlse, **options)
    assert_attention_close(Attention(out, lse), reference.forward(q, k, v, **options), bounds)
    assert_attention_close(Gradients(dq, dk, dv, dbias, dsinks, daux), expected, bounds)


def cases() -> Iterator[tuple[Any, ...]]:
    narrow = {"bias": OPTIONS["bias of keys"]["bias"].astype(np.float16), "causal": True}
    along = ("x",), ("x",)  # parts of its gradient would be rounded before they are summed
    yield AxisType.Auto, "one axis", along, "narrow", narrow, (1, HQ), (B, HQ), np.float16
    for Hkv in (1, 2):  # four devices cannot share them
        heads = (None, "x"), ()
        yield AxisType.Auto, "one axis", heads, "few", {}, (B, HQ), (B, HQ), np.float32, Hkv
        both, part = (("x", "y"), ("x",)), (2, HQ // Hkv)
        yield AxisType.Auto, "two axes", both, "few", {}, part, part, np.float32, Hkv
    for kind in (AxisType.Auto, AxisType.Explicit):
        for mesh, rows, keys, part in SHARDINGS:
            for name, options in (OPTIONS | INDEXED).items():
                own = part if name in OPTIONS else (B, HQ)
                yield kind, mesh, (rows, keys), name, options, own, own


def main() -> None:
    tileattn.forward, tileattn.backward = map(spied, ("forward", "backward"))
    part = slice(int(sys.argv[1]), None, int(sys.argv[2]))
    done = 0
    for kind, name, sharding, label, *rest in [*cases()][part]:
        sizes, names = MESHES[name]
        mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))
        try:
            with jax.set_mesh(mesh) if kind == AxisType.Explicit else nullcontext():
                check(mesh, sharding, *rest)
        except Exception as error:
            sys.stdout.write(f"{kind} {name} {sharding} {label}: {type(error).__name__} {error}\n")
        done += 1
    sys.stdout.write(f"{done} done\n")


if __name__ == "__main__":
    main()
