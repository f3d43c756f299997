"""From a kernel key to machine code: NVRTC, the disk cache, the loader."""
