"""Tools to test a backend: error bounds, a comparison, and random problems.

``error_bound`` bounds the error of each result, ``assert_attention_close`` compares a result with
the float64 oracle, and ``problems`` is a Hypothesis strategy that draws whole calls. Only the
strategy needs Hypothesis, and imports it when called.
"""

from tileattn.testing.bounds import Bound, error_bound
from tileattn.testing.compare import assert_attention_close
from tileattn.testing.strategies import AttentionCase, problems

__all__ = ["AttentionCase", "Bound", "assert_attention_close", "error_bound", "problems"]
