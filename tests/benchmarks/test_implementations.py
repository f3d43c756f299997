"""Every baseline computes the attention that tileattn is given: the same mask, the same inputs."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import gpu, implementations
from benchmarks.configurations import PASSES, Configuration, Inputs, Mask, normal
from benchmarks.engines import ENGINES
from benchmarks.implementations import Flex, Naive, NaiveTorch, Peer, Tileattn
from benchmarks.libraries import Sdpa
from tests.benchmarks.fake_gpu import Fake
from tileattn import BlockMask, reference
from tileattn.testing import assert_attention_close, error_bound

OTHERS = {
    "grouped": Configuration("forward", "f32", 2, 6, 20, 8, causal=True, Hkv=3),
    "wide": Configuration("forward", "f32", 2, 3, 20, 8, Dv=12),
    "window": Configuration("forward", "f32", 2, 3, 20, 8, window=6),
    "causal window": Configuration("forward", "f32", 2, 3, 20, 8, causal=True, window=6),
}


@pytest.fixture(name="torch")
def pytorch() -> Any:
    """Skip where PyTorch is missing: it is a baseline, and no dependency."""
    return pytest.importorskip("torch", reason="a baseline, and no dependency: pip install torch")


@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize("name", OTHERS)
def test_naive_attention_agrees(name: str, kind: str) -> None:
    row = gpu.compare(replace(OTHERS[name], kind=kind), [Tileattn(), Naive(np)], Fake())
    assert row["failed"] == {}
    assert row["speedup_over"] == {"numpy": 1.0}


def check_against_reference(one: Any, x: Inputs, mask: Mask) -> None:
    out, gradients = one.forward(x, mask)(), one.backward(x, mask)()
    dq, dk, dv = (np.asarray(y) for y in gradients)
    bounds, wanted = error_bound(*x, **mask.options()), reference.forward(*x[:3], **mask.options())
    found = wanted._replace(out=np.asarray(out))
    assert_attention_close(found, wanted, bounds, names=["out"])
    exact = reference.backward(x.dout, *x[:3], **mask.options())
    names = ["dq", "dk", "dv"]
    assert_attention_close(exact._replace(dq=dq, dk=dk, dv=dv), exact, bounds, names=names)


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize(("name", "causal"), [("naive", False), ("sdpa", False), ("sdpa", True)])
def test_attention_in_pytorch_is_that_of_the_oracle(name: str, causal: bool) -> None:
    x = Inputs(*(normal(np, (2, 3, 20, 8), "f32", seed) for seed in range(4)))
    check_against_reference(
        NaiveTorch() if name == "naive" else Peer("torch", Sdpa("SDPA")), x, Mask(causal)
    )


@pytest.mark.parametrize("name", OTHERS)
def test_flash_attention_4_is_told_the_window(
    torch: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def attend(q: Any, k: Any, v: Any, causal: bool, window_size: Any = (None, None)) -> Any:
        asked.append((causal, window_size))
        i, j = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
        left, right = (q.shape[1] if side is None else side for side in window_size)
        mask = (j >= i - left) & (j <= i + (0 if causal else right))
        heads = (x.transpose(1, 2) for x in (q, k, v))
        function = torch.nn.functional.scaled_dot_product_attention
        return function(*heads, attn_mask=mask, enable_gqa=True).transpose(1, 2), None

    package = SimpleNamespace(flash_attn_func=attend)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(cute=package))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package)
    monkeypatch.setattr(implementations, "HALF", ("f32",))
    found, missing = implementations.find(["fa4"], np)
    assert missing == {}
    row = gpu.compare(OTHERS[name], [Tileattn(), *found], Fake())
    assert row["speedup_over"] == {"fa4": 1.0}
    windows = {"window": (3, 2), "causal window": (5, 0)}
    assert set(asked) == {(OTHERS[name].causal, windows.get(name, (None, None)))}


# --- FlexAttention --------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(1, 1), (2, 3)])
def test_the_blocks_of_flex_are_those_of_the_mask(torch: Any, lead: tuple[int, int]) -> None:
    attended = np.random.default_rng(0).random((*lead, 4, 5)) < 0.4
    made = Flex(BlockMask(attended, (128, 128))).mask(torch.device("cpu"), (500, 640))
    assert np.array_equal(np.broadcast_to(made.to_dense().numpy(), attended.shape), attended)
    assert made.BLOCK_SIZE == (128, 128)
    assert made.seq_lengths == (500, 640)
    assert not made.kv_num_blocks.any()  # all are full


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("causal", [False, True])
def test_inference_engines_compute_the_same(name: str, causal: bool) -> None:
    for module in ("onnx", name):
        pytest.importorskip(module, reason="a baseline, and no dependency: pip install it")
    x = Inputs(*(normal(np, (2, 3, 20, 8), "f32", seed) for seed in range(4)))
    out = np.asarray(ENGINES[name]().forward(x, Mask(causal))())
    wanted = reference.forward(*x[:3], causal=causal)
    bounds = error_bound(*x, causal=causal)
    assert_attention_close(wanted._replace(out=out), wanted, bounds, names=["out"])
