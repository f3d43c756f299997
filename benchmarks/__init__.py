"""Measurements of tileattn: ``python -m tileattn bench`` in a checkout of the repository."""

MEASURES = "tileattn"
"""Tells this package from another one of its name."""
