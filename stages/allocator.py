"""The C library's memory in a process that makes and frees the same blocks again and again.

glibc gives large blocks back to the kernel when they are freed, and the kernel clears each page that it hands out
again: some percent of a microbatch's time on a CPU. Here freed memory stays with the process until it is asked for, and
lies in pages of 2 MiB where the kernel has them, so that few of them are to be found in a table. Other C libraries are
left as they are.
"""

import ctypes
from collections.abc import Mapping
from typing import Final

_TRIM_THRESHOLD: Final = -1
_TOP_PAD: Final = -2
_MMAP_THRESHOLD: Final = -3
LARGEST_KEPT_BYTES: Final = 32 << 20
"""Blocks above come from the kernel and go back to it: glibc takes no higher threshold."""
GROWTH_BYTES: Final = 64 << 20
"""What a worker's heap grows by at once."""
UNLIMITED: Final = 2**31 - 1


def keep_freed_memory(*, most_bytes: int = UNLIMITED, growth_bytes: int | None = GROWTH_BYTES) -> bool:
    """From now on, in the whole process. Returns whether its C library can do that.

    most_bytes: that stay free at the end of the heap. growth_bytes: what it grows by at once; None: glibc's own.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {_MMAP_THRESHOLD: LARGEST_KEPT_BYTES, _TRIM_THRESHOLD: most_bytes}
    if growth_bytes is not None:
        settings[_TOP_PAD] = growth_bytes
    return all(mallopt(name, value) == 1 for name, value in settings.items())


TUNABLES: Final = "GLIBC_TUNABLES"
_LARGE_PAGES: Final = "glibc.malloc.hugetlb"


def with_large_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of a new process for its heap to lie in pages of 2 MiB: glibc asks when it starts.

    environment: the one it would have; what that tells glibc stays. The kernel gives such pages where
    /sys/kernel/mm/transparent_hugepage/enabled says `madvise` or `always`.
    """
    told = environment.get(TUNABLES, "")
    if _LARGE_PAGES in told:
        return {}
    return {TUNABLES: ":".join(filter(None, (told, f"{_LARGE_PAGES}=1")))}


def release_freed_memory() -> None:
    """Give the kernel what is free now: between two jobs, or two stages."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
