"""Masks of transformers: options of attention where they can say the same, else tensors."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

from tileattn.errors import UnsupportedError
from tileattn.torch.drop_in import option_of

# Classes of configs of models that add masks to scores, as eager attention does. Others take
# booleans, as ``"sdpa"`` does.
ADDITIVE: set[type] = set()

# Operators that make numbers of booleans, in place or not.
_ARITHMETIC = frozenset({"add", "sub", "rsub", "mul", "div", "cat", "stack", "copy", "_to_copy"})


class StructuredMask(torch.Tensor):  # type: ignore[misc]  # untyped
    """A mask, (B, 1, Nq, Nk), known by the options of attention that mean the same.

    Its entries are booleans, True = attended, or the numbers that eager attention adds to its
    scores. They are computed when an operator asks for them, and that operator's result is a plain
    tensor: models may slice masks, combine them and write to them.

    Parameters
    ----------
    options : mapping
        Options of `attention`.
    dense : callable
        Makes the tensor of entries.
    shape : sequence of int
        Shape of that tensor.
    dtype : torch.dtype
        Its dtype.
    device : torch.device
        Its device.

    Raises
    ------
    UnsupportedError
        If numbers are made of booleans, which are no numbers to add to scores.
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
        dtype: torch.dtype,
        device: Any,
    ) -> "StructuredMask":
        mask: StructuredMask = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device
        )
        mask.options, mask.dense = options, dense
        return mask

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on the entries."""
        given = torch.utils._pytree.tree_map_only(cls, cls.entries, (args, kwargs or {}))
        result = func(*given[0], **given[1])
        masks = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, cls)]
        is_arithmetic = func.__name__.partition(".")[0].rstrip("_") in _ARITHMETIC
        are_booleans = any(mask.dtype is torch.bool for mask in masks)
        if is_arithmetic and are_booleans and result.is_floating_point():
            raise UnsupportedError(
                "the model computes with the attention mask as with numbers, but "
                "attn_implementation='tileattn' gave it booleans, as 'sdpa' does; use "
                "attn_implementation='eager', or set _supports_sdpa = False in the model"
            )
        for argument, x in zip(func._schema.arguments, args, strict=False):
            if isinstance(x, cls) and argument.alias_info is not None:  # something may write to it
                x.options = x.options_of(None)
        return result

    def entries(self) -> torch.Tensor:
        """Return the tensor of entries. It is made once, so that writes to it stay."""
        if not hasattr(self, "_entries"):
            self._entries = self.dense().contiguous()
        return self._entries

    def options_of(self, pairs: Sequence[int] | None) -> Mapping[str, Any]:
        """Return the options if they are for these pairs of queries and keys; else the entries."""
        fits = pairs is not None and self.shape == torch.Size(pairs)
        return self.options if fits else {option_of(self): self.entries()}


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    config: Any = None,
    dtype: torch.dtype = torch.float32,
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
        Config of the model, which says whether it takes booleans or numbers.
    dtype : torch.dtype
        Dtype of numbers.
    device : torch.device or str
        Device of the mask.
    **others
        What other implementations need.

    Returns
    -------
    torch.Tensor, shape (B, 1, Nq, Nk)
        A `StructuredMask`; under a compiler its entries.
    """
    others |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    given: dict[str, Any] = {
        **{"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length},
        **{"q_offset": q_offset, "kv_offset": kv_offset, "mask_function": mask_function},
        **{"attention_mask": attention_mask, "device": device, "dtype": dtype, **others},
    }
    adds = type(config) in ADDITIVE
    make = masking_utils.eager_mask if adds else masking_utils.sdpa_mask
    if is_tracing(attention_mask):
        mask: torch.Tensor = make(**given)
        return mask
    given["q_offset"] = q_offset = int(q_offset)  # a static cache counts on, in place
    options = _structure(mask_function)
    if options is None:
        booleans = masking_utils.sdpa_mask(**given)
        options = {"mask": booleans}
        dense = partial(_numbers, booleans, dtype) if adds else booleans.clone
    else:
        # Operators of the mask cannot use vmap, which index arithmetic does not need.
        dense = partial(make, **given | {"use_vmap": False})
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
    shape = (batch_size, 1, q_length, kv_length)
    return StructuredMask(options, dense, shape, dtype if adds else torch.bool, device)


def _numbers(booleans: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the entries that eager attention adds to its scores."""
    zero = torch.zeros((), dtype=dtype, device=booleans.device)
    return torch.where(booleans, zero, torch.finfo(dtype).min)


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
