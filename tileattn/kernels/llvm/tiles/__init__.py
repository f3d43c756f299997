"""Tiles in scratch memory: loads and stores, bits, matrix products, long sums."""
