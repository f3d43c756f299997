"""A value for each option that must change the result, and every entry that takes options.

The table of values is read against ``Options``, the list of options: a new option without a row
fails ``tests/contract/test_every_option.py``.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import tileattn
from tileattn import Attention, BlockMask, Gradients, reference
from tileattn.testing import assert_attention_close, error_bound

Array = NDArray[Any]
SIZES = B, HQ, HKV, NQ, NK, D, DV = 2, 4, 2, 7, 12, 16, 8
PAGE = 4
ENDS_Q, ENDS_K = np.array([0, 5, 14]), np.array([0, 13, 24])
DTYPE = np.dtype(np.float32)


class Value(NamedTuple):
    """Options that show that one option counts, and those that the result is compared with.

    Parameters
    ----------
    options : dict
        The option, with what it needs beside it.
    without : dict
        The same call without the option, or with another value of it.
    """

    options: dict[str, Any]
    without: dict[str, Any]


def _normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(DTYPE)


def _learned(s: Any, _b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return s + table[h, abs(i - j)]


def _biased(s: Any, b: Any, h: Any, i: Any, j: Any, *_aux: Any) -> Any:
    return s - 0.3 * abs(i - j) + 0.1 * h - 0.2 * b


def _near(b: Any, h: Any, i: Any, j: Any, *_aux: Any) -> Any:
    return abs(i - j + h - b) < 4


_CAUSAL = {"causal": True}
_DROPOUT = {"dropout_p": 0.4, "seed": 3}
_LENGTHS = np.array([12, 5])
_PAGES = {"kv_lengths": _LENGTHS}
_TABLE = {"score_mod": _learned, "aux": (_normal(1, HQ, 32),)}
_DESCALES: dict[str, Any] = {
    "k_descale": np.array([0.01, 0.03], DTYPE),
    "v_descale": np.array([0.02, 0.05], DTYPE),
}

VALUES: dict[str, Value] = {
    "scale": Value({"scale": 0.7}, {}),
    "softcap": Value({"softcap": 0.5}, {}),
    "alibi_slopes": Value({"alibi_slopes": np.linspace(0.1, 1, HQ, dtype=DTYPE)}, {}),
    "bias": Value({"bias": _normal(2, HQ, NQ, NK)}, {}),
    "causal": Value(_CAUSAL, {}),
    "window": Value({"window": (2, 1)}, {}),
    "mask": Value({"mask": _normal(3, B, 1, NQ, NK) < 0.5}, {}),
    "block_mask": Value({"block_mask": BlockMask(_normal(4, 4, 6) < 0.3, (2, 2))}, {}),
    "kv_lengths": Value({"kv_lengths": _LENGTHS}, {}),
    "q_offset": Value(_CAUSAL | {"q_offset": np.array([0, 3])}, _CAUSAL),
    "cu_seqlens_q": Value(
        {"cu_seqlens_q": ENDS_Q, "cu_seqlens_k": ENDS_K},
        {"cu_seqlens_q": np.array([0, 6, 14]), "cu_seqlens_k": ENDS_K},
    ),
    "cu_seqlens_k": Value(
        {"cu_seqlens_q": ENDS_Q, "cu_seqlens_k": ENDS_K},
        {"cu_seqlens_q": ENDS_Q, "cu_seqlens_k": np.array([0, 12, 24])},
    ),
    "block_table": Value(
        _PAGES | {"block_table": np.array([[4, 0, 2], [1, 5, 3]])},
        _PAGES | {"block_table": np.array([[0, 1, 2], [3, 4, 5]])},
    ),
    "k_descale": Value(_DESCALES, _DESCALES | {"k_descale": np.float32(0.01)}),
    "v_descale": Value(_DESCALES, _DESCALES | {"v_descale": np.float32(0.01)}),
    "tree_mask": Value({"tree_mask": np.eye(NQ, dtype=bool)[None]}, {}),
    "prefix": Value(
        _CAUSAL | {"prefix": np.array([9, 3]), "q_offset": 0}, _CAUSAL | {"q_offset": 0}
    ),
    "origin": Value(_DROPOUT | {"origin": (1, 2, 30, 40)}, _DROPOUT),
    "sinks": Value({"sinks": np.linspace(-1, 2, HQ, dtype=DTYPE)}, {}),
    "dropout_p": Value(_DROPOUT, {}),
    "seed": Value(_DROPOUT | {"seed": 2**63 + 5}, _DROPOUT),
    "score_mod": Value({"score_mod": _biased}, {}),
    "mask_mod": Value({"mask_mod": _near}, {}),
    "aux": Value(_TABLE, _TABLE | {"aux": (np.zeros((HQ, 32), DTYPE),)}),
    "invariant": Value({"invariant": True}, {}),
}
"""By name of the option."""

EXACT = frozenset({"invariant"})
"""Options that change no exact result, only its rounding."""


class Call(NamedTuple):
    """One call of an entry: forward arrays, the upstream gradient, options."""

    q: Array
    k: Array
    v: Array
    dout: Array
    options: Mapping[str, Any]

    @property
    def is_forward_only(self) -> bool:
        """True if there are no gradients: pages and caches of 8 bits have none."""
        return not self.options.keys().isdisjoint({"block_table", "k_descale"})


def call_with(options: Mapping[str, Any]) -> Call:
    """Draw the arrays of a call: dense, packed or paged, as its options say."""
    q, k = (B, HQ, NQ), (B, HKV, NK)
    if "block_table" in options:
        k = (B * NK // PAGE, HKV, PAGE)
    if "cu_seqlens_q" in options:
        q = (1, HQ, int(ENDS_Q[-1]))
        k = k if "block_table" in options else (1, HKV, int(ENDS_K[-1]))
    rows: list[Array] = [_normal(1, *k, D), _normal(2, *k, DV)]
    if "k_descale" in options:
        rows = [(40 * x).astype(np.int8) for x in rows]
    return Call(_normal(0, *q, D), rows[0], rows[1], _normal(3, *q, DV), options)


class Results(NamedTuple):
    """Results of an entry; gradients are None for a call that has none."""

    attention: Attention
    grads: Gradients | None


Entry = Callable[[Call], Results]


def expected(call: Call) -> Results:
    """Ask the oracle."""
    rows, options = call[:3], call.options
    attention = reference.forward(*rows, **options)
    if call.is_forward_only:
        return Results(attention, None)
    return Results(attention, reference.backward(call.dout, *rows, **options))


def hold(call: Call, found: Results) -> None:
    """Compare what an entry computed with the oracle."""
    wanted = expected(call)
    assert (found.grads is None) == (wanted.grads is None)
    dout = None if call.is_forward_only else call.dout
    bounds = error_bound(*call[:3], dout, **call.options)
    assert_attention_close(found.attention, wanted.attention, bounds)
    if found.grads is not None and wanted.grads is not None:
        assert_attention_close(found.grads, wanted.grads, bounds)


# --- entries --------------------------------------------------------------------------------------


def on_arrays(backend: str) -> Entry:
    """Call ``forward`` and ``backward``."""

    def run(call: Call) -> Results:
        rows, options = call[:3], {"backend": backend, **call.options}
        attention = tileattn.forward(*rows, **options)
        if call.is_forward_only:
            return Results(attention, None)
        return Results(attention, tileattn.backward(call.dout, *rows, *attention, **options))

    return run


def on_vjp(call: Call) -> Results:
    """Call ``vjp`` and its pullback."""
    attention, pullback = tileattn.vjp(*call[:3], backend="numpy", **call.options)
    return Results(attention, pullback(call.dout))


def on_torch(transformed: Callable[[Any], Any] = lambda function: function) -> Entry:
    """Call ``tileattn.torch.attention`` under autograd, and a transformation of it."""

    def run(call: Call) -> Results:
        import torch

        from tileattn.torch import attention

        named = {**dict(zip("qkv", call[:3], strict=True)), **call.options}
        given = {name: _tensors(x) for name, x in named.items()}
        learned = [given[name] for name in "qkv"]
        learned += [given[name] for name in ("bias", "sinks") if name in given]
        learned += given.get("aux", ())
        if not call.is_forward_only:
            for x in learned:
                x.requires_grad_(x.is_floating_point())
        function = transformed(
            lambda q, k, v, more: attention(q, k, v, return_lse=True, backend="numpy", **more)
        )
        more = {name: x for name, x in given.items() if name not in "qkv"}
        out, lse = function(*learned[:3], more)
        attention_found = Attention(out.detach().numpy(), lse.detach().numpy())
        if call.is_forward_only:
            return Results(attention_found, None)
        out.backward(torch.from_numpy(call.dout))
        grads = [
            None if name not in given else given[name].grad.numpy()
            for name in ("q", "k", "v", "bias", "sinks")
        ]
        found = Gradients(*grads)
        found.daux = tuple(x.grad.numpy() for x in given["aux"]) if "aux" in given else None
        return Results(attention_found, found)

    return run


def _tensors(x: Any) -> Any:
    """Copy arrays as tensors."""
    import torch

    if isinstance(x, np.ndarray):
        return torch.from_numpy(x.copy())
    if isinstance(x, tuple) and any(isinstance(y, np.ndarray) for y in x):
        return tuple(map(_tensors, x))
    return x


def compiled(function: Any) -> Any:
    """Compile a function of tensors, as one graph."""
    import torch

    torch._dynamo.reset()  # each call is one of its own, not a recompilation of the last
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def mapped(function: Any) -> Any:
    """Map a function of tensors over a batch of calls, of which it returns the last."""
    import torch

    def run(q: Any, k: Any, v: Any, more: Any) -> Any:
        aux = more.get("aux", ())
        batch = [torch.stack((torch.zeros_like(x), x)) for x in (q, k, v, *aux)]

        def one(q: Any, k: Any, v: Any, *aux: Any) -> Any:
            return function(q, k, v, more | ({"aux": aux} if aux else {}))

        out, lse = torch.vmap(one)(*batch)
        return out[1], lse[1]

    return run


def on_jax(transformed: Callable[[Any], Any] = lambda function: function) -> Entry:
    """Call ``tileattn.jax.attention`` and its pullback, and a transformation of it."""

    def run(call: Call) -> Results:
        import jax

        from tileattn.jax import attention
        from tileattn.jax.arrays import TRACED

        arrays = {name: x for name, x in call.options.items() if name in TRACED}
        fixed = {name: x for name, x in call.options.items() if name not in TRACED}
        floating = {name: arrays.pop(name) for name in ("bias", "sinks", "aux") if name in arrays}

        def forward(rows: Any, more: Any, others: Any) -> Any:
            options = {**more, **others, **fixed}
            return attention(*rows, return_lse=True, backend="numpy", **options)

        function = transformed(forward)
        if call.is_forward_only:
            return Results(Attention(*map(np.asarray, function(call[:3], floating, arrays))), None)
        found, pullback = jax.vjp(lambda *x: function(*x, arrays), call[:3], floating)
        dlse = jax.numpy.zeros_like(found[1])
        rows, more = pullback(type(found)(jax.numpy.asarray(call.dout), dlse))
        dbias, dsinks = (
            np.asarray(more[name]) if name in more else None for name in ("bias", "sinks")
        )
        dq, dk, dv = map(np.asarray, rows)
        grads = Gradients(dq, dk, dv, dbias, dsinks)
        grads.daux = tuple(map(np.asarray, more["aux"])) if "aux" in more else None
        return Results(Attention(*map(np.asarray, found)), grads)

    return run


def jitted(function: Any) -> Any:
    """Compile a function of JAX arrays."""
    import jax

    return jax.jit(function)


def batched(function: Any) -> Any:
    """Map a function of JAX arrays over a batch of calls, of which it returns the last."""
    import jax

    def run(rows: Any, more: Any, others: Any) -> Any:
        batch = [jax.numpy.stack((jax.numpy.zeros_like(x), x)) for x in rows]
        found = jax.vmap(function, in_axes=(0, None, None))(batch, more, others)
        return jax.tree.map(lambda x: x[1], found)

    return run


ENTRIES: dict[str, Entry] = {
    "numpy": on_arrays("numpy"),
    "llvm": on_arrays("llvm"),
    "vjp": on_vjp,
    "torch": on_torch(),
    "torch.compile": on_torch(compiled),
    "torch.vmap": on_torch(mapped),
    "jax": on_jax(),
    "jax.jit": on_jax(jitted),
    "jax.vmap": on_jax(batched),
}
"""Everything that takes the options by their own names."""
