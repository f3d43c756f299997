"""Training in float16 with a scaled loss, in PyTorch: small gradients are not rounded to zero."""

import torch

from tileattn.torch import attention

torch.manual_seed(0)
x, target = torch.randn(2, 4, 64, 32), torch.randn(2, 4, 64, 32)
weight = torch.nn.Parameter(torch.eye(32).repeat(3, 1, 1))
optimiser = torch.optim.SGD([weight], lr=1.0)
scale, losses = 2.0**12, []
for _ in range(20):
    q, k, v = ((x @ w).half() for w in weight)
    loss = (attention(q, k, v, causal=True).float() - target).square().mean()
    optimiser.zero_grad()
    (scale * loss).backward()
    weight.grad /= scale
    # Skip a step whose gradients overflow, and lower the scale.
    if weight.grad.isfinite().all():
        optimiser.step()
    else:
        scale /= 2
    losses.append(loss.item())
assert losses[-1] < losses[0]
print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last")
