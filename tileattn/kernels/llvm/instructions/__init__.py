"""Emit instructions: vectors, loops, elementary functions, parameters, functions of a module."""
