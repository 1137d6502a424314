"""Keeps freed memory in a process that makes and frees blocks of few sizes repeatedly.

glibc gives large blocks back to the kernel when they are freed, and the kernel clears each page that it hands out
again: some percent of a microbatch's time on a CPU. Here freed memory stays with the process until it is released. It
lies in pages of 2 MiB if the kernel has them, so that fewer table entries are needed. Other C libraries are unchanged.
"""

import ctypes
from collections.abc import Mapping
from typing import Final

_TRIM_THRESHOLD: Final = -1
_TOP_PAD: Final = -2
_MMAP_THRESHOLD: Final = -3
LARGEST_KEPT_BYTES: Final = 32 << 20
"""Larger blocks come from the kernel and go back to it: glibc takes no higher threshold."""
GROWTH_BYTES: Final = 64 << 20
"""Bytes by which a worker's heap grows at once."""
UNLIMITED: Final = 2**31 - 1


def keep_freed_memory(*, most_bytes: int = UNLIMITED, growth_bytes: int | None = GROWTH_BYTES) -> bool:
    """Keep freed memory from now on, in the whole process. Returns whether its C library can do that.

    most_bytes: maximum that stays free at the end of the heap. growth_bytes: growth of the heap; None: glibc's own.
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
    """Return additions to a new process's environment that put its heap in pages of 2 MiB: glibc reads them at its
    start.

    environment: the process's environment; its settings for glibc stay. The kernel gives such pages if
    /sys/kernel/mm/transparent_hugepage/enabled says `madvise` or `always`.
    """
    told = environment.get(TUNABLES, "")
    if _LARGE_PAGES in told:
        return {}
    return {TUNABLES: ":".join(filter(None, (told, f"{_LARGE_PAGES}=1")))}


def release_freed_memory() -> None:
    """Give free memory back to the kernel now: between two jobs, or two stages."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
