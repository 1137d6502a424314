"""Memory that is freed stays with the daemon, as far as it is little: the next piece of a file needs as much again.

glibc gives back what it can at once, so that every piece of a transfer would get new pages from the kernel, each zeroed
first. Other C libraries are left as they are.
"""

import ctypes
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
KEPT_BYTES: Final = 64 << 20
"""Most that a heap keeps at its end."""
LARGEST_BYTES: Final = 32 << 20
"""What is larger comes from the kernel and goes back to it: glibc's own upper limit."""


def keep_freed_memory() -> bool:
    """For the rest of this process's life. Returns False where the C library knows no such thing."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    taken = mallopt(_M_MMAP_THRESHOLD, LARGEST_BYTES), mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    return taken == (1, 1)
