"""Attention for the models of Hugging Face's transformers."""

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from tileattn.errors import UnsupportedError
from tileattn.torch.drop_in import option_of
from tileattn.torch.functional import attention

NAME = "tileattn"

# Arguments of single models that change what is computed, and that nobody here knows.
_REFUSED = ("block_indices", "cache", "indices", "sinks")


def register() -> None:
    """Let models take ``attn_implementation="tileattn"``.

    It may be called again.

    Notes
    -----
    Masks of padding, windows, chunks and packed sequences are those that transformers makes for
    ``"sdpa"``: booleans of shape (B, 1, Nq, Nk), or none where the attention is causal or full.
    Soft caps, sinks (``s_aux``), groups of heads and T5's ``position_bias`` are options of the
    call, and dropout takes its seed from PyTorch's generator on the CPU.

    Examples
    --------
    >>> from tileattn.torch.transformers import register
    >>> register()
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    >>> config = LlamaConfig(vocab_size=64, num_hidden_layers=2, num_key_value_heads=2, **sizes)
    >>> config._attn_implementation = "tileattn"
    >>> model = LlamaForCausalLM(config)
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


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
    """Compute the attention of a layer, as ``AttentionInterface`` asks for it.

    Parameters
    ----------
    module : torch.nn.Module
        The layer; its ``is_causal`` counts where there is neither a mask nor an argument.
    query : torch.Tensor, shape (B, Hq, Nq, D)
        Queries.
    key : torch.Tensor, shape (B, Hkv, Nk, D)
        Keys.
    value : torch.Tensor, shape (B, Hkv, Nk, Dv)
        Values.
    attention_mask : torch.Tensor, broadcastable to (B, Hq, Nq, Nk), or None
        Booleans, or numbers that are added.
    dropout : float
        Probability of dropping an entry.
    scaling : float or None
        Multiplies the products.
    is_causal : bool or None
        Whether query i attends to keys up to i, where there is no mask.
    position_bias : torch.Tensor, broadcastable to (B, Hq, Nq, Nk), or None
        Added to the scores; has a gradient.
    softcap : float or None
        Caps the scaled products.
    s_aux : torch.Tensor, shape (Hq,), or None
        Sinks.
    **others
        What other implementations need.

    Returns
    -------
    torch.Tensor, shape (B, Nq, Hq, Dv)
        The output.
    None
        In place of the probabilities, which are not computed.

    Raises
    ------
    UnsupportedError
        If probabilities are asked for, or an argument is one that only its model knows.
    """
    if others.get("output_attentions"):
        raise UnsupportedError(
            "output_attentions is True, and probabilities are not computed; "
            "attn_implementation='eager' computes them"
        )
    for name in _REFUSED:
        if others.get(name) is not None:
            raise UnsupportedError(f"{name} is given; attn_implementation='eager' may take it")
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    if dropout:
        options |= {"dropout_p": dropout, "seed": torch.randint(1 << 62, ())}
    if attention_mask is not None:
        options[option_of(attention_mask)] = attention_mask
    elif getattr(module, "is_causal", True) if is_causal is None else is_causal:
        # A cache that was filled ahead has more keys than queries; one query attends to all.
        options |= {"causal": True, "q_offset": 0} if query.shape[2] > 1 else {}
    if position_bias is not None:
        added = options.get("bias")
        options["bias"] = position_bias if added is None else position_bias + added
    return attention(query, key, value, **options).transpose(1, 2).contiguous(), None
