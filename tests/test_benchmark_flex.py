"""FlexAttention is given the very mask that tileattn is given."""

from typing import Any

import numpy as np
import pytest

from benchmarks import gpu, gpu_flex, traffic
from benchmarks.gpu_cells import Cell
from benchmarks.gpu_device import Inputs
from benchmarks.gpu_peers import Mask, Stepwise
from tests.fake_gpu import Fake
from tileattn import BlockMask, reference
from tileattn.testing import assert_attention_close, error_bound

torch = pytest.importorskip("torch", reason="a peer, and no dependency: pip install torch")


@pytest.mark.parametrize("lead", [(1, 1), (2, 3)])
def test_the_blocks_are_those_of_the_mask(lead: tuple[int, int]) -> None:
    seen = np.random.default_rng(0).random((*lead, 4, 5)) < 0.4
    made = gpu_flex.Flex(BlockMask(seen, (128, 128))).mask(torch.device("cpu"), (500, 640))
    assert np.array_equal(np.broadcast_to(made.to_dense().numpy(), seen.shape), seen)
    assert made.BLOCK_SIZE == (128, 128)
    assert made.seq_lengths == (500, 640)
    assert not made.kv_num_blocks.any()  # all that are seen are seen in full


def test_blocks_that_are_partly_seen_are_refused() -> None:
    mask = BlockMask.from_mask(np.tri(8, dtype=bool)[None, None], (4, 4))
    with pytest.raises(ValueError, match="blocks has some that are partly seen"):
        gpu_flex.Flex(mask)


def test_other_masks_are_refused() -> None:
    flex = gpu_flex.Flex(BlockMask(np.ones((1, 1), bool)))
    x = np.zeros((1, 1, 128, 16), np.float32)
    with pytest.raises(NotImplementedError, match="a block mask is all"):
        flex.forward(Inputs(x, x, x, x), Mask(causal=True))()


def test_a_row_has_both_times_and_how_far_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*arrays: Any, block_mask: Any) -> Any:
        assert block_mask.BLOCK_SIZE == (128, 128)
        return torch.nn.functional.scaled_dot_product_attention(*arrays)

    monkeypatch.setattr(gpu_flex, "_compiled", lambda: attend)
    cell = Cell("forward", "f32", 1, 2, 256, 8, causal=False)
    everything = BlockMask(np.ones((2, 2), bool), (128, 128))
    row = traffic.sparse(everything, cell, Fake(), beside=True)
    assert (row["ms"], row["flex"]["ms"]) == (2.0, 2.0)
    assert 0 < row["flex"]["difference"] <= gpu.AGREEMENT["f32"]
    half = BlockMask(np.eye(2, dtype=bool), (128, 128))
    row = traffic.sparse(half, cell, Fake(), beside=True)
    assert row["flex"].pop("difference") > gpu.AGREEMENT["f32"]
    assert row == {"ms": 2.0, "flex": {"failed": "another result"}}


def test_a_failure_of_flex_leaves_the_time_of_tileattn(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(gpu_flex, "_compiled", fail)
    cell = Cell("forward", "f32", 1, 2, 256, 8, causal=False)
    row = traffic.sparse(BlockMask(np.ones((2, 2), bool), (128, 128)), cell, Fake(), beside=True)
    assert row == {"ms": 2.0, "flex": {"failed": "RuntimeError: no compiler"}}


def test_steps_in_pytorch_are_attention() -> None:
    rng = np.random.default_rng(0)
    x = Inputs(*(rng.standard_normal((2, 3, 20, 8)).astype(np.float32) for _ in range(4)))
    out = Stepwise().forward(x, Mask(causal=False))().numpy()
    dq, dk, dv = (y.numpy() for y in Stepwise().backward(x, Mask(causal=False))())
    bounds = error_bound(*x)
    wanted = reference.forward(*x[:3])
    assert_attention_close(wanted._replace(out=out), wanted, bounds, names=["out"])
    exact = reference.backward(x.dout, *x[:3])
    found = exact._replace(dq=dq, dk=dk, dv=dv)
    assert_attention_close(found, exact, bounds, names=["dq", "dk", "dv"])
