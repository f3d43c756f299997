"""FlexAttention under a block mask: what users of PyTorch have for block-sparse attention."""

import importlib
from functools import cache
from typing import Any

import numpy as np

from benchmarks.gpu_peers import Mask, Torch
from tileattn.algorithm.block_mask import EMPTY, PARTIAL, BlockMask


class Flex(Torch):
    """PyTorch's ``flex_attention``, compiled, with a mask of whole blocks.

    Parameters
    ----------
    blocks : BlockMask
        The mask, without blocks that are partly seen.
    """

    name = "flex"

    def __init__(self, blocks: BlockMask) -> None:
        super().__init__()
        if (blocks.kinds == PARTIAL).any():
            raise ValueError("blocks has some that are partly seen; whole ones are accepted")
        self._blocks = blocks
        self._made: Any = None  # for the inputs of one measurement

    def mask(self, device: Any, lengths: tuple[int, int]) -> Any:
        """Write the mask as FlexAttention takes it: for each row the numbers of its blocks."""
        seen = self._blocks.kinds != EMPTY
        order = np.argsort(~seen, axis=-1, kind="stable").astype(np.int32)
        counts, none = seen.sum(-1, dtype=np.int32), np.zeros(seen.shape[:3], np.int32)
        given = (self._torch.from_numpy(x).to(device) for x in (none, order, counts, order))
        make = importlib.import_module("torch.nn.attention.flex_attention").BlockMask
        return make.from_kv_blocks(*given, BLOCK_SIZE=self._blocks.block_size, seq_lengths=lengths)

    def _attend(self, q: Any, k: Any, v: Any, mask: Mask) -> Any:
        if mask.causal or mask.window is not None:
            raise NotImplementedError("a block mask is all that is timed")
        if self._made is None:
            self._made = self.mask(q.device, (q.shape[2], k.shape[2]))
        return _compiled()(q, k, v, block_mask=self._made)


@cache
def _compiled() -> Any:
    """Compile the function once for all masks: what is not compiled looks at no blocks."""
    function = importlib.import_module("torch.nn.attention.flex_attention").flex_attention
    return importlib.import_module("torch").compile(function)
