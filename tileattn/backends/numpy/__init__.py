"""NumPy arrays: the specification, on threads."""
