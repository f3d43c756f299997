"""The oracle: attention by its definition, in NumPy, as the reference for tests."""
