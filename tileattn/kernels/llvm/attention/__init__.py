"""The steps of attention on tiles, each named after its counterpart in ``tileattn/algorithm``."""
