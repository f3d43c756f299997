"""Attention by its definition, in NumPy: what the library is tested against."""
