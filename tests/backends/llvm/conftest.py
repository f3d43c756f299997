"""Memory whose neighbours may not be touched."""

import ctypes
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Array = NDArray[Any]

PAGE = mmap.PAGESIZE


@pytest.fixture
def guarded() -> Iterator[Callable[[Array, bool], Array]]:
    """Copy arrays to memory whose next page, after or before it, may not be touched."""
    library = ctypes.CDLL(None, use_errno=True)
    held: list[mmap.mmap] = []

    def copied(x: Array, at_end: bool) -> Array:
        pages = max(1, -(-x.nbytes // PAGE))
        memory = mmap.mmap(-1, (pages + 2) * PAGE)
        held.append(memory)
        whole = np.frombuffer(memory, np.uint8)
        start = whole.ctypes.data
        for page in (start, start + (pages + 1) * PAGE):
            assert not library.mprotect(ctypes.c_void_p(page), PAGE, 0)
        first = (pages + 1) * PAGE - x.nbytes if at_end else PAGE
        found = whole[first : first + x.nbytes].view(x.dtype).reshape(x.shape)
        found[...] = x
        return found

    yield copied
    for memory in held:
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for page in (start, start + len(memory) - PAGE):
            library.mprotect(ctypes.c_void_p(page), PAGE, mmap.PROT_READ | mmap.PROT_WRITE)
