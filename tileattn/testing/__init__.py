"""Tools to check a kernel or a backend: the oracle, error bounds, a comparison, random problems.

``error_bound`` bounds the error of each result, ``assert_attention_close`` compares a result with
the float64 oracle, and ``problems`` is a Hypothesis strategy that draws whole calls. Only the
strategy needs Hypothesis, and imports it when called.

A kernel that returns arrays or tensors needs no more than two calls:

>>> import numpy as np
>>> import tileattn
>>> from tileattn.testing import assert_attention_close, error_bound
>>> def my_kernel(q, k, v):
...     s = q @ k.swapaxes(-1, -2) / np.sqrt(np.float32(q.shape[-1]))
...     p = np.exp(s - s.max(axis=-1, keepdims=True))
...     return p / p.sum(axis=-1, keepdims=True) @ v
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 50, 32), np.float32)
>>> expected = tileattn.reference.forward(q, k, v)
>>> assert_attention_close(my_kernel(q, k, v), expected, error_bound(q, k, v))

The comparison takes an output, a pair ``(out, lse)``, a tuple ``(dq, dk, dv)`` or a mapping, of
arrays of NumPy, CuPy and JAX or of tensors of PyTorch. Shape, dtype, the positions of NaN and
infinity, and the Frobenius norm of the error must be right; `error_bound` says how large the error
of a kernel with the sums of its dtype may be.

To check a whole backend, start from a copy of `tileattn.testing.template`, and run its contract:

- ``TILEATTN_TEST_BACKEND=my_package:MyBackend python -m pytest --pyargs tileattn.testing`` runs
  the suite ``tileattn.testing.test_contract``. Every option must be honoured, or be refused by a
  sentence of ``why_not``.
- ``python -m tileattn check --backend my_package:MyBackend`` compares random problems with the
  oracle for as long as you like.

A backend whose arrays are not NumPy's has a method ``asarray``, which copies a NumPy array to one
of them. Results are copied back if they are arrays of PyTorch, CuPy or JAX.
"""

from tileattn.testing.bounds import Bound, error_bound
from tileattn.testing.compare import assert_attention_close
from tileattn.testing.strategies import AttentionCase, problems

__all__ = ["AttentionCase", "Bound", "assert_attention_close", "error_bound", "problems"]
