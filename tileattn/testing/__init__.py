"""What a backend is checked with: bounds on the error, one comparison, whole random problems.

``error_bound`` says how far off each result may be, ``assert_attention_close`` holds a result to
the float64 oracle within it, and ``problems`` is a Hypothesis strategy that draws whole calls.
Hypothesis is needed for the strategy only, and is imported when it is asked for.
"""

from tileattn.testing.bounds import Bound, error_bound
from tileattn.testing.compare import assert_attention_close
from tileattn.testing.strategies import AttentionCase, problems

__all__ = ["AttentionCase", "Bound", "assert_attention_close", "error_bound", "problems"]
