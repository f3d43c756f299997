"""The command line: ``python -m tileattn``."""
