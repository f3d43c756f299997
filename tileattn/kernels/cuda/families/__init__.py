"""Which kernels there are, and which ones a call launches, with which tiles."""
