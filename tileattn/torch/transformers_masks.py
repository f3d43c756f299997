"""Masks of transformers as options of attention if possible, otherwise as tensors."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

from tileattn.errors import UnsupportedError
from tileattn.torch.drop_in import option_of

# Config classes of models that add masks to scores, as eager attention does. Other models use
# boolean masks, as with ``"sdpa"``.
ADDITIVE: set[type] = set()

# Operators whose result is numbers if a boolean mask is among their inputs, in place or not.
_ARITHMETIC = frozenset({"add", "sub", "rsub", "mul", "div", "cat", "stack", "copy", "_to_copy"})


class StructuredMask(torch.Tensor):  # type: ignore[misc]  # untyped
    """A mask, (B, 1, Nq, Nk), that carries the equivalent options of attention.

    Its entries are booleans, True = attended, or the numbers that eager attention adds to scores.
    They are computed when an operator reads them, and the operator returns a plain tensor: models
    may slice masks, combine them and write to them.

    Parameters
    ----------
    options : mapping
        Options of `attention`.
    dense : callable
        Makes the tensor of entries.
    shape : sequence of int
        Shape of the mask.
    dtype : torch.dtype
        Dtype of the entries.
    device : torch.device
        Device of the entries.

    Raises
    ------
    UnsupportedError
        If the model computes numbers with boolean entries, as if it could add them to scores.
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
                "the model computes with the attention mask as if it were numbers, but "
                "attn_implementation='tileattn' makes boolean masks, as 'sdpa' does; use "
                "attn_implementation='eager', or set _supports_sdpa = False in the model"
            )
        for argument, x in zip(func._schema.arguments, args, strict=False):
            if isinstance(x, cls) and argument.alias_info is not None:  # the result may be written
                x.options = x.options_of(None)
        return result

    def entries(self) -> torch.Tensor:
        """Return the tensor of entries; it is made once, so that writes to it persist."""
        if not hasattr(self, "_entries"):
            self._entries = self.dense().contiguous()
        return self._entries

    def options_of(self, pairs: Sequence[int] | None) -> Mapping[str, Any]:
        """Return the options if the mask has this shape (B, 1, Nq, Nk), else the entries."""
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
    """Make the mask of a layer; it takes the arguments of ``AttentionMaskInterface``.

    Parameters
    ----------
    batch_size : int
        Number of sequences, B.
    q_length : int
        Number of queries, Nq.
    kv_length : int
        Number of keys, Nk.
    q_offset : int or torch.Tensor
        Position of the first query.
    kv_offset : int
        Position of the first key.
    mask_function : callable
        Takes indices of batch and head and positions of query and key; True = attended.
    attention_mask : torch.Tensor, shape (B, N), or None
        Booleans by position; False = padding.
    config : transformers.PreTrainedConfig or None
        Config of the model; its class decides between booleans and numbers.
    dtype : torch.dtype
        Dtype of numbers.
    device : torch.device or str
        Device of the mask.
    **others
        Arguments for other implementations.

    Returns
    -------
    torch.Tensor, shape (B, 1, Nq, Nk)
        A `StructuredMask`; under a compiler, a plain tensor.
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
    given["q_offset"] = q_offset = int(q_offset)  # a static cache increments its tensor in place
    options = _structure(mask_function)
    if options is None:
        booleans = masking_utils.sdpa_mask(**given)
        options = {"mask": booleans}
        dense = partial(_numbers, booleans, dtype) if adds else booleans.clone
    else:
        # Inside __torch_dispatch__ vmap does not work; plain index arithmetic does.
        dense = partial(make, **given | {"use_vmap": False})
        seen = kv_length
        if "window" in options:
            options["q_offset"] = q_offset - kv_offset
            right = options["window"][1]
            if right is not None:  # windows already mask out the keys to the right of the last one
                seen = min(seen, options["q_offset"] + q_length + right)
        if attention_mask is not None:
            options |= _padding(attention_mask, kv_offset, kv_length, seen)
        if "kv_lengths" not in options and options.get("q_offset") == kv_length - q_length:
            del options["q_offset"]  # the default; a window over all keys is then dropped
    shape = (batch_size, 1, q_length, kv_length)
    return StructuredMask(options, dense, shape, dtype if adds else torch.bool, device)


def _numbers(booleans: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Make the numbers that eager attention adds to scores."""
    zero = torch.zeros((), dtype=dtype, device=booleans.device)
    return torch.where(booleans, zero, torch.finfo(dtype).min)


def _padding(mask: torch.Tensor, first: int, count: int, seen: int) -> dict[str, Any]:
    """Express padding on the right by lengths, and other padding by a mask of the keys.

    The window already masks out the keys from ``seen`` on.
    """
    if mask.shape[1] >= first + seen and bool(mask.all()):
        return {}
    missing = max(first + count - mask.shape[1], 0)
    attended = torch.nn.functional.pad(mask, (0, missing))[:, first : first + count]
    lengths = attended.sum(1)
    if not torch.equal(attended, torch.arange(count, device=mask.device) < lengths[:, None]):
        return {"mask": attended[:, None, None, :]}
    return {} if bool((lengths >= seen).all()) else {"kv_lengths": lengths}


def _structure(mask_function: Callable[..., Any]) -> dict[str, Any] | None:
    """Return the options that are equivalent to a mask function; None if there are none."""
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
    """Split a combined mask function into terms: the function that made each, and its closure."""
    if getattr(mask_function, "__module__", None) != masking_utils.__name__:
        yield "", {}
        return
    name = mask_function.__qualname__.partition(".")[0]
    held = inspect.getclosurevars(mask_function).nonlocals
    if name == "and_masks":
        for term in held["mask_functions"]:
            yield from _terms(term)
    elif name == "remap_positions_for_packed_sequence":
        # Another term restricts attention to one sequence, and inside a sequence the remapped
        # positions have the same distances.
        yield from _terms(held["mask_function"])
    else:
        yield name, held


def _same_sequence(b: Any, _h: Any, i: Any, j: Any, sequences: Any) -> Any:
    return sequences[b, i] == sequences[b, j]
