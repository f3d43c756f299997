"""The test data of ONNX's operator Attention: what others say that attention is."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("onnx", reason="its Attention has test data: pip install onnx")

from onnx import helper
from onnx.backend.test.case.node import collect_testcases

import tileattn

Array = NDArray[Any]
SLOTS = ("q", "k", "v", "attn_mask", "past_key", "past_value", "kv_lengths")
CASES = {
    case.name: case
    for case in collect_testcases("Attention")
    if case.model.graph.node[0].op_type == "Attention"  # others write it as smaller operators
}


def heads_first(x: Array, heads: int) -> Array:
    """Split (B, N, H D) into (B, H, N, D)."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def padded(mask: Array, keys: int) -> Array:
    """Mask out the keys that a shorter mask does not reach."""
    hidden = False if mask.dtype == bool else -np.inf
    missing = [(0, 0)] * (mask.ndim - 1) + [(0, keys - mask.shape[-1])]
    return np.pad(mask, missing, constant_values=hidden)


def options_of(given: dict[str, Any], x: dict[str, Array]) -> dict[str, Any]:
    """Translate attributes and optional inputs; 0 is no softcap, and -1 an open side."""
    options: dict[str, Any] = {"scale": given.get("scale"), "softcap": given.get("softcap") or None}
    left, right = (given.get(f"{side}_window_size", -1) for side in ("left", "right"))
    right = 0 if given.get("is_causal") else right
    options["window"] = tuple(None if side < 0 else side for side in (left, right))
    if "attn_mask" in x:
        mask = padded(x["attn_mask"], x["k"].shape[2])
        options["mask" if mask.dtype == bool else "bias"] = mask
    if "kv_lengths" in x:
        return options | {"kv_lengths": x["kv_lengths"]}
    past = x["past_key"].shape[2] if "past_key" in x else 0
    return options | {"q_offset": past}


@pytest.mark.parametrize("backend", ["numpy", "llvm"])
@pytest.mark.parametrize("name", CASES)
def test_the_output_is_that_of_onnx(name: str, backend: str) -> None:
    reason = tileattn.available_backends()[backend]
    if reason is not None:
        pytest.skip(reason)
    case = CASES[name]
    (node,) = case.model.graph.node
    given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    ((inputs, (expected, *_)),) = case.data_sets
    slots = (slot for slot, name in zip(SLOTS, node.input, strict=False) if name)
    x = dict(zip(slots, inputs, strict=True))
    packed = x["q"].ndim == 3
    if packed:
        heads = {"q": given["q_num_heads"], "k": given["kv_num_heads"], "v": given["kv_num_heads"]}
        x |= {slot: heads_first(x[slot], H) for slot, H in heads.items()}
    for slot, past in (("k", "past_key"), ("v", "past_value")):
        if past in x:
            x[slot] = np.concatenate([x[past], x[slot]], axis=2)
    out = tileattn.forward(x["q"], x["k"], x["v"], backend=backend, **options_of(given, x)).out
    if packed:
        out = out.swapaxes(1, 2).reshape(expected.shape)
    # Both round the output, and ONNX also its scores and probabilities.
    roundings = 4 * float(np.spacing(np.ones((), out.dtype))) / 2
    found, wanted = (x.astype(np.float64) for x in (out, expected))
    np.testing.assert_allclose(found, wanted, rtol=max(case.rtol, roundings), atol=case.atol)
