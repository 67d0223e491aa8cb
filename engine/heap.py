"""What the allocator below Python does with memory in a process that serves."""

import ctypes
import sys
from contextlib import suppress

# Of glibc's mallopt(3). Values beyond 32 MiB are refused for the first.
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -3, -1, -8
_LARGEST_BYTES, _KEPT_BYTES = 32 << 20, 256 << 20


def keep_freed() -> None:
    """Memory that was freed is used again, by all threads, and not handed back and fetched anew: each page of 4 KiB
    that the system has to find and clear takes some microseconds, more on a virtual machine, and the arrays of a batch
    of steps have hundreds. Does nothing where the C library is not glibc."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            tune = ctypes.CDLL(None).mallopt
            tune(_MMAP_THRESHOLD, _LARGEST_BYTES)
            tune(_TRIM_THRESHOLD, _KEPT_BYTES)
            tune(_ARENA_MAX, 1)
