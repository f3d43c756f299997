"""FlashAttention, versions 2 to 4, as libraries of the benchmarks."""

import importlib
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.libraries import NAMES, Step, Torch

OPTIONS = ("causal", "scale", "softcap", "window", "kv_lengths", "block_table", "cu_seqlens_q")


class Flash(Torch):
    """A version of FlashAttention; its arrays are (B, N, H, D), or (T, H, D) if packed."""

    tokens_first = True
    has_dropout = False
    table = "page_table"  # its name of a block table

    def attend(self, step: Step) -> Callable[..., Any] | None:
        drops = ("dropout_p", "seed") if self.has_dropout else ()
        if step.learned or step.without("mask_mod", *OPTIONS, *drops):
            return None
        given, own = step.options, self._own(step)
        if "kv_lengths" in given:
            return self._with_lengths(given["kv_lengths"], own)
        if not step.longest:
            return self.plain(own)
        packs = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), given["cu_seqlens_q"])
        longest = dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), step.longest)
        return self.packed(own | packs | longest)

    def _own(self, step: Step) -> dict[str, Any]:
        """Translate the options; a mask function of a loop is a causal window."""
        given = step.options
        names = {"scale": "softmax_scale", "window": "window_size", "block_table": self.table}
        kept = (*names, "softcap", "dropout_p")
        own = {names.get(n, n): given[n] for n in kept if given.get(n) is not None}
        own["causal"] = given.get("causal", False) or "mask_mod" in given
        return own | ({"window_size": (int(step.number) - 1, 0)} if "mask_mod" in given else {})

    def _with_lengths(self, lengths: Any, own: dict[str, Any]) -> Callable[..., Any]:
        """Copy a list of lengths to the GPU in the call: the lengths are new."""
        if not isinstance(lengths, list):
            return self.ragged(own)(lengths)
        make, ragged = self.torch.tensor, self.ragged(own)

        def attend(*rows: Any) -> Any:
            return ragged(make(lengths, dtype=self.torch.int32, device=rows[0].device))(*rows)

        return attend

    @abstractmethod
    def plain(self, own: dict[str, Any]) -> Callable[..., Any]: ...

    @abstractmethod
    def packed(self, own: dict[str, Any]) -> Callable[..., Any]: ...

    @abstractmethod
    def ragged(self, own: dict[str, Any]) -> Callable[[Any], Callable[..., Any]]:
        """Return a function of lengths that returns a function of q, k and v."""


class FlashAttention4(Flash):
    """FlashAttention-4, or FlashAttention-2 with the same arguments."""

    def __init__(self, name: str = "FlashAttention-4", module: str = "flash_attn.cute") -> None:
        super().__init__(name)
        self._module = importlib.import_module(module)

    def plain(self, own: dict[str, Any]) -> Callable[..., Any]:
        return _first(partial(self._module.flash_attn_func, **own))

    def packed(self, own: dict[str, Any]) -> Callable[..., Any]:
        return _first(partial(self._module.flash_attn_varlen_func, **own))

    def ragged(self, own: dict[str, Any]) -> Callable[[Any], Callable[..., Any]]:
        return lambda lengths: self.packed(own | {"seqused_k": lengths})


class FlashAttention2(FlashAttention4):
    has_dropout = True
    table = "block_table"

    def __init__(self) -> None:
        super().__init__("FlashAttention-2", "flash_attn")
        self._module.flash_attn_func  # noqa: B018 - FlashAttention-4 has a package of this name

    def ragged(self, own: dict[str, Any]) -> Callable[[Any], Callable[..., Any]]:
        function = self._module.flash_attn_with_kvcache
        return lambda lengths: partial(function, cache_seqlens=lengths, **own)


class FlashAttention3(Flash):
    """The operators of FlashAttention-3, with gradients."""

    def __init__(self) -> None:
        super().__init__("FlashAttention-3")
        if not hasattr(self.torch.ops.flash_attn_3, "fwd"):
            importlib.import_module("flash_attn_interface")
        self._function = _differentiable(self.torch)

    def plain(self, own: dict[str, Any]) -> Callable[..., Any]:
        own = dict(own)
        own["is_causal"] = own.pop("causal")
        left, right = own.pop("window_size", (None, None))
        sides = {"window_size_left": left, "window_size_right": right}
        own |= {name: -1 if side is None else side for name, side in sides.items()}
        return lambda q, k, v: self._function(q, k, v, own)

    packed = plain

    def ragged(self, own: dict[str, Any]) -> Callable[[Any], Callable[..., Any]]:
        return lambda lengths: self.plain(own | {"seqused_k": lengths})


def _first(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the output of a function that may return the logsumexp, too."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        out = function(q, k, v)
        return out[0] if isinstance(out, tuple) else out

    return attend


def _differentiable(torch: Any) -> Any:
    """Return FlashAttention-3 as a function of autograd."""
    library = torch.ops.flash_attn_3

    class Function(torch.autograd.Function):  # type: ignore[misc,unused-ignore]  # it is untyped
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, own: dict[str, Any]) -> Any:
            out, lse, *_ = library.fwd(q, k, v, **own)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.own = own
            return out

        @staticmethod
        def backward(ctx: Any, dout: Any) -> Any:
            saved = ctx.saved_tensors
            into = {f"d{n}": torch.empty_like(x) for n, x in zip(NAMES, saved[:3], strict=True)}
            library.bwd(dout, *saved, **into, **ctx.own)
            return *into.values(), None

    return Function.apply
