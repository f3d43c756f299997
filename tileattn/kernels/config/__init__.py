"""Which kernels there are, and which one serves a call with which tiles."""
