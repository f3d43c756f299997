"""Exact attention tile by tile, as FlashAttention computes it, in O(N) memory.

``forward`` and ``backward`` take NumPy or CuPy arrays. The algorithm is written once, as an
executable specification, in ``tileattn.algorithm.spec``.
"""

import importlib
import types
import typing

from tileattn.algorithm.philox import dropout_mask
from tileattn.api import backward, explain, forward
from tileattn.backends.registry import available_backends, register_backend
from tileattn.call.block_mask import BlockMask
from tileattn.cascading import cascade
from tileattn.differentiation import vjp
from tileattn.errors import BackendUnavailableError, UnsupportedError
from tileattn.kv_cache import append_kv
from tileattn.merging import merge
from tileattn.results import Attention, Gradients
from tileattn.rotary import rope

if typing.TYPE_CHECKING:
    from tileattn import reference, testing

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "BackendUnavailableError",
    "BlockMask",
    "Gradients",
    "UnsupportedError",
    "__version__",
    "append_kv",
    "available_backends",
    "backward",
    "cascade",
    "dropout_mask",
    "explain",
    "forward",
    "merge",
    "reference",
    "register_backend",
    "rope",
    "testing",
    "vjp",
]


def __getattr__(name: str) -> types.ModuleType:
    """Load the oracle and the test helpers at first use."""
    if name in ("reference", "testing"):
        return importlib.import_module(f"tileattn.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
