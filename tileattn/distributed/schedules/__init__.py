"""Schedules: ring, all-gather, Ulysses, and groups of ranks that combine ring and Ulysses."""
