"""Exact attention on PyTorch tensors, differentiable, under autograd and ``torch.compile``.

``pip install 'tileattn[torch]'`` brings it. ``import tileattn`` does not load PyTorch.
"""

from tileattn.torch.attention import attention
from tileattn.torch.sdpa import scaled_dot_product_attention, sdpa

__all__ = ["attention", "scaled_dot_product_attention", "sdpa"]
