"""Exact attention on PyTorch tensors, differentiable, under autograd and ``torch.compile``.

The extra ``torch`` installs what it needs. ``import tileattn`` does not load PyTorch.
"""

try:
    import torch as _torch  # noqa: F401 - to say what is missing
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("tileattn.torch needs PyTorch: pip install torch") from error

from tileattn.torch.cascading import cascade
from tileattn.torch.distributed import distributed_attention
from tileattn.torch.drop_in import scaled_dot_product_attention, sdpa
from tileattn.torch.explaining import explain
from tileattn.torch.functional import attention
from tileattn.torch.kv_cache import append_kv
from tileattn.torch.merging import merge
from tileattn.torch.rotary import rope

__all__ = [
    "append_kv",
    "attention",
    "cascade",
    "distributed_attention",
    "explain",
    "merge",
    "rope",
    "scaled_dot_product_attention",
    "sdpa",
]
