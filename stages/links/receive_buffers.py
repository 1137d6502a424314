"""Allocates memory for arriving tensors: blocks of few sizes, taken and freed repeatedly.

torch takes its memory by `posix_memalign`, and glibc does not find a freed block again for an equal size and alignment:
it looks for a larger one. So fresh pages are taken each time, which can double the time of a frame of 16 MiB. A block
of plain `malloc`, with room to align inside, is found again. A device with streams has memory of its own for this.
"""

from collections.abc import Callable
from typing import Any

import numpy
import torch

from headway.stages.device.device import StageDevice
from headway.stages.links.frame_contract import ALIGNMENT_BYTES


def empty_bytes(num_bytes: int) -> "numpy.ndarray[Any, Any]":
    """Return uint8 [num_bytes] that begin at a multiple of ALIGNMENT_BYTES."""
    block = numpy.empty(num_bytes + ALIGNMENT_BYTES, dtype=numpy.uint8)
    begin = -torch.from_numpy(block).data_ptr() % ALIGNMENT_BYTES  # numpy's own ways to an address are slower
    return block[begin : begin + num_bytes]


EmptyBytes = Callable[[int], Any]
"""Returns uint8 [number] as a numpy array."""


def bytes_for(device: StageDevice) -> EmptyBytes:
    """Return what allocates payloads for a device: memory from which it copies without another copy."""
    if device.is_immediate:
        return empty_bytes
    return lambda num_bytes: device.host_buffer(torch.uint8, (num_bytes,)).numpy()
