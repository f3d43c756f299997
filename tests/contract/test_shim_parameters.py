"""Each parameter of the calls of other libraries that are computed here changes what it should.

A shim is compared with the oracle, for a value of each of its parameters. The table is read against
the signature: a parameter without a row fails.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.every_option import (
    ENDS_K,
    ENDS_Q,
    HKV,
    HQ,
    VALUES,
    Call,
    call_with,
)
from tileattn.testing import assert_attention_close, error_bound

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="it has a shim: pip install 'transformers>=5.4'")

from tileattn import Attention, reference  # noqa: E402 - PyTorch may be absent
from tileattn.torch import flash_attn, scaled_dot_product_attention  # noqa: E402 - as above
from tileattn.torch.transformers import attention_forward  # noqa: E402 - as above

Given = dict[str, Any]
SEED = 7


def value(name: str) -> Any:
    """Return the value that shows that an option of the library counts."""
    return VALUES[name].options[name]


def tensor(x: Any) -> Any:
    return torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x


def drawn_seed() -> int:
    """Return the seed that the next call draws from PyTorch's generator."""
    torch.manual_seed(SEED)
    seed = int(torch.randint(1 << 62, ()))
    torch.manual_seed(SEED)
    return seed


class Row(NamedTuple):
    """A value of a shim's parameter, and the library's options that it means.

    Parameters
    ----------
    given : dict
        Arguments of the shim besides its tensors; arrays are passed as tensors.
    options : dict
        The same as options of the library.
    """

    given: Given
    options: Given


class Shim(NamedTuple):
    """One call of another library.

    Parameters
    ----------
    function : callable
        The shim.
    run : callable
        Calls it with q, k, v in the library's layout and returns the output in that layout.
    rows : dict of str to Row
        By parameter of the shim.
    base : Row
        What each call has besides.
    others : set of str
        Parameters that take q, k and v, or have no influence on the output.
    """

    function: Callable[..., Any]
    run: Callable[..., Any]
    rows: Mapping[str, Row]
    others: set[str]
    base: Row = Row({}, {})


def _tokens_first(x: Any) -> Any:
    return x.transpose(-3, -2).contiguous()


def _run_flash(function: Any, q: Any, k: Any, v: Any, given: Given) -> Any:
    out = function(_tokens_first(q), _tokens_first(k), _tokens_first(v), **given)
    return out.transpose(-3, -2)


def _run_varlen(function: Any, q: Any, k: Any, v: Any, given: Given) -> Any:
    keys = (k, v) if "block_table" in given else (k[0], v[0])
    return _run_flash(function, q[0], *keys, given)[None]


def _run_one_tensor(function: Any, q: Any, k: Any, v: Any, given: Given) -> Any:
    qkv = torch.stack([_tokens_first(x) for x in (q, k, v)], 2)
    return function(qkv, **given).transpose(-3, -2)


def _run_two_tensors(function: Any, q: Any, k: Any, v: Any, given: Given) -> Any:
    kv = torch.stack([_tokens_first(x) for x in (k, v)], 2)
    return function(_tokens_first(q), kv, **given).transpose(-3, -2)


def _run_model(function: Any, q: Any, k: Any, v: Any, given: Given) -> Any:
    layer = given.pop("module", torch.nn.Module())
    mask = given.pop("attention_mask", None)
    return function(layer, q, k, v, mask, **given)[0].transpose(1, 2)


def _same(name: str, there: str, of_both: Any = None) -> Row:
    """Make a row of a parameter that is an option under another name."""
    x = value(name) if of_both is None else of_both
    return Row({there: x}, {name: x})


DROPOUT = Row({"dropout_p": 0.4}, {"dropout_p": 0.4})
FLASH = {
    "dropout_p": DROPOUT,
    "softmax_scale": _same("scale", "softmax_scale"),
    "causal": _same("causal", "causal"),
    "window_size": Row({"window_size": (2, -1)}, {"window": (2, None)}),
    "softcap": _same("softcap", "softcap"),
    "alibi_slopes": _same("alibi_slopes", "alibi_slopes"),
    "learnable_sink": _same("sinks", "learnable_sink"),
}
NOT_OF_THE_OUTPUT = {"deterministic", "return_attn_probs", "return_lse", "return_softmax_lse"}
PACKED = {"cu_seqlens_q": ENDS_Q, "cu_seqlens_k": ENDS_K}
PAGES = {"block_table": value("block_table")}
LENGTHS = VALUES["kv_lengths"].options["kv_lengths"]
TOP_LEFT = {"causal": True, "q_offset": 0}
OF_PAGES = {"kv_lengths": np.array([12, 5]), "cu_seqlens_q": ENDS_Q}


SHIMS: dict[str, Shim] = {
    "scaled_dot_product_attention": Shim(
        scaled_dot_product_attention,
        lambda f, q, k, v, given: f(q, k, v, **given),
        {
            "attn_mask": _same("bias", "attn_mask"),
            "attn_mask of booleans": _same("mask", "attn_mask"),
            "dropout_p": DROPOUT,
            "is_causal": Row({"is_causal": True}, TOP_LEFT),
            "scale": _same("scale", "scale"),
            "enable_gqa": Row({}, {}),
        },
        {"query", "key", "value"},
        Row({"enable_gqa": True}, {}),
    ),
    "flash_attn_func": Shim(
        flash_attn.flash_attn_func, _run_flash, FLASH, {"q", "k", "v", *NOT_OF_THE_OUTPUT}
    ),
    "flash_attn_qkvpacked_func": Shim(
        flash_attn.flash_attn_qkvpacked_func,
        _run_one_tensor,
        FLASH,
        {"qkv", *NOT_OF_THE_OUTPUT},
    ),
    "flash_attn_kvpacked_func": Shim(
        flash_attn.flash_attn_kvpacked_func,
        _run_two_tensors,
        FLASH,
        {"q", "kv", *NOT_OF_THE_OUTPUT},
    ),
    "flash_attn_varlen_func": Shim(
        flash_attn.flash_attn_varlen_func,
        _run_varlen,
        {
            **FLASH,
            "cu_seqlens_q": Row(PACKED, PACKED),
            "cu_seqlens_k": Row(PACKED, PACKED),
            "seqused_k": Row({"seqused_k": LENGTHS}, {"kv_lengths": LENGTHS}),
            "block_table": Row(
                {"block_table": PAGES["block_table"], "cu_seqlens_k": np.array([0, 12, 17])},
                {**PAGES, **OF_PAGES},
            ),
        },
        {"q", "k", "v", "max_seqlen_q", "max_seqlen_k", *NOT_OF_THE_OUTPUT},
        Row(PACKED, PACKED),
    ),
    "flash_attn_with_kvcache": Shim(
        flash_attn.flash_attn_with_kvcache,
        _run_flash,
        {
            **{name: row for name, row in FLASH.items() if name != "dropout_p"},
            "cache_seqlens": Row({"cache_seqlens": LENGTHS}, {"kv_lengths": LENGTHS}),
            "block_table": Row(
                {**PAGES, "cache_seqlens": LENGTHS}, {**PAGES, "kv_lengths": LENGTHS}
            ),
        },
        # Those from k on are held by tests/torch/test_flash_cache.py.
        {
            *{"q", "k_cache", "v_cache", "num_splits", *NOT_OF_THE_OUTPUT},
            *{"k", "v", "rotary_cos", "rotary_sin", "rotary_interleaved"},
            *{"cache_batch_idx", "cache_leftpad"},
        },
    ),
    "attention_forward": Shim(
        attention_forward,
        _run_model,
        {
            "attention_mask": _same("mask", "attention_mask"),
            "attention_mask of numbers": _same("bias", "attention_mask"),
            "dropout": Row({"dropout": 0.4}, DROPOUT.options),
            "scaling": _same("scale", "scaling"),
            "is_causal": Row({"is_causal": True}, TOP_LEFT),
            "position_bias": _same("bias", "position_bias"),
            "softcap": _same("softcap", "softcap"),
            "s_aux": _same("sinks", "s_aux"),
        },
        {"module", "query", "key", "value", "others"},
    ),
}
"""By name of the function."""

CASES = [(name, parameter) for name, shim in SHIMS.items() for parameter in shim.rows]


def call_of(shim: Shim, options: Given) -> Call:
    """Draw the arrays of a call; those in one tensor have the same shape."""
    call = call_with(options)
    if shim.run is _run_two_tensors:
        return call._replace(v=call.k[..., ::-1].copy())
    if shim.run is _run_one_tensor:
        x = call.k.repeat(HQ // HKV, 1)
        return call._replace(q=x, k=x[:, ::-1].copy(), v=x[..., ::-1].copy())
    return call


@pytest.mark.parametrize("name", SHIMS)
def test_every_parameter_has_a_row(name: str) -> None:
    shim = SHIMS[name]
    rows = {parameter.partition(" ")[0] for parameter in shim.rows}
    assert rows | shim.others >= set(inspect.signature(shim.function).parameters)
    assert rows.isdisjoint(shim.others)


@pytest.mark.parametrize(("name", "parameter"), CASES)
def test_a_parameter_means_the_option(name: str, parameter: str) -> None:
    shim, row = SHIMS[name], SHIMS[name].rows[parameter]
    options = {**shim.base.options, **row.options}
    if "block_table" in options:
        options.pop("cu_seqlens_k", None)
    if "dropout_p" in options:
        options["seed"] = drawn_seed()
    call = call_of(shim, options)
    given = {n: tensor(x) for n, x in {**shim.base.given, **row.given}.items()}
    out = shim.run(shim.function, *map(tensor, call[:3]), given).numpy()
    wanted = reference.forward(*call[:3], **options)
    bounds = error_bound(*call[:3], **options)
    assert_attention_close(Attention(out, wanted.lse), wanted, bounds, names=("out",))
