"""The benchmark inside PyTorch: what it compares computes the same."""

import pytest

torch = pytest.importorskip("torch")

from benchmarks.frameworks import ATTENTIONS, Block, drawn  # noqa: E402 - PyTorch may be absent


def test_blocks_with_either_attention_compute_the_same() -> None:
    results = []
    for attention in ATTENTIONS.values():
        torch.manual_seed(0)
        model = Block(64, 16, 2, attention)
        (x,) = drawn((2, 20, 64))
        out = model(x)
        results.append((out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
