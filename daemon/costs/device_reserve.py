"""Says how much of a CUDA device's memory no plan fills. Pure.

The fixed part is for what torch does not allocate: the CUDA context with its kernels (about 0.5 GiB), work space of
cuBLAS (32 MiB), and NCCL's buffers (a few hundred MiB). Fragments of torch's allocator grow with what it holds.
"""

from typing import Final

GIB: Final = 1 << 30
FIXED_BYTES: Final = GIB
FRAGMENTS: Final = 0.04
"""Fragments' share of a device's memory."""


def cuda_reserve(memory_bytes: int, reserve_gib: float | None = None) -> int:
    """Return the bytes that plans leave free on a device. reserve_gib: from the settings; None: the default."""
    if not memory_bytes:
        return 0
    wanted = FIXED_BYTES + FRAGMENTS * memory_bytes if reserve_gib is None else reserve_gib * GIB
    return min(round(wanted), memory_bytes - 1)
