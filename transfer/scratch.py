"""Memory for payload, taken again once nobody holds it: fresh pages cost about as much as a copy."""

import ctypes
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

MAX_KEPT_BYTES = 64 * 2**20  # of each size
MAX_FREED_BUFFER_BYTES = 32 * 2**20  # glibc allows no more
MAX_FREED_BYTES = 256 * 2**20  # more than the mailbox and a connection hold

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt

Memory = npt.NDArray[np.uint8]


class Scratch:
    """Lends memory in one thread; whoever drops the last view of it, in any thread, gives it back."""

    def __init__(self, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        """Starts empty. More than `max_kept_bytes` of a size go back to the system."""
        self._max_kept_bytes = max_kept_bytes
        self._free: dict[int, deque[Memory]] = {}  # by capacity, a power of two

    def take(self, num_bytes: int) -> memoryview:
        """So many bytes, with anything in them."""
        capacity = 1 << max(0, num_bytes - 1).bit_length()
        free = self._free.setdefault(capacity, deque(maxlen=self._max_kept_bytes // capacity))
        memory = free.pop() if free else np.empty(capacity, np.uint8)
        lent = memory[:num_bytes]
        weakref.finalize(lent, free.append, memory).atexit = False
        return lent.data


def keep_freed_memory() -> None:
    """Tells glibc to reuse the buffers of payload that leaves, if the process has glibc.

    By default large ones are given back to the kernel, and to get new pages for each takes longer than to copy it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MAX_FREED_BUFFER_BYTES)
        mallopt(_M_TRIM_THRESHOLD, MAX_FREED_BYTES)
