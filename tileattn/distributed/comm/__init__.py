"""Communicators: MPI, NCCL and process groups of PyTorch, and what all ranks do together."""
