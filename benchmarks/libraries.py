"""Attention libraries in a loop: each prepares a call for a step, with arguments made beforehand.

A `Step` holds the arguments of one call. Arrays are shared with PyTorch through DLPack.
"""

import ctypes
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import tileattn
from benchmarks.configurations import Call
from benchmarks.implementations import arrays, compiled_flex, to_torch
from benchmarks.report import one_line

NAMES = ("q", "k", "v")


class Step(NamedTuple):
    """The arguments of one call; q is (B, Hq, Nq, D), or (Hq, Tq, D) if sequences are packed."""

    rows: tuple[Any, ...]  # q, k, v and, if gradients are wanted, dout
    options: dict[str, Any]  # of tileattn
    number: float = 0.0  # captured by the function in options: a temperature, or a window
    longest: int = 0  # tokens of the longest packed sequence

    def without(self, *allowed: str) -> set[str]:
        """Return the options that are not among these."""
        return set(self.options) - set(allowed)


class Library(ABC):
    """One way to compute attention."""

    ours = False
    tokens_first = False  # the memory of its arrays is (B, N, H, D)

    def __init__(self, name: str) -> None:
        self.name = name

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    @abstractmethod
    def prepare(self, step: Step) -> Call | None:
        """Return the call of a step, or None if the library lacks one of its options."""

    def result(self, step: Step, xp: Any) -> list[Any]:
        """Run a step; return its output, or its gradients, as arrays with heads before tokens."""
        call = self.prepare(step)
        with self.context():
            found = arrays(call(), xp) if call else []
        return [x.swapaxes(-3, -2) for x in found] if self.tokens_first else found


class Arrays(Library):
    """The calls of tileattn on arrays."""

    ours = True

    def __init__(self, name: str, backend: str = "auto") -> None:
        super().__init__(name)
        self._backend = backend

    def prepare(self, step: Step) -> Call:
        options = step.options | {"backend": self._backend}
        q, k, v, *upstream = step.rows
        forward = partial(tileattn.forward, q, k, v, **options)
        if not upstream:
            return lambda: forward()[0]
        (dout,) = upstream

        def call() -> Any:
            out, lse = forward()
            return tuple(tileattn.backward(dout, q, k, v, out, lse, **options)[:3])

        return call


class Torch(Library):
    """A library that takes tensors of PyTorch."""

    @cached_property
    def torch(self) -> Any:
        return importlib.import_module("torch")

    @abstractmethod
    def attend(self, step: Step) -> Callable[..., Any] | None:
        """Return a function of q, k and v."""

    def tensor(self, x: Any) -> Any:
        made = to_torch(x)
        return made.transpose(-3, -2) if self.tokens_first else made

    def prepare(self, step: Step) -> Call | None:
        attend = self.attend(step)
        if attend is None:
            return None
        leaves = [self.tensor(x) for x in step.rows]
        if len(leaves) == 3:
            return partial(attend, *leaves)
        dout = leaves.pop()
        for leaf in leaves:
            leaf.requires_grad_()
        gradients = self.torch.autograd.grad
        return lambda: gradients(attend(*leaves), leaves, dout)


class TileattnTorch(Torch):
    """`tileattn.torch.attention`."""

    ours = True

    def attend(self, step: Step) -> Callable[..., Any]:
        attention = importlib.import_module("tileattn.torch").attention
        given = {n: to_torch(x) if hasattr(x, "shape") else x for n, x in step.options.items()}
        return partial(attention, **given)


class Sdpa(Torch):
    """PyTorch's scaled_dot_product_attention, by its own choice or with one of its backends."""

    def __init__(self, name: str, member: str | None = None) -> None:
        super().__init__(name)
        self._choice = importlib.import_module("torch.nn.attention")
        self._member = member

    def context(self) -> AbstractContextManager[Any]:
        if self._member is None:
            return nullcontext()
        backend = getattr(self._choice.SDPBackend, self._member)
        made: AbstractContextManager[Any] = self._choice.sdpa_kernel([backend])
        return made

    @property
    def function(self) -> Callable[..., Any]:
        made: Callable[..., Any] = self.torch.nn.functional.scaled_dot_product_attention
        return made

    def attend(self, step: Step) -> Callable[..., Any] | None:
        given = step.options
        if step.without("causal", "scale", "dropout_p", "seed", "kv_lengths", "cu_seqlens_q"):
            return None
        own = {"is_causal": given.get("causal", False), "scale": given.get("scale")}
        own["dropout_p"] = given.get("dropout_p", 0.0)
        if step.rows[0].shape[-3] != step.rows[1].shape[-3]:
            own["enable_gqa"] = True
        sdpa = partial(self.function, **own)
        if "kv_lengths" in given:
            return self._masked(sdpa, given["kv_lengths"])
        return self._one_by_one(sdpa, given["cu_seqlens_q"]) if step.longest else sdpa

    def _masked(self, sdpa: Any, lengths: Any) -> Callable[..., Any]:
        """Make the mask in the call: the lengths are new."""
        torch = self.torch
        given = to_torch(lengths) if hasattr(lengths, "shape") else lengths

        def attend(q: Any, k: Any, v: Any) -> Any:
            known = torch.as_tensor(given, device=q.device)
            mask = torch.arange(k.shape[2], device=q.device) < known[:, None]
            return sdpa(q, k, v, attn_mask=mask[:, None, None])

        return attend

    def _one_by_one(self, sdpa: Any, offsets: Any) -> Callable[..., Any] | None:
        """Call it for each packed sequence, which only small sequences on a CPU can afford."""
        if not isinstance(offsets, np.ndarray):
            return None
        sizes = np.diff(offsets).tolist()

        def attend(*rows: Any) -> Any:
            parts = zip(*(x.split(sizes, 1) for x in rows), strict=True)
            return self.torch.cat([sdpa(*(x[None] for x in part))[0] for part in parts], 1)

        return attend


class DropIn(Sdpa):
    """`tileattn.torch.scaled_dot_product_attention`, which draws a new seed in each call."""

    ours = True

    @property
    def function(self) -> Callable[..., Any]:
        made: Callable[..., Any] = importlib.import_module(
            "tileattn.torch"
        ).scaled_dot_product_attention
        return made


class VarlenAttn(Torch):
    """PyTorch's function for packed sequences."""

    tokens_first = True

    def attend(self, step: Step) -> Callable[..., Any] | None:
        if not step.longest or step.without("cu_seqlens_q", "causal"):
            return None
        function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        cu = to_torch(step.options["cu_seqlens_q"])
        given = {"cu_seq_q": cu, "cu_seq_k": cu, "max_q": step.longest, "max_k": step.longest}
        return partial(function, **given, window_size=(-1, 0))


class Flash(Torch):
    """A version of FlashAttention; its arrays are (B, N, H, D), or (T, H, D) if packed."""

    tokens_first = True
    has_dropout = False

    def attend(self, step: Step) -> Callable[..., Any] | None:
        given = step.options
        known = {"causal", "scale", "kv_lengths", "cu_seqlens_q", "mask_mod"}
        known |= {"dropout_p", "seed"} if self.has_dropout else set()
        if step.without(*known):
            return None
        own: dict[str, Any] = {"causal": given.get("causal", False) or "mask_mod" in given}
        own |= {"softmax_scale": given["scale"]} if "scale" in given else {}
        own |= {"dropout_p": given["dropout_p"]} if "dropout_p" in given else {}
        own |= {"window_size": (int(step.number) - 1, 0)} if "mask_mod" in given else {}
        if "kv_lengths" in given:
            return self._with_lengths(given["kv_lengths"], own)
        if not step.longest:
            return self.plain(own)
        cu = to_torch(given["cu_seqlens_q"])
        packs = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
        return self.packed(
            own | packs | dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), step.longest)
        )

    def _with_lengths(self, lengths: Any, own: dict[str, Any]) -> Callable[..., Any]:
        """Copy a list of lengths to the GPU in the call: the lengths are new."""
        if hasattr(lengths, "shape"):
            return self.ragged(own)(to_torch(lengths))
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
        function = self._module.flash_attn_varlen_func
        return lambda lengths: _first(partial(function, seqused_k=lengths, **own))


class FlashAttention2(FlashAttention4):
    has_dropout = True

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
        left, right = own.pop("window_size", (-1, -1))
        own |= {"window_size_left": left, "window_size_right": right}
        return lambda q, k, v: self._function(q, k, v, own)

    packed = plain

    def ragged(self, own: dict[str, Any]) -> Callable[[Any], Callable[..., Any]]:
        return lambda lengths: self.plain(own | {"seqused_k": lengths})


class Flex(Torch):
    """FlexAttention, compiled; captured numbers are tensors, which a step fills."""

    def attend(self, step: Step) -> Callable[..., Any] | None:
        if step.without("causal", "score_mod", "mask_mod") or not step.number:
            return None
        masks = importlib.import_module("torch.nn.attention.flex_attention")
        N, device = step.rows[0].shape[2], self._number.device
        make = partial(masks.create_block_mask, B=None, H=None, Q_LEN=N, KV_LEN=N, device=device)
        number, flex, blocks = self._number, compiled_flex(), None
        if "score_mod" in step.options:
            blocks = make(lambda b, h, i, j: i >= j)

        def attend(q: Any, k: Any, v: Any) -> Any:
            number.fill_(step.number)
            if blocks is None:
                return flex(q, k, v, block_mask=make(self._window))
            return flex(q, k, v, score_mod=self._temperature, block_mask=blocks)

        return attend

    @cached_property
    def _number(self) -> Any:
        device = "cuda" if self.torch.cuda.is_available() else "cpu"
        return self.torch.zeros((), device=device)

    @cached_property
    def _temperature(self) -> Any:
        number = self._number
        return lambda s, b, h, i, j: s * number

    @cached_property
    def _window(self) -> Any:
        number = self._number
        return lambda b, h, i, j: (i >= j) & (i - j < number)


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


def add_folder(folder: Path) -> None:
    """Find FlashAttention-4 among the packages in a folder, and FlashAttention-3 in fa3/_C.so."""
    sys.path[:0] = [str(folder), str(folder / "nvidia_cutlass_dsl" / "dsl_packages")]
    kernels = folder / "fa3" / "_C.so"
    if kernels.exists():
        for runtime in kernels.parent.glob("libcudart.so*"):
            ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
        importlib.import_module("torch").ops.load_library(str(kernels))


PEERS: dict[str, Callable[[], Library]] = {
    "sdpa": partial(Sdpa, "SDPA"),
    "cudnn": partial(Sdpa, "SDPA, cuDNN", "CUDNN_ATTENTION"),
    "flash": partial(Sdpa, "SDPA, flash", "FLASH_ATTENTION"),
    "efficient": partial(Sdpa, "SDPA, efficient", "EFFICIENT_ATTENTION"),
    "varlen": partial(VarlenAttn, "varlen_attn"),
    "fa2": FlashAttention2,
    "fa3": FlashAttention3,
    "fa4": FlashAttention4,
    "flex": partial(Flex, "FlexAttention"),
}
ON_CPU = ("sdpa",)


def find(names: Iterable[str]) -> tuple[list[Library], dict[str, str]]:
    """Return the libraries that can be imported, and why each of the others cannot."""
    found, missing = [], {}
    for name in names:
        try:
            found.append(PEERS[name]())
        # A package that does not fit the others installed may fail with anything.
        except Exception as error:
            missing[name] = one_line(error)
    return found, missing


def ours(on_gpu: bool) -> list[Library]:
    """Return the ways to call tileattn."""
    kinds = [Arrays("arrays")] if on_gpu else [Arrays("llvm", "llvm"), Arrays("numpy", "numpy")]
    has_torch = importlib.util.find_spec("torch") is not None
    return [*kinds, *([TileattnTorch("torch")] if has_torch else [])]
