"""Expressions of a user's own score and mask functions: traced once, read by several visitors."""
