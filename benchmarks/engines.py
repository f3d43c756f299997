"""Inference engines on the CPU: OpenVINO and ONNX Runtime, each with its attention operator.

They compute the forward pass in float32; a causal mask is an attribute of their operators.
"""

import importlib
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from benchmarks.configurations import Call, Inputs, Mask
from benchmarks.implementations import Implementation
from tileattn.backends import threads


class Engine(Implementation):
    """An engine that compiles a graph of one operator for fixed shapes."""

    dtypes, passes = ("f32",), ("forward",)

    @property
    @abstractmethod
    def version(self) -> str: ...

    @abstractmethod
    def forward(self, x: Inputs, mask: Mask) -> Call: ...

    def backward(self, x: Inputs, mask: Mask) -> Call:
        raise NotImplementedError(f"{self.name} has no gradients")


class OpenVino(Engine):
    name = "openvino"

    def __init__(self) -> None:
        self._module = importlib.import_module("openvino")
        self._operators = importlib.import_module("openvino.opset13")

    @property
    def version(self) -> str:
        return str(self._module.__version__).split("-", maxsplit=1)[0]

    def forward(self, x: Inputs, mask: Mask) -> Call:
        """Compile the operator for these shapes; its input and output memory is shared."""
        rows = [self._operators.parameter(y.shape, dtype=y.dtype) for y in x[:3]]
        out = self._operators.scaled_dot_product_attention(*rows, causal=mask.causal)
        limits: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads.worker_count()}
        limits |= {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
        model = self._module.Model([out], rows)
        compiled = self._module.Core().compile_model(model, "CPU", limits)
        given = list(x[:3])
        return lambda: compiled(given, share_inputs=True, share_outputs=True)[0]


class OnnxRuntime(Engine):
    name = "onnxruntime"

    def __init__(self) -> None:
        self._runtime = importlib.import_module("onnxruntime")
        self._onnx = importlib.import_module("onnx")

    @property
    def version(self) -> str:
        return str(self._runtime.__version__)

    def forward(self, x: Inputs, mask: Mask) -> Call:
        """Make a session of the operator ``Attention`` for these shapes."""
        helper, kind = self._onnx.helper, self._onnx.TensorProto.FLOAT
        node = helper.make_node("Attention", ["q", "k", "v"], ["out"], is_causal=int(mask.causal))
        given = dict(zip(("q", "k", "v"), x[:3], strict=True))
        tensors = {n: helper.make_tensor_value_info(n, kind, y.shape) for n, y in given.items()}
        out = helper.make_tensor_value_info("out", kind, x.dout.shape)
        graph = helper.make_graph([node], "attention", list(tensors.values()), [out])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
        limits = self._runtime.SessionOptions()
        limits.intra_op_num_threads = threads.worker_count()
        session = self._runtime.InferenceSession(model.SerializeToString(), limits)
        return lambda: session.run(["out"], given)[0]


ENGINES: dict[str, Callable[[], Engine]] = {"openvino": OpenVino, "onnxruntime": OnnxRuntime}
