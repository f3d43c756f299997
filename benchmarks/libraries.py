"""Attention libraries: each prepares the calls of a step, whose arguments are made beforehand.

A `Step` holds the arguments of one call. Arrays are shared with PyTorch through DLPack.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import tileattn
from benchmarks.configurations import Call
from benchmarks.tensors import arrays, to_torch

NAMES = ("q", "k", "v")


class Step(NamedTuple):
    """The arguments of one call; q is (B, Hq, Nq, D), or (Hq, Tq, D) if sequences are packed."""

    rows: tuple[Any, ...]  # q, k, v and, if gradients are wanted, dout
    options: dict[str, Any]  # of tileattn
    number: float = 0.0  # captured by the function in options: a temperature, or a window
    longest: int = 0  # tokens of the longest packed sequence
    learned: tuple[str, ...] = ()  # options whose gradients are wanted, too

    def without(self, *allowed: str) -> set[str]:
        """Return the options that are not among these."""
        return set(self.options) - set(allowed)

    @property
    def lengths(self) -> tuple[int, int]:
        """Return the number of queries and of keys."""
        return self.rows[0].shape[-2], self.rows[1].shape[-2]

    @property
    def is_grouped(self) -> bool:
        return bool(self.rows[0].shape[-3] != self.rows[1].shape[-3])


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
        """Return one call of all passes of a step, or None if the library lacks an option."""

    @abstractmethod
    def passes(self, step: Step) -> list[Call]:
        """Return a call of each pass; none if the library lacks an option."""

    def result(self, step: Step, xp: Any) -> list[Any]:
        """Run a step; return its output, or its gradients, as arrays with heads before tokens."""
        call = self.prepare(step)
        with self.context():
            return arrays(self.heads_first(call), xp) if call else []

    def laid_out(self, step: Step) -> Step:
        """Return a step whose memory has the order of the library's arrays."""
        if not self.tokens_first:
            return step
        return step._replace(rows=tuple(map(tokens_first, step.rows)))

    def heads_first(self, call: Call) -> Any:
        """Call; return an array or tensor, or a tuple of them, with heads before tokens."""
        found = call()
        if not self.tokens_first:
            return found
        if isinstance(found, tuple):
            return tuple(x.swapaxes(-3, -2) for x in found)
        return found.swapaxes(-3, -2)


class Arrays(Library):
    """The calls of tileattn on arrays."""

    ours = True

    def __init__(self, name: str, backend: str = "auto") -> None:
        super().__init__(name)
        self._backend = backend

    def prepare(self, step: Step) -> Call:
        forward, backward = self._calls(step)
        return (lambda: backward(*forward())) if len(step.rows) == 4 else lambda: forward()[0]

    def passes(self, step: Step) -> list[Call]:
        forward, backward = self._calls(step)
        calls: list[Call] = [lambda: forward()[0]]
        return [*calls, partial(backward, *forward())] if len(step.rows) == 4 else calls

    def _calls(self, step: Step) -> tuple[Call, Callable[..., Any]]:
        options = step.options | {"backend": self._backend}
        q, k, v, *upstream = step.rows
        wrt = (*NAMES, *step.learned)

        def backward(out: Any, lse: Any) -> Any:
            found = tileattn.backward(upstream[0], q, k, v, out, lse, wrt=wrt, **options)
            return tuple(getattr(found, f"d{name}") for name in wrt)

        return partial(tileattn.forward, q, k, v, **options), backward


class Torch(Library):
    """A library that takes tensors of PyTorch."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.torch: Any = importlib.import_module("torch")

    @abstractmethod
    def attend(self, step: Step) -> Callable[..., Any] | None:
        """Return a function of q, k and v; arrays in the options are tensors."""

    def tensor(self, x: Any) -> Any:
        made = to_torch(x)
        return made.transpose(-3, -2) if self.tokens_first else made

    def prepare(self, step: Step) -> Call | None:
        attend, leaves, upstream = self._made(step)
        if attend is None or not upstream:
            return attend
        gradients = self.torch.autograd.grad
        return lambda: gradients(attend(), leaves, upstream)

    def passes(self, step: Step) -> list[Call]:
        """Prepare each pass: the forward pass of inference, the backward pass of one output."""
        attend, leaves, upstream = self._made(step)
        if attend is None:
            return []
        forward = self.torch.no_grad()(attend)
        if not upstream:
            return [forward]
        gradients = partial(self.torch.autograd.grad, attend(), leaves, upstream)
        return [forward, partial(gradients, retain_graph=True)]

    def _made(self, step: Step) -> tuple[Call | None, list[Any], list[Any]]:
        """Return the forward pass, and the tensors with gradients and the upstream gradient."""
        given = {n: to_torch(x) if is_array(x) else x for n, x in step.options.items()}
        attend = self.attend(step._replace(options=given))
        if attend is None:
            return None, [], []
        leaves, upstream = ([*map(self.tensor, x)] for x in (step.rows[:3], step.rows[3:]))
        call = partial(attend, *leaves)
        leaves += [given[name] for name in step.learned]
        for leaf in leaves if upstream else ():
            leaf.requires_grad_()
        return call, leaves, upstream


def is_array(x: Any) -> bool:
    return hasattr(x, "__dlpack__")


def tokens_first(x: Any) -> Any:
    """Copy (..., H, N, D) to memory of the order (..., N, H, D), unless it has that."""
    swapped = x.swapaxes(-3, -2)
    return (swapped if swapped.flags.c_contiguous else swapped.copy(order="C")).swapaxes(-3, -2)


class TileattnTorch(Torch):
    """`tileattn.torch.attention`."""

    ours = True

    def attend(self, step: Step) -> Callable[..., Any]:
        attention = importlib.import_module("tileattn.torch").attention
        return partial(attention, **step.options)


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
        masks = step.options.keys() & {"bias", "mask", "kv_lengths", "causal"}
        known = {"scale", "dropout_p", "seed", "cu_seqlens_q", "causal", *masks}
        if step.without(*known) or len(masks) > 1:
            return None
        given = step.options
        own = {"scale": given.get("scale"), "dropout_p": given.get("dropout_p", 0.0)}
        own |= {"enable_gqa": True} if step.is_grouped else {}
        dense = [given[name] for name in ("bias", "mask") if name in given]
        own |= {"attn_mask": dense[0]} if dense else {}
        own |= self._causal(step) if given.get("causal") else {}
        sdpa = partial(self.function, **own)
        if "kv_lengths" in given:
            return self._masked(sdpa, given["kv_lengths"])
        return self._one_by_one(sdpa, given["cu_seqlens_q"]) if step.longest else sdpa

    def _causal(self, step: Step) -> dict[str, Any]:
        """Give a mask where the lengths differ: PyTorch aligns its own at the top left."""
        if len(set(step.lengths)) == 1:
            return {"is_causal": True}
        Nq, Nk = step.lengths
        ones = self.torch.ones(Nq, Nk, dtype=self.torch.bool, device=to_torch(step.rows[0]).device)
        return {"attn_mask": ones.tril(Nk - Nq)}

    def _masked(self, sdpa: Any, lengths: Any) -> Callable[..., Any]:
        """Make the mask in the call: the lengths are new."""
        torch = self.torch

        def attend(q: Any, k: Any, v: Any) -> Any:
            known = torch.as_tensor(lengths, device=q.device)
            mask = torch.arange(k.shape[2], device=q.device) < known[:, None]
            return sdpa(q, k, v, attn_mask=mask[:, None, None])

        return attend

    def _one_by_one(self, sdpa: Any, offsets: Any) -> Callable[..., Any] | None:
        """Call it for each packed sequence, which only small sequences on a CPU can afford."""
        if offsets.is_cuda:
            return None
        sizes = offsets.diff().tolist()

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
        cu = step.options["cu_seqlens_q"]
        given = {"cu_seq_q": cu, "cu_seq_k": cu, "max_q": step.longest, "max_k": step.longest}
        window = (-1, 0 if step.options.get("causal") else -1)
        return partial(function, **given, window_size=window)


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


@cache
def compiled_flex() -> Any:
    """Compile the function once for all masks: uncompiled, it ignores the blocks."""
    function = importlib.import_module("torch.nn.attention.flex_attention").flex_attention
    return importlib.import_module("torch").compile(function)
