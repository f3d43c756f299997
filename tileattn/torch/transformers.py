"""Attention for the models of Hugging Face's transformers."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

try:
    from transformers.utils.versions import require_version

    require_version("transformers>=5.4")  # which asks for masks with the arguments of make_mask
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    from transformers.utils.import_utils import is_tracing
except ImportError as error:
    raise ImportError(
        "tileattn.torch.transformers needs transformers 5.4 or later: "
        "pip install 'transformers>=5.4'"
    ) from error

from tileattn.errors import UnsupportedError
from tileattn.torch.drop_in import option_of
from tileattn.torch.functional import attention, new_seed

NAME = "tileattn"


def register() -> None:
    """Let models of transformers take ``attn_implementation="tileattn"``.

    It may be called again.

    Notes
    -----
    Causal masks, sliding windows, padding, caches and packed sequences become options of the call.
    Other masks, such as those of chunks and images, are tensors of booleans, as for ``"sdpa"``.

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


# --- attention ------------------------------------------------------------------------------------

# What attention functions of transformers read and this one does not; the rest of what models pass
# on, from use_cache to the sliding_window that their masks have, changes nothing.
_REFUSED = {
    "block_indices": "it selects blocks of keys",
    "block_table": "it is of a paged cache",
    "cache": "it is of continuous batching",
    "indices": "it selects keys",
    "output_attentions": "probabilities are not computed",
    "sinks": "they are of each query, not of each head, as s_aux",
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
    """Compute the attention of a layer, as ``AttentionInterface`` asks for it.

    Parameters
    ----------
    module : torch.nn.Module
        The layer. Its ``is_causal`` counts where there is neither a mask nor an argument.
    query : torch.Tensor, shape (B, Hq, Nq, D)
        Queries.
    key : torch.Tensor, shape (B, Hkv, Nk, D)
        Keys.
    value : torch.Tensor, shape (B, Hkv, Nk, Dv)
        Values.
    attention_mask : torch.Tensor, broadcastable to (B, Hq, Nq, Nk), or None
        Booleans, True = attended, or numbers that are added to the scores.
    dropout : float
        Probability of dropping an entry. The seed comes from PyTorch's generator on the CPU.
    scaling : float or None
        Multiplies the products; None is ``1 / sqrt(D)``.
    is_causal : bool or None
        Without a mask, query i attends to keys ``j <= i``; a single query attends to all.
    position_bias : torch.Tensor, broadcastable to (B, Hq, Nq, Nk), or None
        Added to the scores; has a gradient.
    softcap : float or None
        Soft cap of the scaled products.
    s_aux : torch.Tensor, shape (Hq,), or None
        Sinks; they have a gradient.
    **others
        What models pass to all attention functions.

    Returns
    -------
    torch.Tensor, shape (B, Nq, Hq, Dv)
        The output.
    None
        In place of the probabilities.

    Raises
    ------
    UnsupportedError
        If an argument asks for what is not computed here.
    """
    for name, reason in _REFUSED.items():
        if others.get(name) is not None and others[name] is not False:
            raise UnsupportedError(
                f"{name} is given and {reason}; attn_implementation='eager' may support it"
            )
    if query.shape[0] != key.shape[0]:  # learned queries, of a batch of 1
        query = query.expand(key.shape[0], -1, -1, -1)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    if dropout:
        options |= {"dropout_p": dropout, "seed": new_seed()}
    if attention_mask is not None:
        pairs = (query.shape[0], 1, query.shape[2], key.shape[2])
        options |= _options_of(attention_mask, pairs)
    elif getattr(module, "is_causal", True) if is_causal is None else is_causal:
        options |= {"causal": True, "q_offset": 0} if query.shape[2] > 1 else {}
    if others.get("cu_seq_lens_q") is not None and options.keys().isdisjoint(("mask", "mask_mod")):
        raise UnsupportedError(
            "cu_seq_lens_q is given without a mask that separates its sequences; position_ids that "
            "start again with each sequence, without attention_mask and cache, are accepted"
        )
    if position_bias is not None:
        bias = options.get("bias")
        options["bias"] = position_bias if bias is None else position_bias + bias
    return attention(query, key, value, **options).transpose(1, 2).contiguous(), None


def _options_of(mask: torch.Tensor, pairs: Sequence[int]) -> Mapping[str, Any]:
    """Say a mask by options."""
    if isinstance(mask, StructuredMask) and mask.shape == torch.Size(pairs):
        return mask.options
    return {option_of(mask): mask}


# --- masks ----------------------------------------------------------------------------------------


class StructuredMask(torch.Tensor):  # type: ignore[misc]  # untyped
    """A boolean mask, (B, 1, Nq, Nk), known by the options of attention that mean the same.

    Its entries are computed when an operator asks for them, and that operator's result is a plain
    tensor: models may slice masks and combine them.

    Parameters
    ----------
    options : mapping
        Options of `attention`.
    dense : callable
        Makes the tensor of booleans.
    shape : sequence of int
        Shape of that tensor.
    device : torch.device
        Its device.
    """

    options: Mapping[str, Any]
    dense: Callable[[], torch.Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls: Any,
        options: Mapping[str, Any],
        dense: Callable[[], torch.Tensor],
        shape: Sequence[int],
        device: Any,
    ) -> "StructuredMask":
        mask: StructuredMask = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bool, device=device
        )
        mask.options, mask.dense = options, dense
        return mask

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on the entries."""
        given = torch.utils._pytree.tree_map_only(cls, lambda x: x.dense(), (args, kwargs or {}))
        return func(*given[0], **given[1])


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    config: Any = None,
    device: Any = "cpu",
    **others: Any,
) -> torch.Tensor:
    """Make the mask of a layer, as ``AttentionMaskInterface`` asks for it.

    Parameters
    ----------
    batch_size : int
        B.
    q_length : int
        Nq.
    kv_length : int
        Nk.
    q_offset : int or torch.Tensor
        Position of the first query.
    kv_offset : int
        Position of the first key.
    mask_function : callable
        Takes batch, head, position of the query and position of the key; says which are attended.
    attention_mask : torch.Tensor, shape (B, N), or None
        Booleans by position; False = padding.
    config : transformers.PreTrainedConfig or None
        Config of the model.
    device : torch.device or str
        Device of the mask.
    **others
        What other implementations need.

    Returns
    -------
    torch.Tensor, shape (B, 1, Nq, Nk)
        A `StructuredMask`; booleans where options cannot say the same, and under a compiler.

    Raises
    ------
    UnsupportedError
        If the model takes no attention from ``AttentionInterface``.
    """
    _check_model(config)
    options = None if is_tracing(attention_mask) else _structure(mask_function)
    if options is not None:
        q_offset = int(q_offset)  # a static cache counts on, in place
    others |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    shape = (batch_size, 1, q_length, kv_length)
    dense = partial(
        masking_utils.sdpa_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        device=device,
        **others,
    )
    if options is None:
        mask: torch.Tensor = dense()
        return mask
    seen = kv_length
    if "window" in options:
        options["q_offset"] = q_offset - kv_offset
        right = options["window"][1]
        if right is not None:  # what lies right of all windows needs no length to hide it
            seen = min(seen, options["q_offset"] + q_length + right)
    if attention_mask is not None:
        options |= _padding(attention_mask, kv_offset, kv_length, seen)
    if "kv_lengths" not in options and options.get("q_offset") == kv_length - q_length:
        del options["q_offset"]  # the default, with which a window over all keys is no window
    return StructuredMask(options, dense, shape, device)


def _check_model(config: Any) -> None:
    """Raise an error if a model would add our mask to scores of its own."""
    of_config = type(config).__module__
    of_model = of_config.replace(".configuration_", ".modeling_")
    loaded = of_model != of_config and of_model in sys.modules
    if loaded and not hasattr(sys.modules[of_model], "ALL_ATTENTION_FUNCTIONS"):
        raise UnsupportedError(
            f"a model of {type(config).__name__} takes no attention from AttentionInterface; "
            "attn_implementation='eager' is accepted"
        )


def _padding(mask: torch.Tensor, first: int, count: int, seen: int) -> dict[str, Any]:
    """Express padding by lengths where it is on the right, else by a mask of the keys.

    Nothing need be said of keys from `seen` on.
    """
    missing = max(first + count - mask.shape[1], 0)
    attended = torch.nn.functional.pad(mask, (0, missing))[:, first : first + count]
    lengths = attended.sum(1)
    if not torch.equal(attended, torch.arange(count, device=mask.device) < lengths[:, None]):
        return {"mask": attended[:, None, None, :]}
    return {} if bool((lengths >= seen).all()) else {"kv_lengths": lengths}


def _structure(mask_function: Callable[..., Any]) -> dict[str, Any] | None:
    """Express a mask function by options; None if they cannot say the same."""
    left, right = [], []
    options: dict[str, Any] = {}
    for name, held in _terms(mask_function):
        match name:
            case "causal_mask_function":
                right.append(0)
            case "sliding_window_overlay":
                left.append(held["sliding_window"] - 1)
            case "sliding_window_bidirectional_overlay":
                left.append(held["sliding_window"])
                right.append(held["sliding_window"])
            case "packed_sequence_mask_function":
                options |= {"mask_mod": _same_sequence, "aux": (held["packed_sequence_mask"],)}
            case "bidirectional_mask_function":
                pass
            case _:
                return None
    if left or right:
        options["window"] = (min(left, default=None), min(right, default=None))
    return options


def _terms(mask_function: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Take apart what transformers joins: who made each term, and the variables it holds."""
    if getattr(mask_function, "__module__", None) != masking_utils.__name__:
        yield "", {}
        return
    name = mask_function.__qualname__.partition(".")[0]
    held = inspect.getclosurevars(mask_function).nonlocals
    if name == "and_masks":
        for term in held["mask_functions"]:
            yield from _terms(term)
    elif name == "remap_positions_for_packed_sequence":
        # Within a sequence, which is where its companion lets queries attend, positions are as far
        # apart as they are in the batch.
        yield from _terms(held["mask_function"])
    else:
        yield name, held


def _same_sequence(b: Any, _h: Any, i: Any, j: Any, sequences: Any) -> Any:
    return sequences[b, i] == sequences[b, j]
