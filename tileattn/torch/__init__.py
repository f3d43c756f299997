"""Exact attention on PyTorch tensors, differentiable, under autograd and ``torch.compile``.

``pip install 'tileattn[torch]'`` brings it. ``import tileattn`` does not load PyTorch.
"""

from tileattn.torch.drop_in import scaled_dot_product_attention, sdpa
from tileattn.torch.functional import attention

__all__ = ["attention", "scaled_dot_product_attention", "sdpa"]
