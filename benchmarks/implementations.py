"""What is compared: tileattn, and the baselines that a user would pick instead.

An implementation turns one set of arrays into a call without arguments, forward (the output) or
backward (dq, dk, dv). Arrays are shared with PyTorch through DLPack, never copied.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

import tileattn
from benchmarks import peers
from benchmarks.configurations import DTYPES, PASSES, Call, Configuration, Inputs, Mask
from benchmarks.libraries import Library, Step, compiled_flex
from benchmarks.tensors import to_torch
from tileattn.call.block_mask import EMPTY, PARTIAL, BlockMask

HALF = ("bf16", "fp16")


class Implementation(ABC):
    """One way to compute attention."""

    name: str
    dtypes: tuple[str, ...] = tuple(DTYPES)
    passes: tuple[str, ...] = PASSES
    quadratic = False  # stores N x N probabilities, so one set of inputs exceeds the L2 cache

    def supports(self, configuration: Configuration) -> bool:
        return configuration.dtype in self.dtypes and configuration.kind in self.passes

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    @abstractmethod
    def forward(self, x: Inputs, mask: Mask) -> Call: ...

    @abstractmethod
    def backward(self, x: Inputs, mask: Mask) -> Call: ...


class Tileattn(Implementation):
    """The calls of tileattn, with any options; with ``reuse``, out is a caller-provided buffer."""

    def __init__(
        self,
        name: str = "tileattn",
        passes: tuple[str, ...] = PASSES,
        *,
        deterministic: bool = False,
        reuse: bool = True,
        **options: Any,
    ) -> None:
        self.name, self.passes = name, passes
        self._deterministic, self._reuse, self._options = deterministic, reuse, options

    def forward(self, x: Inputs, mask: Mask) -> Call:
        """Prepare ``tileattn.forward``; what it leaves unwritten is wrong, and so is noticed."""
        out = x.dout.copy() if self._reuse else None
        options = mask.options() | self._options
        call = partial(tileattn.forward, *x[:3], out=out, **options)
        return lambda: call().out

    def backward(self, x: Inputs, mask: Mask) -> Call:
        options = mask.options() | self._options
        out, lse = tileattn.forward(*x[:3], **options)
        given = (x.dout, *x[:3], out, lse)
        call = partial(tileattn.backward, *given, deterministic=self._deterministic, **options)
        return lambda: call()[:3]


class Naive(Implementation):
    """Matmul, softmax, matmul, as a user of NumPy or CuPy writes them."""

    quadratic = True

    def __init__(self, xp: Any) -> None:
        self.name, self._xp = xp.__name__, xp

    def _probabilities(self, x: Inputs, masked_out: Any) -> Any:
        s = self._xp.matmul(x.q, x.k.swapaxes(-1, -2))
        s *= s.dtype.type(x.q.shape[-1] ** -0.5)
        if masked_out is not None:
            s = self._xp.where(masked_out, s.dtype.type(-np.inf), s)
        s -= s.max(axis=-1, keepdims=True)
        self._xp.exp(s, out=s)
        s /= s.sum(axis=-1, keepdims=True)
        return s

    def _masked_out(self, x: Inputs, mask: Mask) -> Any:
        if not mask.causal and mask.window is None:
            return None
        N = x.q.shape[-2]
        left, right = mask.window or (N, 0)
        everything = self._xp.ones((N, N), bool)
        return self._xp.triu(everything, right + 1) | self._xp.tril(everything, -left - 1)

    def _repeated(self, x: Inputs) -> Inputs:
        group = x.q.shape[1] // x.k.shape[1]
        if group == 1:
            return x
        return x._replace(**{n: self._xp.repeat(getattr(x, n), group, axis=1) for n in "kv"})

    def forward(self, x: Inputs, mask: Mask) -> Call:
        """Prepare the three steps; the mask and copies of shared heads are made once."""
        masked_out, x = self._masked_out(x, mask), self._repeated(x)
        return lambda: self._xp.matmul(self._probabilities(x, masked_out), x.v)

    def backward(self, x: Inputs, mask: Mask) -> Call:
        """Prepare the gradients from the stored probabilities and copies of shared heads."""
        matmul, heads, x = self._xp.matmul, x.k.shape[1], self._repeated(x)
        p = self._probabilities(x, self._masked_out(x, mask))
        out = matmul(p, x.v)
        scale = p.dtype.type(x.q.shape[-1] ** -0.5)

        def call() -> Any:
            ds = matmul(x.dout, x.v.swapaxes(-1, -2))
            ds -= (x.dout * out).sum(axis=-1, keepdims=True)
            ds *= p
            ds *= scale
            dk, dv = matmul(ds.swapaxes(-1, -2), x.q), matmul(p.swapaxes(-1, -2), x.dout)
            return matmul(ds, x.k), *(self._summed(each, heads) for each in (dk, dv))

        return call

    @staticmethod
    def _summed(x: Any, heads: int) -> Any:
        B, H, *sizes = x.shape
        return x if heads == H else x.reshape(B, heads, H // heads, *sizes).sum(axis=2)


class Torch(Implementation):
    """A PyTorch function of three tensors, with its gradients by autograd."""

    def __init__(self) -> None:
        self._torch = importlib.import_module("torch")
        self._torch.backends.cuda.matmul.allow_tf32 = False

    @abstractmethod
    def _attend(self, q: Any, k: Any, v: Any, mask: Mask) -> Any: ...

    def forward(self, x: Inputs, mask: Mask) -> Call:
        """Prepare the call on shared memory."""
        q, k, v = map(to_torch, x[:3])
        return partial(self._attend, q, k, v, mask)

    def backward(self, x: Inputs, mask: Mask) -> Call:
        """Run the forward pass and prepare the gradients of its output."""
        q, k, v, dout = map(to_torch, x)
        leaves = [leaf.requires_grad_() for leaf in (q, k, v)]
        out = self._attend(q, k, v, mask)
        return partial(self._torch.autograd.grad, out, leaves, dout, retain_graph=True)


class NaiveTorch(Torch):
    """Matmul, softmax, matmul, as a user of PyTorch writes them."""

    name, quadratic = "pytorch", True

    def _attend(self, q: Any, k: Any, v: Any, mask: Mask) -> Any:
        if mask.causal or mask.window is not None or q.shape[1] != k.shape[1]:
            raise NotImplementedError("naive attention in PyTorch takes no mask and no groups")
        scores = self._torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
        return self._torch.matmul(self._torch.softmax(scores, -1), v)


class Flex(Torch):
    """PyTorch's ``flex_attention``, compiled, with a mask of full and empty blocks."""

    name = "flex"

    def __init__(self, blocks: BlockMask) -> None:
        super().__init__()
        if (blocks.kinds == PARTIAL).any():
            raise ValueError("blocks must have only full and empty blocks")
        self._blocks = blocks
        self._made: Any = None  # for the inputs of one measurement

    def mask(self, device: Any, lengths: tuple[int, int]) -> Any:
        """Write the mask as FlexAttention takes it: for each row the indices of its blocks."""
        attended = self._blocks.kinds != EMPTY
        order = np.argsort(~attended, axis=-1, kind="stable").astype(np.int32)
        counts, none = attended.sum(-1, dtype=np.int32), np.zeros(attended.shape[:3], np.int32)
        given = (self._torch.from_numpy(x).to(device) for x in (none, order, counts, order))
        make = importlib.import_module("torch.nn.attention.flex_attention").BlockMask
        return make.from_kv_blocks(*given, BLOCK_SIZE=self._blocks.block_size, seq_lengths=lengths)

    def _attend(self, q: Any, k: Any, v: Any, mask: Mask) -> Any:
        if mask.causal or mask.window is not None:
            raise NotImplementedError("a block mask is all that is timed")
        if self._made is None:
            self._made = self.mask(q.device, (q.shape[2], k.shape[2]))
        return compiled_flex()(q, k, v, block_mask=self._made)


class Peer(Implementation):
    """A library; its arrays may have tokens before heads, and so be copies."""

    def __init__(
        self,
        name: str,
        library: Library,
        dtypes: tuple[str, ...] = tuple(DTYPES),
        quadratic: bool = False,
    ) -> None:
        self.name, self._library, self.dtypes, self.quadratic = name, library, dtypes, quadratic

    def context(self) -> AbstractContextManager[Any]:
        return self._library.context()

    def forward(self, x: Inputs, mask: Mask) -> Call:
        return self._passes(x[:3], mask)[0]

    def backward(self, x: Inputs, mask: Mask) -> Call:
        return self._passes(tuple(x), mask)[1]

    def _passes(self, rows: tuple[Any, ...], mask: Mask) -> list[Call]:
        calls = self._library.passes(self._library.laid_out(Step(rows, mask.options())))
        if not calls:
            raise NotImplementedError(f"{self.name} has no window")
        return [partial(self._library.heads_first, call) for call in calls]


_DTYPES = {"efficient": (*HALF, "f32"), "math": tuple(DTYPES)}  # others have 16 bits only
BASELINES = ("flash", "cudnn", "efficient", "math", "fa3", "fa4", "cupy")


def find(names: Iterable[str], xp: Any) -> tuple[list[Implementation], dict[str, str]]:
    """Return the baselines that can be imported, and why each of the others cannot."""
    libraries, missing = peers.find(name for name in names if name != "cupy")
    found: list[Implementation] = [
        Peer(name, library, _DTYPES.get(name, HALF), quadratic=name == "math")
        for name, library in libraries.items()
    ]
    return [*found, *([Naive(xp)] if "cupy" in names else [])], missing
