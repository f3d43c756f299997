"""Backends: who computes a call, on which arrays."""
