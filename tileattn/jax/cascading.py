"""``tileattn.jax.cascade``: attention over pages that sequences share, on JAX arrays."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tileattn import cascading
from tileattn.jax import ring
from tileattn.jax.arrays import array_of, holds_arrays_of_jax, integers_of, integers_on_host
from tileattn.jax.functional import attention
from tileattn.messages import must_be
from tileattn.results import Attention
from tileattn.validation import check_flags


def cascade(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    shared_lengths: Any,
    block_table: Any,
    kv_lengths: Any,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    tree_mask: Any = None,
    sinks: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    backend: str = "auto",
) -> Attention:
    """Attention that reads pages which sequences share once, as `tileattn.cascade` does.

    Parameters
    ----------
    q : jax.Array, shape (B, Hq, Nq, D)
        Queries, on the CPU or an NVIDIA GPU.
    k : jax.Array, shape (pages, Hkv, page, D)
        Pages of keys.
    v : jax.Array, shape (pages, Hkv, page, Dv)
        Pages of values.
    shared_lengths : int, jax.Array or sequence of int of shape (G,)
        Number of keys that the sequences of each of G groups share. The batch is G groups of B / G
        consecutive sequences. An integer is for one group of all sequences.
    block_table : jax.Array or sequence of int, shape (B, pages of a sequence)
        Pages of each sequence.
    kv_lengths : int, jax.Array or sequence of int of shape (B,)
        Number of keys of each sequence, with the shared ones.
    causal : bool
        As in `tileattn.cascade`.
    scale : float, default 1/sqrt(D)
        As in `tileattn.cascade`.
    softcap : float or None
        As in `tileattn.cascade`.
    tree_mask : jax.Array of bool, shape (B, Nq, Nq) or (1, Nq, Nq), or None
        As in `tileattn.cascade`.
    sinks : jax.Array, shape (Hq,), or None
        As in `tileattn.cascade`.
    k_descale, v_descale : float or jax.Array of float32, or None
        As in `tileattn.cascade`.
    backend : str
        As for ``tileattn.forward``.

    Returns
    -------
    Attention
        The arrays ``(out, lse)``.

    Raises
    ------
    TypeError, ValueError
        As `tileattn.cascade` and `attention`; the message names the argument. Values of JAX arrays
        are not compared with one another.
    UnsupportedError
        If no backend supports the call, or an array is on another device.

    Notes
    -----
    All arrays and integers may be traced. The program has two calls of the library; XLA computes
    the rest. Pages have no gradients: a program that differentiates the call raises an error.

    Examples
    --------
    >>> import jax
    >>> from tileattn.jax import attention, cascade
    >>> q = jax.random.normal(jax.random.key(0), (2, 4, 1, 8))
    >>> k, v = jax.random.normal(jax.random.key(1), (2, 5, 2, 16, 8))  # 5 pages of 16 keys
    >>> pages = {"block_table": [[3, 0, 1], [3, 0, 4]], "kv_lengths": [40, 33]}
    >>> out, lse = cascade(q, k, v, shared_lengths=32, **pages)
    >>> bool(jax.numpy.allclose(out, attention(q, k, v, **pages), atol=1e-5))
    True
    """
    both = {"scale": scale, "softcap": softcap, "k_descale": k_descale, "v_descale": v_descale}
    last = {"tree_mask": tree_mask, "sinks": sinks}
    both, last = ({n: x for n, x in given.items() if x is not None} for given in (both, last))
    check_flags(causal=causal)
    q, k, v = (array_of(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    cascading.check_axes({"q": q, "k": k, "v": v})
    integers = {"shared_lengths": shared_lengths, "block_table": block_table}
    integers["kv_lengths"] = kv_lengths
    for name, x in integers.items():
        if x is None:
            raise TypeError(must_be(name, "integers", None))
        convert = integers_of if holds_arrays_of_jax(x) else integers_on_host
        integers[name] = convert(name, x)
    if holds_arrays_of_jax(kv_lengths) and not integers["kv_lengths"].shape:
        integers["kv_lengths"] = jnp.broadcast_to(integers["kv_lengths"], q.shape[:1])
    pages, lengths, shared = cascading.places_of(q, k, integers)
    last["causal"] = causal
    attend = partial(attention, return_lse=True, backend=backend)
    if cascading.shares_nothing(q, pages, shared):
        places = {"block_table": pages.block_table, "kv_lengths": lengths}
        plain: Attention = attend(q, k, v, **places, **both, **last)
        return plain
    given = pages.block_table, lengths, shared
    split = _tables if any(map(holds_arrays_of_jax, given)) else cascading.cascade_tables
    tables = cascading.Tables(*split(*given, pages.page))
    return cascading.merged((q, k, v), tables, both, last, attend, _merge)


def _tables(table: Any, lengths: Any, shared: Any, page: int) -> tuple[Any, Any, Any, Any]:
    """Compute the tables and lengths of both calls, as `tileattn.cascading.cascade_tables`."""
    named = {"block_table": table, "kv_lengths": lengths, "shared_lengths": shared}
    table, lengths, shared = (integers_of(*given) for given in named.items())
    (B, width), (G,) = table.shape, shared.shape
    dropped = jnp.clip(shared // page, 0, width)
    own = jnp.repeat(dropped, B // G)
    columns = jnp.minimum(own[:, None] + jnp.arange(width), width - 1)
    rest = jnp.take_along_axis(table, columns, axis=1)
    return rest, lengths - own * page, table[:: B // G], dropped * page


def _merge(outs: Sequence[jax.Array], lses: Sequence[jax.Array]) -> Attention:
    one, other = ((x.astype(y.dtype), y) for x, y in zip(outs, lses, strict=True))
    out, lse = ring.merge(one, other)
    return Attention(out.astype(outs[0].dtype), lse)
