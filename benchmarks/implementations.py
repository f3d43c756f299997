"""What is compared: tileattn, and the baselines that a user would pick instead.

An implementation turns one set of arrays into a call without arguments, forward (the output) or
backward (dq, dk, dv). Arrays are shared with PyTorch through DLPack, never copied.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import ml_dtypes
import numpy as np

import tileattn
from benchmarks.configurations import DTYPES, PASSES, Call, Configuration, Inputs, Mask
from benchmarks.report import one_line
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

    def _tensor(self, x: Any) -> Any:
        return to_torch(x)

    def _array(self, tensor: Any) -> Any:
        return tensor

    def forward(self, x: Inputs, mask: Mask) -> Call:
        """Prepare the call on shared memory."""
        q, k, v = map(self._tensor, x[:3])
        return lambda: self._array(self._attend(q, k, v, mask))

    def backward(self, x: Inputs, mask: Mask) -> Call:
        """Run the forward pass and prepare the gradients of its output."""
        q, k, v, dout = map(self._tensor, x)
        leaves = [leaf.requires_grad_() for leaf in (q, k, v)]
        out = self._attend(q, k, v, mask)
        gradients = partial(self._torch.autograd.grad, out, leaves, dout, retain_graph=True)
        return lambda: tuple(map(self._array, gradients()))


class NaiveTorch(Torch):
    """Matmul, softmax, matmul, as a user of PyTorch writes them."""

    name, quadratic = "pytorch", True

    def _attend(self, q: Any, k: Any, v: Any, mask: Mask) -> Any:
        if mask.causal or mask.window is not None or q.shape[1] != k.shape[1]:
            raise NotImplementedError("naive attention in PyTorch takes no mask and no groups")
        scores = self._torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
        return self._torch.matmul(self._torch.softmax(scores, -1), v)


class Sdpa(Torch):
    """PyTorch's ``scaled_dot_product_attention``, restricted to one backend where it is named."""

    def __init__(
        self,
        name: str = "torch",
        member: str | None = None,
        dtypes: tuple[str, ...] = tuple(DTYPES),
        quadratic: bool = False,
    ) -> None:
        super().__init__()
        self.name, self.dtypes, self.quadratic = name, dtypes, quadratic
        self._choice = importlib.import_module("torch.nn.attention")
        self._backends = [getattr(self._choice.SDPBackend, member)] if member else []

    def context(self) -> AbstractContextManager[Any]:
        """Restrict PyTorch to the backend; it raises where that does not support a call."""
        if not self._backends:
            return nullcontext()
        restricted: AbstractContextManager[Any] = self._choice.sdpa_kernel(self._backends)
        return restricted

    def _attend(self, q: Any, k: Any, v: Any, mask: Mask) -> Any:
        if mask.window is not None:
            raise NotImplementedError("scaled_dot_product_attention has no window")
        attend = self._torch.nn.functional.scaled_dot_product_attention
        grouped = q.shape[1] != k.shape[1]
        return attend(q, k, v, is_causal=mask.causal, enable_gqa=grouped)


class FlashAttention4(Torch):
    """FlashAttention-4's kernels, which take (B, N, H, D) and so get contiguous copies of that."""

    name, dtypes = "fa4", HALF

    def __init__(self) -> None:
        super().__init__()
        self._function = importlib.import_module("flash_attn.cute").flash_attn_func

    def _tensor(self, x: Any) -> Any:
        return to_torch(x).transpose(1, 2).contiguous()

    def _array(self, tensor: Any) -> Any:
        return tensor.transpose(1, 2)

    def _attend(self, q: Any, k: Any, v: Any, mask: Mask) -> Any:
        window = mask.window or (None, None)
        out = self._function(q, k, v, causal=mask.causal, window_size=window)
        return out[0] if isinstance(out, tuple) else out


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


@cache
def compiled_flex() -> Any:
    """Compile the function once for all masks: uncompiled, it ignores the blocks."""
    function = importlib.import_module("torch.nn.attention.flex_attention").flex_attention
    return importlib.import_module("torch").compile(function)


_SDPA = {
    "flash": ("FLASH_ATTENTION", HALF, False),
    "cudnn": ("CUDNN_ATTENTION", HALF, False),
    "efficient": ("EFFICIENT_ATTENTION", (*HALF, "f32"), False),
    "math": ("MATH", tuple(DTYPES), True),
}

BASELINES = (*_SDPA, "fa4", "cupy")


def _make(name: str, xp: Any) -> Implementation:
    if name == "cupy":
        return Naive(xp)
    return FlashAttention4() if name == "fa4" else Sdpa(name, *_SDPA[name])


def find(names: Iterable[str], xp: Any) -> tuple[list[Implementation], dict[str, str]]:
    """Return the baselines that can be imported, and why each of the others cannot."""
    found, missing = [], {}
    for name in names:
        try:
            found.append(_make(name, xp))
        # A package that does not fit the others installed may fail with anything.
        except Exception as error:
            missing[name] = one_line(error)
    return found, missing


def to_torch(x: Any) -> Any:
    """Share an array with PyTorch; bfloat16, which DLPack may not carry, goes as int16."""
    torch = importlib.import_module("torch")
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(x)


def arrays(result: Any, xp: Any) -> list[Any]:
    """Share what a call returned, one array or tensor or a tuple of them, with the library."""
    given = result if isinstance(result, tuple) else (result,)
    return [x if isinstance(x, xp.ndarray) else _from_torch(x.detach(), xp) for x in given]


def _from_torch(tensor: Any, xp: Any) -> Any:
    torch = importlib.import_module("torch")
    if tensor.dtype == torch.bfloat16:
        return xp.from_dlpack(tensor.view(torch.int16)).view(ml_dtypes.bfloat16)
    return xp.from_dlpack(tensor)
