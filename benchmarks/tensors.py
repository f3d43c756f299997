"""Arrays of NumPy or CuPy and tensors of PyTorch that share memory through DLPack."""

import importlib
from typing import Any

import ml_dtypes
import numpy as np


def to_torch(x: Any) -> Any:
    """Share an array with PyTorch; bfloat16, which DLPack may not carry, goes as int16."""
    torch = importlib.import_module("torch")
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(x)


def arrays(result: Any, xp: Any) -> list[Any]:
    """Share what a call returned, one array or tensor or a tuple of them, with the library."""
    given = result if isinstance(result, tuple) else (result,)
    return [x if isinstance(x, xp.ndarray) else _from_torch(x.detach(), xp) for x in given]


def _from_torch(tensor: Any, xp: Any) -> Any:
    torch = importlib.import_module("torch")
    if tensor.dtype == torch.bfloat16:
        return xp.from_dlpack(tensor.view(torch.int16)).view(ml_dtypes.bfloat16)
    return xp.from_dlpack(tensor)
