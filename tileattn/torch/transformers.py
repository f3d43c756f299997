"""An attention implementation for models of Hugging Face's transformers."""

from typing import Any

import torch

try:
    from transformers.utils.versions import require_version

    require_version("transformers>=5.4")  # the first that passes the arguments of make_mask
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.utils.output_capturing import _active_collector
except ImportError as error:
    raise ImportError(
        "tileattn.torch.transformers needs transformers 5.4 or later: "
        "pip install 'transformers>=5.4'"
    ) from error

from tileattn.errors import UnsupportedError
from tileattn.torch.drop_in import causal_options, option_of
from tileattn.torch.functional import attention, new_seed
from tileattn.torch.transformers_masks import StructuredMask, make_mask
from tileattn.torch.transformers_models import UNSUPPORTED, check_models

__all__ = ["StructuredMask", "attention_forward", "make_mask", "register"]

NAME = "tileattn"


def register() -> None:
    """Register ``attn_implementation="tileattn"`` with transformers.

    It may be called more than once.

    Notes
    -----
    Causal masks, sliding windows, padding, caches and packed sequences become options of the call.
    Other masks, such as chunked attention and images, are boolean tensors, as for ``"sdpa"``.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from tileattn.torch.transformers import register
    >>> register()
    >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    >>> config = LlamaConfig(vocab_size=64, num_hidden_layers=2, num_key_value_heads=2, **sizes)
    >>> model = LlamaForCausalLM._from_config(config, attn_implementation="tileattn")
    >>> model(torch.tensor([[5, 6, 7]])).logits.shape
    torch.Size([1, 3, 64])
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)
    check_models(NAME)


# --- attention ------------------------------------------------------------------------------------

# Arguments that other attention functions of transformers read and this one does not support. The
# other arguments that models pass, such as use_cache or sliding_window, need nothing here: the mask
# already has the window.
_REFUSED = UNSUPPORTED | {
    "block_table": "paged caches are not supported",
    "cache": "continuous batching takes attn_implementation='sdpa' inside tileattn.torch.sdpa()",
}


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of a layer; it takes the arguments of ``AttentionInterface``.

    Parameters
    ----------
    module : torch.nn.Module
        The layer. Its ``is_causal``, if it has one, is used if there is neither a mask nor the
        argument.
    query : torch.Tensor, shape (B, Hq, Nq, D)
        Queries.
    key : torch.Tensor, shape (B, Hkv, Nk, D)
        Keys.
    value : torch.Tensor, shape (B, Hkv, Nk, Dv)
        Values.
    attention_mask : torch.Tensor, broadcastable to (B, Hq, Nq, Nk), or None
        Booleans, True = attended, or numbers that are added to the scores; ``finfo.min`` masks a
        key out. A query that attends to no key has output 0.
    dropout : float
        Probability of dropping an entry. The seed comes from PyTorch's generator on the CPU.
    scaling : float or None
        Multiplies the products; None is ``1 / sqrt(D)``.
    is_causal : bool or None
        True without a mask: query i attends to keys ``j <= i``, and a single query to all keys. By
        default all queries attend to all keys, as in eager attention.
    position_bias : torch.Tensor, broadcastable to (B, Hq, Nq, Nk), or None
        Added to the scores; has a gradient.
    softcap : float or None
        Soft cap of the scaled scores.
    s_aux : torch.Tensor, shape (Hq,), or None
        Sinks; they have a gradient.
    **others
        What models pass to all attention functions.

    Returns
    -------
    torch.Tensor, shape (B, Nq, Hq, Dv)
        The output.
    None
        Stands for the probabilities, which are not computed.

    Raises
    ------
    UnsupportedError
        If probabilities are requested, or an argument is not supported.
    """
    if _wants_probabilities(module, others.get("output_attentions")):
        raise UnsupportedError(
            "output_attentions must be False: attn_implementation='tileattn' does not compute "
            "probabilities; attn_implementation='eager' returns them"
        )
    for name, reason in _REFUSED.items():
        if others.get(name) is not None and others[name] is not False:
            raise UnsupportedError(
                f"{name} must be None: {reason}; attn_implementation='eager' may support it"
            )
    if query.shape[0] != key.shape[0]:  # learned queries, with a batch of 1
        query = query.expand(key.shape[0], -1, -1, -1)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    if dropout:
        options |= {"dropout_p": dropout, "seed": new_seed()}
    if isinstance(attention_mask, StructuredMask):
        options |= attention_mask.options_of((query.shape[0], 1, query.shape[2], key.shape[2]))
    elif attention_mask is not None:
        options[option_of(attention_mask)] = attention_mask
    elif query.shape[2] > 1:
        is_causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        if is_causal:
            options |= causal_options(query, key)
    if others.get("cu_seq_lens_q") is not None and options.keys().isdisjoint(("mask", "mask_mod")):
        raise UnsupportedError(
            "cu_seq_lens_q must come with position_ids that start again with each sequence, and "
            "without attention_mask and cache: they make the mask that separates the sequences"
        )
    added = options.get("bias")
    if position_bias is not None:
        options["bias"] = position_bias if added is None else position_bias + added
    if added is None:
        out = attention(query, key, value, **options)
    else:
        out, lse = attention(query, key, value, return_lse=True, **options)
        attends_to_none = lse < torch.finfo(added.dtype).min / 2
        out = out.masked_fill(attends_to_none[..., None], 0.0)
    return out.transpose(1, 2).contiguous(), None


def _wants_probabilities(module: torch.nn.Module, output_attentions: bool | None) -> bool:
    """Return True if the model's call or its config requests probabilities."""
    collector = _active_collector  # compilers cannot read its context variable
    collected = collector.global_var if torch.compiler.is_compiling() else collector.get()
    return bool(
        output_attentions
        or any("attentions" in name for name in collected or ())
        or getattr(getattr(module, "config", None), "output_attentions", False)
    )
